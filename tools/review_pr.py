"""Reviews a change to PyTorch inference code: rules over the syntax tree of what changed, and a report.

python tools/review_pr.py --pr-number 12 --repo OWNER/NAME      a pull request, through the command gh
python tools/review_pr.py --range main..feature                 a range of commits
python tools/review_pr.py --diff FILE                           a unified diff
python tools/review_pr.py --tree omnistage tools                all lines of these folders

The same as the command `omnistage-review`; it needs no installation. See docs/review/README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

if (root := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, root)

from omnistage_review.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Writes docs/review/rules.md and docs/review/guide.md from the rules and the checklist of omnistage_review."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from omnistage_review import rules  # noqa: E402
from omnistage_review.documentation import guide_page, rules_page  # noqa: E402

PAGES = {"rules.md": rules_page, "guide.md": guide_page}

if __name__ == "__main__":
    print(f"{len(rules.__all__)} groups of rules")
    for name, page in PAGES.items():
        (ROOT / "docs" / "review" / name).write_text(page(), encoding="utf-8")
        print(f"docs/review/{name}")

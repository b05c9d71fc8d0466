"""`python -m omnistage_review`."""

from omnistage_review.cli import main

raise SystemExit(main())

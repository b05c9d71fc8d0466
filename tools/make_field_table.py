"""Write the table of fields in docs/api.md: `python tools/make_field_table.py`; with `--check` only compare it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
BEGIN, END = "<!-- fields: begin -->\n", "<!-- fields: end -->\n"


def written(page: str) -> str:
    """The page with the table as it should be."""
    from tests.server.field_table import table

    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n\n{END}{tail}"


def main() -> int:
    file = ROOT / "docs" / "api.md"
    page = file.read_text()
    if "--check" in sys.argv:
        return 0 if written(page) == page else 1
    file.write_text(written(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The table of `omnistage models` for models with media, from the pages that the coverage tools write.

python tools/make_media_table.py      after docs/multimodal_coverage.md or docs/speech_models.md was made anew
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs/multimodal_coverage.md", ROOT / "docs/speech_models.md")
TABLE = ROOT / "omnistage/models/media_coverage.json"
_ROW = re.compile(r"^\| ([\w.-]+) \| (\w+) \| (.*) \|$", re.MULTILINE)
_RELEASE = re.compile(r"^transformers ([\w.]+), ", re.MULTILINE)


def sections(page: str) -> dict[str, dict[str, list[str]]]:
    """For each section of a page its types: state, and media or reason."""
    found: dict[str, dict[str, list[str]]] = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, text = section.split("\n", 1)
        exact = re.search(r"^Exact: (.*)\.$", text, re.MULTILINE)
        types = {name: ["exact", ""] for name in re.findall(r"`([^`]+)`", exact.group(1))} if exact else {}
        for name, state, reason in _ROW.findall(text):
            types[name] = [state, reason.replace("\\|", "|").replace("&lt;", "<")]
        types.pop("model_type", None)  # the head of the table
        if types:
            found[title.lower()] = dict(sorted(types.items()))
    return found


def table() -> str:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    releases = {release for page in pages for release in _RELEASE.findall(page)}
    if len(releases) != 1:
        raise SystemExit(f"the pages are of several releases of transformers: {sorted(releases)}")
    kinds = {title: types for page in pages for title, types in sections(page).items()}
    return json.dumps({"transformers": releases.pop(), "kinds": kinds}, indent=1) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")

"""What the diagrams of the documentation are made of: words, boxes and arrows in SVG."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INK, SOFT, LINE = "#1f2933", "#52606d", "#7b8794"


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "middle", *, bold: bool = False) -> str:
    look = f'fill="{INK}" font-weight="600"' if bold else f'fill="{SOFT}"'
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" {look}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{LINE}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.6" marker-end="url(#tip)"/>'


def drawing(parts: Iterable[str], width: int, height: int, label: str) -> str:
    """The whole SVG; `label` says what it shows to those who cannot see it."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img" '
        f'aria-label="{escape(label)}">\n'
        f'<defs><marker id="tip" markerWidth="9" markerHeight="9" refX="7" refY="4" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )

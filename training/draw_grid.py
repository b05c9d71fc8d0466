"""The held-out grid of the documentation: captions that were never seen in training, drawn by the served model.

    python training/draw_grid.py --out docs/images/starter-held-out.png

Reads training/held_out.txt, which evaluate.py writes beside its numbers, and draws through `Omni("starter")`, as a
user would.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from rich.progress import track

from omnistage import DiffusionParams, Omni

_COLUMNS, _GAP, _WORDS = 8, 12, 46
_SIDE = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="starter")
    parser.add_argument("--captions", type=Path, default=Path(__file__).with_name("held_out.txt"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/starter-held-out.png"))
    args = parser.parse_args()
    captions = args.captions.read_text(encoding="utf-8").splitlines()
    pictures = []
    with Omni(args.model) as omni:
        for number, caption in enumerate(track(captions, "drawing")):
            asked = [{"role": "user", "content": f"Draw {caption}."}]
            out = omni.chat(asked, {"draw": DiffusionParams(seed=number)}, modalities=["image"])
            if out.image is None:
                raise SystemExit(f"nothing was drawn for {caption!r}: {out.error}")
            pictures.append(Image.fromarray(out.image.pixels))
    sheet(pictures, captions).save(args.out, optimize=True)


def sheet(pictures: list[Image.Image], captions: list[str]) -> Image.Image:
    """Images in rows, each above its caption."""
    font = ImageFont.load_default(size=10)
    width, height = _SIDE + _GAP, _SIDE + _WORDS
    rows = -(-len(pictures) // _COLUMNS)
    canvas = Image.new("RGB", (_COLUMNS * width + _GAP, rows * height + _GAP), "white")
    pen = ImageDraw.Draw(canvas)
    for index, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left, top = _GAP + index % _COLUMNS * width, _GAP + index // _COLUMNS * height
        canvas.paste(picture, (left, top))
        pen.rectangle((left - 1, top - 1, left + _SIDE, top + _SIDE), outline="#dddddd")
        words = re.sub("^an? ", "", caption).removesuffix(" background")
        words = re.sub(" on an? ", " on ", words)
        for line, text in enumerate(textwrap.wrap(words, 19)[:3]):
            pen.text((left, top + _SIDE + 2 + 12 * line), text, fill="#333333", font=font)
    return canvas


if __name__ == "__main__":
    main()

"""Draw docs/images/starter.svg: the stages of the starter, what flows between them, and how they overlap.

    python tools/make_starter_figures.py

With `--pictures` also docs/images/starter-pictures.png: what the starter drew for some words, enlarged. That takes the
real weights: `omnistage pull starter`. With `--demo out/picture.png` also docs/images/starter-demo.png: what
`make demo` drew, enlarged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from diagram import SOFT, arrow, box, drawing, text

IMAGES = Path(__file__).parents[1] / "docs" / "images"
DIAGRAM, PICTURES, DEMO = (IMAGES / name for name in ("starter.svg", "starter-pictures.png", "starter-demo.png"))
WIDTH, HEIGHT = 1080, 440
BLUE, GREEN, ORANGE, PINK = "#d9e8fb", "#dff3e4", "#fdebd0", "#f9dfe8"
BOX_WIDTH, BOX_HEIGHT = 150, 96
# name, left, top, colour, engine, what it is
STAGES = (
    ("hear", 110, 112, GREEN, "codec engine", ("speech and pictures", "to words, ONNX")),
    ("think", 360, 112, BLUE, "autoregressive engine", ("SmolLM2-135M,", "PyTorch")),
    ("speak", 640, 30, ORANGE, "codec engine", ("hibari-tts,", "ONNX")),
    ("draw", 640, 194, PINK, "diffusion engine", ("a small DiT,", "PyTorch")),
    ("paint", 855, 194, PINK, "diffusion engine", ("pixels from", "patches")),
)
SPANS = (
    ("hear", GREEN, 130, 220),
    ("think", BLUE, 215, 640),
    ("speak", ORANGE, 390, 760),
    ("draw, paint", PINK, 260, 560),
)
WORDS = (
    "a red apple",
    "a yellow star",
    "a green tree",
    "a blue fish",
    "a smiling face",
    "a house",
    "a cat",
    "a rocket",
)
SEED, SCALE, GAP, COLUMNS = 0, 2, 12, 4
DEMO_SCALE = 3


def stages() -> list[str]:
    parts: list[str] = []
    for name, x, y, colour, engine, about in STAGES:
        middle = x + BOX_WIDTH / 2
        parts.append(box(x, y, BOX_WIDTH, BOX_HEIGHT, colour))
        parts.append(text(middle, y + 25, name, 17, bold=True))
        parts.append(text(middle, y + 43, engine, 12))
        parts += [text(middle, y + 65 + 17 * i, line, 12) for i, line in enumerate(about)]
    return parts


def flows() -> list[str]:
    parts = [text(45, 144 + 20 * i, kind, bold=True) for i, kind in enumerate(("text", "speech", "picture"))]
    parts += [arrow(80, 160, 106, 160), arrow(260, 160, 356, 160)]
    parts += [text(308, 150, "hear2think", 11), text(308, 178, "words", 11)]
    parts += [arrow(510, 140, 636, 84), text(562, 96, "think2speak", 11), text(594, 130, "sentences", 11)]
    parts += [arrow(510, 180, 636, 236), text(596, 196, "think2draw", 11), text(546, 228, "hidden rows", 11)]
    parts += [arrow(790, 242, 851, 242), text(820, 234, "latents", 11)]
    parts += [arrow(790, 78, 1001, 78), text(1040, 83, "speech", bold=True)]
    parts += [arrow(1005, 242, 1036, 242), text(1040, 226, "picture", bold=True)]
    parts += [arrow(435, 208, 435, 246), text(435, 264, "text", bold=True)]
    return parts


def overlap() -> list[str]:
    """Bars on a time axis: speech begins while the text is still being written, and the picture beside both."""
    parts = [text(40, 346, "in time", 12, "start")]
    for row, (name, colour, start, end) in enumerate(SPANS):
        y = 322 + 24 * row
        parts += [box(start, y, end - start, 19, colour), text(start + 8, y + 14, name, 11, "start")]
    parts += [arrow(130, 425, 870, 425), text(880, 429, "time", 11, "start")]
    return parts


def render() -> str:
    return drawing(
        (*stages(), *flows(), *overlap()),
        WIDTH,
        HEIGHT,
        "The starter: hear, think, speak, draw and paint as a pipeline",
    )


def draw_pictures(model: str) -> None:
    """What the starter draws for `WORDS`, all with one seed: chosen by nobody."""
    from PIL import Image, ImageDraw, ImageFont

    from omnistage import DiffusionParams, Omni

    with Omni(model, progress=False) as omni:
        drawn = [
            omni.chat(
                [{"role": "user", "content": words}],
                {"draw": DiffusionParams(seed=SEED)},
                modalities=["image"],
                progress=False,
            ).images[0]
            for words in WORDS
        ]
    side = drawn[0].width * SCALE
    rows = -(-len(drawn) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (side + GAP) + GAP, rows * (side + 2 * GAP + 16) + GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for number, (picture, words) in enumerate(zip(drawn, WORDS, strict=True)):
        x = GAP + number % COLUMNS * (side + GAP)
        y = GAP + number // COLUMNS * (side + 2 * GAP + 16)
        sheet.paste(picture.to_pil().resize((side, side), Image.Resampling.NEAREST), (x, y))
        pen.text((x + side / 2, y + side + 4), words, fill=SOFT, font=font, anchor="ma")
    sheet.save(PICTURES, optimize=True)


def enlarge(source: Path) -> None:
    from PIL import Image

    with Image.open(source) as picture:
        size = (picture.width * DEMO_SCALE, picture.height * DEMO_SCALE)
        picture.convert("RGB").resize(size, Image.Resampling.NEAREST).save(DEMO, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", action="store_true", help="also draw with the real weights")
    parser.add_argument("--demo", type=Path, metavar="FILE", help="a picture to enlarge")
    parser.add_argument("--model", default="starter")
    args = parser.parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    DIAGRAM.write_text(render(), encoding="utf-8")
    if args.demo is not None:
        enlarge(args.demo)
    if args.pictures:
        draw_pictures(args.model)

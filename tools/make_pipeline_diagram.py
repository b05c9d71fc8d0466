"""Draw docs/images/qwen2_5_omni.svg: the stages of Qwen2.5-Omni, what flows between them, and how they overlap.

python tools/make_pipeline_diagram.py
"""

from __future__ import annotations

from pathlib import Path

from diagram import arrow, box, drawing, text

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "qwen2_5_omni.svg"
WIDTH, HEIGHT = 980, 330
COLOURS = {"thinker": "#d9e8fb", "talker": "#dff3e4", "token2wav": "#fdebd0"}
STAGES = (
    ("thinker", 150, "autoregressive engine", ("encoders: image, audio,", "video; language model")),
    ("talker", 430, "autoregressive engine", ("codec language model,", "one step behind the text")),
    ("token2wav", 710, "codec engine", ("flow matching by blocks,", "then a vocoder")),
)
BOX_WIDTH, BOX_TOP, BOX_HEIGHT = 160, 50, 110


def stages() -> list[str]:
    parts: list[str] = []
    for name, x, engine, about in STAGES:
        middle = x + BOX_WIDTH / 2
        parts.append(box(x, BOX_TOP, BOX_WIDTH, BOX_HEIGHT, COLOURS[name]))
        parts.append(text(middle, BOX_TOP + 28, name, 17, bold=True))
        parts.append(text(middle, BOX_TOP + 48, engine, 12))
        parts += [text(middle, BOX_TOP + 74 + 18 * i, line, 12) for i, line in enumerate(about)]
    return parts


def flows() -> list[str]:
    centre = BOX_TOP + BOX_HEIGHT / 2
    parts = [
        text(60, centre - 27 + 20 * i, kind, bold=True) for i, kind in enumerate(("text", "image", "audio", "video"))
    ]
    parts.append(arrow(95, centre, 146, centre))
    for x, bridge, cargo in ((310, "thinker2talker", "hidden rows"), (590, "talker2token2wav", "codec tokens")):
        parts += [
            arrow(x, centre, x + 116, centre),
            text(x + 58, centre - 10, bridge, 11),
            text(x + 58, centre + 18, cargo, 11),
        ]
    parts += [arrow(870, centre, 921, centre), text(950, centre + 5, "audio", bold=True)]
    parts += [arrow(230, 160, 230, 193), text(230, 209, "text", bold=True)]
    return parts


def overlap() -> list[str]:
    """Bars on a time axis: each stage starts while the one before it still runs."""
    parts = [text(40, 240, "in time", 12, "start")]
    for row, (name, start, end) in enumerate((("thinker", 150, 470), ("talker", 185, 700), ("token2wav", 330, 800))):
        y = 224 + 26 * row
        parts.append(box(start, y, end - start, 20, COLOURS[name]))
        parts.append(text(start + 8, y + 14, name, 11, "start"))
    parts += [arrow(150, 312, 870, 312), text(880, 316, "time", 11, "start")]
    return parts


def render() -> str:
    return drawing(
        (*stages(), *flows(), *overlap()), WIDTH, HEIGHT, "Qwen2.5-Omni: thinker, talker and token2wav as a pipeline"
    )


if __name__ == "__main__":
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(render(), encoding="utf-8")

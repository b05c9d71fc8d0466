"""The rows of `table.py`: how each figure is read, the peers' figures, what must be reached, what the hardware allows.

Peers were measured on 2026-11-15 on the same kind of H200 at the same shapes, with random weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PARTS = ("text", "serve", "diffusion")
Measured = tuple[float, str] | None
"""A value and a note beside it; None: not measured."""

# ------------------------------------------------------------------------------------------- what bounds them

THINKER_STEP, TALKER_STEP = 3.54e-3, 0.66e-3  # seconds: their weights at 4 TB/s
BANDWIDTH, PEAK_FLOPS = 4e12, 989e12  # an H200's, bfloat16 without sparsity
PROMPT_PARAMETERS = 6.5e9  # of the thinker's layers; the head runs for the last token alone
KV_BYTES = 28 * 2 * 4 * 128 * 2  # of a token: layers, keys and values, heads, their size, bfloat16
SPEECH_FLOP = 60e12  # of token2wav for one answer
TEXT, CODES = 128, 384
FIRST_CODES = 36  # until token2wav can emit: a block of 12 and two to look ahead


def prompt_seconds(tokens: int) -> float:
    return 2 * PROMPT_PARAMETERS * tokens / PEAK_FLOPS


def text_bound(count: int, prompt: int, tokens: int) -> float:
    """Tokens a second."""
    keys_and_values = count * (prompt + tokens / 2) * KV_BYTES / BANDWIDTH
    return count * tokens / (prompt_seconds(count * prompt) + tokens * (THINKER_STEP + keys_and_values))


def answer_bound(count: int) -> float:
    """Seconds until `count` spoken answers are complete."""
    steps = TEXT * THINKER_STEP + CODES * TALKER_STEP
    return prompt_seconds(128 * count) + steps + count * SPEECH_FLOP / PEAK_FLOPS


def first_sound_bound(count: int) -> float:
    return prompt_seconds(128 * count) + FIRST_CODES * (THINKER_STEP + TALKER_STEP)


# ------------------------------------------------------------------------------------------------- the figures


@dataclass
class Figures:
    """What the scripts have written, and why a part has not."""

    text: dict[str, Any] = field(default_factory=dict)
    serve: dict[str, Any] = field(default_factory=dict)
    diffusion: dict[str, Any] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def summary(self, name: str) -> dict[str, Any]:
        """Of one load on the service; nothing where no request of it was answered."""
        summary: dict[str, Any] = self.serve.get(name, {}).get("summary", {})
        return summary if summary.get("succeeded") else {}


@dataclass(frozen=True)
class Row:
    title: str
    part: str
    measure: Callable[[Figures], Measured]
    must: float | None = None
    lower_is_better: bool = True
    unit: str = " s"
    digits: int = 2
    omni: tuple[float | None, float | None] = (None, None)
    """vLLM-Omni, as shipped and tuned."""
    omni_note: str = ""
    vllm: float | None = None
    bound: float | None = None
    panel: str = ""
    label: str = ""

    def show(self, value: float) -> str:
        return f"{value:,.{self.digits}f}{self.unit}"

    def met(self, value: float) -> bool:
        """Whether what must be reached is reached; a row without such a figure always is."""
        if self.must is None:
            return True
        return value <= self.must if self.lower_is_better else value >= self.must

    def omni_text(self) -> str:
        if self.omni == (None, None):
            return self.omni_note
        shown = " / ".join("-" if value is None else self.show(value) for value in self.omni)
        return f"{shown} ({self.omni_note})" if self.omni_note else shown

    def vllm_text(self) -> str:
        return "" if self.vllm is None else self.show(self.vllm)


def failures(summary: dict[str, Any]) -> str:
    count = summary["sent"] - summary["succeeded"]
    return f"{count} of {summary['sent']} requests failed" if count else ""


def spread(name: str, load: str, figures: Figures) -> Measured:
    """The median of a time over HTTP, in seconds."""
    summary = figures.summary(load)
    found = summary.get("spreads", {}).get(name)
    if not found:
        return None
    slowest = f"slowest {found['largest']:.2f}" if found["count"] > 2 else ""
    return found["p50"], ", ".join(filter(None, (slowest, failures(summary))))


def rate(load: str, figures: Figures) -> Measured:
    summary = figures.summary(load)
    return (summary["throughput"]["requests"], failures(summary)) if summary else None


def stutter(load: str, figures: Figures) -> Measured:
    summary = figures.summary(load)
    found = summary.get("stutter")
    return (100 * found["requests_share"], failures(summary)) if found else None


def tokens_per_second(load: str, figures: Figures) -> float | None:
    summary = figures.summary(load)
    return summary["throughput"]["output_tokens"] if summary else None


def engine(case: str, name: str, figures: Figures) -> Measured:
    found = figures.text.get("compiled", {}).get(f"{case} greedy")
    return (found[name], "") if found else None


def share(value: float | None, whole: float | None) -> Measured:
    if not value or not whole:
        return None
    return 100 * value / whole, f"{value:,.0f} of {whole:,.0f} tokens/s"


def sampled_share(figures: Figures) -> Measured:
    return share(
        tokens_per_second("text_64_temperature_1", figures), tokens_per_second("text_64_temperature_0", figures)
    )


def engine_share(figures: Figures) -> Measured:
    alone = engine("64x(128+128)", "tokens_per_second", figures)
    return share(tokens_per_second("text_64_temperature_0", figures), alone and alone[0])


def start(index: int, figures: Figures) -> Measured:
    return (figures.starts[index], "") if len(figures.starts) > index else None


def pictures(model: str, figures: Figures) -> Measured:
    """How many times as fast as diffusers one by one: the variant that is the default on CUDA."""
    found = figures.diffusion.get(model, {})
    for variant in ("compiled, graphs", "plain"):
        if variant in found:
            return found["diffusers_one_by_one"] / found[variant]["together"], variant
    return None


def _first_sound(count: int, must: float) -> Row:
    return Row(
        f"first sound, {count} at once",
        "serve",
        functools.partial(spread, "ttfa", f"speech_{count}"),
        must,
        omni_note="end of the answer",
        bound=first_sound_bound(count),
        panel="First sound, s",
        label=f"{count} at once",
    )


def _stutter(count: int, must: float | None) -> Row:
    return Row(
        f"`serve`, {count} spoken answers at once: requests that stutter",
        "serve",
        functools.partial(stutter, f"speech_{count}"),
        must,
        unit=" %",
        digits=0,
    )


def _text(count: int, length: int, must: float, vllm: float) -> Row:
    return Row(
        f"text, {count} x ({length} + {length}), tokens/s",
        "text",
        functools.partial(engine, f"{count}x({length}+{length})", "tokens_per_second"),
        must,
        lower_is_better=False,
        unit="",
        digits=0,
        vllm=vllm,
        bound=text_bound(count, length, length),
        panel="Text, tokens/s",
        label=f"{count} x ({length} + {length})",
    )


def _answers(count: int, must: float, tuned: float | None, note: str) -> Row:
    return Row(
        f"{count} at once, text + speech",
        "serve",
        functools.partial(rate, f"speech_{count}"),
        must,
        lower_is_better=False,
        unit=" /s",
        omni=(None, tuned),
        omni_note=note,
        bound=count / answer_bound(count),
        panel="Spoken answers a second",
        label=f"{count} at once",
    )


def _pictures(model: str, title: str) -> Row:
    return Row(
        f"{title}, 512 px, 16 at once, against diffusers one by one",
        "diffusion",
        functools.partial(pictures, model),
        1.5,
        lower_is_better=False,
        unit=" times",
    )


def _start(title: str, index: int, must: float | None, label: str) -> Row:
    peers = {"omni": (141.0, 150.0), "vllm": 48.9} if index == 0 else {}
    measure = functools.partial(start, index)
    return Row(title, "serve", measure, must, digits=1, panel="Ready, 7B from disk, s", label=label, **peers)  # type: ignore[arg-type]


_SPOKEN = Row(
    "1 request, text + speech",
    "serve",
    functools.partial(spread, "latency", "speech_1"),
    1.3,
    omni=(11.33, 3.58),
    bound=answer_bound(1),
    panel="One spoken answer, s",
    label="1 request",
)
_TOKEN = Row(
    "text, 1 request, a token",
    "text",
    functools.partial(engine, "1x(128+128)", "ms_per_token"),
    4.9,
    unit=" ms",
    vllm=4.73,
    bound=1e3 * THINKER_STEP,
    panel="Text, one request, ms a token",
    label="1 request",
)
_PERCENT: dict[str, Any] = {"lower_is_better": False, "unit": " %", "digits": 0}

ROWS = (
    _SPOKEN,
    _answers(8, 3.0, 8 / 15.8, "it mixed up the requests' audio"),
    _answers(64, 6.0, None, "out of memory, the whole service died"),
    _first_sound(1, 0.20),
    _first_sound(8, 0.40),
    _first_sound(32, 1.0),
    _TOKEN,
    _text(64, 128, 10_500, 9_934),
    _text(256, 256, 18_500, 17_934),
    Row("`serve`, 64 text streams, temperature 1, of greedy", "serve", sampled_share, 95, **_PERCENT),
    Row("`serve`, 64 text streams, greedy, of the engine alone", "serve", engine_share, 92, **_PERCENT),
    _stutter(8, 0),
    _stutter(24, 0),
    _stutter(64, None),
    _start("ready, 7B from disk, first start", 0, 15, "first start"),
    _start("ready, 7B from disk, second start", 1, 15, "second start"),
    _pictures("sd3", "Stable Diffusion 3"),
    _pictures("flux", "FLUX.1"),
)

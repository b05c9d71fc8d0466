"""A custom pipeline: any causal LM, followed by a stage that plays a note for each word.

The stage's network and the bridge are registered by name, and `custom_bridge_pipeline.yaml` uses the names.

    python examples/custom_bridge_pipeline.py out/tiny-lm "Once upon a time" --max-tokens 32
"""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnistage import CodecParams, Omni, SamplingParams
from omnistage.core.family import BridgeResult, LoadContext
from omnistage.core.types import CodecFrames, CodecInput, RequestInfo, StageChunk, TokenChunk
from omnistage.engines.codec import CodecComponent, CodecLayout, Window
from omnistage.models.registry import REGISTRY

LONGEST_WORD = 24


class Notes(CodecComponent):
    """A code is a word's length and becomes a note of a fifth of a second; longer words are lower."""

    sample_rate = 16_000
    layout = CodecLayout(block_codes=1, codebook_size=LONGEST_WORD + 1, max_codes=4096)
    voices = ()

    def __init__(self, context: LoadContext) -> None:
        del context  # it says where to run and with which configuration; numpy needs neither

    def group(self, params: CodecParams) -> Hashable:
        return None

    def open(self, request_id: str, params: CodecParams, voice: str | None) -> object:
        return None

    def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
        return [self._play(w.codes[w.history : w.history + w.emit]) for w in windows]

    def _play(self, codes: Sequence[int]) -> np.ndarray:
        t = np.arange(self.sample_rate // 5) / self.sample_rate
        fade = np.minimum(1.0, 20 * np.minimum(t, t[-1] - t))
        notes = [0.3 * fade * np.sin(2 * np.pi * 880 * 2 ** (-code / 12) * t) for code in codes]
        return np.concatenate([np.zeros(0), *notes]).astype(np.float32)


@dataclass(frozen=True)
class Reading:
    """The bridge's state: the unfinished word, and whether the notes stage has been started."""

    word: str = ""
    started: bool = False


def words2notes(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """A fold over the chunks of the language model: each word that ends becomes a code."""
    reading = state if isinstance(state, Reading) else Reading()
    text = chunk.payload.text if isinstance(chunk.payload, TokenChunk) else ""
    final = chunk.finish is not None
    *words, rest = (reading.word + text).split(" ")
    if final:
        words, rest = [*words, rest], ""
    codes = tuple(min(len(word), LONGEST_WORD) for word in words if word)
    if not codes and not final:
        return Reading(rest, reading.started), ()
    more = CodecFrames(codes, final) if reading.started else CodecInput(codes, final)
    return Reading(rest, started=True), (more,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a causal LM's folder, or its name in the local hub cache")
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("notes.wav"))
    args = parser.parse_args()

    REGISTRY.register_component("example.notes", Notes)
    REGISTRY.register_bridge("example.words2notes", words2notes)
    with Omni(args.model, config=Path(__file__).with_suffix(".yaml")) as omni:
        params = SamplingParams(max_tokens=args.max_tokens, seed=0)
        [out] = omni.generate(args.prompt, params, modalities=["text", "audio"])
    print(out.text)
    if out.audio is None:
        raise SystemExit("the output has no words")
    print(f"wrote {out.audio.save(args.out)}: {out.audio.seconds:.2f} s, {round(out.audio.seconds * 5)} notes")
    print(out.trace)


if __name__ == "__main__":
    main()

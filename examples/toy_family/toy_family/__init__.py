"""A family of one's own: text in; text and tones out. Nothing heavy is imported until a stage is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from omnistage.core.checkpoint import Checkpoint
from omnistage.core.family import BridgeResult, Family, InputProcessor, LoadContext
from omnistage.core.types import CodecFrames, CodecInput, RequestInfo, StageChunk, TokenChunk


def tokens2codes(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """A tone a token. The first input starts the beeper, later ones feed it, the last one is final."""
    tokens = chunk.payload.token_ids if isinstance(chunk.payload, TokenChunk) else ()
    codes = tuple(token % 64 for token in tokens)
    final = chunk.finish is not None
    if not codes and not final:
        return state, ()
    return "started", (CodecFrames(codes, final) if state == "started" else CodecInput(codes, final),)


def _thinker(context: LoadContext) -> object:
    from toy_family.thinker import load

    return load(context)


def _beeper(context: LoadContext) -> object:
    from toy_family.beeper import Beeper

    return Beeper()


def _processor(model: Checkpoint) -> InputProcessor:
    from omnistage.models.causal_lm.processor import CausalLMProcessor

    class Processor(CausalLMProcessor):
        def voices(self) -> tuple[str, ...]:
            return ("low", "high")

    return Processor.load(model.folder)


def _tiny(folder: Path, **options: object) -> None:
    """A small checkpoint with random weights, for tests: a Llama under this family's name."""
    from omnistage.models.causal_lm import tiny

    tiny.write(folder, **options)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "architectures": ["ToneForConditionalGeneration"]}), encoding="utf-8")


FAMILY = Family(
    name="tone",
    architectures=("ToneForConditionalGeneration",),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={"tone.thinker": _thinker, "tone.beeper": _beeper},
    bridges={"tone.tokens2codes": tokens2codes},
    processor=_processor,
    tiny=_tiny,
)

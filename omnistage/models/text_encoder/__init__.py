"""Embeddings and scores of texts: encoders, decoders with pooling, and sequence classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from omnistage.core.family import Family
from omnistage.models.lazy import lazy, lazy_factory


def _pipeline_of(config: Mapping[str, object]) -> Path:
    names = config.get("architectures")
    classifies = any(str(name).endswith("ForSequenceClassification") for name in names or ())  # type: ignore[attr-defined]
    return Path(__file__).with_name("scores.yaml" if classifies else "pipeline.yaml")


FAMILY = Family(
    name="text_encoder",
    architectures=("SentenceTransformer", "*ForSequenceClassification", "*Model"),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={
        "text_encoder.embed": lazy_factory("text_encoder.component", "load_embedder"),
        "text_encoder.classify": lazy_factory("text_encoder.component", "load_classifier"),
    },
    bridges={},
    processor=lambda model: lazy("text_encoder.processor", "EncoderProcessor.load")(model.folder),
    tiny=lazy("text_encoder.tiny", "write"),
    variants=("encoder", "decoder", "cross_encoder", "classifier"),
    pipeline_of=_pipeline_of,
)

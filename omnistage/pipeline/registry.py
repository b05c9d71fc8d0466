"""Deprecated path: see `omnistage.core.family` and `omnistage.core.registry` and `omnistage.models.registry`."""

from omnistage.core.deprecation import forward_names

__getattr__ = forward_names(
    __name__,
    "omnistage.core.family",
    "omnistage.core.registry",
    "omnistage.models.registry",
    renamed={
        "HearingProcessor": "AudioLimits",
        "PartialProcessor": "OptionalInputs",
        "ReadingProcessor": "SpeechReader",
        "WritingProcessor": "Transcriber",
    },
)

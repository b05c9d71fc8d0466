"""Omnistage: any-to-any models as pipelines of stages.

Public names are imported on first use, so that `import omnistage` and `omnistage --help` stay quick and need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnistage.config import OmniEngineArgs, OmniModelConfig
    from omnistage.errors import OmniError
    from omnistage.omni import AsyncOmni, Omni, OmniLLM
    from omnistage.pipeline.stage import Stage
    from omnistage.types import (
        CodecParams,
        DiffusionParams,
        FinishReason,
        Modality,
        OmniRequestOutput,
        OmniTokensPrompt,
        OutputChunk,
        SamplingParams,
        StructuredOutput,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncOmni",
    "CodecParams",
    "DiffusionParams",
    "FinishReason",
    "Modality",
    "Omni",
    "OmniEngineArgs",
    "OmniError",
    "OmniLLM",
    "OmniModelConfig",
    "OmniRequestOutput",
    "OmniTokensPrompt",
    "OutputChunk",
    "SamplingParams",
    "Stage",
    "StructuredOutput",
    "__version__",
]

_MODULE_OF = {
    "AsyncOmni": "omnistage.omni",
    "CodecParams": "omnistage.types",
    "DiffusionParams": "omnistage.types",
    "FinishReason": "omnistage.types",
    "Modality": "omnistage.types",
    "Omni": "omnistage.omni",
    "OmniEngineArgs": "omnistage.config",
    "OmniError": "omnistage.errors",
    "OmniLLM": "omnistage.omni",
    "OmniModelConfig": "omnistage.config",
    "OmniRequestOutput": "omnistage.types",
    "OmniTokensPrompt": "omnistage.types",
    "OutputChunk": "omnistage.types",
    "SamplingParams": "omnistage.types",
    "Stage": "omnistage.pipeline.stage",
    "StructuredOutput": "omnistage.types",
}


if not TYPE_CHECKING:  # a type checker sees the imports above, and would take any name for known here

    def __getattr__(name: str) -> object:
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(module), name)
        globals()[name] = value  # the next look-up does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

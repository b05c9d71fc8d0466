"""Omnistage: any-to-any models as pipelines of stages.

Public names are imported on first use, so that `import omnistage` and `omnistage --help` stay quick and need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnistage.config import OmniEngineArgs, OmniModelConfig
    from omnistage.core.errors import OmniError
    from omnistage.core.params import CodecParams, DiffusionParams, SamplingParams, StructuredOutput
    from omnistage.core.stage import Stage
    from omnistage.core.types import FinishReason, Modality, OmniTokensPrompt
    from omnistage.omni import AsyncOmni, Omni, OmniLLM
    from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk

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
    "CodecParams": "omnistage.core.params",
    "DiffusionParams": "omnistage.core.params",
    "FinishReason": "omnistage.core.types",
    "Modality": "omnistage.core.types",
    "Omni": "omnistage.omni",
    "OmniEngineArgs": "omnistage.config",
    "OmniError": "omnistage.core.errors",
    "OmniLLM": "omnistage.omni",
    "OmniModelConfig": "omnistage.config",
    "OmniRequestOutput": "omnistage.pipeline.outputs",
    "OmniTokensPrompt": "omnistage.core.types",
    "OutputChunk": "omnistage.pipeline.outputs",
    "SamplingParams": "omnistage.core.params",
    "Stage": "omnistage.core.stage",
    "StructuredOutput": "omnistage.core.params",
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

"""Model families: one folder each, all that is special to it inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnistage.pipeline.registry import Family


def builtin_families() -> tuple[Family, ...]:
    """The families that come with the package. Nothing heavy is imported until one is used."""
    from omnistage.models.causal_lm.family import FAMILY as CAUSAL_LM
    from omnistage.models.qwen2_5_omni.family import FAMILY as QWEN2_5_OMNI

    return (QWEN2_5_OMNI, CAUSAL_LM)

"""The voices of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Speakers = Mapping[str, Mapping[str, torch.Tensor | int]]
"""By name: `cond` and `ref_mel` for token2wav, `bos_token` for the talker."""
_DEFAULT = "Chelsie"


def first_voice(speakers: Speakers) -> str:
    """The voice of a request that names none: `transformers`' default, where the checkpoint has it."""
    return _DEFAULT if _DEFAULT in speakers else next(iter(speakers))

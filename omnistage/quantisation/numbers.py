"""The numbers of quantised weights: integers or float8, with the scales by which they stand for others."""

from __future__ import annotations

import torch

from omnistage.core.errors import CheckpointError
from omnistage.quantisation.schemes import SCALE, VALUES, Int4, Scheme


def pack(weight: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    """A weight `[O, I]`, or `[E, O, I]` of experts, as it is stored, by the ends of the names."""
    if weight.ndim != 2:
        flat = pack(weight.reshape(-1, weight.shape[-1]), scheme)
        return {end: part.view(*weight.shape[:-1], *part.shape[1:]) for end, part in flat.items()}
    return scheme.pack(weight.float())


def pack_turned(weight: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    """The same of weights `[E, I, O]`, which keep that order; scales are `[E, 1, O]`. Of schemes with scales by row."""
    parts = pack(weight.transpose(1, 2), scheme)
    return {VALUES: parts[VALUES].transpose(1, 2), SCALE: parts[SCALE][:, None]}


def unpack(values: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None) -> torch.Tensor:
    """The float32 weight that stored numbers stand for; raises for shapes that do not fit each other."""
    try:
        if minimum is None:
            if values.ndim == scale.ndim == 3 and scale.shape == (values.shape[0], 1, values.shape[2]):
                return values.float() * scale.float()  # turned
            if scale.shape != values.shape[:-1] or values.ndim < 2:
                raise CheckpointError(f"quantised values {list(values.shape)} have scales {list(scale.shape)}")
            return values.float() * scale.float()[..., None]
        return expand_int4(values, scale, minimum)
    except (RuntimeError, IndexError) as error:
        raise CheckpointError(f"quantised values {list(values.shape)} do not fit their scales: {error}") from error


def expand_int4(values: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """float32 `[..., I]` of two weights a byte."""
    steps = torch.stack((values >> 4, values & Int4.steps), dim=-1).view(*scale.shape, -1)
    weight = steps.float() * scale[..., None] + minimum[..., None]
    return weight.view(*values.shape[:-1], 2 * values.shape[-1])

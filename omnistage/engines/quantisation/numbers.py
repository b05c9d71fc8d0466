"""The numbers of quantised weights: integers or float8, with the scales by which they stand for others."""

from __future__ import annotations

import torch

from omnistage.config.quantize import QuantizeConfig
from omnistage.core.errors import CheckpointError
from omnistage.engines.quantisation.packed import int8_rows

VALUES, SCALE, MINIMUM = ".values", ".scale", ".minimum"
_FLOAT8_MAX = 448.0
_INT4_MAX = 15


def pack(weight: torch.Tensor, config: QuantizeConfig) -> dict[str, torch.Tensor]:
    """A weight `[O, I]`, or `[E, O, I]` of experts, as it is stored, by the ends of the names."""
    if weight.ndim != 2:
        flat = pack(weight.reshape(-1, weight.shape[-1]), config)
        return {end: part.view(*weight.shape[:-1], *part.shape[1:]) for end, part in flat.items()}
    values = weight.float()
    if config.scheme in ("int8", "int8_dynamic"):
        rounded, scale = int8_rows(values)
        return {VALUES: rounded, SCALE: scale}
    if config.scheme == "float8":
        scale = values.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / _FLOAT8_MAX
        return {VALUES: (values / scale[:, None]).to(torch.float8_e4m3fn), SCALE: scale}
    groups = values.view(len(values), -1, config.group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / _INT4_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    steps = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, _INT4_MAX).to(torch.uint8)
    steps = steps.view(len(values), -1)
    return {VALUES: steps[:, ::2] << 4 | steps[:, 1::2], SCALE: scale, MINIMUM: low}


def pack_turned(weight: torch.Tensor, config: QuantizeConfig) -> dict[str, torch.Tensor]:
    """The same of weights `[E, I, O]`, which keep that order; scales are `[E, 1, O]`. Not for int4."""
    parts = pack(weight.transpose(1, 2), config)
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
    steps = torch.stack((values >> 4, values & _INT4_MAX), dim=-1).view(*scale.shape, -1)
    weight = steps.float() * scale[..., None] + minimum[..., None]
    return weight.view(*values.shape[:-1], 2 * values.shape[-1])

"""Selection on a device: the rule of `selection.py` for all rows at once, without a look at the result on the host.

On CUDA one Triton kernel does it (`triton_select.py`); elsewhere, and as its reference, a sort in torch does. It serves
code predictors, and devices without Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from omnistage.core.params import SamplingParams
from omnistage.engines.ar.sampling.selection import FAILED, WEIGHT_SCALE, temperature_of
from omnistage.engines.streams import upload
from omnistage.engines.triton_jit import HAS_TRITON, has_c_compiler

NOTHING = -3
"""In place of a token id: no token of the row may be sampled."""


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run there."""
    return device.type == "cuda" and HAS_TRITON and has_c_compiler()


class DeviceSelector:
    """How the tokens of a fixed list of rows are selected; greedy ones have temperature 0."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        rows = np.array(
            [
                (
                    0.0 if p.greedy else temperature_of(p),
                    p.top_k if 0 < p.top_k < vocab_size else vocab_size,
                    p.top_p,
                    p.min_p,
                )
                for p in params
            ],
            dtype=np.float64,
        )
        # One copy for all of them; float64 holds each of them exactly.
        columns = upload(np.ascontiguousarray(rows.T), device)
        self.temperature, self.min_p = columns[0].float(), columns[3].float()
        self.top_k, self.top_p = columns[1].to(torch.int32), columns[2]
        self.random = any(not p.greedy for p in params)
        """Whether `select` needs random numbers."""

    def select(self, x: Tensor, u: Tensor) -> Tensor:
        """An id for each row of `[R, V]` logits, int64 `[R]`; `FAILED` where NaN or infinity is, or `NOTHING`.

        `u` has a number in [0, 1) for each row, float64.
        """
        if has_kernels(x.device):
            from omnistage.engines.ar.sampling import triton_select

            return triton_select.select(x, self.temperature, self.top_k, self.top_p, self.min_p, u)
        return self.select_sorted(x, u)

    def select_sorted(self, x: Tensor, u: Tensor) -> Tensor:
        """`select` by a sort of every row."""
        x = x.float()
        best, first = x.max(dim=1)
        if self.random:
            first = torch.where(self.temperature == 0, first, self._pick(x, u))
        first = torch.where(best == -torch.inf, NOTHING, first)
        return torch.where(best < torch.inf, first, FAILED)  # NaN is not

    def _pick(self, x: Tensor, u: Tensor) -> Tensor:
        temperature = torch.where(self.temperature == 0, 1.0, self.temperature)[:, None]
        values, ids = x.sort(dim=1, descending=True, stable=True)
        scaled = values / temperature
        shares = (scaled - scaled[:, :1]).exp()
        weights = (shares * WEIGHT_SCALE).to(torch.int64)
        weights *= scaled >= scaled.gather(1, self.top_k[:, None].long() - 1)
        mass = weights.cumsum(dim=1)
        threshold = (self.top_p[:, None] * mass[:, -1:]).ceil()
        keep = ((mass - weights < threshold) | (self.top_p[:, None] >= 1)) & (shares >= self.min_p[:, None])
        mass = torch.zeros_like(weights).scatter_(1, ids, weights * keep).cumsum(dim=1)
        total = mass[:, -1]
        target = torch.minimum((u * total).to(torch.int64), total - 1)
        return (mass <= target[:, None]).sum(dim=1).clamp(max=x.shape[1] - 1)

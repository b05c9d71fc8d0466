"""Linear layers in int8 on the CPU: packed weights, activations quantised by row."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import nn

INT8_MAX = 127
_TINY = torch.finfo(torch.float32).tiny


def has_packed_int8() -> bool:
    """Whether this torch has the kernels; they are for x86."""
    return "fbgemm" in torch.backends.quantized.supported_engines


@functools.cache
def _activation_levels() -> int:
    """Without VNNI products of 8 bits are summed in 16, which full activations would overflow."""
    return INT8_MAX if torch.cpu._is_vnni_supported() else INT8_MAX // 2


def int8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[O, I]` as int8 with a float32 scale `[O]`: the largest weight of a row is ±127 and comes back exactly."""
    values = weight.float()
    scale = values.abs().amax(-1).div(INT8_MAX)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (values / scale[:, None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


class PackedInt8Linear(nn.Linear):
    """A linear layer whose product is one of integers: exact, so that no row depends on the others of its batch.

    torch's own dynamic layers take one scale for all rows. Here each row is divided by its largest value first, and
    all of them are quantised with the same constant.
    """

    _packed: torch.ScriptObject
    _levels: int

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """float32 `[O, I]`, unpacked anew at each access."""
        weight: torch.Tensor = torch.ops.quantized.linear_unpack(self._packed)[0].dequantize()
        return weight

    @property
    def weight_bytes(self) -> int:
        return self.out_features * (self.in_features + 4)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Few operators: of a small model each costs as much as a part of its product.
        if not input.numel():
            return input.new_empty(*input.shape[:-1], self.out_features)
        if input.ndim == 1:
            return self.forward(input[None])[0]
        rows = input if input.dtype == torch.float32 else input.float()
        largest = rows.abs().amax(-1, keepdim=True).clamp_min(_TINY)
        out: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(
            rows / largest, 1 / self._levels, self._levels, self._packed
        )
        out.mul_(largest)
        if self.bias is not None:
            out += self.bias
        return out if out.dtype == input.dtype else out.to(input.dtype)


def pack_linear(layer: nn.Linear) -> None:
    """Make a linear layer a `PackedInt8Linear`, in place: all references to it compute with integers from now on."""
    values, scale = int8_rows(layer.weight.detach())
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"  # of the layout, which goes with the packed weights
    try:
        with warnings.catch_warnings():
            # Tensors of quantised types are on their way out of torch; packed weights have no other entrance yet.
            warnings.simplefilter("ignore", UserWarning)
            quantised = torch._make_per_channel_quantized_tensor(values, scale.double(), zeros, 0)
        packed = torch.ops.quantized.linear_prepack(quantised, None)
    finally:
        torch.backends.quantized.engine = engine
    del layer._parameters["weight"]
    layer.__class__ = PackedInt8Linear
    layer._packed, layer._levels = packed, _activation_levels()  # type: ignore[assignment]

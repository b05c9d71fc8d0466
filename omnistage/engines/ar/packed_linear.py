"""Linear layers in float32 on the CPU whose weights lie as its kernels read them; they replace the plain weights.

MKL, which computes plain layers, rearranges a matrix at every product of more than a few rows: with a decode batch's
few rows that takes longer than the product. oneDNN and FBGEMM rearrange it once, when it is packed. FBGEMM keeps
numbers in float16 and computes in float32: it is taken where float16 holds the very numbers, as it does for
checkpoints in float16, and for nearly all in bfloat16 once they are multiplied by a power of two. So no rounding is
added, half the bytes are read, and each row is computed alike in every batch.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from omnistage.core.memory import trim_heap
from omnistage.engines.ar.cpu_kernels import WeightFirstLinear
from omnistage.engines.ar.merged import MergedLinear, merge_linears

if TYPE_CHECKING:
    from omnistage.config.schema import ARBudget
    from omnistage.engines.ar.component import ARComponent

Layer = TypeVar("Layer", bound=nn.Module)

_PACKED_FOR_ROWS = 16
"""oneDNN chooses a layout for so many rows; products of other numbers of rows are as fast with it."""
_LARGEST_EXPONENT = 15
"""Numbers below 2**15 in float16 stay clear of its largest, 65504."""

_HALF_BLOCK = 512, 32
"""Inputs and outputs of a block of FBGEMM's; those at the edges are filled up."""


class PackedLinear(nn.Linear):
    """A float32 layer with packed weights."""

    weight_bytes: int
    """Of the packed weights."""

    @property
    @abstractmethod
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """float32 `[O, I]`, unpacked anew at each access: the very numbers that were packed."""


class HalfLinear(PackedLinear):
    """FBGEMM's product of float32 rows with weights that float16 holds exactly, summed in float32."""

    _packed: torch.ScriptObject
    _scale: float
    """A power of two by which products are multiplied, since their weights were divided by it."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        weight: torch.Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return weight * self._scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.ndim == 1:
            return self.forward(input[None])[0]
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16.default(input, self._packed)
        if self._scale != 1.0:
            out.mul_(self._scale)
        if self.bias is not None:
            out += self.bias
        return out


class BlockedLinear(PackedLinear):
    """oneDNN's product with weights in its own layout."""

    _packed: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return self._packed.to_dense()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not input.numel():
            return input.new_empty(*input.shape[:-1], self.out_features)
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return _traceable_product()(input, self._packed, self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(input, self._packed, self.bias, "none", [], "")
        return out


@functools.cache
def _traceable_product() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """oneDNN's product as a function of TorchScript, whose tracer takes no empty list of scalars."""
    source = """
def product(rows: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
"""
    product: Callable[..., torch.Tensor] = torch.jit.CompilationUnit(source).product
    return product


def has_packed_float() -> bool:
    """Whether this torch has the kernels; they are for x86."""
    return "fbgemm" in torch.backends.quantized.supported_engines and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def packs(component: ARComponent, budget: ARBudget) -> bool:
    """Whether a stage on the CPU packs weights: not where layers read them themselves, nor what is compiled."""
    spec = component.spec
    alone = spec.own_state is not None or spec.grouped or spec.states
    return budget.pack_weights and not alone and budget.compile is not True and has_packed_float()


def merge_as_planned(component: ARComponent, budget: ARBudget, *, cuda: bool) -> None:
    """Merge on the meta device what a stage will merge: a joint product is held as long as any of its parts."""
    spec, merge = component.spec, budget.merge_linears
    if spec.own_state is not None or spec.grouped or merge is False:
        return
    if merge is True or cuda or packs(component, budget):
        for decoder in component.decoders:
            merge_linears(decoder)


def packed_copies(component: ARComponent) -> int:
    """Bytes at most of packed heads whose plain weights stay, because they are the embedding."""
    embedded = {id(each.weight) for each in _modules(component.modules, nn.Embedding)}
    weights = (head.weight for head in _modules(component.heads, nn.Linear))
    copied = [each for each in weights if id(each) in embedded and each.dtype == torch.float32]
    return sum(max(each.nbytes, _half_bytes(each)) for each in copied)


def can_pack(module: nn.Module) -> bool:
    """A linear layer in float32 on the CPU without a forward of its own."""
    weight = module._parameters.get("weight")
    if type(module) not in (nn.Linear, WeightFirstLinear) or type(weight) is not nn.Parameter:
        return False
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0


def pack_layers(decoders: Sequence[nn.Module], heads: Sequence[nn.Module], *, merge: bool) -> int:
    """Pack what can be packed of decoders and of what makes logits of their rows; how many layers.

    `merge`: queries, keys and values (gate and up) become one product first.
    """
    if not has_packed_float():
        return 0
    for decoder in decoders if merge else ():
        merge_linears(decoder, {name for name, module in decoder.named_modules() if can_pack(module)})
    count = 0
    for network in (*decoders, *heads):
        for module in list(network.modules()):
            layer = module.group.joint if isinstance(module, MergedLinear) else module
            if isinstance(layer, nn.Linear) and can_pack(layer):
                pack_layer(layer)
                count += 1
    trim_heap()  # plain weights were freed among what stays
    return count


@torch.no_grad()
def pack_layer(layer: nn.Linear) -> None:
    """Pack a layer's weights, in place: all references to it compute with them from now on."""
    weight = layer.weight.detach()
    scale = half_scale(weight)
    del layer._parameters["weight"]
    if scale is None:
        layer.__class__ = BlockedLinear
        layer._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        layer.weight_bytes = weight.nbytes  # type: ignore[assignment]
        return
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"  # of the layout, which goes with the packed weights
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(weight if scale == 1.0 else weight / scale, None)
    finally:
        torch.backends.quantized.engine = engine
    layer.__class__ = HalfLinear
    layer._packed, layer._scale = packed, scale  # type: ignore[assignment]
    layer.weight_bytes = _half_bytes(weight)  # type: ignore[assignment]


@torch.no_grad()
def half_scale(weight: torch.Tensor) -> float | None:
    """The power of two by which float16 holds a weight exactly when it is divided by it; None: there is none."""
    largest = float(weight.abs().amax())
    if not math.isfinite(largest):  # FBGEMM would make its largest number of an infinite one
        return None
    if _in_half(weight):
        return 1.0
    scale = math.ldexp(1.0, math.frexp(largest)[1] - _LARGEST_EXPONENT)
    return scale if _in_half(weight / scale) else None


def _half_bytes(weight: torch.Tensor) -> int:
    rows, columns = weight.shape
    return 2 * _padded(columns, _HALF_BLOCK[0]) * _padded(rows, _HALF_BLOCK[1])


def _modules(networks: Sequence[nn.Module], kind: type[Layer]) -> Iterator[Layer]:
    for network in networks:
        yield from (module for module in network.modules() if isinstance(module, kind))


def _padded(size: int, block: int) -> int:
    return -(-size // block) * block


def _in_half(weight: torch.Tensor) -> bool:
    return torch.equal(weight.to(torch.float16).to(torch.float32), weight)

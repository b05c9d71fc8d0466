"""Quantisation schemes. One class is all that there is to say of one: its name and help, the devices that run it, the
layers that it fits, what is stored of a weight, how many bytes that takes, and how a layer computes with it.

The configuration and the command line read the names here, so torch is imported where a layer is touched.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from omnistage.core.errors import ConfigError, InternalError, MissingDependencyError

if TYPE_CHECKING:
    import torch
    from torch import nn

VALUES, SCALE, MINIMUM = ".values", ".scale", ".minimum"
"""Ends of the names of what is stored in place of a weight."""


class Scheme(ABC):
    """How weights are rounded, stored and multiplied."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """For help and documentation."""
    by_row: ClassVar[bool] = True
    """One scale for each row; else one for each `group_size` inputs of it."""
    packed: ClassVar[bool] = False
    """Layers compute with packed weights of the CPU, which are no tensors; merged layers are one of them."""
    tolerance: ClassVar[float | None] = None
    """How far two orders of the same sums may differ, of the range of logits, where activations are rounded too."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    @abstractmethod
    def check(self, device: torch.device, dtype: torch.dtype, param: str) -> None:
        """Refuse a device or dtype that cannot run it, before anything is loaded."""

    @abstractmethod
    def quantise(self, layer: nn.Linear, device: torch.device) -> None:
        """Quantise a linear layer in place, for `device`."""

    @abstractmethod
    def pack(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """A weight `[O, I]` in float32 as it is stored, by the ends of the names."""

    def fits(self, inputs: int, outputs: int) -> bool:
        """Whether it has products for linear layers of this size."""
        return True

    def weight_bytes(self, inputs: int, outputs: int) -> int:
        """Bytes of a weight with its scales."""
        return inputs * outputs + 4 * outputs


class Int8Dynamic(Scheme):
    name = "int8_dynamic"
    summary = "weights and activations by row, on x86 CPUs"
    packed = True

    def check(self, device: torch.device, dtype: torch.dtype, param: str) -> None:
        from omnistage.quantisation.packed import has_packed_int8

        if device.type != "cpu":
            raise ConfigError(f"{self.name} is for the CPU, not for {device}; use int8 or float8", param=param)
        if not has_packed_int8():
            raise ConfigError(f"{self.name} needs the int8 kernels of x86, which this torch lacks", param=param)

    def quantise(self, layer: nn.Linear, device: torch.device) -> None:
        from omnistage.quantisation.packed import pack_linear

        pack_linear(layer)

    def pack(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return _int8_parts(rows)


class _Torchao(Scheme):
    """Computed by torchao, on GPUs of some compute capability."""

    capability: ClassVar[tuple[int, int]]
    on_cpu: ClassVar[bool] = False
    bfloat16_only: ClassVar[bool] = True

    def check(self, device: torch.device, dtype: torch.dtype, param: str) -> None:
        if not self.on_cpu or device.type != "cpu":
            self._check_gpu(device, dtype, param)
        if importlib.util.find_spec("torchao") is None:
            raise MissingDependencyError(f"{self.name} needs torchao: pip install 'omnistage[quantize]'")

    def _check_gpu(self, device: torch.device, dtype: torch.dtype, param: str) -> None:
        import torch

        if device.type != "cuda":
            raise ConfigError(f"{self.name} runs on CUDA only, not on {device}; use int8_dynamic there", param=param)
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < self.capability:
            needs = ".".join(map(str, self.capability))
            raise ConfigError(
                f"{self.name} needs a GPU of compute capability {needs}, {device} has {major}.{minor}; use int8",
                param=param,
            )
        if self.bfloat16_only and dtype != torch.bfloat16:
            raise ConfigError(f"{self.name} computes in bfloat16 only, the stage's dtype is {dtype}", param=param)

    def quantise(self, layer: nn.Linear, device: torch.device) -> None:
        from torch import nn

        layer.__class__ = nn.Linear  # subclasses read the numbers of their weights
        layer.to(device)
        weight = layer.weight
        layer.weight = nn.Parameter(self.torchao_weight(weight.detach()), requires_grad=False)
        if type(layer.weight) is type(weight):
            raise InternalError(f"torchao left a layer of {list(weight.shape)} as it was")

    def torchao_weight(self, weight: torch.Tensor) -> torch.Tensor:
        from torch import nn
        from torchao.quantization import quantize_

        holder = nn.Linear(1, 1, bias=False, device="meta")
        holder.in_features, holder.out_features = weight.shape[1], weight.shape[0]
        holder.weight = nn.Parameter(weight, requires_grad=False)
        quantize_(holder, self.recipe())
        return holder.weight.data

    def recipe(self) -> Any:
        """torchao's configuration."""
        raise NotImplementedError


class Int8(_Torchao):
    name = "int8"
    summary = "weights only"
    capability, on_cpu, bfloat16_only = (7, 0), True, False

    def pack(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return _int8_parts(rows)

    def torchao_weight(self, weight: torch.Tensor) -> torch.Tensor:
        from torchao.quantization import Int8Tensor, PerRow

        # Our scales, so that weights that were quantised before come out the same.
        scale = self.pack(weight)[SCALE][:, None]
        quantised: torch.Tensor = Int8Tensor.from_hp(weight.contiguous(), PerRow(), scale=scale)
        return quantised


class Int4(_Torchao):
    name = "int4"
    summary = "weights only, on GPUs of compute capability 8.0 and higher"
    capability, by_row = (8, 0), False
    width, height = 1024, 8
    """Weights are padded to multiples of these."""
    steps = 15

    def fits(self, inputs: int, outputs: int) -> bool:
        return inputs % self.group_size == 0

    def pack(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        import torch

        groups = rows.view(len(rows), -1, self.group_size)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / self.steps).clamp_min(torch.finfo(torch.float32).tiny)
        values = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, self.steps).to(torch.uint8)
        values = values.view(len(rows), -1)
        return {VALUES: values[:, ::2] << 4 | values[:, 1::2], SCALE: scale, MINIMUM: low}

    def weight_bytes(self, inputs: int, outputs: int) -> int:
        inputs, outputs = (-(-n // size) * size for n, size in ((inputs, self.width), (outputs, self.height)))
        return inputs * outputs // 2 + 4 * outputs * (inputs // self.group_size)

    def recipe(self) -> Any:
        from torchao.quantization import Int4WeightOnlyConfig

        return Int4WeightOnlyConfig(
            group_size=self.group_size, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )


class Float8(_Torchao):
    name = "float8"
    summary = "weights and activations by row, on GPUs of compute capability 8.9 and higher"
    capability = (8, 9)
    tolerance = 0.25
    multiple = 16
    """Of both sizes of a weight, for the products of GPUs."""
    largest = 448.0

    def fits(self, inputs: int, outputs: int) -> bool:
        return inputs % self.multiple == 0 and outputs % self.multiple == 0

    def pack(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        import torch

        scale = rows.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / self.largest
        return {VALUES: (rows / scale[:, None]).to(torch.float8_e4m3fn), SCALE: scale}

    def recipe(self) -> Any:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

        return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)


def _int8_parts(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    from omnistage.quantisation.packed import int8_rows

    values, scale = int8_rows(rows)
    return {VALUES: values, SCALE: scale}


SCHEMES: dict[str, type[Scheme]] = {scheme.name: scheme for scheme in (Int8, Int4, Int8Dynamic, Float8)}
NAMES_IN_WORDS = " or ".join((", ".join(list(SCHEMES)[:-1]), list(SCHEMES)[-1]))

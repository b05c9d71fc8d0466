"""Adds adapters to a network's linear layers from outside, with shapes that never change.

Every layer gets the matrices of all slots side by side: one product goes down to `slots × rank` numbers, those of slots
that a row does not use become zeros, and one product comes up again. What a row uses is a table in a buffer that keeps
its place, so that captured and compiled steps hold, and adapters of different requests share a batch.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from omnistage.core.errors import AdapterError, InternalError
from omnistage.engines.adapters.files import LoraPair
from omnistage.engines.adapters.library import Adapter, AdapterLibrary, Pairs, Selection
from omnistage.engines.adapters.triton_up import adapter_up, fits
from omnistage.engines.ar.merged import MergedLinear
from omnistage.engines.streams import upload

_PROBED_TOKENS, _PROBED_PICTURES = (5, 11), (2, 3)
Rows = Sequence[tuple[int, Selection]]
"""A step's rows in order: how many in turn use what."""


def delta(module: nn.Module, low: torch.Tensor) -> torch.Tensor:
    """What the rows' adapters add to a layer's output, from the product with all adapters' `down`."""
    parts, slots, rank = module.adapter_shape  # type: ignore[misc]
    table: torch.Tensor = module.adapter_table  # type: ignore[assignment]
    if module.adapter_by_token:
        weights = table[: low.shape[-2], None, :, None]
    else:
        weights = table[: low.shape[0]].view(-1, *(1,) * (low.ndim - 2), 1, slots, 1)
    each = low.unflatten(-1, (parts, slots, rank))  # type: ignore[no-untyped-call]
    # Not a product alone: another request's adapter may have overflowed in this row, and 0 x inf is NaN.
    weighted = torch.where(weights != 0, each * weights, 0)
    return nn.functional.linear(weighted.flatten(-3), module.adapter_up)  # type: ignore[arg-type]


def add_delta(module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
    """Forward hook of a layer, whatever its class: quantised ones, too."""
    if not module.adapter_state.active:  # type: ignore[union-attr]
        return out
    down: torch.Tensor = module.adapter_down  # type: ignore[assignment]
    return out + delta(module, nn.functional.linear(args[0].to(down.dtype), down)).to(out.dtype)


class FoldedLinear(nn.Linear):
    """A float layer whose weight stands above the adapters' `down`, so that one product computes both.

    On a GPU a small product over the same input would cost nearly as much time as the layer's own.
    """

    adapter_stacked: torch.Tensor
    adapter_bias: torch.Tensor | None
    adapter_up: torch.Tensor
    adapter_table: torch.Tensor
    adapter_sizes: tuple[int, ...] = ()
    """Where a kernel adds the adapters: the outputs of each part of `adapter_up`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        both = nn.functional.linear(input, self.adapter_stacked, self.adapter_bias)
        if self.adapter_sizes:
            added: torch.Tensor = adapter_up(both, self.adapter_up, self.adapter_table, self.adapter_sizes)
            return added
        return both[..., : self.out_features] + delta(self, both[..., self.out_features :])


@dataclass(slots=True)
class _State:
    active: bool = True
    """False skips the products of a step without adapters, where nothing is captured or compiled."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a layer's adapters go: a part of a product, at some of its outputs."""

    module: nn.Module
    part: int
    first: int
    outputs: int


class AdapterLayers:
    """The linear layers of a stage's networks, and the adapters that are on the device.

    Made before layers are merged; `install` after that, before they are compiled and captured.
    """

    def __init__(
        self,
        library: AdapterLibrary,
        networks: Mapping[str, nn.Module],
        probe: Callable[[int], None],
        *,
        by_token: bool,
        dtype: torch.dtype,
        apart: Sequence[nn.Module] = (),
    ) -> None:
        """`networks` by the beginning of their layers' names; `probe` runs them over so many rows.

        Layers in the modules `apart` are left out. Rows are tokens, the last dimension but one of a layer's input, or
        else its first dimension.
        """
        self.library = library
        self.by_token = by_token
        self._networks = networks
        self._dtype = dtype
        if not library.shapes:
            library.shapes = self._probed(probe, {layer for module in apart for layer in module.modules()})
        self.shapes = library.shapes
        """Inputs and outputs by layer, of those that adapters can change."""
        self._places: dict[str, _Place] = {}
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        """Slots by content, least recently used first."""
        self._free: list[int] = []
        self._step: set[bytes] = set()
        """What the step that is being put together uses."""
        self._last: object = None
        self._state = _State()
        self._skips = False
        self.table = torch.empty(0)
        """`[rows, slots]`: how strongly a row uses the adapter of a slot."""

    # ------------------------------------------------------------------------------------------------ layers

    def _linears(self) -> Iterator[tuple[str, nn.Module, tuple[int, int]]]:
        for prefix, network in self._networks.items():
            merged = ""
            for name, module in network.named_modules():
                if merged and name.startswith(merged):
                    continue
                inputs: object
                outputs: object
                if isinstance(module, MergedLinear):
                    merged = f"{name}."
                    inputs, outputs = module.group.joint.in_features, module.group.sizes[module.index]
                else:
                    inputs, outputs = getattr(module, "in_features", None), getattr(module, "out_features", None)
                # Experts that are layers of their own see some of a step's rows, in an order of their own.
                if isinstance(inputs, int) and isinstance(outputs, int) and ".experts." not in f".{name}.":
                    yield f"{prefix}.{name}" if prefix else name, module, (inputs, outputs)

    @torch.inference_mode()
    def _probed(self, probe: Callable[[int], None], left_out: Set[nn.Module]) -> dict[str, tuple[int, int]]:
        """The layers that run once for each row, in the rows' order, as far as shapes can tell."""
        linears = {name: (module, shape) for name, module, shape in self._linears() if module not in left_out}
        suitable = set(linears)
        for count in _PROBED_TOKENS if self.by_token else _PROBED_PICTURES:
            checks: dict[str, bool] = {}

            def note(name: str, args: tuple[Any, ...], count: int = count, checks: dict[str, bool] = checks) -> None:
                shape: tuple[int, ...] = tuple(args[0].shape) if args and isinstance(args[0], torch.Tensor) else ()
                if self.by_token:
                    rows = len(shape) in (2, 3) and shape[-2] == count and shape[:-2] in ((), (1,))
                else:
                    rows = len(shape) >= 2 and shape[0] == count
                checks[name] = checks.get(name, True) and rows

            handles = [
                module.register_forward_pre_hook(lambda _module, args, name=name, note=note: note(name, args))
                for name, (module, _shape) in linears.items()
            ]
            try:
                probe(count)
            finally:
                for handle in handles:
                    handle.remove()
            suitable &= {name for name, fits in checks.items() if fits}
        return {name: shape for name, (_module, shape) in linears.items() if name in suitable}

    def fit(self, layer: str, path: str, pair: LoraPair) -> LoraPair:
        """The pair in the network's dtype. Raises where its shapes are not the layer's."""
        inputs, outputs = self.shapes[layer]
        if (pair.down.shape[1], pair.up.shape[0]) != (inputs, outputs):
            raise AdapterError(
                f"{path} is for a layer of {pair.down.shape[1]} inputs and {pair.up.shape[0]} outputs, and here it has "
                f"{inputs} and {outputs}: the adapter was trained on another base"
            )
        down, up = pair.down.to(self._dtype), pair.up.to(self._dtype)
        if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
            raise AdapterError(f"{path} has values beyond the range of {self._dtype}; use another dtype")
        return LoraPair(down, up)

    def install(self, *, max_rows: int, fold: bool, skip_idle: bool, kernels: bool = False) -> None:
        """Make room on the device and change the layers. `fold`: float layers compute with the adapters' rows.

        `skip_idle`: steps without adapters leave the products out, which captured and compiled steps cannot.
        `kernels`: folded layers, whose rows are tokens, add them with a Triton kernel.
        """
        library = self.library
        slots, rank = library.limits.slots, library.fix_rank()
        library_layers = set(map(_numbered, library.layers()))
        names = [name for name in self.shapes if library.limits.at_run_time or _numbered(name) in library_layers]
        products: dict[nn.Module, list[tuple[str, int, int]]] = {}
        for name, module, (_inputs, outputs) in self._linears():
            if name not in names:
                continue
            product, first = module, 0
            if isinstance(module, MergedLinear):
                product, first = module.group.joint, sum(module.group.sizes[: module.index])
            products.setdefault(product, []).append((name, first, outputs))
        device = next((weight.device for product in products for weight in product.parameters()), torch.device("cpu"))
        self.table = torch.zeros(max_rows, slots, dtype=self._dtype, device=device)
        self._free = list(reversed(range(slots)))
        self._skips, self._state = skip_idle, _State(active=not skip_idle)
        for product, parts in products.items():
            self._attach(product, (len(parts), slots, rank), fold=fold)
            for index, (name, first, outputs) in enumerate(parts):
                self._places[name] = _Place(product, index, first, outputs)
            sizes = tuple(outputs for _name, _first, outputs in parts)
            if isinstance(product, FoldedLinear) and kernels and self.by_token and fits(sizes, product.out_features):
                product.adapter_sizes = sizes
        if device.type == "cuda":  # pragma: no cover  (needs CUDA)
            torch.cuda.current_stream(device).synchronize()  # stages' streams wait for no other

    def _attach(self, module: nn.Module, shape: tuple[int, int, int], *, fold: bool) -> None:
        """Give a layer its matrices, zeros, and what adds them. One that was given them before keeps its own."""
        columns, device = shape[0] * shape[1] * shape[2], self.table.device
        inputs, outputs = int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
        if getattr(module, "adapter_shape", None) not in (None, shape):
            raise InternalError("a layer cannot be given adapters of other sizes")
        known = hasattr(module, "adapter_shape")
        setattr(module, "adapter_shape", shape)  # noqa: B010  (torch types attributes as tensors and modules)
        setattr(module, "adapter_by_token", self.by_token)  # noqa: B010
        setattr(module, "adapter_state", self._state)  # noqa: B010
        module.register_buffer("adapter_table", self.table, persistent=False)
        if known:
            return
        module.register_buffer("adapter_up", torch.zeros(outputs, columns, dtype=self._dtype, device=device), False)
        if fold and type(module) is nn.Linear and type(module.weight.data) is torch.Tensor:
            _fold(module, columns)
            return
        down = torch.zeros(columns, inputs, dtype=self._dtype, device=device)
        module.register_buffer("adapter_down", down, persistent=False)
        module.register_forward_hook(add_delta)

    # ------------------------------------------------------------------------------------------------- steps

    def begin_step(self) -> None:
        """No slot is needed yet."""
        self._step.clear()

    def activate(self, selection: Selection) -> None:
        """Have a request's adapters on the device for this step. Raises what reading them raises."""
        for adapter, _weight in selection.adapters:
            self._step.add(adapter.digest)
            if adapter.digest in self._slots:
                self._slots.move_to_end(adapter.digest)
                continue
            if not self._free:
                unused = next((digest for digest in self._slots if digest not in self._step), None)
                if unused is None:
                    raise InternalError("a step uses more adapters than there are slots")
                self._free.append(self._slots.pop(unused))
            pairs = self.library.pairs(adapter)
            self._last = None
            self._write(self._free[-1], pairs)
            self._slots[adapter.digest] = self._free.pop()

    @torch.inference_mode()
    def _write(self, slot: int, pairs: Pairs) -> None:
        for name, place in self._places.items():
            _parts, slots, rank = place.module.adapter_shape  # type: ignore[misc]
            start = (place.part * slots + slot) * rank
            down = place.module.adapter_down[start : start + rank]  # type: ignore[index]
            up = place.module.adapter_up[place.first : place.first + place.outputs, start : start + rank]  # type: ignore[index]
            pair = pairs.get(name)
            pair_rank = 0 if pair is None else len(pair.down)
            if pair is not None:
                down[:pair_rank].copy_(pair.down)
                up[:, :pair_rank].copy_(pair.up)
            down[pair_rank:].zero_()
            up[:, pair_rank:].zero_()

    @torch.inference_mode()
    def select(self, rows: Rows) -> None:
        """Say what each row of the next forward uses; all of it is active."""
        if rows == self._last:
            return
        self._last = rows
        total = sum(count for count, _selection in rows)
        table = np.zeros((total, self.table.shape[1]), dtype=np.float32)
        start = 0
        for count, selection in rows:
            for adapter, weight in selection.adapters:
                table[start : start + count, self._slots[adapter.digest]] += weight
            start += count
        if self._skips:
            self._state.active = any(selection.adapters for _count, selection in rows)
            if not self._state.active:
                return
        self.table[:total].copy_(upload(table, self.table.device))


def _fold(layer: nn.Linear, columns: int) -> None:
    """Put so many rows, zeros, below a layer's weight."""
    weight = layer.weight.data
    stacked = torch.cat((weight, weight.new_zeros(columns, layer.in_features)))
    bias = None if layer.bias is None else nn.functional.pad(layer.bias.data, (0, columns))
    layer.register_buffer("adapter_stacked", stacked, persistent=False)
    layer.register_buffer("adapter_bias", bias, persistent=False)
    layer.register_buffer("adapter_down", stacked[layer.out_features :], persistent=False)
    layer.weight = nn.Parameter(stacked[: layer.out_features], requires_grad=False)
    layer.__class__ = FoldedLinear


def target_of(path: str, layers: Mapping[str, object], words: frozenset[str]) -> str | None:
    """The layer that a path in a whole model names; `words` are what may stand before its own name."""
    parts = path.split(".")
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        if name in layers and words.issuperset(parts[:start]):
            return name
    return None


def _numbered(name: str) -> str:
    """A layer's name for all repeated blocks: they are computed alike, and compiled once."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


__all__ = ["Adapter", "AdapterLayers", "FoldedLinear", "target_of"]

"""What each stage of a model needs of its device, from the model's configuration alone.

A stage's component is built on the meta device, without weights, and its largest step is run there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from omnistage.config import (
    ARStageConfig,
    CodecBudget,
    CodecStageConfig,
    DiffusionStageConfig,
    LocalStageConfig,
    OmniModelConfig,
)
from omnistage.config.adapters import takes_adapters
from omnistage.core.failures import log_defect
from omnistage.core.family import LoadContext
from omnistage.core.registry import Registry
from omnistage.core.stage_memory import StageMemory
from omnistage.core.types import DTypeName

if TYPE_CHECKING:
    import torch
    from torch import nn

    from omnistage.engines.ar.memory import ARNeeds

_ESTIMATED_ACTIVATIONS = 0.25
"""Share of the weights, where nothing better is known."""
_ITEM_SIZES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class StageNeeds(ABC):
    """A stage's memory as a function of the load."""

    name: str
    device: str
    dtype: str

    estimated = False

    @abstractmethod
    def at(self, concurrency: int, context: int) -> StageMemory:
        """For so many requests at once, of so many tokens each."""

    def settings(self, memory: StageMemory, concurrency: int, *, reduced: bool) -> dict[str, int]:
        """Settings of the stage's budget that keep it within `memory`; `reduced`: fewer requests than was asked for."""
        return {}


@dataclass(frozen=True)
class AutoregressiveNeeds(StageNeeds):
    needs: ARNeeds
    host_limit: int | None
    """Bytes of the KV cache in host memory; None: on a GPU."""

    def at(self, concurrency: int, context: int) -> StageMemory:
        needs = self.needs
        memory = needs.memory_at(context)
        if needs.fixed_blocks is not None:
            return replace(memory, kv_cache=needs.fixed_blocks * needs.block_bytes)
        num_bytes = needs.blocks(concurrency, context) * needs.block_bytes
        if self.host_limit is not None:
            num_bytes = min(num_bytes, max(self.host_limit, needs.block_bytes))
        return replace(memory, kv_cache=num_bytes)

    def grow(self, memory: StageMemory) -> StageMemory:
        """With room for one sequence of full length, and for media that fill it."""
        needs = self.needs
        longest = -(-needs.max_length // needs.block_size) * needs.block_bytes if needs.fixed_blocks is None else 0
        most = needs.memory_at(needs.max_length)
        return replace(
            memory,
            kv_cache=max(memory.kv_cache, longest),
            media=max(memory.media, most.media),
        )

    def tokens(self, memory: StageMemory) -> int:
        """Tokens that the KV cache holds."""
        return memory.kv_cache // self.needs.block_bytes * self.needs.block_size

    def settings(self, memory: StageMemory, concurrency: int, *, reduced: bool) -> dict[str, int]:
        return {} if self.needs.fixed_blocks is not None else {"kv_memory": memory.kv_cache}


@dataclass(frozen=True)
class _Batched(StageNeeds):
    """A stage whose largest forward grows with the requests in it."""

    lone: StageMemory
    """With one row."""
    pair: StageMemory
    """With two, from which all others follow."""
    rows_each: int
    """Rows of a request: two where it is guided."""
    max_rows: int
    estimated: bool = False

    def at(self, concurrency: int, context: int) -> StageMemory:
        del context
        lone, pair, more = self.lone, self.pair, self._rows(concurrency) - 1
        return replace(
            lone,
            activations=lone.activations + more * max(0, pair.activations - lone.activations),
            graphs=lone.graphs + more * max(0, pair.graphs - lone.graphs),
        )

    def _rows(self, concurrency: int) -> int:
        return min(self.max_rows, self.rows_each * concurrency)

    def settings(self, memory: StageMemory, concurrency: int, *, reduced: bool) -> dict[str, int]:
        return {"max_batch": self._rows(concurrency)} if reduced else {}


@dataclass(frozen=True)
class _Estimate(StageNeeds):
    """A family that cannot say: the size of its files, and a share of that."""

    weights: int

    estimated = True

    def at(self, concurrency: int, context: int) -> StageMemory:
        del concurrency, context
        return StageMemory(self.weights, activations=int(self.weights * _ESTIMATED_ACTIVATIONS))


class NeedsReader:
    """Reads the needs of a model's stages."""

    def __init__(self, model: OmniModelConfig, registry: Registry, dtype: DTypeName = "auto") -> None:
        self._model = model
        self._dtype = dtype
        self._registry = registry
        self._size = (1024, 1024, 1)
        """Of pictures and videos; the encoder, which comes first, knows."""
        self._counted = False

    @cached_property
    def _plans(self) -> bool:
        return self._registry.family(self._model.family).plans_memory

    def read(self, name: str, stage: LocalStageConfig, device: torch.device, dtype: torch.dtype) -> StageNeeds:
        import torch

        device_name = "cuda" if str(device) == "cuda:0" else str(device)  # one GPU, not two
        where = (name, device_name, str(dtype).removeprefix("torch."))
        if not self._plans:
            weights = 0 if self._counted else weights_on_disk(self._model.folder, dtype.itemsize)
            self._counted = True  # which stage has which is unknown: all of them count once
            return _Estimate(*where, weights)
        with torch.device("cpu"):  # tables that libraries make on import must have values
            component = self.outline(name, stage, device, dtype)
            self._plan_quantised(stage, component)
        if isinstance(stage, ARStageConfig):
            return self._autoregressive(where, component, stage, device)
        if isinstance(stage, CodecStageConfig):
            return self._codec(where, component, stage.budget, device)
        return self._diffusion(where, component, stage, device)

    def outline(self, name: str, stage: LocalStageConfig, device: torch.device, dtype: torch.dtype) -> object:
        """A stage's component without data, of a family whose memory is planned."""
        from omnistage.engines.peak_memory import META

        context = LoadContext(self._model, name, stage, META, dtype, requested_dtype=self._dtype, target=device)
        return self._registry.component(stage.component)(context)

    def _plan_quantised(self, stage: LocalStageConfig, component: object) -> None:
        from omnistage.engines.peak_memory import META
        from omnistage.engines.quantisation.transform import Quantiser

        if isinstance(stage, CodecStageConfig) or stage.quantize is None:
            return
        full_precision = self._registry.family(self._model.family).full_precision
        Quantiser(stage.quantize, isinstance(stage, DiffusionStageConfig), full_precision).apply_to(component, META)

    def _autoregressive(
        self, where: tuple[str, str, str], component: object, stage: ARStageConfig, device: torch.device
    ) -> StageNeeds:
        from omnistage.engines.ar.component import ARComponent
        from omnistage.engines.ar.memory import ar_needs, default_host_kv

        if not isinstance(component, ARComponent):
            return _Estimate(*where, 0)
        cuda, budget = device.type == "cuda", stage.budget
        if stage.tensor_parallel > 1:  # rank 0, which takes the most
            from omnistage.engines.ar.sharding import RankGroup

            component.shard(RankGroup(0, stage.tensor_parallel), component.device)
            budget = budget.model_copy(update={"cuda_graphs": False, "torchscript": False})
        adapters = self._adapters(where[0], component.dtype.itemsize, (component.decoder,))
        if takes_adapters(self._model.config.deployment, where[0]):  # layers with adapters are not traced
            budget = budget.model_copy(update={"torchscript": False})
        needs = ar_needs(component, budget, cuda=cuda)  # merges layers, each of which has its own adapters
        if self._model.hf_config.get("quantization_config") is not None:
            # Quantised numbers lie packed in their files as in memory; the modules without weights do not know.
            needs = replace(needs, memory=replace(needs.memory, weights=weights_on_disk(self._model.folder, 2)))
        needs = replace(needs, memory=replace(needs.memory, weights=needs.memory.weights + adapters))
        return AutoregressiveNeeds(*where, needs, None if cuda else default_host_kv())

    def _adapters(self, name: str, item_size: int, networks: Sequence[nn.Module]) -> int:
        """Bytes of the places for adapters on these networks."""
        deployment = self._model.config.deployment
        if not takes_adapters(deployment, name):
            return 0
        from omnistage.engines.adapters.memory import adapter_bytes, largest_rank

        folders = [Path(adapter.folder).expanduser() for adapter in deployment.adapters.values()]
        rank = deployment.adapter_rank or largest_rank(folders)
        return adapter_bytes(networks, deployment.adapter_slots, rank, item_size)

    def _codec(
        self, where: tuple[str, str, str], component: object, budget: CodecBudget, device: torch.device
    ) -> StageNeeds:
        from omnistage.engines.codec.component import CodecComponent

        if not isinstance(component, CodecComponent):
            return _Estimate(*where, 0)
        layout = component.layout
        ahead = min(budget.lookahead_blocks, layout.max_lookahead_blocks)
        blocks = layout.history_blocks + budget.max_chunk_blocks + ahead
        codes = min(blocks * layout.block_codes, layout.max_codes)
        least = max(budget.first_chunk_blocks, layout.first_blocks) * layout.block_codes
        caches = component.request_bytes * budget.max_running
        sizes = [replace(component.memory(rows, codes, least) or StageMemory(), caches=caches) for rows in (1, 2)]
        if device.type != "cuda" or not budget.cuda_graphs:
            sizes = [replace(size, graphs=0) for size in sizes]
        rows = min(budget.max_batch, max(1, budget.max_batch_blocks // blocks))
        return _Batched(*where, sizes[0], sizes[1], 1, rows)

    def _diffusion(
        self, where: tuple[str, str, str], component: object, stage: DiffusionStageConfig, device: torch.device
    ) -> StageNeeds:
        from omnistage.engines.diffusion.component import Denoiser, LatentDecoder, PromptEncoder
        from omnistage.engines.diffusion.graphs import graph_bytes
        from omnistage.engines.peak_memory import weight_bytes

        budget = stage.budget
        rows_each, limit, caches, graphs, adapters = 2, budget.max_batch, 0, 0, 0
        if isinstance(component, PromptEncoder):
            self._size = component.planned_size()
            modules, caches, peak = component.modules, budget.prompt_cache, component.encode_bytes
        elif isinstance(component, Denoiser):
            modules, peak = component.transformers, partial(_sized, component.step_bytes, self._size)
            item_size = next(component.transformer.parameters()).dtype.itemsize
            adapters = self._adapters(where[0], item_size, modules)
            limit = min(limit, max(1, budget.max_batch_tokens // max(component.tokens(*self._size), 1)))
        elif isinstance(component, LatentDecoder):
            modules, peak = component.modules, partial(_sized, component.decode_bytes, self._size)
            rows_each = 1
        else:
            return _Estimate(*where, 0)
        weights, estimated = weight_bytes(modules) + adapters, False
        try:
            peaks = [peak(1), peak(2)]
            if isinstance(component, Denoiser) and device.type == "cuda":
                graphs = graph_bytes(component, budget, stage.params)
        except Exception as error:  # a boundary: a network without data may fail anywhere, and loads all the same
            log_defect(f"planning the memory of stage {where[0]!r}", error)
            peaks, estimated = [int(weights * _ESTIMATED_ACTIVATIONS)] * 2, True
        sizes = [StageMemory(weights, activations=each, graphs=graphs, caches=caches) for each in peaks]
        return _Batched(*where, sizes[0], sizes[1], rows_each, limit, estimated)


def _sized(peak: Callable[[int, int, int, int], int], size: tuple[int, int, int], rows: int) -> int:
    return peak(rows, *size)


def weights_on_disk(folder: Path, item_size: int) -> int:
    """Bytes of all tensors in a folder's safetensors, by their headers, with floating-point ones of `item_size`.

    Files of a variant (`model.fp16.safetensors`) lie beside what they are a variant of.
    """
    files = [path for path in folder.rglob("*.safetensors") if ".fp16." not in path.name and ".bf16." not in path.name]
    return sum(_tensor_bytes(path, item_size) for path in files)


def _tensor_bytes(path: Path, item_size: int) -> int:
    """Nothing for a file that is no safetensors, which loading will say."""
    try:
        with safe_open(path, framework="np") as file:
            tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
            sizes = [(tensor.get_dtype(), math.prod(tensor.get_shape())) for tensor in tensors]
    except (OSError, SafetensorError):
        return 0
    return sum(count * (item_size if dtype in _FLOATS else _ITEM_SIZES.get(dtype, 1)) for dtype, count in sizes)

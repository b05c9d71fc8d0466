"""The memory of an autoregressive stage: how many KV blocks it gets, and what a step takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from omnistage.config.schema import ARBudget
from omnistage.core.errors import CapacityError, ConfigError
from omnistage.core.memory import free_host_memory
from omnistage.core.stage_memory import StageMemory
from omnistage.engines.ar.attention import (
    AttentionBackend,
    AttentionPlan,
    BatchLayout,
    KVCache,
    PagedContext,
    ScoreOptions,
    bind_caches,
    current,
)
from omnistage.engines.ar.attention.float8_cache import FLOAT8, float8_bytes
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.graphs import graph_shapes
from omnistage.engines.ar.group import Group
from omnistage.engines.ar.packed_linear import merge_as_planned, packed_copies, packs
from omnistage.engines.ar.scheduler import MIN_UNCUT_TOKENS
from omnistage.engines.ar.torchscript import may_script, program_bytes
from omnistage.engines.peak_memory import META, peak_bytes, weight_bytes
from omnistage.engines.quantisation.experts import expansion_bytes

_CPU_SHARE, _CPU_CAP = 0.1, 1 << 30
_DEVICE_SHARE = 0.35
_SAMPLING_BYTES = 16
"""For each logit: a float32 copy, and sorted values with their int64 ids."""
_SAMPLED_BYTES = 4
"""For each logit of a captured step that samples: the kernels' float32 copy."""
_ESTIMATED_WIDTH = 24
"""Numbers a token at the peak of a step, in widths of the residual stream, where a model cannot run without data."""
_HOST_ALIGNMENT = 64  # as torch's own allocator has it
OWN_RUNNING = 8
"""Sequences at once of a component that keeps their state itself: they take turns, so more gain nothing."""
_NOT_SHARED = {"prefix_caching": False, "cuda_graphs": False}
_SHORT_PROMPTS = (16, 32, 64)
_GRAPH_BYTES = 8 << 20
"""What the driver takes for a captured step, beside its buffers."""


def kv_dtype_of(component: ARComponent, budget: ARBudget) -> torch.dtype:
    """In which keys and values are stored."""
    return FLOAT8 if budget.kv_dtype == "float8" else component.dtype


def block_bytes(component: ARComponent, block_size: int, kv_dtype: torch.dtype | None = None) -> int:
    """Bytes of one block: keys and values of all layers, and the hidden rows kept beside them.

    `kv_dtype` is the component's own where it is None.
    """
    spec = component.spec
    if spec.own_state is not None:
        return max(1, spec.own_state.token_bytes) * block_size
    item = component.dtype.itemsize
    if kv_dtype == FLOAT8:
        per_token = float8_bytes(spec)
    else:
        per_token = sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in spec.kv_shapes) * item
    # Without attention, blocks only count tokens.
    return max(1, per_token + spec.emit_size * item) * block_size


def max_length_of(component: ARComponent, budget: ARBudget) -> int:
    """Tokens of the longest sequence that the model and the budget allow."""
    spec = component.spec
    return min(budget.max_model_len or spec.usual_length or spec.max_length, spec.max_length)


def effective_budget(component: ARComponent, budget: ARBudget) -> ARBudget:
    """The budget without what does not apply to sequences with a state of their own.

    That state cannot be shared: a recurrent one holds all tokens at once, and nobody keeps it for a prefix. Where the
    component keeps it itself, blocks only count its tokens. Nor is a prefix used where prompts are computed whole.
    """
    own = component.spec.own_state
    if budget.kv_dtype == "float8":
        _check_float8(component)
    if own is None:
        if component.spec.states:
            tokens = max(budget.max_batch_tokens, MIN_UNCUT_TOKENS)
            chunk = None if budget.prefill_chunk is None else max(budget.prefill_chunk, MIN_UNCUT_TOKENS)
            return budget.model_copy(update={"max_batch_tokens": tokens, "prefill_chunk": chunk, **_NOT_SHARED})
        if component.spec.whole_prompts:
            return budget.model_copy(update=_NOT_SHARED)
        return budget.model_copy(update={"cuda_graphs": False}) if component.spec.grouped else budget
    running = 1 if own.alone else min(budget.max_running, OWN_RUNNING)
    return budget.model_copy(update={"max_running": running, **_NOT_SHARED})


def _check_float8(component: ARComponent) -> None:
    """Refuse a cache in float8 where keys and values are not in the engine's pool, or not all that it holds."""
    spec = component.spec
    reason = None
    if spec.own_state is not None:
        reason = "it runs with transformers' own cache"
    elif spec.grouped:
        reason = "its own forward reads the cache in the model's dtype"
    elif spec.states:
        reason = "it has recurrent layers, whose state is not keys and values"
    elif not spec.kv_shapes:
        reason = "it has no attention"
    if reason is not None:
        raise ConfigError(
            f"{type(component).__name__} does not support kv_dtype: float8, because {reason}; leave kv_dtype out",
            param="budget.kv_dtype",
        )


def plan_blocks(component: ARComponent, budget: ARBudget, max_length: int) -> int:
    """Blocks that fit the budget, never more than `max_running` sequences of full length could use.

    The memory plan of a pipeline sets `kv_memory`; `auto` is for a stage that is built without one.
    """
    useful = -(-max_length // budget.block_size) * budget.max_running
    if budget.kv_blocks is not None:
        return min(budget.kv_blocks, useful)
    size = block_bytes(component, budget.block_size, kv_dtype_of(component, budget))
    memory = _available(component.device) if budget.kv_memory == "auto" else int(budget.kv_memory)
    blocks = min(memory // size, useful)
    if blocks < 1:
        raise CapacityError(
            f"a KV budget of {memory} bytes holds no block of {size} bytes; raise budget.kv_memory or lower block_size"
        )
    return int(blocks)


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free * _DEVICE_SHARE)
    return default_host_kv()


def default_host_kv() -> int:
    """Bytes of a KV cache in host memory, where the configuration does not say."""
    return min(int(free_host_memory() * _CPU_SHARE), _CPU_CAP)


def zeros(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros. In host memory the system provides a page when it is first written: unused ones take none."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _HOST_ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % _HOST_ALIGNMENT
    memory[first] = 0  # the first page, which may be a huge one, is there before the first request
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(*shape)


@dataclass(frozen=True, slots=True)
class ARNeeds:
    """A stage's memory without its KV cache, and the sizes of that."""

    memory: StageMemory
    media_token_bytes: int
    """Peak of the media encoders for each token that media take of a prompt."""
    block_bytes: int
    block_size: int
    max_length: int
    useful_blocks: int
    """More could never be used."""
    fixed_blocks: int | None
    """As the configuration says; None: as many as the plan has room for."""

    @property
    def max_running(self) -> int:
        """Sequences that run at once at most."""
        return self.useful_blocks // -(-self.max_length // self.block_size)

    def memory_at(self, context: int) -> StageMemory:
        """With media encoders that run for prompts of this length."""
        encoders = self.media_token_bytes * min(context, self.max_length)
        return replace(self.memory, media=max(0, encoders - self.memory.activations))

    def blocks(self, concurrency: int, context: int) -> int:
        """Blocks for this many sequences of this length."""
        return min(-(-min(context, self.max_length) // self.block_size) * concurrency, self.useful_blocks)


def ar_needs(component: ARComponent, budget: ARBudget, *, cuda: bool) -> ARNeeds:
    """What a stage needs around a component on the meta device, whose layers are merged as the stage's will be."""
    budget = effective_budget(component, budget)
    max_length = max_length_of(component, budget)
    size = block_bytes(component, budget.block_size, kv_dtype_of(component, budget))
    useful = -(-max_length // budget.block_size) * budget.max_running
    fixed = budget.kv_blocks
    if fixed is None and budget.kv_memory != "auto":
        fixed = int(budget.kv_memory) // size
    rows = min(budget.max_running, budget.max_batch_tokens)
    media = component.media_bytes(max_length) // max_length
    own = component.spec.own_state
    whole = own is not None or component.spec.whole_prompts
    # On the CPU experts are computed one by one.
    experts = max((expansion_bytes(module) for module in component.modules), default=0) if cuda else 0
    copies = packed_copies(component) if not cuda and packs(component, budget) else 0
    merge_as_planned(component, budget, cuda=cuda)
    if cuda:
        programs = _graph_bytes(component, budget, max_length) + experts if budget.cuda_graphs else 0
    else:
        programs = program_bytes(component) if may_script(component, budget) else 0
    memory = StageMemory(
        weights=weight_bytes(component.modules) + copies,
        activations=_step_bytes(component, max_length if whole else budget.max_batch_tokens, rows) + experts,
        graphs=programs,
        caches=(budget.encoder_cache if media and not whole else 0)
        + (component.spec.state_bytes + component.spec.held_bytes) * budget.max_running
        + (0 if own is None else own.fixed_bytes * budget.max_running),
    )
    fixed = None if fixed is None else min(fixed, useful)
    return ARNeeds(memory, media, size, budget.block_size, max_length, useful, fixed)


def _step_bytes(component: ARComponent, tokens: int, rows: int) -> int:
    """Peak of a step with this many tokens, that samples for `rows` sequences."""
    spec = component.spec

    def step() -> torch.Tensor:
        embeds = component.embed(torch.empty(tokens, dtype=torch.int64, device=META))
        paged = current.paged = PagedContext(
            NoAttention(), torch.empty(tokens, dtype=torch.int64, device=META), AttentionPlan()
        )
        positions = torch.empty(spec.position_dims, tokens, dtype=torch.int64, device=META)
        hidden = component.forward(embeds, positions, paged)
        if spec.emit_size:
            component.emit(embeds, hidden, torch.empty(tokens, 1, dtype=torch.bool, device=META))
        return component.logits(hidden[:rows])

    bind_caches(component.attention_modules, spec.empty_caches(1, 1, lambda shape: zeros(shape, META, component.dtype)))
    try:
        with _few_layers(component.decoder):
            if spec.own_state is not None or spec.whole_prompts:
                peak = _prompt_bytes(component, tokens)
            else:
                peak = _group_bytes(component, tokens) if spec.grouped else peak_bytes(step)
    except (NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError, LookupError):
        # It looks at its data, like a router of experts, a layer needs one that was left out, or the model will turn
        # out to need transformers' own cache.
        peak = tokens * spec.embed_size * _ESTIMATED_WIDTH * component.dtype.itemsize
    return max(peak, rows * spec.vocab_size * (component.dtype.itemsize + _SAMPLING_BYTES))


def _group_bytes(component: ARComponent, tokens: int) -> int:
    """Peak of a chunk of a prompt, and no less than of its scores at the end of the longest usual sequence."""
    longest = max(tokens, component.spec.usual_length)
    group = Group.of(tokens, [longest], [np.zeros(longest, dtype=np.int64)], META)
    return peak_bytes(lambda: component.forward_group(torch.empty(1, tokens, dtype=torch.int64, device=META), group))


def _prompt_bytes(component: ARComponent, tokens: int) -> int:
    """Peak of a prompt that is computed whole, from short ones: recurrent layers may loop over tokens."""

    def peak(count: int) -> int:
        ids = torch.empty(count, dtype=torch.int64, device=META)
        return peak_bytes(lambda: component.open_sequence().forward(ids))

    small, middle, large = _SHORT_PROMPTS
    first, second = (peak(middle) - peak(small)) / (middle - small), (peak(large) - peak(middle)) / (large - middle)
    # Scores of attention grow with the square of the length.
    square = max(0.0, (second - first) / (large - small))
    linear = max(0.0, second - square * (large + middle))
    return int(peak(large) + linear * max(0, tokens - large) + square * max(0, tokens**2 - large**2))


@contextmanager
def _few_layers(decoder: nn.Module) -> Iterator[None]:
    """Leave two layers of each kind: what one takes is given back before the next but one runs."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        yield
        return
    kinds: Counter[Hashable] = Counter()
    short = nn.ModuleList()
    for layer in layers:
        kind = (type(layer), *((name, weight.shape) for name, weight in layer.named_parameters()))
        kinds[kind] += 1
        if kinds[kind] <= 2:
            short.append(layer)
    decoder.layers = short
    try:
        yield
    finally:
        decoder.layers = layers


def _graph_bytes(component: ARComponent, budget: ARBudget, max_length: int) -> int:
    """Each captured step keeps its outputs; the largest one's activations and sampling serve all."""
    spec, item = component.spec, component.dtype.itemsize
    required, optional = graph_shapes(budget.graph_batch_sizes, max_length)
    rows = sum(size for size, _length in (*required, *optional))
    outputs = rows * (spec.vocab_size + spec.emit_size + spec.embed_size) * item
    largest = _step_bytes(component, budget.graph_batch_sizes[-1], 1)
    if budget.sample_in_graph:
        largest += budget.graph_batch_sizes[-1] * spec.vocab_size * _SAMPLED_BYTES
    count = len(required) + len(optional) + len(budget.graph_prefill_tokens)
    if spec.residual is not None:  # a predictor is also captured by itself, for steps that are not
        count += len(budget.graph_batch_sizes)
    if budget.graph_prefill_tokens:
        outputs += sum(budget.graph_prefill_tokens) * (2 * spec.embed_size + spec.emit_size) * item
        largest += _step_bytes(component, max(budget.graph_prefill_tokens), 1)
    return outputs + count * _GRAPH_BYTES + largest


class NoAttention(AttentionBackend):
    """Allocates what paged attention allocates: its result."""

    name = "none"

    def plan(self, layout: BatchLayout, device: torch.device) -> AttentionPlan:
        del layout, device
        return AttentionPlan()

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        paged: PagedContext,
        scores: ScoreOptions,
    ) -> torch.Tensor:
        del key, cache, paged, scores
        return torch.zeros(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)

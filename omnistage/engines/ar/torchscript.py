"""Decode steps on the CPU as TorchScript: the operators of transformers' own forward, without Python between them.

For a small model a third of a step on the CPU is Python between operators that take microseconds. The tracer of
`torch.jit` runs the component's forward once over made-up rows and notes its operators, with the layers' own (packed)
weights; TorchScript runs these for every later step of nothing but generated tokens. There are two programs: for one
sequence, whose keys and values are read in place, and for several.

A program holds what the forward does whatever the rows are. So a forward whose Python reads numbers of its tensors,
like a loop over the experts that are used, is not traced; nor one that gives other numbers than the plain path, which
is the reference, for other rows, other lengths and another number of sequences.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from omnistage.config.schema import ARBudget
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
from omnistage.engines.ar.attention.sdpa import SdpaBackend, SdpaPlan
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.cpu_kernels import MIN_ROWS, WeightFirstLinear
from omnistage.quantisation.packed import PackedInt8Linear

logger = logging.getLogger(__name__)

_READS_NUMBERS = frozenset(
    {"item", "_local_scalar_dense", "is_nonzero", "equal", "allclose"}
    | {"nonzero", "nonzero_numpy", "argwhere", "where.default", "masked_select", "repeat_interleave.Tensor"}
    | {"_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
)
"""Operators by which Python, or a shape, comes to depend on the numbers in a tensor."""
_LAYER_BYTES = 4 << 20
"""Of both programs for each layer, whatever its width: 3 to 5 MiB, by its operators and the depth of the stack."""
_BLOCK_SIZE, _BLOCKS = 4, 12
"""Of the caches that programs are traced and compared with."""
_LENGTHS = {False: ((5,), (14,), (6,)), True: ((7, 4), (3, 15, 9), (11,))}
"""Of the sequences of a step, by whether a program is for several: it is traced with the first, compared with all."""
_MAX_TRACED = max(max(lengths[0]) for lengths in _LENGTHS.values())
"""Tokens of the sequences that programs are traced with, and more than there are sequences."""
_TRACER_SAYS = ("Python list", "NumPy array")
"""In the tracer's warnings where numbers are read without an operator."""
_MAX_REASON_CHARS = 200
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
"""Of the largest number of a comparison; the kernels are the same, so that usually all numbers are."""


def may_script(component: ARComponent, budget: ARBudget) -> bool:
    """Whether decode steps of a stage on the CPU may run as TorchScript; adapters and ranks are not looked at here."""
    spec = component.spec
    alone = spec.own_state is not None or spec.grouped or bool(spec.states)
    plain = spec.plain_attention and budget.kv_dtype == "auto"
    traceable = component.pure_forward and component.dtype in _TOLERANCE
    return budget.torchscript and traceable and plain and not alone and budget.compile is not True


def scripts(component: ARComponent, budget: ARBudget, backend: AttentionBackend) -> bool:
    """Whether decode steps of a stage run as TorchScript where they can be traced."""
    return may_script(component, budget) and component.device.type == "cpu" and isinstance(backend, SdpaBackend)


def program_bytes(component: ARComponent) -> int:
    """Host memory of a component's programs, which hold no weights: lists of operators, and where each was noted."""
    return _LAYER_BYTES * component.spec.num_layers


@dataclass(slots=True)
class _Single(AttentionPlan):
    """One sequence with adjacent slots: the caches are those alone, up to that of its new token."""

    biases: dict[int | None, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Several(AttentionPlan):
    """`slots` int64 `[B, longest]`, padded; `lengths` int64 `[B, 1]`."""

    slots: torch.Tensor
    lengths: torch.Tensor
    biases: dict[int | None, torch.Tensor] = field(default_factory=dict)
    head_rows: dict[int, torch.Tensor] = field(default_factory=dict)
    head_biases: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def bias(self, window: int | None) -> torch.Tensor:
        """What is added to the scores, `[B, 1, 1, longest]`: computed once a step, not in every layer."""
        if window not in self.biases:
            keys = torch.arange(self.slots.shape[1])
            seen = keys < self.lengths
            if window is not None:
                seen = seen & (keys >= self.lengths - window)
            self.biases[window] = torch.zeros(()).masked_fill(~seen, float("-inf"))[:, None, None, :]
        return self.biases[window]

    def by_head(self, window: int | None, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For keys and values of each head apart: their rows int64 `[B * heads * longest]` in a cache
        `[slots * heads, dim]`, and the bias `[B * heads, 1, longest]`."""
        if heads not in self.head_rows:
            self.head_rows[heads] = (self.slots[:, None, :] * heads + torch.arange(heads)[:, None]).flatten()
        if (window, heads) not in self.head_biases:
            bias = self.bias(window)[:, 0].expand(-1, heads, -1)
            self.head_biases[window, heads] = bias.flatten(0, 1)[:, None]
        return self.head_rows[heads], self.head_biases[window, heads]


class _TracedAttention(AttentionBackend):
    """What `sdpa` computes for single queries, with all that differs between steps in tensors.

    Caches are `[slots, kv_heads, head_dim]` here. `batched`: several sequences attend by batched products, which two
    threads share well, where torch's fused attention takes a quarter longer; the sums round differently.
    """

    name = "traced"

    def __init__(self, batched: bool) -> None:
        self._batched = batched

    def plan(self, layout: BatchLayout, device: torch.device) -> AttentionPlan:
        raise NotImplementedError("programs are traced with plans of their own")

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        paged: PagedContext,
        scores: ScoreOptions,
    ) -> torch.Tensor:
        plan = paged.plan
        if isinstance(plan, _Single):
            return _attend_one(query, key, value, cache, plan, scores)
        if not isinstance(plan, _Several):
            raise TypeError(f"plan of another backend: {type(plan).__name__}")
        keys, values = cache
        (kv_heads, dim), value_dim = _sizes(keys), _sizes(values)[1]
        keys.index_copy_(0, paged.slot_mapping, key)
        values.index_copy_(0, paged.slot_mapping, value)
        longest = plan.slots.shape[1]
        if self._batched:
            rows, bias = plan.by_head(scores.window, kv_heads)
            k = keys.view(-1, dim).index_select(0, rows).view(-1, longest, dim)
            v = values.view(-1, value_dim).index_select(0, rows).view(-1, longest, value_dim)
            q = query.reshape(-1, int(query.shape[1]) // kv_heads, dim)
            weights = torch.baddbmm(bias.to(q.dtype), q, k.transpose(1, 2), alpha=scores.scale).softmax(-1)
            return torch.bmm(weights, v).view(-1, int(query.shape[1]), value_dim)
        flat = plan.slots.view(-1)
        k = keys.index_select(0, flat).view(-1, longest, kv_heads, dim).transpose(1, 2)
        v = values.index_select(0, flat).view(-1, longest, kv_heads, value_dim).transpose(1, 2)
        q = query.unflatten(1, (kv_heads, -1))  # type: ignore[no-untyped-call]
        bias = plan.bias(scores.window).to(q.dtype)
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scores.scale).flatten(1, 2)


def _attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: _Single, how: ScoreOptions
) -> torch.Tensor:
    k, v = cache
    k[-1:].copy_(key)
    v[-1:].copy_(value)
    q = query.unflatten(1, (_sizes(cache[0])[0], -1))  # type: ignore[no-untyped-call]
    bias = None
    if how.window is not None:
        if how.window not in plan.biases:
            places = torch.arange(k.shape[0])
            hidden = places < k.shape[0] - how.window
            plan.biases[how.window] = torch.zeros(()).masked_fill(hidden, float("-inf"))[None]
        bias = plan.biases[how.window].to(q.dtype)
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=how.scale).flatten(1, 2)


def _sizes(cache: torch.Tensor) -> tuple[int, int]:
    """Heads and their width, as numbers: the tracer would make each a step of the program."""
    _, heads, dim = (int(size) for size in cache.shape)
    return heads, dim


class _ReadsNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operators let Python see numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not _READS_NUMBERS.isdisjoint((name, f"{name}.{func._overloadname}")):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def _program_of(component: ARComponent, several: bool, inputs: tuple[Any, ...]) -> Callable[..., torch.Tensor]:
    """The component's forward, traced as a function of tensors.

    `torch.jit.trace` would register it, and with it all weights as constants, with the process for ever. A module in a
    compilation unit of its own is freed with the last reference to it. It holds the packed weights of all layers, which
    TorchScript cannot take for constants; there is no module below it, so that the forward is one list of operators.
    """
    # A sum that rounds differently would push a quantised activation over the edge of its step.
    batched = not any(isinstance(layer, PackedInt8Linear) for each in component.decoders for layer in each.modules())
    compiler: Any = torch._C  # what `torch.jit.trace` itself calls, without types
    module = compiler.ScriptModule("DecodeStep", compiler.CompilationUnit(), True)
    count = 0
    for network in component.decoders:
        for layer in network.modules():
            for value in vars(layer).values():
                if isinstance(value, torch.ScriptObject):
                    kind = compiler._jit_try_infer_type(value).type()
                    module._register_attribute(f"packed_{count}", kind, value)
                elif isinstance(value, torch.Tensor) and value.is_mkldnn:
                    module._register_attribute(f"packed_{count}", compiler.TensorType.get(), value)
                count += 1

    def forward(embeds: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        if several:
            slot_mapping, slots, lengths, caches = rest
            plan: AttentionPlan = _Several(slots, lengths)
        else:
            slot_mapping, caches = rest
            plan = _Single()
        pairs = list(zip(caches[::2], caches[1::2], strict=True))
        bind_caches(component.attention_modules, pairs)
        paged = current.paged = PagedContext(_TracedAttention(batched), slot_mapping, plan)
        return component.forward(embeds, positions, paged)

    names = [f"input_{number}" for number in range(len(inputs))]
    module._create_method_from_trace("forward", forward, inputs, lambda value: "", True, False, names, False)
    method = module._get_method("forward")
    _fold_widths(method.graph)
    return method  # type: ignore[no-any-return]


def _fold_widths(graph: Any) -> None:
    """Make numbers of the widths that the forward asks for, like a head's: what is computed with them is constant, too.

    The tracer notes `x.shape[-1] // 2` as operators on tensors, of which a layer's rotary embedding has eight. Numbers
    of sequences and tokens stay as they are; they are small where programs are traced.
    """
    for node in graph.findAllNodes("aten::size"):
        tensor, axis = node.inputs()
        sizes = tensor.type().sizes() if isinstance(tensor.type(), torch.TensorType) else None
        dim = axis.toIValue()
        if sizes is None or dim is None or dim % len(sizes) != len(sizes) - 1 or sizes[-1] <= _MAX_TRACED:
            continue
        with graph.insert_point_guard(node):  # the node stays: whatever still points at it finds it there
            node.output().replaceAllUsesWith(graph.insertConstant(sizes[-1]))
    compiler: Any = torch._C
    compiler._jit_pass_constant_propagation(graph)


class DecodeScripts:
    """The programs of a component, for steps that the plain path would compute with `backend`."""

    def __init__(self, component: ARComponent, backend: AttentionBackend, caches: Sequence[KVCache]) -> None:
        self._component = component
        self._backend = backend
        self._caches = _flat(caches)
        layers = [module for network in component.decoders for module in network.modules()]
        weight_first = any(isinstance(layer, WeightFirstLinear) for layer in layers)
        self._max_rows = MIN_ROWS - 1 if weight_first else None
        """Layers that are not packed take the weight first for more, which a program would not."""
        self._programs: dict[bool, Callable[..., torch.Tensor]] = {}
        """By whether they are for several sequences."""

    def run(
        self, embeds: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor, layout: BatchLayout
    ) -> torch.Tensor | None:
        """Hidden states `[B, H]` of a step with one token of each sequence; None: it is for the plain path."""
        rows = len(embeds)
        if (
            not self._programs
            or rows != len(layout.query_lengths)
            or (self._max_rows is not None and rows > self._max_rows)
        ):
            return None
        plan = self._backend.plan(layout, embeds.device)
        if not isinstance(plan, SdpaPlan) or plan.single_slots is None:
            return None
        program = self._programs.get(plan.first_slot is None)
        if program is None:
            return None
        try:
            return program(embeds, positions, *_arguments(plan, slot_mapping, self._caches))
        except RuntimeError as error:  # the plain path computes the step again, and is asked alone from now on
            self._programs.clear()
            name, kind = type(self._component).__name__, type(error).__name__
            logger.warning("decode steps of %s run as TorchScript no more: one failed with %s", name, kind)
            return None

    @property
    def count(self) -> int:
        """Programs; 0 where every step takes the plain path."""
        return len(self._programs)

    def trace(self, max_length: int) -> None:
        """Make the programs. A component that cannot be traced has none, and says why in the log."""
        reason = None
        try:
            with _scratch_caches(self._component) as caches:
                reason = self._unsuitable(caches)
                for several in (False, True) if reason is None else ():
                    program = self._trace(_step(self._component, caches, _LENGTHS[several][0], several), several)
                    if not self._agrees(program, caches, several, max_length):
                        reason = "it computes other numbers as TorchScript"
                        break
                    self._programs[several] = program
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, LookupError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON_CHARS]}"
        if reason is not None:
            self._programs.clear()
            logger.info("decode steps of %s do not run as TorchScript: %s", type(self._component).__name__, reason)

    def _unsuitable(self, caches: Sequence[KVCache]) -> str | None:
        """Why the forward is no fixed list of operators."""
        step = _step(self._component, caches, _LENGTHS[True][0], True)
        with _ReadsNumbers() as reads:
            _plain(self._component, step)
        return f"its forward reads numbers ({', '.join(sorted(reads.names))})" if reads.names else None

    def _trace(self, step: _Step, several: bool) -> Callable[..., torch.Tensor]:
        inputs = (step.embeds, step.positions, *step.arguments(self._backend))
        with warnings.catch_warnings(record=True) as warning_list:
            warnings.simplefilter("always")
            program = _program_of(self._component, several, inputs)
        # The others are that sizes become constants, which the comparison finds out, and that torch means to replace
        # TorchScript.
        for warning in warning_list:
            if any(words in str(warning.message) for words in _TRACER_SAYS):
                raise ValueError(f"its forward reads numbers ({warning.message})")
        return program

    def _agrees(
        self, program: Callable[..., torch.Tensor], caches: Sequence[KVCache], several: bool, max_length: int
    ) -> bool:
        """Whether a program gives the plain path's numbers. Its first run and those after it are compiled apart."""
        first, *others = _LENGTHS[several]
        for lengths in (*others, first):
            step = _step(self._component, caches, lengths, several, offset=max(max_length - 1 - max(lengths), 0))
            bind_caches(self._component.attention_modules, caches)
            expected = _plain(self._component, step)
            out = program(step.embeds, step.positions, *step.arguments(self._backend))
            limit = _TOLERANCE[self._component.dtype] * float(expected.abs().amax())
            if out.shape != expected.shape or not bool(((out - expected).abs() <= limit).all()):
                return False
        return True


@dataclass(frozen=True, slots=True)
class _Step:
    """Made-up rows: one token of each sequence, on caches that hold what came before."""

    embeds: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    layout: BatchLayout
    caches: Sequence[KVCache]

    def arguments(self, backend: AttentionBackend) -> tuple[Any, ...]:
        plan = backend.plan(self.layout, self.embeds.device)
        if not isinstance(plan, SdpaPlan):
            raise TypeError(f"plan of another backend: {type(plan).__name__}")
        return _arguments(plan, self.slot_mapping, _flat(self.caches))


def _arguments(plan: SdpaPlan, slot_mapping: torch.Tensor, caches: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What a program takes behind the positions."""
    if plan.first_slot is not None:
        first, end = plan.first_slot, plan.first_slot + plan.longest
        return slot_mapping, [cache[first:end] for cache in caches]  # once, where a program would ask for both numbers
    if plan.single_slots is None:
        raise TypeError("the plan has no one-query sequences")
    lengths = plan.lengths
    if lengths is None:
        lengths = torch.full((len(plan.single_slots), 1), plan.longest)
    return slot_mapping, plan.single_slots, lengths, list(caches)


def _step(
    component: ARComponent, caches: Sequence[KVCache], lengths: Sequence[int], scattered: bool, offset: int = 0
) -> _Step:
    """Sequences with so many tokens, the new one included; `offset` is added to their positions.

    `scattered`: their blocks are not adjacent.
    """
    spec, generator = component.spec, torch.Generator().manual_seed(sum(lengths))
    count = len(lengths)
    blocks = [-(-length // _BLOCK_SIZE) for length in lengths]
    starts = np.cumsum([0, *blocks[:-1]])
    tables = [np.arange(start, start + size, dtype=np.int32) for start, size in zip(starts, blocks, strict=True)]
    if scattered:
        tables = [table[::-1].copy() for table in tables]
    slots = [(table[:, None] * _BLOCK_SIZE + np.arange(_BLOCK_SIZE)).reshape(-1).astype(np.int64) for table in tables]
    ids = torch.randint(spec.vocab_size, (count,), generator=generator)
    kind = torch.float64 if spec.fractional_positions else torch.int64
    positions = (torch.tensor(lengths) - 1 + offset).to(kind).expand(spec.position_dims, -1).contiguous()
    layout = BatchLayout(np.ones(count, dtype=np.int32), np.array(lengths, dtype=np.int32), slots, tables)
    last = torch.tensor([int(own[length - 1]) for own, length in zip(slots, lengths, strict=True)])
    return _Step(component.embed(ids), positions, last, layout, caches)


def _plain(component: ARComponent, step: _Step) -> torch.Tensor:
    backend = SdpaBackend()
    plan = backend.plan(step.layout, component.device)
    paged = current.paged = PagedContext(backend, step.slot_mapping, plan, step.layout)
    return component.forward(step.embeds, step.positions, paged)


@contextmanager
def _scratch_caches(component: ARComponent) -> Iterator[list[KVCache]]:
    """Small caches with random numbers in place of the modules' own."""
    modules = component.attention_modules
    caches_before = [module.kv_cache for module in modules]
    generator = torch.Generator().manual_seed(0)
    caches = component.spec.empty_caches(
        _BLOCKS, _BLOCK_SIZE, lambda shape: torch.randn(shape, generator=generator).to(component.dtype)
    )
    bind_caches(modules, caches)
    try:
        yield caches
    finally:
        bind_caches(modules, caches_before)  # type: ignore[arg-type]


def _flat(caches: Sequence[KVCache]) -> list[torch.Tensor]:
    """Keys, values, keys, … of all modules, each `[slots, kv_heads, head_dim]`."""
    return [each.view(-1, *each.shape[2:]) for pair in caches for each in pair]

"""DiT caches: diffusers' hooks that reuse the work of earlier steps, with a state for each request.

The hooks keep what they reuse on themselves, for a single request. Here every lane and branch has states of its own,
which are put into the hooks before its forward and taken out after it; between forwards the hooks hold nothing. The
knowledge of the inside of those hooks is in `_slots`, `_enter` and `_HookedTransformer.put`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor, nn

from omnistage.core.errors import ConfigError, StageError
from omnistage.core.validation import short_repr
from omnistage.engines.diffusion.component import Branch, Denoiser, Lane, Row

Number = int | float
States = list[Any]
"""What the hooks keep for one lane and branch, in the order of the slots."""

_BLOCK_LISTS = (
    "blocks",
    "transformer_blocks",
    "single_transformer_blocks",
    "visual_transformer_blocks",
    "temporal_transformer_blocks",
    "layers",
)
"""Names that diffusers' transformers give their lists of blocks."""
_ATTENTION = re.compile(r"(transformer_|single_transformer_|temporal_transformer_)?blocks\..*attn")
_LATER = math.inf
"""A timestep at which no attention is skipped."""


class StepCache:
    """Runs rows through transformers whose hooks reuse work of earlier steps. A state for each lane and branch."""

    def __init__(self, kind: _Kind, numbers: Sequence[Number], transformers: Sequence[nn.Module]) -> None:
        self.kind = kind
        self._parts = [_HookedTransformer(transformer) for transformer in transformers]
        for part in self._parts:
            kind.apply(part, numbers)
            part.slots = _slots(part.transformer)
            # The list of hooks that a context reaches is kept from the first one on; it must know the new hooks.
            registry = _diffusers("hooks").HookRegistry.check_if_exists_or_initialize(part.transformer)
            registry.invalidate_child_registries_cache()
        self._states: dict[Lane, dict[Branch, States]] = {}

    @classmethod
    def open(cls, spec: str, denoiser: Denoiser) -> Self:
        """The cache that `spec` names (like `first_block:0.1`), applied to the denoiser's transformers."""
        kind, numbers = _parse(spec)
        for transformer in denoiser.transformers:
            if _slots(transformer):
                raise ConfigError(f"{type(transformer).__name__} has a cache already; use one", param="cache")
            reason = kind.incompatible_reason(transformer)
            if reason is not None:
                compatible = [
                    other.example for other in KINDS.values() if other.incompatible_reason(transformer) is None
                ]
                raise ConfigError(
                    f"{kind.name} does not support {type(transformer).__name__}: {reason}; caches for this model: "
                    + (", ".join(compatible) or "none, leave it out"),
                    param="cache",
                )
        return cls(kind, numbers, denoiser.transformers)

    @property
    def states(self) -> int:
        """Lanes and branches that something is kept for."""
        return sum(len(branches) for branches in self._states.values())

    def forward(self, denoiser: Denoiser, rows: Sequence[Row]) -> list[Tensor]:
        """`denoiser.forward(rows)`; all rows are of one lane and branch."""
        row = rows[0]
        if any(other.lane is not row.lane or other.branch != row.branch for other in rows):
            raise StageError("a cache was given rows of several requests in one forward")
        branches = self._states.setdefault(row.lane, {})
        # A forward that fails has moved some hooks on and others not: its states are not put back.
        states = branches.pop(row.branch, None)
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(_enter(part, row))
            count = 0
            for part in self._parts:
                part.put(states[count : count + len(part.slots)] if states is not None else None, row)
                count += len(part.slots)
            predictions = denoiser.forward(rows)
            branches[row.branch] = [state for part in self._parts for state in part.take()]
        return predictions

    def forget(self, lane: Lane) -> None:
        """Drop what is kept for a lane."""
        self._states.pop(lane, None)

    def close(self) -> None:
        """Take the hooks off the transformers, which run as before then."""
        self._states.clear()
        for part in self._parts:
            for module in list(part.transformer.modules()):
                registry: Any = getattr(module, "_diffusers_hook", None)
                if registry is not None:
                    for name in list(registry.hooks):
                        registry.remove_hook(name, recurse=False)


def _diffusers(module: str) -> Any:
    """A module of diffusers, which is imported only where a cache is asked for."""
    return import_module(f"diffusers.{module}")


# ------------------------------------------------------------------------------------------- states in hooks


@dataclass(slots=True)
class _Slot:
    """A place in a hook that holds state."""

    owner: Any
    attribute: str
    fresh: Callable[[], Any]


class _HookedTransformer:
    """One transformer with its hooks."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer
        self.slots: list[_Slot] = []
        self.mag: _Mag | None = None
        self._timestep = _LATER

    def timestep(self) -> float:
        """Of the row that runs: hooks on attention ask for it."""
        return self._timestep

    def put(self, states: States | None, row: Row) -> None:
        if states is None:
            states = [slot.fresh() for slot in self.slots]
        for slot, state in zip(self.slots, states, strict=True):
            setattr(slot.owner, slot.attribute, state)
        if self.mag is not None:
            self.mag.set_steps(row.lane)
        # FasterCache would skip on the first forward too, with nothing to use instead, where a lane starts within
        # the timesteps that it skips: one from a picture does, and the second of two experts.
        counts = [state.iteration for state in states if hasattr(state, "iteration")]
        self._timestep = float(row.timestep) if counts and min(counts) > 0 else _LATER

    def take(self) -> States:
        return [getattr(slot.owner, slot.attribute) for slot in self.slots]

    def clear(self) -> None:
        for slot in self.slots:
            setattr(slot.owner, slot.attribute, slot.fresh())


@contextmanager
def _enter(part: _HookedTransformer, row: Row) -> Iterator[None]:
    """The context that hooks with named states ask for; they are empty again after it."""
    mixin = _diffusers("models.cache_utils").CacheMixin
    try:
        # Not a method call: the hooks serve transformers without the mixin too, which then lack only this.
        with mixin.cache_context(part.transformer, row.branch):
            yield
    finally:
        part.clear()


def _slots(transformer: nn.Module) -> list[_Slot]:
    """Where diffusers' cache hooks in a transformer keep state.

    Some have a `StateManager` with a dictionary of states by context name (blocks share one), the others a `state`.
    Neither can be told apart by request from outside, nor forgotten one by one, so both are swapped whole.
    """
    manager_class = _diffusers("hooks.hooks").StateManager
    slots: dict[int, _Slot] = {}
    for module in transformer.modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook in registry.hooks.values() if registry is not None else ():
            manager = getattr(hook, "state_manager", None)
            if isinstance(manager, manager_class):
                slots[id(manager)] = _Slot(manager, "_state_cache", dict)
            elif hasattr(hook, "state"):
                slots[id(hook)] = _Slot(hook, "state", type(hook.state))
    return list(slots.values())


# ----------------------------------------------------------------------------------------- what a model has


def _blocks(transformer: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of blocks whose work can be skipped, in the order in which they run.

    A last block that gives no text stream (Stable Diffusion 3 has one) is left out, and so always runs: the hooks
    cannot keep what it does not give.
    """
    lists: dict[str, nn.ModuleList] = {}
    for name, child in transformer.named_children():
        if name in _BLOCK_LISTS and isinstance(child, nn.ModuleList):
            lists[name] = nn.ModuleList(block for block in child if not getattr(block, "context_pre_only", False))
    return lists


def _alike_blocks(transformer: nn.Module) -> nn.Module:
    """A module with nothing but blocks that can be skipped together: diffusers hooks those that it finds in one.

    Where lists differ in what their blocks give (FLUX.2's first ones keep the text apart), it is the longest one.
    """
    table = _diffusers("hooks._helpers").TransformerBlockRegistry
    lists = _blocks(transformer)
    gives_text = {table.get(type(b)).return_encoder_hidden_states_index is not None for p in lists.values() for b in p}
    if len(gives_text) > 1:
        longest = max(lists, key=lambda name: len(lists[name]))
        lists = {longest: lists[longest]}
    view = nn.Module()
    for name, blocks in lists.items():
        view.add_module(name, blocks)
    return view


def _no_blocks(transformer: nn.Module) -> str | None:
    """Why whole blocks cannot be skipped by their residuals, if so."""
    table = _diffusers("hooks._helpers").TransformerBlockRegistry
    blocks = [block for part in _blocks(transformer).values() for block in part]
    for cls in {type(block) for block in blocks}:
        try:
            metadata = table.get(cls)
        except ValueError:
            return f"diffusers does not know what its {cls.__name__} gives"
        parameters = inspect.signature(cls.forward).parameters
        if "hidden_states" not in parameters or metadata.hidden_states_argument_name != "hidden_states":
            return f"diffusers cannot read the hidden states of its {cls.__name__}"
    if sum(len(part) for part in _alike_blocks(transformer).children() if isinstance(part, nn.ModuleList)) < 2:
        return "it needs at least two blocks that can be skipped"
    return None


def _no_ratios(transformer: nn.Module) -> str | None:
    if not isinstance(transformer, _diffusers("models").FluxTransformer2DModel):
        return "there are no calibrated magnitude ratios for this model, only for FLUX.1"
    return _no_blocks(transformer)


def _no_projection(transformer: nn.Module) -> str | None:
    if not any(len(part) for part in _blocks(transformer).values()):
        return "it has no blocks that can be skipped"
    if not isinstance(getattr(transformer, "proj_out", None), nn.Module):
        return "it has no last projection (proj_out) to predict"
    return None


def _no_attention(transformer: nn.Module) -> str | None:
    processors = _diffusers("models.attention_processor")
    classes = (processors.Attention, processors.MochiAttention, _diffusers("models.attention").AttentionModuleMixin)
    if any(isinstance(module, classes) and _ATTENTION.match(name) for name, module in transformer.named_modules()):
        return None
    return "it has no attention that diffusers can skip"


# ------------------------------------------------------------------------------------------------- the kinds


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    defaults: tuple[Number, ...]
    """The numbers after the name; a whole one takes whole numbers only."""
    limits: tuple[tuple[Number, Number], ...]
    meanings: tuple[str, ...]
    incompatible_reason: Callable[[nn.Module], str | None]
    """Why it cannot be applied to a transformer, if so."""
    apply: Callable[[_HookedTransformer, Sequence[Number]], None]

    @property
    def example(self) -> str:
        return f"{self.name}:{self.defaults[0]}"


def _first_block(part: _HookedTransformer, numbers: Sequence[Number]) -> None:
    """The other blocks are skipped where the first one changes its input about as it did last."""
    hooks = _diffusers("hooks")
    config = hooks.FirstBlockCacheConfig(threshold=float(numbers[0]))
    hooks.apply_first_block_cache(_alike_blocks(part.transformer), config)


def _taylorseer(part: _HookedTransformer, numbers: Sequence[Number]) -> None:
    """Between full steps the last projection's output is extrapolated and no block runs.

    This is diffusers' lite mode with the blocks by name. Its other mode keeps the output of every attention, which
    is gigabytes for each request.
    """
    hooks = _diffusers("hooks")
    hooked = {id(block) for blocks in _blocks(part.transformer).values() for block in blocks}
    names = [re.escape(name) for name, module in part.transformer.named_modules() if id(module) in hooked]
    config = hooks.TaylorSeerCacheConfig(
        cache_interval=int(numbers[0]),
        max_order=int(numbers[1]),
        taylor_factors_dtype=torch.float32,
        skip_predict_identifiers=names,
        cache_identifiers=["proj_out"],
    )
    hooks.apply_taylorseer_cache(part.transformer, config)


def _magnitude(part: _HookedTransformer, numbers: Sequence[Number]) -> None:
    """All blocks are skipped while the error that known magnitude ratios let expect stays below the threshold."""
    part.mag = _Mag(float(numbers[0]))
    _diffusers("hooks").apply_mag_cache(_alike_blocks(part.transformer), part.mag.config)


def _faster(part: _HookedTransformer, numbers: Sequence[Number]) -> None:
    """Self-attention is extrapolated from its last two outputs but every so many steps.

    FasterCache's other half, guessing the unguided branch, needs both branches in one batch, side by side. Here they
    are rows of their own, so the model is declared guidance-distilled, which leaves that half out.
    """
    hooks, every = _diffusers("hooks"), int(numbers[0])
    config = hooks.FasterCacheConfig(
        spatial_attention_block_skip_range=every,
        temporal_attention_block_skip_range=every,
        attention_weight_callback=lambda _: 0.5,
        is_guidance_distilled=True,
        current_timestep_callback=part.timestep,
    )
    hooks.apply_faster_cache(part.transformer, config)


def _pyramid(part: _HookedTransformer, numbers: Sequence[Number]) -> None:
    """Attention of every sort is computed every so many steps and reused in between, but for the first and last."""
    hooks, every = _diffusers("hooks"), int(numbers[0])
    config = hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=every,
        temporal_attention_block_skip_range=every,
        cross_attention_block_skip_range=every,
        current_timestep_callback=part.timestep,
    )
    hooks.apply_pyramid_attention_broadcast(part.transformer, config)


class _Mag:
    """MagCache's configuration, which is for one number of steps, set to that of the lane that runs."""

    def __init__(self, threshold: float) -> None:
        self.config = self._config_for(threshold, 1)
        self._ratios: dict[int, Tensor] = {}

    def set_steps(self, lane: Lane) -> None:
        """All hooks read this one configuration when they run, so it can be set before each forward.

        The ratios are those of the lane's part of the schedule: a lane that starts from a picture does its end only.
        """
        whole = max(len(getattr(lane.scheduler, "timesteps", ())), lane.steps)
        if whole not in self._ratios:
            self._ratios[whole] = self._config_for(self.config.threshold, whole).mag_ratios
        self.config.num_inference_steps = lane.steps
        self.config.mag_ratios = self._ratios[whole][whole - lane.steps :]

    @staticmethod
    def _config_for(threshold: float, steps: int) -> Any:
        module = _diffusers("hooks.mag_cache")
        return module.MagCacheConfig(threshold=threshold, num_inference_steps=steps, mag_ratios=module.FLUX_MAG_RATIOS)


_THRESHOLD = (0.0, 10.0)
_STEPS = (1, 1000)
KINDS = {
    kind.name: kind
    for kind in (
        _Kind("first_block", (0.1,), (_THRESHOLD,), ("threshold",), _no_blocks, _first_block),
        _Kind("taylorseer", (5, 1), (_STEPS, (0, 4)), ("interval", "order"), _no_projection, _taylorseer),
        _Kind("mag", (0.06,), (_THRESHOLD,), ("threshold",), _no_ratios, _magnitude),
        _Kind("faster", (2,), (_STEPS,), ("interval",), _no_attention, _faster),
        _Kind("pyramid", (2,), (_STEPS,), ("interval",), _no_attention, _pyramid),
    )
}


def _parse(spec: str) -> tuple[_Kind, list[Number]]:
    """A kind and all its numbers; those that are left out are the defaults."""
    name, *values = spec.split(":")
    kind = KINDS.get(name.strip())
    if kind is None:
        choices = ", ".join(k.example for k in KINDS.values())
        raise ConfigError(f"there is no cache {short_repr(name)}; known: {choices}", param="cache")
    if len(values) > len(kind.defaults):
        usage = ":".join((kind.name, *kind.meanings))
        raise ConfigError(f"{short_repr(spec)} has too many numbers; write {usage}", param="cache")
    numbers = list(kind.defaults)
    for index, text in enumerate(values):
        low, high = kind.limits[index]
        whole = isinstance(kind.defaults[index], int)
        try:
            value: Number = int(text) if whole else float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:  # also where it is no number
            what = "a whole number" if whole else "a number"
            raise ConfigError(
                f"{kind.name}'s {kind.meanings[index]} must be {what} from {low:g} to {high:g}, got "
                f"{short_repr(text)}; like {kind.example}",
                param="cache",
            )
        numbers[index] = value
    return kind, numbers

"""Processors: what changes a request's logits before a token is selected. And its random numbers.

Everything works on many rows at once, and no row's result depends on the others. Selection is in
`selection.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnistage.core.params import SamplingParams
from omnistage.engines.ar.sampling.selection import temperature_of
from omnistage.engines.streams import upload

if TYPE_CHECKING:
    from omnistage.engines.ar.sampling.grammar_state import GrammarState

Array: TypeAlias = Any
"""numpy's on the host, where small operations cost a fraction of torch's; torch's on a device. The code is one: what
it does with them is written alike for both."""
Ints: TypeAlias = npt.NDArray[np.int64]

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_RESIDUAL = 0xD1B54A32D192ED03
"""Tells the streams of residual codes from those of tokens."""


def mix(value: int) -> int:
    """SplitMix64's finaliser: 64 bits to 64 well-mixed bits."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def uniform(stream: int, step: int) -> float:
    """The `step`-th number in [0, 1) of a stream; a counter, so no state is lost with a preempted request."""
    return (mix(stream + (step + 1) * _GOLDEN) >> 11) * 2.0**-53


def uniforms(streams: npt.NDArray[np.uint64], steps: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """`uniform` for many streams at once."""
    value = streams + (steps + np.uint64(1)) * np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    numbers: npt.NDArray[np.float64] = (value >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def residual_numbers(
    states: Sequence[RowState], count: int, temperature: float | None = None
) -> npt.NDArray[np.float64]:
    """What the residual codes of the tokens that are sampled next are chosen by, `[1 + count, S]`.

    For each row its temperature (0: greedy), or `temperature` where it is not, then a number in [0, 1) for each code,
    from a stream beside the tokens'.
    """
    numbers = np.zeros((1 + count, len(states)), dtype=np.float64)
    numbers[0] = [0.0 if s.params.greedy else temperature or temperature_of(s.params) for s in states]
    if numbers[0].any():
        streams = np.array([state.stream for state in states], dtype=np.uint64) ^ np.uint64(_RESIDUAL)
        steps = np.array([state.step for state in states], dtype=np.uint64) * np.uint64(count)
        numbers[1:] = uniforms(streams[None], steps[None] + np.arange(count, dtype=np.uint64)[:, None])
    return numbers


# ------------------------------------------------------------------------------------------------ processors


@dataclass(slots=True)
class RowState:
    """What the sampler holds of one request; `None` means unused. Ids and values are on the host."""

    params: SamplingParams
    stream: int
    """Start of the request's random stream."""
    step: int = 0
    """Tokens sampled so far."""
    occurrences: Array | None = None
    """int32 `[V]` where the logits are: not zero where in the prompt or the output (repetition penalty)."""
    counts: Array | None = None
    """int32 `[V]` where the logits are: times in the output (presence and frequency penalties)."""
    bias_ids: Ints | None = None
    bias_values: npt.NDArray[np.float32] | None = None
    allowed: Ints | None = None
    """The only ids that may be sampled, suppressed ones already left out."""
    suppressed: Ints | None = None
    stops: Ints | None = None
    """Ids masked until `min_tokens` were sampled."""
    grammar: GrammarState | None = None
    bias: Tensor | None = None
    """float32 `[V]` on the device, for the sampling kernels (`row_block.py`). Likewise `masks`."""
    masks: dict[bool, Tensor] = field(default_factory=dict)

    @property
    def holds_stops(self) -> bool:
        """min_tokens still keeps the request from ending."""
        return self.stops is not None and self.step < self.params.min_tokens

    @property
    def processed(self) -> bool:
        """Something changes this row's logits before selection."""
        static = (self.occurrences, self.counts, self.bias_ids, self.allowed, self.suppressed, self.grammar)
        return self.holds_stops or any(part is not None for part in static)


class Arrays:
    """Makes the arrays that the processors work with: numpy's on the host, else torch's."""

    def __init__(self, device: torch.device, *, host: bool) -> None:
        self.host = host
        self.device = device
        self.xp: Any = np if self.host else torch

    def put(self, array: npt.NDArray[Any]) -> Array:
        return array if self.host else upload(array, self.device)


@dataclass(slots=True)
class _Pairs:
    """Places in flattened `[P, V]` logits: some ids in some of the rows."""

    rows: Array
    row_of_each: Array
    places: Array

    @classmethod
    def of(cls, ids: Sequence[Ints | None], arrays: Arrays, vocab_size: int) -> _Pairs | None:
        """From one entry a row; `None` if no row has any."""
        rows = np.array([row for row, entry in enumerate(ids) if entry is not None])
        if not len(rows):
            return None
        entries = [entry for entry in ids if entry is not None]
        row_of_each = np.repeat(rows, [len(entry) for entry in entries])
        places = np.concatenate(entries) + row_of_each * vocab_size
        return cls(arrays.put(rows), arrays.put(row_of_each), arrays.put(places))


class _Places:
    """Where a stack of `[V]` rows is not zero, followed as tokens are sampled."""

    def __init__(self, counts: Sequence[Array], rows: Sequence[int]) -> None:
        self.stack = np.stack(counts)
        self.flat = self.stack.reshape(-1)
        self._vocab_size = self.stack.shape[1]
        self._starts = np.arange(len(rows)) * self._vocab_size
        self._part_rows = np.array(rows)
        self._each = np.arange(len(rows))
        self._shift = self._part_rows * self._vocab_size - self._starts
        self.in_stack = np.flatnonzero(self.flat)
        self.row = self.in_stack // self._vocab_size
        self.in_part = self.in_stack + self._shift[self.row]
        """The same places in the flattened logits that the stack's rows are part of."""

    def add(self, ids: Ints) -> None:
        """Count the tokens sampled for all `P` rows."""
        # FAILED wraps to the last id; that request ends here and its counts with it.
        new = ids[self._part_rows] % self._vocab_size + self._starts
        first = self.flat[new] == 0
        self.flat[new] += 1
        if first.any():
            self.in_stack = np.concatenate((self.in_stack, new[first]))
            self.row = np.concatenate((self.row, self._each[first]))
            self.in_part = np.concatenate((self.in_part, (new + self._shift)[first]))


class _DenseCounts:
    """A stack of `[V]` rows on a device, used whole: to find where it is not zero would be to wait for the device."""

    def __init__(self, counts: Sequence[Array], rows: Sequence[int], arrays: Arrays) -> None:
        self.stack: Tensor = torch.stack(list(counts))
        self.part_rows: Tensor = arrays.put(np.array(rows))
        self._each: Tensor = arrays.put(np.arange(len(rows)))

    def add(self, ids: Tensor) -> None:
        """Count the tokens sampled for all `P` rows."""
        self.stack[self._each, ids[self.part_rows] % self.stack.shape[1]] += 1


class _Penalties:
    """Repetition, presence and frequency penalties of some rows, over count arrays stacked for the batch.

    The stacked rows replace the requests' own arrays, so what is recorded here survives a change of the batch.
    """

    def __init__(self, states: Sequence[RowState], arrays: Arrays) -> None:
        repeating = [(i, s) for i, s in enumerate(states) if s.occurrences is not None]
        counting = [(i, s) for i, s in enumerate(states) if s.counts is not None]
        self._host = arrays.host
        self._repeated: Any = None
        self._counts: Any = None

        def numbers(values: Sequence[float]) -> Array:
            return arrays.put(np.array(values, dtype=np.float32))

        if repeating:
            self._repeated = _counters([s.occurrences for _, s in repeating], [i for i, _ in repeating], arrays)
            self._repetition = numbers([s.params.repetition_penalty for _, s in repeating])
            for row, (_, state) in zip(self._repeated.stack, repeating, strict=True):
                state.occurrences = row
        if counting:
            self._counts = _counters([s.counts for _, s in counting], [i for i, _ in counting], arrays)
            self._presence = numbers([s.params.presence_penalty for _, s in counting])
            self._frequency = numbers([s.params.frequency_penalty for _, s in counting])
            for row, (_, state) in zip(self._counts.stack, counting, strict=True):
                state.counts = row
        self.counters = [counter for counter in (self._repeated, self._counts) if counter is not None]

    def apply(self, x: Array) -> None:
        if self._host:
            self._apply_places(x.reshape(-1))
        else:
            self._apply_dense(x)

    def _apply_places(self, flat: Array) -> None:
        if self._repeated is not None:
            places, factor = self._repeated.in_part, self._repetition[self._repeated.row]
            values = flat[places]
            flat[places] = np.where(values < 0, values * factor, values / factor)
        if self._counts is not None:
            places, row = self._counts.in_part, self._counts.row
            frequency = self._frequency[row]
            frequency *= self._counts.flat[self._counts.in_stack]  # in place, so that numpy stays with float32
            flat[places] = flat[places] - frequency - self._presence[row]

    def _apply_dense(self, x: Tensor) -> None:
        if self._repeated is not None:
            rows, factor = x[self._repeated.part_rows], self._repetition[:, None]
            changed = torch.where(rows < 0, rows * factor, rows / factor)
            x[self._repeated.part_rows] = torch.where(self._repeated.stack != 0, changed, rows)
        if self._counts is not None:
            rows, counts = x[self._counts.part_rows], self._counts.stack
            rows = rows - self._frequency[:, None] * counts
            x[self._counts.part_rows] = torch.where(counts != 0, rows - self._presence[:, None], rows)


def _counters(counts: Sequence[Array], rows: Sequence[int], arrays: Arrays) -> _Places | _DenseCounts:
    return _Places(counts, rows) if arrays.host else _DenseCounts(counts, rows, arrays)


class Processors:
    """All that changes the logits of a fixed list of rows, in transformers' order; built once for a batch.

    Rows with a grammar must come first. `apply` works in place on contiguous float32 `[P, V]`; `record` takes the ids
    `[P]` sampled from it. Rebuild when a row's `holds_stops` changes.
    """

    def __init__(self, states: Sequence[RowState], vocab_size: int, arrays: Arrays) -> None:
        self._arrays = arrays
        # A Python number assigned to places of a CUDA tensor travels from the host and waits for it; this does not.
        self._never = arrays.put(np.array(-np.inf, dtype=np.float32))
        self._penalties = _Penalties(states, arrays)
        self.records = bool(self._penalties.counters)
        """Whether `record` has anything to do."""
        self._bias = _Pairs.of([s.bias_ids for s in states], arrays, vocab_size)
        values = [s.bias_values for s in states if s.bias_values is not None]
        self._bias_values = arrays.put(np.concatenate(values)) if values else None
        self._allowed = _Pairs.of([s.allowed for s in states], arrays, vocab_size)
        self._suppressed = _Pairs.of([s.suppressed for s in states], arrays, vocab_size)
        self._stops = _Pairs.of([s.stops if s.holds_stops else None for s in states], arrays, vocab_size)
        grammars = [s.grammar for s in states if s.grammar is not None]
        self._grammar = None
        if grammars:
            from omnistage.engines.ar.sampling.grammar_state import GrammarMask

            self._grammar = GrammarMask(grammars, arrays.device)

    def apply(self, logits: Tensor) -> None:
        x: Array = logits.numpy() if self._arrays.host else logits
        flat = x.reshape(-1)
        self._penalties.apply(x)
        if self._bias is not None:
            flat[self._bias.places] += self._bias_values
        if self._allowed is not None:
            allowed = flat[self._allowed.places]
            x[self._allowed.rows] = self._never
            flat[self._allowed.places] = allowed
        if self._suppressed is not None:
            flat[self._suppressed.places] = self._never
        if self._grammar is not None:
            self._grammar.apply(logits[: len(self._grammar)])
        if self._stops is not None:
            self._hold_stops(x, flat, self._stops)

    def _hold_stops(self, x: Array, flat: Array, stops: _Pairs) -> None:
        values = flat[stops.places]
        flat[stops.places] = self._never
        # A finished grammar, or a list of allowed ids, may leave only ids that stop: then they stay.
        nothing_left = self._arrays.xp.amax(x, 1) == -np.inf
        flat[stops.places] = self._arrays.xp.where(nothing_left[stops.row_of_each], values, self._never)

    def record(self, ids: Tensor) -> None:
        """Count the sampled tokens."""
        new: Array = ids.numpy() if self._arrays.host else ids
        for places in self._penalties.counters:
            places.add(new)

"""The arithmetic of sampling: processors that change logits, and the draw that picks a token from them.

Everything works on many rows at once, and no row's result depends on the others. For the draw that holds bit by bit:
probabilities are turned into fixed-point weights, whose integer sums come out the same in any order, over any width
and on either of the paths below, so a row that shares its batch with other shapes of request still gets its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnistage.types import SamplingParams

if TYPE_CHECKING:
    from omnistage.engines.ar.grammar import GrammarState

FAILED = -1
"""In place of a token id: the row held NaN, an infinity, or nothing that may be sampled."""
UNCOVERED = -2
"""In place of a token id: the likeliest tokens did not settle the draw; draw again with the next `attempt`."""

MAX_FAST_TOP_K = 1024
MIN_TEMPERATURE = 1e-6
"""Smaller temperatures count as this one: below it logits overflow, and the draw is greedy in any case."""

_WEIGHT_SCALE = float(2**30)
"""Weight of the likeliest token. Rarer than 2^-30 of it rounds to never; `[V]` weights fit int32, sums int64."""
_HOST_CANDIDATES = (128, 4096)
_DEVICE_CANDIDATES = (256,)
"""Likeliest tokens to look at, by attempt, where top_k gives no number; after the last attempt all are sorted."""
_DEVICE_MARGIN = 16
"""Candidates beyond the largest top_k on a device, so that ties of the k-th value are usually all there."""

_REFRESH_STEPS = 256

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """SplitMix64's finaliser: 64 bits to 64 well-mixed bits."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def uniform(stream: int, step: int) -> float:
    """The `step`-th number in [0, 1) of a stream; a counter, so no state is lost with a preempted request."""
    return (mix(stream + (step + 1) * _GOLDEN) >> 11) * 2.0**-53


# ------------------------------------------------------------------------------------------------ processors


@dataclass(slots=True)
class RowState:
    """What the sampler holds of one request. Tensors are on the sampler's device; `None` means unused."""

    params: SamplingParams
    stream: int
    """Start of the request's random stream."""
    step: int = 0
    """Tokens sampled so far."""
    seen: Tensor | None = None
    """int32 `[V]`: not zero where in the prompt or the output (repetition penalty)."""
    counts: Tensor | None = None
    """int32 `[V]`: times in the output (presence and frequency penalties)."""
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None
    allowed: Tensor | None = None
    """int64: the only ids that may be sampled, suppressed ones already left out."""
    suppressed: Tensor | None = None
    stops: Tensor | None = None
    """int64: ids masked until `min_tokens` were sampled."""
    grammar: GrammarState | None = None

    @property
    def holds_stops(self) -> bool:
        """min_tokens still keeps the request from ending."""
        return self.stops is not None and self.step < self.params.min_tokens

    @property
    def processed(self) -> bool:
        """Something changes this row's logits before the draw."""
        static = (self.seen, self.counts, self.bias_ids, self.allowed, self.suppressed, self.grammar)
        return self.holds_stops or any(part is not None for part in static)


class _Pairs:
    """Places in a `[P, V]` tensor: some ids in some of its rows."""

    def __init__(self, ids: Sequence[tuple[int, Tensor]], device: torch.device) -> None:
        lengths = [len(tensor) for _, tensor in ids]
        rows, repeats = torch.tensor([[row for row, _ in ids], lengths], device=device)
        self.rows = rows
        self.row_of_each = torch.repeat_interleave(rows, repeats, output_size=sum(lengths))
        self.ids = torch.cat([tensor for _, tensor in ids])

    @classmethod
    def of(cls, ids: Sequence[Tensor | None], device: torch.device) -> _Pairs | None:
        """From one entry a row; `None` if no row has any."""
        given = [(row, tensor) for row, tensor in enumerate(ids) if tensor is not None]
        return cls(given, device) if given else None

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        return self.row_of_each, self.ids


class _Places:
    """Where a stack of `[V]` rows is not zero, followed as tokens are sampled.

    The places go stale only by naming one twice, which is harmless: what is written there is the same.
    """

    def __init__(self, stack: Tensor, rows: Sequence[int]) -> None:
        self.stack = stack
        self._each = torch.arange(len(stack), device=stack.device)
        self._part_rows = torch.tensor(rows, device=stack.device)
        self._added = 0
        self.local, self.ids = stack.nonzero(as_tuple=True)

    @property
    def in_part(self) -> tuple[Tensor, Tensor]:
        """The same places in the `[P, V]` tensor that the stack's rows are part of."""
        return self._part_rows[self.local], self.ids

    def add(self, ids: Tensor) -> None:
        """Count the tokens sampled for all `P` rows."""
        # FAILED wraps to the last id; that request ends here and its counts with it.
        ids = ids[self._part_rows] % self.stack.shape[1]
        self.stack[self._each, ids] += 1
        self._added += 1
        if self._added % _REFRESH_STEPS:
            self.local, self.ids = torch.cat([self.local, self._each]), torch.cat([self.ids, ids])
        else:
            self.local, self.ids = self.stack.nonzero(as_tuple=True)


class _Penalties:
    """Repetition, presence and frequency penalties of some rows, over count tensors stacked for the batch.

    The stacked rows replace the requests' own tensors, so what is recorded here survives a change of the batch.
    """

    def __init__(self, states: Sequence[RowState], device: torch.device) -> None:
        repeating = [(i, s, s.seen) for i, s in enumerate(states) if s.seen is not None]
        counting = [(i, s, s.counts) for i, s in enumerate(states) if s.counts is not None]
        self._seen: _Places | None = None
        self._counts: _Places | None = None
        if repeating:
            self._seen = _Places(torch.stack([seen for _, _, seen in repeating]), [i for i, _, _ in repeating])
            factors = [s.params.repetition_penalty for _, s, _ in repeating]
            self._repetition = torch.tensor(factors, dtype=torch.float32, device=device)
            for row, (_, state, _) in zip(self._seen.stack, repeating, strict=True):
                state.seen = row
        if counting:
            self._counts = _Places(torch.stack([counts for _, _, counts in counting]), [i for i, _, _ in counting])
            values = [[s.params.presence_penalty, s.params.frequency_penalty] for _, s, _ in counting]
            self._presence, self._frequency = torch.tensor(values, dtype=torch.float32, device=device).unbind(dim=1)
            for row, (_, state, _) in zip(self._counts.stack, counting, strict=True):
                state.counts = row

    def __bool__(self) -> bool:
        return self._seen is not None or self._counts is not None

    def apply(self, x: Tensor) -> None:
        if self._seen is not None:
            places, factor = self._seen.in_part, self._repetition[self._seen.local]
            values = x[places]
            x[places] = torch.where(values < 0, values * factor, values / factor)
        if self._counts is not None:
            places, local = self._counts.in_part, self._counts.local
            counts = self._counts.stack[local, self._counts.ids]
            x[places] = x[places] - counts * self._frequency[local] - self._presence[local]

    def record(self, ids: Tensor) -> None:
        for places in (self._seen, self._counts):
            if places is not None:
                places.add(ids)


class Processors:
    """All that changes the logits of a fixed list of rows, in transformers' order; built once for a batch.

    Rows with a grammar must come first. `apply` works in place on float32 `[P, V]`; `record` takes the ids `[P]`
    sampled from it. Rebuild when a row's `holds_stops` changes.
    """

    def __init__(self, states: Sequence[RowState], device: torch.device) -> None:
        # A Python number assigned to places of a CUDA tensor travels from the host and waits for it; this does not.
        self._never = torch.full((), -torch.inf, device=device)
        self._penalties = _Penalties(states, device)
        self._bias = _Pairs.of([s.bias_ids for s in states], device)
        values = [s.bias_values for s in states if s.bias_values is not None]
        self._bias_values = torch.cat(values) if values else None
        self._allowed = _Pairs.of([s.allowed for s in states], device)
        self._suppressed = _Pairs.of([s.suppressed for s in states], device)
        self._stops = _Pairs.of([s.stops if s.holds_stops else None for s in states], device)
        grammars = [s.grammar for s in states if s.grammar is not None]
        self._grammar = None
        if grammars:
            from omnistage.engines.ar.grammar import GrammarMask

            self._grammar = GrammarMask(grammars, device)

    def apply(self, x: Tensor) -> None:
        self._penalties.apply(x)
        if self._bias is not None and self._bias_values is not None:
            x[self._bias.places] += self._bias_values
        if self._allowed is not None:
            kept = x[self._allowed.places]
            x.index_fill_(0, self._allowed.rows, -torch.inf)
            x[self._allowed.places] = kept
        if self._suppressed is not None:
            x[self._suppressed.places] = self._never
        if self._grammar is not None:
            self._grammar.apply(x[: len(self._grammar)])
        if self._stops is not None:
            self._hold_stops(x, self._stops)

    def _hold_stops(self, x: Tensor, stops: _Pairs) -> None:
        held = x[stops.places]
        x[stops.places] = self._never
        # A finished grammar, or a list of allowed ids, may leave only ids that stop: then they stay.
        nothing_left = x.amax(dim=1) == -torch.inf
        x[stops.places] = torch.where(nothing_left[stops.row_of_each], held, self._never)

    @property
    def records(self) -> bool:
        """Whether `record` has anything to do."""
        return bool(self._penalties)

    def record(self, ids: Tensor) -> None:
        self._penalties.record(ids)


# ---------------------------------------------------------------------------------------------------- draws


def argmax_rows(x: Tensor) -> Tensor:
    """The first of each row's largest logits, int64 `[R]`; `FAILED` where that is not finite (NaN counts largest)."""
    if x.device.type == "cpu":
        # numpy's argmax is some eight times faster than torch's here, and breaks ties the same way.
        array = x.float().numpy()
        ids = array.argmax(axis=1)
        best = array[np.arange(len(ids)), ids]
        return torch.from_numpy(np.where(np.isfinite(best), ids, FAILED))
    values, indices = x.max(dim=1)
    return torch.where(values.abs() < torch.inf, indices, FAILED)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Each row's likeliest tokens in descending order, equal logits by ascending id."""

    values: Tensor
    """float32 `[R, K]`, padded with -inf."""
    ids: Tensor
    """int64 `[R, K]`."""
    floor: Tensor
    """float32 `[R, 1]`: every token above it is there; -inf says that all tokens with any probability are."""


def _sorted_host(x: Tensor) -> _Candidates:
    array = x.numpy() + np.float32(0)  # -0.0 becomes 0.0: they must tie
    bits = array.view(np.int32)
    ascending = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    # One integer holds the logit, reversed, and the id: sorting it is several times faster than a stable argsort.
    keys = (~ascending).astype(np.int64) << 32
    keys |= np.arange(array.shape[1])
    keys.sort(axis=1)
    ids = keys & 0xFFFFFFFF
    values = np.take_along_axis(array, ids, axis=1)
    values[np.isnan(array.max(axis=1))] = np.nan
    floor = torch.full((len(array), 1), -torch.inf)
    return _Candidates(torch.from_numpy(values), torch.from_numpy(ids), floor)


def _top_host(x: Tensor, wanted: Sequence[int]) -> _Candidates:
    """At least the `wanted[i]` likeliest of row i.

    The k-th largest of many column maxima is no larger than the k-th logit of all, and nearly as large: finding it
    and taking all that reaches it costs two passes over the row, where selection would cost many.
    """
    array: npt.NDArray[np.float32] = x.numpy()
    rows, vocab = array.shape
    columns = min(max(512, 4 * max(wanted)), vocab // 2)
    if columns < 2 * max(wanted):
        return _sorted_host(x)
    depth = vocab // columns
    maxima = array[:, : depth * columns].reshape(rows, depth, columns).max(axis=1)
    best = maxima.max(axis=1)
    if depth * columns < vocab:
        best = np.maximum(best, array[:, depth * columns :].max(axis=1))
    kth = [columns - want for want in wanted]
    maxima.partition(sorted(set(kth)), axis=1)
    bound = maxima[np.arange(rows), kth]
    floor = np.nextafter(bound, np.float32(-np.inf))
    bound = np.maximum(bound, np.finfo(np.float32).min)
    flat = np.flatnonzero(array >= bound[:, None])
    row_of_each = flat // vocab
    ends = np.searchsorted(row_of_each, np.arange(rows + 1))
    place = np.arange(len(flat)) - ends[row_of_each]
    width = max(1, int(np.diff(ends).max()))
    values = np.full((rows, width), -np.inf, dtype=np.float32)
    ids = np.zeros((rows, width), dtype=np.int64)
    values[row_of_each, place] = array.reshape(-1)[flat]
    ids[row_of_each, place] = flat - row_of_each * vocab
    order = np.argsort(-values, axis=1, kind="stable")
    values = np.take_along_axis(values, order, axis=1)
    ids = np.take_along_axis(ids, order, axis=1)
    values[np.isnan(best)] = np.nan
    return _Candidates(torch.from_numpy(values), torch.from_numpy(ids), torch.from_numpy(floor)[:, None])


def _sorted_device(x: Tensor) -> _Candidates:
    values, ids = x.sort(dim=1, descending=True, stable=True)
    return _Candidates(values, ids, torch.full_like(values[:, :1], -torch.inf))


def _top_device(x: Tensor, count: int) -> _Candidates:
    if count >= x.shape[1]:
        return _sorted_device(x)
    values, ids = x.topk(count, dim=1)
    # topk leaves equal logits in any order, so: by id, then stably by value.
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return _Candidates(values, ids.gather(1, order), values[:, -1:])


def _exp_(log_shares: Tensor) -> Tensor:
    """exp in place, by the same routine wherever a weight comes from: sums must agree to the last bit.

    On a CPU that is numpy's: torch's takes thirty times as long over -inf and what underflows.
    """
    if log_shares.device.type != "cpu":
        return log_shares.exp_()
    array = log_shares.numpy()
    np.exp(array, out=array)
    return log_shares


def _mass_device(x: Tensor, temperature: Tensor, best: Tensor) -> Tensor:
    """Sum of all of each row's weights, int64 `[R, 1]`."""
    shares = _exp_((x / temperature).sub_(best))
    return shares.mul_(_WEIGHT_SCALE).to(torch.int32).sum(dim=1, keepdim=True, dtype=torch.int64)


def _mass_host(x: Tensor, temperature: Tensor, best: Tensor) -> Tensor:
    # Row by row in one small buffer: a [R, V] temporary costs more in page faults than all of the arithmetic.
    shares = np.empty(x.shape[1], dtype=np.float32)
    weights = np.empty(x.shape[1], dtype=np.int32)
    sums = np.zeros((len(x), 1), dtype=np.int64)
    for i, (row, divisor, top) in enumerate(zip(x.numpy(), temperature.numpy(), best.numpy(), strict=True)):
        if not np.isfinite(top[0]):
            continue  # this row fails
        scaled = row if divisor[0] == 1 else np.divide(row, divisor, out=shares)
        np.subtract(scaled, top, out=shares)
        np.exp(shares, out=shares)
        np.multiply(shares, np.float32(_WEIGHT_SCALE), out=shares)
        np.copyto(weights, shares, casting="unsafe")
        sums[i] = np.add.reduce(weights, dtype=np.int64)
    return torch.from_numpy(sums)


def top_rows(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of float32 `[R, V]`, best first, and their ids; `count` must not exceed V."""
    if x.device.type != "cpu" or not count:
        values, ids = x.topk(count, dim=1)
        return values, ids
    found = _top_host(x, [count] * len(x))
    if found.values.shape[1] < count:
        found = _sorted_host(x)
    return found.values[:, :count], found.ids[:, :count]


class DrawRows:
    """Temperature, top-k, top-p, min-p and the draw for a fixed list of sampled rows; built once for a batch."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self.params = tuple(params)
        self._host = device.type == "cpu"
        self._reach = _HOST_CANDIDATES if self._host else _DEVICE_CANDIDATES
        limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        self._fixed = [limit if limit <= MAX_FAST_TOP_K else 0 for limit in limits]
        floats = [[max(p.temperature, MIN_TEMPERATURE), p.min_p] for p in params]
        columns = torch.tensor(floats, dtype=torch.float32, device=device)
        self._temperature, self._min_p = columns[:, :1], columns[:, 1:]
        self._top_p = torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=device)
        self._last = torch.tensor([[limit - 1] for limit in limits], device=device)
        pairs = list(zip(limits, params, strict=True))
        limited = [limit < vocab_size for limit in limits]
        unfiltered = [limit == vocab_size and p.top_p == 1 and p.min_p == 0 for limit, p in pairs]
        self._limited = torch.tensor(limited, device=device)[:, None] if any(limited) else None
        self._unfiltered = torch.tensor(unfiltered, device=device)[:, None] if any(unfiltered) else None
        self._some_top_p = any(p.top_p < 1 for p in params)
        self._some_min_p = any(p.min_p > 0 for p in params)
        # Rows whose filter or draw is a share of the whole vocabulary's mass.
        weighed = [i for i, (limit, p) in enumerate(pairs) if limit == vocab_size and (p.top_p < 1 or p.min_p == 0)]
        self._all_weighed = len(weighed) == len(pairs)
        self._weighed = torch.tensor(weighed, device=device) if weighed else None

    def _candidates(self, x: Tensor, attempt: int) -> _Candidates:
        if attempt >= len(self._reach):
            return _sorted_host(x) if self._host else _sorted_device(x)
        # A limited row comes back for a second attempt when its ties outnumber the first one's candidates.
        wanted = [fixed if fixed and not attempt else self._reach[attempt] for fixed in self._fixed]
        return _top_host(x, wanted) if self._host else _top_device(x, max(wanted) + _DEVICE_MARGIN)

    def _total(self, x: Tensor, best: Tensor, kept: Tensor) -> Tensor:
        """Mass that top-p takes its share of: of the kept candidates, or of the vocabulary if nothing limits it."""
        if self._weighed is None:
            return kept
        temperature = self._temperature
        if not self._all_weighed:
            x, best, temperature = x[self._weighed], best[self._weighed], temperature[self._weighed]
        mass = (_mass_host if self._host else _mass_device)(x, temperature, best)
        return mass if self._all_weighed else kept.index_copy(0, self._weighed, mass)

    def draw(self, x: Tensor, u: Tensor, *, attempt: int = 0) -> Tensor:
        """Ids int64 `[R]` from float32 logits `[R, V]` and numbers `u` in [0, 1), float64 `[R, 1]`.

        Works on each row's likeliest tokens; a row they do not settle gives `UNCOVERED` and needs a further attempt.
        The last sorts all and settles every row. Whichever attempt does, the id is the same.
        """
        found = self._candidates(x, attempt)
        scaled = found.values / self._temperature
        best = scaled[:, :1]
        shares = _exp_(scaled - best)
        weights = (shares * _WEIGHT_SCALE).to(torch.int64)
        keep = scaled > -torch.inf
        kth = None
        if self._limited is not None:
            kth = scaled.gather(1, self._last.clamp(max=scaled.shape[1] - 1))
            keep = scaled >= kth
            weights *= keep
        mass = weights.cumsum(dim=1)
        total = self._total(x, best, mass[:, -1:])
        if self._some_top_p:
            keep &= (mass - weights) < self._top_p * total
        if self._some_min_p:
            keep &= shares >= self._min_p

        # In descending order each filter keeps a prefix, and so do all of them together.
        kept = keep.sum(dim=1, keepdim=True)
        kept_mass = mass.gather(1, (kept - 1).clamp_(min=0))
        if self._unfiltered is not None:
            kept_mass = torch.where(self._unfiltered, total, kept_mass)
        target = (u * kept_mass).to(torch.int64).minimum(kept_mass - 1)
        pick = (mass <= target).sum(dim=1, keepdim=True)
        ids = found.ids.gather(1, pick.clamp(max=scaled.shape[1] - 1))
        ids = torch.where(self._settled(found, kth, kept, pick), ids, UNCOVERED)
        return torch.where(best.abs() < torch.inf, ids, FAILED)[:, 0]

    def _settled(self, found: _Candidates, kth: Tensor | None, kept: Tensor, pick: Tensor) -> Tensor:
        """bool `[R, 1]`: tokens that are not among the candidates cannot change the pick."""
        known = (found.values > found.floor).sum(dim=1, keepdim=True)
        edge = kept < known
        if self._limited is not None and kth is not None:
            # Whoever is missing has at most the floor's logit: below the k-th it can neither rank nor tie.
            all_k = (self._last < known) & (kth > found.floor / self._temperature)
            edge = torch.where(self._limited, all_k, edge)
        if self._unfiltered is not None:
            edge |= self._unfiltered
        return (pick < known) & (edge | (found.floor == -torch.inf))

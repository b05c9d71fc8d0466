"""Selection on the host: temperature, top-k, top-p and min-p, and the choice of one of the tokens that they keep.

The rule, here and on a device (`device_selection.py`): each token that is kept weighs as much as its probability, and
the tokens lie side by side in the order of their ids; a random number points at one of them.

Filters keep a row's likeliest tokens, so only those are looked at, in numpy: each operation costs a microsecond or two,
where a torch operation costs several and lets another stage's thread take the interpreter.

No row's result depends on the others, bit by bit: probabilities are turned into fixed-point weights, whose integer sums
come out the same in any order, over any width and by any attempt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnistage.core.params import SamplingParams

FAILED = -1
"""In place of a token id: the row held NaN, an infinity, or nothing that may be sampled."""
UNCOVERED = -2
"""In place of a token id: the likeliest tokens did not settle it; select again with the next `attempt`."""

MAX_FAST_TOP_K = 1024
MIN_TEMPERATURE = 1e-6
"""Smaller temperatures count as this one: below it logits overflow, and the choice is greedy in any case."""

WEIGHT_SCALE = float(2**30)
"""Weight of the likeliest token. Rarer than 2^-30 of it rounds to never; `[V]` weights fit int32, sums int64."""
_CANDIDATES = (128, 4096)
"""Likeliest tokens to look at, by attempt, where top_k gives no number; after the last attempt all are sorted."""
_COLUMNS = 512
_PIECE = 512
"""Weights of a whole row are summed in pieces, so that a token is found in its piece alone."""
_SHORT = 1024
"""Rows up to this long are worth turning into lists, which are faster to search."""
_MIN_FINITE = np.finfo(np.float32).min
_LOWEST = np.float32(-np.inf)

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


# ----------------------------------------------------------------------------------------------- candidates


@dataclass(slots=True)
class Candidates:
    """Each row's likeliest tokens in descending order, equal logits by ascending id."""

    values: Floats
    """`[R, K]`, padded with -inf."""
    ids: Ints
    """`[R, K]`."""
    lengths: Ints
    """`[R, 1]`: how many of them are tokens, not padding."""
    floor: Floats
    """`[R, 1]`: every token above it is there; -inf says that all tokens with any probability are."""


def _sort_keys(values: Floats, ids: Ints) -> Ints:
    """One integer for a logit and its id: ascending keys are descending logits, then ascending ids.

    Sorting it is several times faster than a stable argsort.
    """
    bits = (np.float32(0) - values).view(np.int32)  # from 0, so that 0.0 and -0.0 tie
    keys = (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)
    keys <<= 32
    keys |= ids
    return keys


def _sorted_host(array: Floats) -> Candidates:
    keys = _sort_keys(array, np.arange(array.shape[1]))
    keys.sort(axis=1)
    ids = keys & 0xFFFFFFFF
    values = np.take_along_axis(array, ids, axis=1)
    values[np.isnan(array.max(axis=1))] = np.nan
    shape = len(array), 1
    return Candidates(values, ids, np.full(shape, array.shape[1]), np.full(shape, -np.inf, dtype=np.float32))


class _Search:
    """Finds at least the `counts[i]` likeliest of row i, in float32 `[R, vocab_size]`.

    The k-th largest of many column maxima is no larger than the k-th logit of all, and nearly as large: finding it
    and taking all that reaches it costs two passes over the row, where selection would cost many.
    """

    def __init__(self, counts: Ints, vocab_size: int) -> None:
        largest, rows = int(counts.max()), len(counts)
        columns = min(max(_COLUMNS, 4 * largest), vocab_size // 2)
        self._too_narrow = columns < 2 * largest
        if self._too_narrow:
            return
        self._columns = columns
        self._depth = vocab_size // columns
        each = np.arange(rows)
        self._each = each[:, None]
        self._kth = each, columns - counts
        self._starts = np.arange(rows + 1) * vocab_size

    def __call__(self, array: Floats) -> Candidates:
        if self._too_narrow:
            return _sorted_host(array)
        rows, whole = len(array), self._depth * self._columns
        maxima = np.maximum.reduce(array[:, :whole].reshape(rows, self._depth, self._columns), axis=1)
        maxima.sort(axis=1)
        bound = maxima[self._kth]
        flat = np.flatnonzero(array >= np.maximum(bound, _MIN_FINITE)[:, None])
        ends = flat.searchsorted(self._starts)
        lengths = (ends[1:] - ends[:-1])[:, None]
        used = np.arange(max(1, np.maximum.reduce(lengths, axis=None))) < lengths
        falling = np.empty(used.shape, dtype=np.float32)
        falling[:] = np.inf
        falling[used] = -array.reshape(-1)[flat]
        ids = np.empty(used.shape, dtype=np.int64)
        ids[:] = self._starts[:-1, None]
        ids[used] = flat
        ids -= self._starts[:-1, None]
        order = falling.argsort(axis=1, kind="stable")
        values, ids = -falling[self._each, order], ids[self._each, order]
        best = maxima[:, -1]  # NaN sorts last
        if whole < array.shape[1]:
            best = np.maximum(best, np.maximum.reduce(array[:, whole:], axis=1))
        values[best != best] = np.nan
        return Candidates(values, ids, lengths, np.nextafter(bound, _LOWEST)[:, None])


def top_rows(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of float32 `[R, V]`, best first, and their ids; `count` must not exceed V."""
    if x.device.type != "cpu" or not count:
        values, ids = x.topk(count, dim=1)
        return values, ids
    candidates = _Search(np.full(len(x), count), x.shape[1])(x.numpy())
    if candidates.values.shape[1] < count:
        candidates = _sorted_host(x.numpy())
    return torch.from_numpy(candidates.values[:, :count]), torch.from_numpy(candidates.ids[:, :count])


def argmax_host(x: Tensor) -> list[int]:
    """The first of each row's largest logits; `FAILED` where that is not finite.

    numpy's argmax is some eight times faster than torch's; ties break alike.
    """
    array = x.float().numpy()
    ids: list[int] = array.argmax(axis=1).tolist()
    return [id_ if isfinite(array.item(row, id_)) else FAILED for row, id_ in enumerate(ids)]


# ------------------------------------------------------------------------------------------------- selection


@dataclass(frozen=True, slots=True)
class _Rule:
    """How one row's token is selected."""

    limit: int
    """top_k, or the vocabulary's size."""
    limited: bool
    top_p: float

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> _Rule:
        limited = 0 < params.top_k < vocab_size
        return cls(params.top_k if limited else vocab_size, limited, params.top_p)


def is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    """Whether top_k, top_p or min_p may leave tokens out."""
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def temperature_of(params: SamplingParams) -> float:
    return max(params.temperature, MIN_TEMPERATURE)


class TokenSelector:
    """Temperature, top-k, top-p, min-p and the choice for a fixed list of sampled rows; built once for a batch."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, attempt: int = 0) -> None:
        """Filters look at each row's likeliest tokens, the more the higher the `attempt`; the third sorts all.

        Whichever attempt settles a row, the id is the same.
        """
        filtered = [i for i, p in enumerate(params) if is_filtered(p, vocab_size)]
        self._whole = [(i, temperature_of(p)) for i, p in enumerate(params) if not is_filtered(p, vocab_size)]
        self._filtered = filtered
        self._weigher = _Weigher(vocab_size)
        self._filters = (
            _Filters([params[i] for i in filtered], vocab_size, self._weigher, attempt) if filtered else None
        )

    def select(self, x: Tensor, u: Sequence[float]) -> list[int]:
        """Ids from float32 logits `[R, V]` and a number in [0, 1) for each row; `UNCOVERED`: take the next attempt."""
        array = np.ascontiguousarray(x.numpy())
        if self._filters is not None and not self._whole:
            return self._filters.select(array, u)
        ids = [FAILED] * len(array)
        for i, temperature in self._whole:
            ids[i] = self._weigher.pick(array[i], temperature, u[i])
        if self._filters is not None:
            selected = self._filters.select(array[self._filtered], [u[i] for i in self._filtered])
            for i, token in zip(self._filtered, selected, strict=True):
                ids[i] = token
        return ids


def counts_to_look_at(limits: Ints, attempt: int) -> Ints:
    """How many of each row's likeliest tokens an attempt looks at."""
    # A limited row comes back for a second attempt when its ties outnumber the first one's candidates.
    return np.where((limits <= MAX_FAST_TOP_K) & (attempt == 0), limits, _CANDIDATES[attempt])


class _Filters:
    """The rows of a batch that have filters."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, weigher: _Weigher, attempt: int) -> None:
        self._weigher = weigher
        self._rules = [_Rule.of(p, vocab_size) for p in params]
        limits = np.array([rule.limit for rule in self._rules])
        self._temperature = np.array([[temperature_of(p)] for p in params], dtype=np.float32)
        self._min_p = np.array([[p.min_p] for p in params], dtype=np.float32)
        self._each = np.arange(len(limits))[:, None]
        self._last = limits[:, None] - 1
        self._unscaled = all(p.temperature == 1.0 for p in params)
        self._some_limited = any(rule.limited for rule in self._rules)
        self._some_min_p = bool(self._min_p.any())
        # These cut by a share of the whole vocabulary's mass.
        self._weighed = [i for i, rule in enumerate(self._rules) if rule.top_p < 1 and not rule.limited]
        self._search: Callable[[Floats], Candidates] = _sorted_host
        if attempt < len(_CANDIDATES):
            self._search = _Search(counts_to_look_at(limits, attempt), vocab_size)

    def select(self, array: Floats, u: Sequence[float]) -> list[int]:
        candidates = self._search(array)
        width = candidates.values.shape[1]
        with np.errstate(all="ignore"):  # rows that fail make NaN on the way
            scaled = candidates.values if self._unscaled else candidates.values / self._temperature
            best = scaled[:, :1]
            shares = np.exp(scaled - best)
            weights = (shares * WEIGHT_SCALE).astype(np.int64)
            clear = None
            if self._some_limited:
                kth = scaled[self._each, np.minimum(self._last, width - 1)]
                weights *= scaled >= kth
                # A token that is missing has at most the floor's logit: below the k-th it can neither rank nor tie.
                clear = (kth > candidates.floor / self._temperature)[:, 0].tolist()
            mass = weights.cumsum(axis=1)
        shared = np.add.reduce(shares >= self._min_p, axis=1).tolist() if self._some_min_p else None
        masses = mass.tolist() if width <= _SHORT else mass
        lengths, floors, tops = candidates.lengths[:, 0].tolist(), candidates.floor[:, 0].tolist(), best[:, 0].tolist()
        totals = {
            i: self._weigher.mass(array[i], self._temperature.item(i)) for i in self._weighed if isfinite(tops[i])
        }
        ids = []
        # From here on each row is a few numbers, and Python is faster with those than numpy.
        for i, (rule, row) in enumerate(zip(self._rules, masses, strict=True)):
            if not isfinite(tops[i]):
                ids.append(FAILED)
                continue
            # In descending order each filter keeps a prefix, and so do all of them together.
            count = bisect_left(row, ceil(rule.top_p * totals.get(i, int(row[-1])))) + 1
            if shared is not None:
                count = min(count, shared[i])
            # Tokens that are not among the candidates must not be able to change the choice.
            if clear is not None and rule.limited:
                settled = rule.limit <= lengths[i] and clear[i]
            else:
                settled = count < lengths[i]
            if not settled and floors[i] != -inf:
                ids.append(UNCOVERED)
                continue
            count = min(count, lengths[i])
            of_row = candidates.ids[i, :count]
            order = of_row.argsort()
            ends = weights[i, :count][order].cumsum()
            ids.append(of_row.item(order.item(ends.searchsorted(_target(u[i], int(ends[-1])), side="right"))))
        return ids


def _target(u: float, mass: int) -> int:
    """Where in a row of weights that sum to `mass` the random number points at. `u * mass` rounds to less than `mass`
    for every `u` below 1, as `mass` is below 2^53."""
    return int(u * mass)


class _Weigher:
    """Weighs whole rows, one at a time; its memory is kept, for fresh memory costs more than the arithmetic."""

    def __init__(self, vocab_size: int) -> None:
        self._shares = np.empty(vocab_size, dtype=np.float32)
        self._weights = np.empty(vocab_size, dtype=np.int32)
        self._starts = np.arange(0, vocab_size, _PIECE)

    def pick(self, row: Floats, temperature: float, u: float) -> int:
        """The choice from a row that has no filters."""
        if not isfinite(row.max()):
            return FAILED
        ends = self._weigh(row, temperature)
        target = _target(u, int(ends[-1]))
        piece = int(ends.searchsorted(target, side="right"))
        before = int(ends[piece - 1]) if piece else 0
        within = self._weights[piece * _PIECE :][:_PIECE].cumsum(dtype=np.int64)
        return piece * _PIECE + int(within.searchsorted(target - before, side="right"))

    def mass(self, row: Floats, temperature: float) -> int:
        """The sum of all of a row's weights; its largest logit must be finite."""
        return int(self._weigh(row, temperature)[-1])

    def _weigh(self, row: Floats, temperature: float) -> Ints:
        """Write the weights of a row; their sums up to the end of each piece."""
        shares = self._shares
        scaled = row if temperature == 1 else np.divide(row, np.float32(temperature), out=shares)
        np.subtract(scaled, scaled.max(), out=shares)
        np.exp(shares, out=shares)
        np.multiply(shares, np.float32(WEIGHT_SCALE), out=shares)
        np.copyto(self._weights, shares, casting="unsafe")
        ends: Ints = np.add.reduceat(self._weights, self._starts, dtype=np.int64).cumsum()
        return ends

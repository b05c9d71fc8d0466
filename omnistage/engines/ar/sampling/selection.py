"""Selection: temperature, top-k, top-p and min-p over each row's likeliest tokens, and the choice of one of them.

Only the search for those tokens, and sums over the whole vocabulary, happen where the logits are. All else is numpy on
small host arrays: each operation costs a microsecond or two, where a torch operation costs several and lets another
stage's thread take the interpreter, and a kernel's launch costs more still.

No row's result depends on the others, bit by bit: probabilities are turned into fixed-point weights, whose integer sums
come out the same in any order, over any width and by any attempt. The weights of one row, and the sum of them over the
vocabulary, come from one routine for exp: numpy's for logits on the host, the device's for those on a device.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
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

_WEIGHT_SCALE = float(2**30)
"""Weight of the likeliest token. Rarer than 2^-30 of it rounds to never; `[V]` weights fit int32, sums int64."""
_HOST_CANDIDATES = (128, 4096)
_DEVICE_CANDIDATES = (256, 4096)
"""Likeliest tokens to look at, by attempt, where top_k gives no number; after the last attempt all are sorted."""
_DEVICE_MARGIN = 16
"""Candidates beyond the largest top_k on a device, so that ties of the k-th value are usually all there."""
_COLUMNS = 512
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
    known: Ints
    """`[R, 1]`: how many of them are above the floor."""
    floor: Floats
    """`[R, 1]`: every token above it is there; -inf says that all tokens with any probability are."""
    shares: Floats | None = None
    """`[R, K]`, where a device computed them: probabilities as shares of the likeliest token's."""
    masses: Ints | None = None
    """`[R, 1]`, where a device computed them: the sum of all of a row's weights, if its selection needs that."""


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
    known = (values > -np.inf).sum(axis=1, keepdims=True)
    return Candidates(values, ids, known, np.full((len(array), 1), -np.inf, dtype=np.float32))


class _Search:
    """Finds at least the `counts[i]` likeliest of row i, in float32 `[R, vocab_size]`.

    The k-th largest of many column maxima is no larger than the k-th logit of all, and nearly as large: finding it
    and taking all that reaches it costs two passes over the row, where selection would cost many.
    """

    def __init__(self, counts: Ints, vocab_size: int) -> None:
        largest, rows = int(counts.max()), len(counts)
        columns = min(max(_COLUMNS, 4 * largest), vocab_size // 2)
        self._too_narrow = columns < 2 * largest
        self._columns = columns
        self._depth = vocab_size // max(columns, 1)
        self._each = np.arange(rows)[:, None]
        self._kth = self._each[:, 0], columns - counts
        self._starts = np.arange(rows + 1) * vocab_size

    def __call__(self, array: Floats) -> Candidates:
        if self._too_narrow:
            return _sorted_host(array)
        rows, whole = len(array), self._depth * self._columns
        maxima = np.maximum.reduce(array[:, :whole].reshape(rows, self._depth, self._columns), axis=1)
        maxima.sort(axis=1)
        bound = maxima[self._kth]
        flat = (array >= np.maximum(bound, _MIN_FINITE)[:, None]).reshape(-1).nonzero()[0]
        ends = flat.searchsorted(self._starts)
        known = (ends[1:] - ends[:-1])[:, None]
        used = np.arange(max(1, np.maximum.reduce(known, axis=None))) < known
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
        return Candidates(values, ids, known, np.nextafter(bound, _LOWEST)[:, None])


def top_rows(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of float32 `[R, V]`, best first, and their ids; `count` must not exceed V."""
    if x.device.type != "cpu" or not count:
        values, ids = x.topk(count, dim=1)
        return values, ids
    candidates = _Search(np.full(len(x), count), x.shape[1])(x.numpy())
    if candidates.values.shape[1] < count:
        candidates = _sorted_host(x.numpy())
    return torch.from_numpy(candidates.values[:, :count]), torch.from_numpy(candidates.ids[:, :count])


def argmax_rows(x: Tensor) -> Tensor:
    """The first of each row's largest logits, int64 `[R]`; `FAILED` where that is not finite (NaN counts largest)."""
    values, indices = x.max(dim=1)
    return torch.where(values.abs() < torch.inf, indices, FAILED)


def argmax_host(x: Tensor) -> list[int]:
    """The same on the host, where numpy's argmax is some eight times faster than torch's; ties break alike."""
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
    unfiltered: bool
    weighed: bool
    """Its filter or choice is a share of the whole vocabulary's mass."""

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> _Rule:
        limited = 0 < params.top_k < vocab_size
        nucleus, plain = params.top_p < 1, params.min_p == 0
        return cls(
            limit=params.top_k if limited else vocab_size,
            limited=limited,
            top_p=params.top_p,
            unfiltered=not limited and not nucleus and plain,
            weighed=not limited and (nucleus or plain),
        )


class TokenSelector:
    """Temperature, top-k, top-p, min-p and the choice for a fixed list of sampled rows; built once for a batch."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._rules = [_Rule.of(p, vocab_size) for p in params]
        limits = np.array([rule.limit for rule in self._rules])
        self._fixed = np.where(limits <= MAX_FAST_TOP_K, limits, 0)
        self._temperature = np.array([[max(p.temperature, MIN_TEMPERATURE)] for p in params], dtype=np.float32)
        self._min_p = np.array([[p.min_p] for p in params], dtype=np.float32)
        self._each = np.arange(len(limits))[:, None]
        self._last = limits[:, None] - 1
        self._unscaled = all(p.temperature == 1.0 for p in params)
        self._some_limited = any(rule.limited for rule in self._rules)
        self._some_min_p = any(p.min_p > 0 for p in params)
        self._weighed_rows = np.array([i for i, rule in enumerate(self._rules) if rule.weighed], dtype=np.int64)
        self._search = _Search(self._counts(0, _HOST_CANDIDATES), vocab_size) if device.type == "cpu" else None
        self._device_temperature = torch.from_numpy(self._temperature).to(device)
        self._device_weighed = torch.from_numpy(self._weighed_rows).to(device)

    def _counts(self, attempt: int, reach: Sequence[int]) -> Ints:
        """How many of each row's likeliest tokens to look at."""
        # A limited row comes back for a second attempt when its ties outnumber the first one's candidates.
        return np.where((self._fixed > 0) & (attempt == 0), self._fixed, reach[attempt])

    def select(self, x: Tensor, u: Sequence[float], *, attempt: int = 0) -> list[int]:
        """Ids from float32 logits `[R, V]` and a number in [0, 1) for each row.

        Works on each row's likeliest tokens; a row they do not settle gives `UNCOVERED` and needs a further attempt.
        The last sorts all and settles every row. Whichever attempt does, the id is the same.
        """
        if x.device.type != "cpu":
            return self.select_gathered(self.gather(x, attempt).cpu().numpy(), u)
        array = np.ascontiguousarray(x.numpy())
        if attempt >= len(_HOST_CANDIDATES):
            candidates = _sorted_host(array)
        elif attempt or self._search is None:
            candidates = _Search(self._counts(attempt, _HOST_CANDIDATES), self._vocab_size)(array)
        else:
            candidates = self._search(array)
        return self._choose(candidates, u, array)

    def _choose(self, candidates: Candidates, u: Sequence[float], array: Floats | None = None) -> list[int]:
        width = candidates.values.shape[1]
        with np.errstate(all="ignore"):  # rows that fail make NaN on the way
            scaled = candidates.values if self._unscaled else candidates.values / self._temperature
            best = scaled[:, :1]
            shares = np.exp(scaled - best) if candidates.shares is None else candidates.shares
            weights = (shares * _WEIGHT_SCALE).astype(np.int64)
            clear = None
            if self._some_limited:
                kth = scaled[self._each, np.minimum(self._last, width - 1)]
                weights *= scaled >= kth
                # A token that is missing has at most the floor's logit: below the k-th it can neither rank nor tie.
                clear = (kth > candidates.floor / self._temperature)[:, 0].tolist()
            mass = weights.cumsum(axis=1)
        totals = None
        if len(self._weighed_rows):  # these need the mass of the whole vocabulary
            masses_of = candidates.masses
            if array is not None:
                masses_of = _masses_host(array, self._weighed_rows, self._temperature, best)
            totals = None if masses_of is None else masses_of[:, 0].tolist()
        shared = np.add.reduce(shares >= self._min_p, axis=1).tolist() if self._some_min_p else None
        masses = mass.tolist() if width <= _SHORT else mass
        known, floors, tops = candidates.known[:, 0].tolist(), candidates.floor[:, 0].tolist(), best[:, 0].tolist()
        ids = []
        # From here on each row is a few numbers, and Python is faster with those than numpy.
        for i, (rule, row) in enumerate(zip(self._rules, masses, strict=True)):
            if not isfinite(tops[i]):
                ids.append(FAILED)
                continue
            total = int(row[-1] if totals is None or not rule.weighed else totals[i])
            # In descending order each filter keeps a prefix, and so do all of them together.
            kept = width if shared is None else shared[i]
            if rule.top_p < 1:
                kept = min(kept, bisect_left(row, ceil(rule.top_p * total)) + 1)
            kept_mass = total if rule.unfiltered else int(row[kept - 1])
            pick = bisect_right(row, min(int(u[i] * kept_mass), kept_mass - 1))
            # Tokens that are not among the candidates must not be able to change the pick.
            if clear is not None and rule.limited:
                settled = rule.limit <= known[i] and clear[i]
            else:
                settled = rule.unfiltered or kept < known[i]
            settled = pick < known[i] and (settled or floors[i] == -inf)
            ids.append(candidates.ids.item(i, pick) if settled else UNCOVERED)
        return ids

    # ------------------------------------------------------------------------------------------ on a device

    def gather(self, x: Tensor, attempt: int = 0) -> Tensor:
        """What `select_gathered` needs of float32 logits on a device: int32 `[R, N]` there, to be copied at one go."""
        count = self._vocab_size
        if attempt < len(_DEVICE_CANDIDATES):
            count = int(self._counts(attempt, _DEVICE_CANDIDATES).max()) + _DEVICE_MARGIN
        values, ids = x.topk(count, dim=1) if count < self._vocab_size else x.sort(dim=1, descending=True)
        scaled = values / self._device_temperature
        best = scaled[:, :1]
        shares = (scaled - best).exp_()
        parts = [values.view(torch.int32), shares.view(torch.int32), ids.to(torch.int32)]
        if len(self._weighed_rows):
            parts.append(self._gather_masses(x, best).view(torch.int32))
        return torch.cat(parts, dim=1)

    def _gather_masses(self, x: Tensor, best: Tensor) -> Tensor:
        """Sum of all weights of the rows whose selection needs it, int64 `[R, 1]`; 0 for the others."""
        rows, temperature = self._device_weighed, self._device_temperature
        if len(self._weighed_rows) < len(x):
            masses = torch.zeros_like(best, dtype=torch.int64)
            sums = _mass_device(x[rows], temperature[rows], best[rows])
            return masses.index_copy_(0, rows, sums)
        return _mass_device(x, temperature, best)

    def select_gathered(self, gathered: npt.NDArray[np.int32], u: Sequence[float]) -> list[int]:
        """`select`, from the host's copy of what `gather` gave."""
        count = gathered.shape[1] // 3
        floats = np.ascontiguousarray(gathered[:, : 2 * count]).view(np.float32)
        values, shares = floats[:, :count], floats[:, count:]
        # Descending already, but in no order of equal ones: which have equal shares too, so only ids have to move.
        keys = _sort_keys(values, gathered[:, 2 * count : 3 * count].astype(np.int64))
        keys.sort(axis=1)
        masses = None
        if len(self._weighed_rows):
            masses = np.ascontiguousarray(gathered[:, 3 * count :]).view(np.int64)
        floor = values[:, -1:] if count < self._vocab_size else np.full_like(values[:, -1:], -np.inf)
        known = (values > floor).sum(axis=1, keepdims=True)
        return self._choose(Candidates(values, keys & 0xFFFFFFFF, known, floor, shares, masses), u)


def _mass_device(x: Tensor, temperature: Tensor, best: Tensor) -> Tensor:
    """Sum of all of each row's weights, int64 `[R, 1]`."""
    shares = (x / temperature).sub_(best).exp_()
    return shares.mul_(_WEIGHT_SCALE).to(torch.int32).sum(dim=1, keepdim=True, dtype=torch.int64)


def _masses_host(x: Floats, rows: Ints, temperature: Floats, best: Floats) -> Ints:
    """The same for some of the rows; 0 for the others."""
    # Row by row in one small buffer: a [R, V] temporary costs more in page faults than all of the arithmetic.
    shares = np.empty(x.shape[1], dtype=np.float32)
    weights = np.empty(x.shape[1], dtype=np.int32)
    sums = np.zeros((len(x), 1), dtype=np.int64)
    for row in rows:
        if not np.isfinite(best[row, 0]):
            continue  # this row fails
        scaled = x[row] if temperature[row, 0] == 1 else np.divide(x[row], temperature[row, 0], out=shares)
        np.subtract(scaled, best[row, 0], out=shares)
        np.exp(shares, out=shares)
        np.multiply(shares, np.float32(_WEIGHT_SCALE), out=shares)
        np.copyto(weights, shares, casting="unsafe")
        sums[row] = np.add.reduce(weights, dtype=np.int64)
    return sums

"""The Triton kernels that sample a token for each row of a batch, from logits to the counts of the penalties.

They read what each row asks for from a block of numbers (`row_block.py`), so that a captured CUDA graph samples for
whatever rows its next replay has. Passes over the vocabulary are shared by many programs a row. No row's token depends
on the other rows: sums are of integer weights, and random numbers are counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omnistage.engines.ar.sampling import triton_select
from omnistage.engines.ar.sampling.row_block import Field
from omnistage.engines.ar.sampling.triton_select import choose, kept_weights, kth_largest, load_block, number_of
from omnistage.engines.triton_jit import HAS_TRITON, jit

if HAS_TRITON:
    import triton
    import triton.language as tl

    ACTIVE = tl.constexpr(int(Field.ACTIVE))
    STREAM = tl.constexpr(int(Field.STREAM))
    STEP = tl.constexpr(int(Field.STEP))
    TOP_K = tl.constexpr(int(Field.TOP_K))
    OCCURRENCES = tl.constexpr(int(Field.OCCURRENCES))
    COUNTS = tl.constexpr(int(Field.COUNTS))
    BIAS = tl.constexpr(int(Field.BIAS))
    MASK = tl.constexpr(int(Field.MASK))
    SPARE = tl.constexpr(int(Field.SPARE))
    TEMPERATURE = tl.constexpr(int(Field.TEMPERATURE))
    TOP_P = tl.constexpr(int(Field.TOP_P))
    MIN_P = tl.constexpr(int(Field.MIN_P))
    REPETITION = tl.constexpr(int(Field.REPETITION))
    PRESENCE = tl.constexpr(int(Field.PRESENCE))
    FREQUENCY = tl.constexpr(int(Field.FREQUENCY))

_BLOCK, _WARPS = 2048, 4
"""Tokens of a program where many share a row."""
_GROUP = 64
"""Tokens whose largest logit is noted: the k-th largest of these is a bound that at least k tokens reach."""
_LIKELIEST = 1024
"""How many are looked for where only top-p limits a row."""
_CANDIDATES = 4096
"""Room for the tokens that reach a row's bound. Where there are more, or they do not settle it, all are searched."""

# Kernels: Triton reads their arguments' annotations itself, so only constexpr ones have any. `longs_ptr` and
# `numbers_ptr` are a row's column of the block as integers and as float64, `rows` is the block's width.
# fmt: off


@jit()
def _uniform(stream, step):  # type: ignore[no-untyped-def]  # kernel
    """`processors.uniform`: the `step`-th number in [0, 1) of a stream."""
    value = stream.to(tl.uint64, bitcast=True) + (step.to(tl.uint64, bitcast=True) + 1) * 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    value = value ^ (value >> 31)
    return (value >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@jit()
def _filtered(longs_ptr, numbers_ptr, rows, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]  # kernel
    """Whether top-k or top-p may leave tokens of the row out."""
    limited = (tl.load(longs_ptr + rows * TOP_K) < VOCAB) | (tl.load(numbers_ptr + rows * TOP_P) < 1.0)
    return limited & (tl.load(numbers_ptr + rows * TEMPERATURE) > 0.0)


@jit()
def _is_copied(longs_ptr, numbers_ptr, rows, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]  # kernel
    """Whether the later passes read the row's float32 copy: it is changed, or it is read many times."""
    changed = tl.load(longs_ptr + rows * OCCURRENCES) | tl.load(longs_ptr + rows * COUNTS)
    changed = changed | tl.load(longs_ptr + rows * BIAS) | tl.load(longs_ptr + rows * MASK)
    return (changed != 0) | _filtered(longs_ptr, numbers_ptr, rows, VOCAB)


@jit()
def _process(x, place, longs_ptr, numbers_ptr, rows, mask, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]  # kernel
    """Penalties, bias and the mask at address `mask`, in the order and with the rounding of `processors.py`."""
    inside = place < VOCAB
    address = tl.load(longs_ptr + rows * OCCURRENCES)
    if address != 0:
        factor = tl.load(numbers_ptr + rows * REPETITION).to(tl.float32)
        times = tl.load(address.to(tl.pointer_type(tl.int32)) + place, mask=inside, other=0)
        x = tl.where(times != 0, tl.where(x < 0, x * factor, tl.div_rn(x, factor)), x)
    counts = tl.load(longs_ptr + rows * COUNTS)
    if counts != 0:
        presence = tl.load(numbers_ptr + rows * PRESENCE).to(tl.float32)
        frequency = tl.load(numbers_ptr + rows * FREQUENCY).to(tl.float32)
        times = tl.load(counts.to(tl.pointer_type(tl.int32)) + place, mask=inside, other=0)
        x = tl.where(times != 0, x - frequency * times.to(tl.float32) - presence, x)
    bias = tl.load(longs_ptr + rows * BIAS)
    if bias != 0:
        x += tl.load(bias.to(tl.pointer_type(tl.float32)) + place, mask=inside, other=0.0)
    if mask != 0:
        words = tl.load(mask.to(tl.pointer_type(tl.int32)) + (place >> 5), mask=inside, other=0)
        x = tl.where(((words >> (place & 31)) & 1) != 0, x, float("-inf"))
    return x


@jit()
def _finish(token, out_ptr, longs_ptr, rows):  # type: ignore[no-untyped-def]  # kernel
    """Store the row's token and count it for the penalties."""
    tl.store(out_ptr, token)
    address = tl.load(longs_ptr + rows * OCCURRENCES)
    if (token >= 0) & (address != 0):
        at = address.to(tl.pointer_type(tl.int32)) + token
        tl.store(at, tl.load(at) + 1)
    counts = tl.load(longs_ptr + rows * COUNTS)
    if (token >= 0) & (counts != 0):
        at = counts.to(tl.pointer_type(tl.int32)) + token
        tl.store(at, tl.load(at) + 1)


@jit(counts=("rows",), metadata=("longs_ptr", "numbers_ptr"))
def _process_kernel(  # type: ignore[no-untyped-def]  # kernel
    x_ptr, copy_ptr, tops_ptr, firsts_ptr, flags_ptr, maxima_ptr, longs_ptr, numbers_ptr, rows,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):
    """For each block of a row: its processed logits, the largest and its first place, and what is wrong with them."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    longs_ptr += row
    numbers_ptr += row
    if tl.load(longs_ptr + rows * ACTIVE) != 0:
        x = load_block(x_ptr + row * VOCAB, index * BLOCK, VOCAB, BLOCK)
        numbers = tl.max((x != float("-inf")).to(tl.int32), 0)
        place = index * BLOCK + tl.arange(0, BLOCK)
        x = _process(x, place, longs_ptr, numbers_ptr, rows, tl.load(longs_ptr + rows * MASK), VOCAB)
        if _is_copied(longs_ptr, numbers_ptr, rows, VOCAB):
            tl.store(copy_ptr + row * VOCAB + place, x, mask=place < VOCAB)
        defects = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
        top = tl.max(x, 0)
        at = row * tl.num_programs(1) + index
        if _filtered(longs_ptr, numbers_ptr, rows, VOCAB):
            groups = at * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            tl.store(maxima_ptr + groups, tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), 1))
        tl.store(tops_ptr + at, top)
        tl.store(firsts_ptr + at, tl.min(tl.where(x == top, place, VOCAB), 0))
        tl.store(flags_ptr + at, defects + 2 * numbers)


@jit(counts=("rows",), metadata=("longs_ptr", "numbers_ptr", "out_ptr"))
def _reduce_kernel(  # type: ignore[no-untyped-def]  # kernel
    x_ptr, copy_ptr, tops_ptr, firsts_ptr, flags_ptr, maxima_ptr, top_ptr, bound_ptr, out_ptr,
    longs_ptr, numbers_ptr, rows,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, COUNT: tl.constexpr,
    MAXIMA: tl.constexpr, WIDTH: tl.constexpr, LIKELIEST: tl.constexpr,
):
    """For each row: its largest logit, or NaN where that settles the row, since it is greedy or fails.

    And a bound that the tokens which top-k and top-p keep are expected to reach; those of top-k do.
    """
    row = tl.program_id(0).to(tl.int64)
    longs_ptr += row
    numbers_ptr += row
    if tl.load(longs_ptr + rows * ACTIVE) != 0:
        blocks = tl.arange(0, BLOCKS)
        at = row * COUNT + blocks
        tops = tl.load(tops_ptr + at, mask=blocks < COUNT, other=float("-inf"))
        firsts = tl.load(firsts_ptr + at, mask=blocks < COUNT, other=VOCAB)
        flags = tl.load(flags_ptr + at, mask=blocks < COUNT, other=0)
        defects = tl.max(flags & 1, 0)
        top = tl.max(tops, 0)
        first = tl.min(tl.where(tops == top, firsts, VOCAB), 0)
        spare = tl.load(longs_ptr + rows * SPARE)
        if (top == float("-inf")) & (defects == 0) & (spare != 0):
            # Only ids that stop are left: then they stay.
            for start in range(0, VOCAB, BLOCK):
                place = start + tl.arange(0, BLOCK)
                x = load_block(x_ptr + row * VOCAB, start, VOCAB, BLOCK)
                x = _process(x, place, longs_ptr, numbers_ptr, rows, spare, VOCAB)
                tl.store(copy_ptr + row * VOCAB + place, x, mask=place < VOCAB)
                defects = tl.maximum(defects, tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0))
                largest = tl.max(x, 0)
                here = tl.min(tl.where(x == largest, place, VOCAB), 0)
                first = tl.where(largest > top, here, first)
                top = tl.maximum(top, largest)
        # What the request rules out is -inf as well: a row without numbers before that is the model's failure.
        nothing = tl.where(tl.max(flags & 2, 0) > 0, -3, -1)
        failure = tl.where(defects > 0, -1, tl.where(top == float("-inf"), nothing, 0))
        settled = (failure < 0) | (tl.load(numbers_ptr + rows * TEMPERATURE) == 0.0)
        if settled:
            _finish(tl.where(failure < 0, failure, first).to(tl.int64), out_ptr + row, longs_ptr, rows)
        tl.store(top_ptr + row, tl.where(settled, float("nan"), top))
        if (settled == 0) & _filtered(longs_ptr, numbers_ptr, rows, VOCAB):
            top_k = tl.load(longs_ptr + rows * TOP_K).to(tl.int32)
            rank = tl.where(top_k < VOCAB, top_k, LIKELIEST if LIKELIEST < MAXIMA else MAXIMA)
            # Half of the bits will do, rounded down; no lower than -inf.
            bound = kth_largest(maxima_ptr + row * MAXIMA, tl.minimum(rank, MAXIMA), MAXIMA, WIDTH, 8)
            bound = number_of(tl.maximum(bound, 0x007FFFFF))
            tl.store(bound_ptr + row, tl.where(rank > MAXIMA, float("inf"), bound))


@jit(counts=("rows",), metadata=("longs_ptr", "numbers_ptr"))
def _weigh_kernel(  # type: ignore[no-untyped-def]  # kernel
    x_ptr, copy_ptr, top_ptr, bound_ptr, sums_ptr, counts_ptr, longs_ptr, numbers_ptr, rows,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):
    """For each block of a random row: the sum of its weights, and how many tokens reach the bound of its filters."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    longs_ptr += row
    numbers_ptr += row
    if tl.load(longs_ptr + rows * ACTIVE) != 0:
        top = tl.load(top_ptr + row)
        if top == top:
            at = row * tl.num_programs(1) + index
            weights = _block_weights(x_ptr, copy_ptr, row, index, top, longs_ptr, numbers_ptr, rows, VOCAB, BLOCK)
            tl.store(sums_ptr + at, tl.sum(weights, 0))
            if _filtered(longs_ptr, numbers_ptr, rows, VOCAB):
                x = load_block(copy_ptr + row * VOCAB, index * BLOCK, VOCAB, BLOCK)
                temperature = tl.load(numbers_ptr + rows * TEMPERATURE).to(tl.float32)
                tl.store(counts_ptr + at, tl.sum(_reaches(x, tl.load(bound_ptr + row), temperature).to(tl.int32), 0))


@jit(counts=("rows",), metadata=("longs_ptr", "numbers_ptr"))
def _gather_kernel(  # type: ignore[no-untyped-def]  # kernel
    copy_ptr, top_ptr, bound_ptr, counts_ptr, candidates_ptr, places_ptr, longs_ptr, numbers_ptr, rows,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CANDIDATES: tl.constexpr,
):
    """For each row with top-k or top-p: the tokens that reach its bound, in the order of their ids."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    longs_ptr += row
    numbers_ptr += row
    if tl.load(longs_ptr + rows * ACTIVE) != 0:
        top = tl.load(top_ptr + row)
        if (top == top) & _filtered(longs_ptr, numbers_ptr, rows, VOCAB):
            blocks = tl.arange(0, BLOCKS)
            counts = tl.load(counts_ptr + row * tl.num_programs(1) + blocks, mask=blocks < index, other=0)
            x = load_block(copy_ptr + row * VOCAB, index * BLOCK, VOCAB, BLOCK)
            temperature = tl.load(numbers_ptr + rows * TEMPERATURE).to(tl.float32)
            reaches = _reaches(x, tl.load(bound_ptr + row), temperature)
            place = tl.sum(counts, 0) + tl.cumsum(reaches.to(tl.int32), 0) - 1
            fits = reaches & (place < CANDIDATES)
            tl.store(candidates_ptr + row * CANDIDATES + place, x, mask=fits)
            tl.store(places_ptr + row * CANDIDATES + place, index * BLOCK + tl.arange(0, BLOCK), mask=fits)


@jit()
def _reaches(x, bound, temperature):  # type: ignore[no-untyped-def]  # kernel
    """Whether tokens are candidates. After the temperature: what ties with the k-th there is kept with it."""
    return (x > float("-inf")) & (tl.div_rn(x, temperature) >= tl.div_rn(bound, temperature))


@jit()
def _block_weights(  # type: ignore[no-untyped-def]  # kernel
    x_ptr, copy_ptr, row, index, top, longs_ptr, numbers_ptr, rows, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):
    """Weights of a block of a row; of those that min-p keeps, unless top-k or top-p come before it."""
    if _is_copied(longs_ptr, numbers_ptr, rows, VOCAB):
        x = load_block(copy_ptr + row * VOCAB, index * BLOCK, VOCAB, BLOCK)
    else:
        x = load_block(x_ptr + row * VOCAB, index * BLOCK, VOCAB, BLOCK)
    temperature = tl.load(numbers_ptr + rows * TEMPERATURE).to(tl.float32)
    filtered = _filtered(longs_ptr, numbers_ptr, rows, VOCAB)
    min_p = tl.where(filtered, 0.0, tl.load(numbers_ptr + rows * MIN_P)).to(tl.float32)
    return kept_weights(x, temperature, tl.div_rn(top, temperature), float("-inf"), min_p)


@jit(counts=("rows",), metadata=("longs_ptr", "numbers_ptr", "out_ptr"))
def _choose_kernel(  # type: ignore[no-untyped-def]  # kernel
    x_ptr, copy_ptr, top_ptr, sums_ptr, counts_ptr, candidates_ptr, places_ptr, out_ptr, longs_ptr, numbers_ptr, rows,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, COUNT: tl.constexpr,
    SEARCH: tl.constexpr, SEARCHES: tl.constexpr, CANDIDATES: tl.constexpr,
):
    """For each random row: its token."""
    row = tl.program_id(0).to(tl.int64)
    longs_ptr += row
    numbers_ptr += row
    if tl.load(longs_ptr + rows * ACTIVE) != 0:
        top = tl.load(top_ptr + row)
        if top == top:
            u = _uniform(tl.load(longs_ptr + rows * STREAM), tl.load(longs_ptr + rows * STEP))
            blocks = tl.arange(0, BLOCKS)
            sums = tl.load(sums_ptr + row * COUNT + blocks, mask=blocks < COUNT, other=0)
            total = tl.sum(sums, 0)
            if _filtered(longs_ptr, numbers_ptr, rows, VOCAB):
                temperature = tl.load(numbers_ptr + rows * TEMPERATURE).to(tl.float32)
                top_k = tl.load(longs_ptr + rows * TOP_K).to(tl.int32)
                min_p = tl.load(numbers_ptr + rows * MIN_P).to(tl.float32)
                counts = tl.load(counts_ptr + row * COUNT + blocks, mask=blocks < COUNT, other=0)
                length = tl.sum(counts, 0)
                whole = tl.where(top_k < VOCAB, 0, total)
                logits_ptr = candidates_ptr + row * CANDIDATES
                usable = ((length > 0) & (length <= CANDIDATES)).to(tl.int32)
                token = total * 0 - 1
                for attempt in range(2):  # among the candidates, then in the whole row
                    if (token < 0) & (attempt >= 1 - usable):
                        if attempt == 1:
                            logits_ptr = copy_ptr + row * VOCAB
                            length = length * 0 + VOCAB
                        place = choose(
                            logits_ptr, length, whole, top, temperature, top_k, tl.load(numbers_ptr + rows * TOP_P),
                            min_p, u, SEARCH, SEARCHES,
                        )
                        token = place.to(tl.int64)
                        if (attempt == 0) & (place >= 0):
                            token = tl.load(places_ptr + row * CANDIDATES + place).to(tl.int64)
            else:
                # Tokens lie side by side by id. Sums of the blocks tell in which of them the random number points.
                target = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
                passed = tl.cumsum(sums, 0) <= target
                index = tl.sum((passed & (blocks < COUNT)).to(tl.int32), 0)
                target -= tl.sum(tl.where(passed, sums, 0), 0)
                weights = _block_weights(x_ptr, copy_ptr, row, index, top, longs_ptr, numbers_ptr, rows, VOCAB, BLOCK)
                candidate = index * BLOCK + tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
                token = tl.minimum(candidate, VOCAB - 1).to(tl.int64)
            _finish(token, out_ptr + row, longs_ptr, rows)


# fmt: on


def sample(logits: Tensor, block: Tensor, out: Tensor) -> None:
    """Write the token of each active row of `[S, V]` logits to the int64 `out`, or `FAILED` or `NOTHING`.

    `block` is int64 `[FIELDS, S]`. Tokens are counted where the block's addresses point.
    """
    x = logits.contiguous()
    rows, vocab = x.shape
    size = min(_BLOCK, triton.next_power_of_2(vocab))
    count = triton.cdiv(vocab, size)
    sizes = (vocab, size, triton.next_power_of_2(count), count)
    group = min(_GROUP, size)
    groups = count * size // group
    search = min(triton_select._BLOCK, triton.next_power_of_2(vocab))
    searches = triton.next_power_of_2(triton.cdiv(vocab, search))
    room = min(_CANDIDATES, triton.next_power_of_2(vocab))
    columns = (block, block.view(torch.float64), rows)

    def empty(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        # Each of its own, and so aligned: Triton compiles a kernel again for pointers that are not.
        return torch.empty(rows, width, dtype=dtype, device=x.device)

    copy, tops, maxima, candidates, top, bound = map(empty, (vocab, count, groups, room, 1, 1))
    firsts, flags, counts, places = (empty(width, torch.int32) for width in (count, count, count, room))
    sums = empty(count, torch.int64)
    # Without fused multiply-add: the rounding is the host's.
    options = {"num_warps": _WARPS, "enable_fp_fusion": False}
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # not annotated by torch
        grid = (rows, count)
        _process_kernel[grid](x, copy, tops, firsts, flags, maxima, *columns, vocab, size, group, **options)
        _reduce_kernel[(rows,)](
            x, copy, tops, firsts, flags, maxima, top, bound, out, *columns, *sizes,
            groups, triton.next_power_of_2(groups), _LIKELIEST, **options,
        )  # fmt: skip
        _weigh_kernel[grid](x, copy, top, bound, sums, counts, *columns, vocab, size, **options)
        _gather_kernel[grid](copy, top, bound, counts, candidates, places, *columns, *sizes[:3], room, **options)
        options["num_warps"] = max(_WARPS, triton_select._WARPS * search // triton_select._BLOCK)
        _choose_kernel[(rows,)](
            x, copy, top, sums, counts, candidates, places, out, *columns, *sizes,
            search, searches, room, **options,
        )  # fmt: skip

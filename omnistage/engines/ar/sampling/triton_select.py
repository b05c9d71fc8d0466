"""The Triton kernel that selects a token for each row: temperature, top-k, top-p, min-p and the choice.

One program has one row. A filter's bound is searched bit by bit over the logits' bits, in their order as numbers, with
exact sums of integer weights: no sort, no limit on how many tokens are kept, and nothing read back. A row without
filters, and OpenAI's default is one, takes two passes over its logits.
"""

from __future__ import annotations

import torch

from omnistage.engines.triton_jit import HAS_TRITON, jit

if HAS_TRITON:
    import triton
    import triton.language as tl

_BLOCK, _WARPS = 8192, 32
"""One program reads a row alone, so it needs many loads in flight."""


# Kernels: Triton reads their arguments' annotations itself, so only constexpr ones have any.
# fmt: off


@jit()
def load_block(x_ptr, start, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # kernel
    place = start + tl.arange(0, BLOCK)
    return tl.load(x_ptr + place, mask=place < length, other=float("-inf")).to(tl.float32)


@jit()
def _ordered(x):  # type: ignore[no-untyped-def]  # kernel
    """Unsigned integers in the order of the numbers; 0.0 and -0.0 are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.uint32, bitcast=True) ^ 0x80000000


@jit()
def number_of(ordered):  # type: ignore[no-untyped-def]  # kernel
    """The number that `_ordered` gave."""
    bits = (ordered ^ 0x80000000).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@jit()
def _weigh(x, temperature, best, kth):  # type: ignore[no-untyped-def]  # kernel
    """Each token's share of the likeliest one's probability, and its weight: 0 below the k-th."""
    scaled = tl.div_rn(x, temperature)
    shares = tl.exp(scaled - best)
    weights = (shares * 1073741824.0).to(tl.int64)
    return shares, tl.where(scaled >= kth, weights, 0)


@jit()
def kth_largest(x_ptr, k, length, BLOCK: tl.constexpr, TURNS: tl.constexpr):  # type: ignore[no-untyped-def]  # kernel
    """The largest bound, in order, that at least `k` numbers reach, in its upper 2 * `TURNS` bits."""
    bound = (k * 0).to(tl.uint32)
    for turn in range(TURNS):
        step = (k * 0 + 1).to(tl.uint32) << (30 - 2 * turn)
        one = tl.zeros([BLOCK], tl.int32)
        two = tl.zeros([BLOCK], tl.int32)
        three = tl.zeros([BLOCK], tl.int32)
        for start in range(0, length, BLOCK):
            ordered = _ordered(load_block(x_ptr, start, length, BLOCK))
            one += (ordered >= bound + step).to(tl.int32)
            two += (ordered >= bound + 2 * step).to(tl.int32)
            three += (ordered >= bound + 3 * step).to(tl.int32)
        # One sum for the three of them: a vocabulary has fewer than 2 ** 21 tokens.
        counts = tl.sum(one.to(tl.int64) + (two.to(tl.int64) << 21) + (three.to(tl.int64) << 42))
        passes = ((counts & 0x1FFFFF) >= k).to(tl.uint32) + (((counts >> 21) & 0x1FFFFF) >= k).to(tl.uint32)
        bound += (passes + ((counts >> 42) >= k).to(tl.uint32)) * step
    return bound


@jit()
def _nucleus(x_ptr, mass, temperature, best, kth, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # kernel
    """The largest bound, in order, above and at which the weights sum to at least `mass`."""
    bound = (mass * 0).to(tl.uint32)
    for turn in range(16):
        step = (mass * 0 + 1).to(tl.uint32) << (30 - 2 * turn)
        one = tl.zeros([BLOCK], tl.int64)
        two = tl.zeros([BLOCK], tl.int64)
        three = tl.zeros([BLOCK], tl.int64)
        for start in range(0, length, BLOCK):
            x = load_block(x_ptr, start, length, BLOCK)
            ordered = _ordered(x)
            _, weights = _weigh(x, temperature, best, kth)
            one += tl.where(ordered >= bound + step, weights, 0)
            two += tl.where(ordered >= bound + 2 * step, weights, 0)
            three += tl.where(ordered >= bound + 3 * step, weights, 0)
        passes = (tl.sum(one) >= mass).to(tl.uint32) + (tl.sum(two) >= mass).to(tl.uint32)
        bound += (passes + (tl.sum(three) >= mass).to(tl.uint32)) * step
    return bound


@jit()
def kept_weights(x, temperature, best, kth, min_p):  # type: ignore[no-untyped-def]  # kernel
    """The weights of what top-k and min-p keep."""
    shares, weights = _weigh(x, temperature, best, kth)
    return tl.where(shares >= min_p, weights, 0)


@jit()
def _in_nucleus(x, ties_before, temperature, best, kth, bound, ties, min_p):  # type: ignore[no-untyped-def]  # kernel
    """The same after top-p, which keeps the first `ties` tokens of those at its bound. And how many lie there."""
    weights = kept_weights(x, temperature, best, kth, min_p)
    ordered = _ordered(x)
    at_bound = (ordered == bound).to(tl.int32)
    in_nucleus = (ordered > bound) | ((at_bound > 0) & (ties_before + tl.cumsum(at_bound) <= ties))
    return tl.where(in_nucleus, weights, 0), tl.sum(at_bound)


@jit()
def _first_largest(x_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # kernel
    """The largest number, the first place where it stands, and whether something is NaN or infinite."""
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    defects = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        x = load_block(x_ptr, start, VOCAB, BLOCK)
        defects |= ((x != x) | (x == float("inf"))).to(tl.int32)
        place = tl.where(x > largest, start + lane, place)
        largest = tl.where(x > largest, x, largest)
    top = tl.max(largest, 0)
    return top, tl.min(tl.where(largest == top, place, VOCAB), 0), tl.max(defects, 0)


@jit()
def choose(  # type: ignore[no-untyped-def]  # kernel
    x_ptr, length, whole, top, temperature, top_k, top_p, min_p, u, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):
    """The place that `u` in [0, 1) points at, among `length` logits without defects, the largest of which is `top`.

    They may be the likeliest of more, which all together weigh `whole`; -1: top-p keeps some that are not among them.
    """
    best = tl.div_rn(top, temperature)
    kth = top * 0.0 - float("inf")
    if top_k < length:
        kth = tl.div_rn(number_of(kth_largest(x_ptr, top_k, length, BLOCK, 16)), temperature)
    bound = (top_k * 0).to(tl.uint32)
    ties = top_k * 0 + length
    covered = top_k * 0 + 1
    if top_p < 1.0:
        mass = tl.zeros([BLOCK], tl.int64)
        for start in range(0, length, BLOCK):
            _, weights = _weigh(load_block(x_ptr, start, length, BLOCK), temperature, best, kth)
            mass += weights
        above = tl.sum(mass)
        goal = tl.ceil(top_p * tl.maximum(above, whole).to(tl.float64)).to(tl.int64)
        covered = (above >= goal).to(tl.int32)
        bound = _nucleus(x_ptr, goal, temperature, best, kth, length, BLOCK)
        mass = tl.zeros([BLOCK], tl.int64)
        for start in range(0, length, BLOCK):
            x = load_block(x_ptr, start, length, BLOCK)
            _, weights = _weigh(x, temperature, best, kth)
            mass += tl.where(_ordered(x) > bound, weights, 0)
        _, weight = _weigh(number_of(bound), temperature, best, kth)
        ties = ((goal - tl.sum(mass) + weight - 1) // tl.maximum(weight, 1)).to(tl.int32)

    # What is kept lies side by side by id. Sums of the blocks tell in which of them the random number points.
    blocks = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.int64)
    ties_of = tl.zeros([BLOCKS], tl.int32)
    ties_before = top_k * 0
    for index in range(0, (length + BLOCK - 1) // BLOCK):
        x = load_block(x_ptr, index * BLOCK, length, BLOCK)
        if top_p < 1.0:
            weights, at_bound = _in_nucleus(x, ties_before, temperature, best, kth, bound, ties, min_p)
            ties_of = tl.where(blocks == index, ties_before, ties_of)
            ties_before += at_bound
        else:
            weights = kept_weights(x, temperature, best, kth, min_p)
        sums = tl.where(blocks == index, tl.sum(weights), sums)
    total = tl.sum(sums)
    target = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
    passed = tl.cumsum(sums) <= target
    index = tl.sum((passed & (blocks < (length + BLOCK - 1) // BLOCK)).to(tl.int32))
    target -= tl.sum(tl.where(passed, sums, 0))
    x = load_block(x_ptr, index * BLOCK, length, BLOCK)
    if top_p < 1.0:
        ties_before = tl.sum(tl.where(blocks == index, ties_of, 0))
        weights, _ = _in_nucleus(x, ties_before, temperature, best, kth, bound, ties, min_p)
    else:
        weights = kept_weights(x, temperature, best, kth, min_p)
    place = index * BLOCK + tl.sum((tl.cumsum(weights) <= target).to(tl.int32))
    return tl.where(covered > 0, tl.minimum(place, length - 1), -1)


@jit()
def _select_kernel(  # type: ignore[no-untyped-def]  # kernel
    x_ptr, out_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, u_ptr, stride_x,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    top, first, defects = _first_largest(x_ptr, VOCAB, BLOCK)
    failure = tl.where(defects > 0, -1, tl.where(top == float("-inf"), -3, 0))
    temperature = tl.load(temperature_ptr + row)
    if (failure < 0) | (temperature == 0.0):
        tl.store(out_ptr + row, tl.where(failure < 0, failure, first).to(tl.int64))
        return
    place = choose(
        x_ptr, VOCAB, 0, top, temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row),
        tl.load(u_ptr + row), BLOCK, BLOCKS,
    )
    tl.store(out_ptr + row, place.to(tl.int64))


# fmt: on


def select(
    x: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    u: torch.Tensor,
) -> torch.Tensor:
    """`DeviceSelector.select`; `x` may have any floating dtype and a stride between its rows."""
    rows, vocab = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(rows, dtype=torch.int64, device=x.device)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # not annotated by torch
        _select_kernel[(rows,)](
            x, out, temperature, top_k, top_p, min_p, u, x.stride(0),
            vocab, block, triton.next_power_of_2(triton.cdiv(vocab, block)), num_warps=max(4, _WARPS * block // _BLOCK),
        )  # fmt: skip
    return out

"""The Triton kernels against attention written out in float64.

Without a GPU the cases run in Triton's interpreter. That is chosen when the kernels are defined and holds for the
whole process, so this file runs itself in a child process and reads the results back as JSON.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "omnistage/engines/ar/attention"
PACKAGE = "omnistage.engines.ar.attention"


@functools.cache
def kernels() -> ModuleType:
    """The modules by their paths: they need torch and triton alone, and the package around them needs more."""
    for name in ("triton_kernels", "triton_decode"):
        if f"{PACKAGE}.{name}" not in sys.modules:
            load(f"{PACKAGE}.{name}", FOLDER / f"{name}.py")
    return load("triton_paged_under_test", FOLDER / "triton_paged.py")


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Case:
    """One flattened batch. A sequence of length 0 is padding; `tail` rows belong to no sequence."""

    name: str
    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 32
    block_size: int = 16
    window: int | None = None
    dtype: str = "float32"
    max_seq_len: int | None = None
    max_query_len: int | None = None
    tail: int = 0
    head_major: bool = False  # query and out as views of [heads, T, head_dim]


@dataclass
class Result:
    """`error` is relative to the largest value; the others say what the tests below are named after."""

    error: float
    alone: bool
    clean: bool
    fused: bool
    looped: bool


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    seqs = rng.randint(1, 5)
    seq_lens = tuple(rng.choice([0, 1, 15, 16, 17, 33, 64, 90, rng.randint(1, 700)]) for _ in range(seqs))
    decode_only = rng.random() < 0.4
    q_lens = tuple(1 if decode_only or n < 2 else rng.randint(1, min(n, 24)) for n in seq_lens)
    return Case(
        name=f"random{seed}",
        q_lens=q_lens,
        seq_lens=seq_lens,
        heads=(kv_heads * rng.choice([1, 2, 3, 5, 7]), kv_heads),
        head_dim=rng.choice([16, 32, 64, 80]),
        block_size=rng.choice([16, 32]),
        window=rng.choice([None, None, 1, 7, 40]),
        max_seq_len=rng.choice([None, 700]),
        tail=rng.choice([0, 3]),
        head_major=rng.random() < 0.5,
    )


# A split has at least 256 keys in float32 and 512 in the other dtypes.
CASES = [
    Case("decode one split", (1, 1, 1, 1), (5, 1, 33, 64)),
    Case("decode many splits", (1, 1, 1, 1, 1), (1300, 257, 258, 513, 514)),
    Case("decode past the split limit", (1, 1), (17000, 20), heads=(1, 1), head_dim=16, block_size=32),
    Case("decode with a loose bound", (1, 1), (3, 600), heads=(4, 2), max_seq_len=20000),
    Case("decode with a bound set too low", (1, 1), (1300, 40), max_seq_len=600),
    Case("decode with padding", (1, 1, 1), (600, 0, 0), max_seq_len=1500),
    Case("decode one split with padding", (1, 1, 1), (50, 0, 0)),
    Case("decode with unused sequences", (1, 0, 0), (50, 0, 0), tail=2, max_seq_len=1500),
    Case("decode window", (1, 1, 1), (300, 20, 64), window=40),
    Case("decode window over splits", (1, 1, 1), (1400, 100, 600), window=1100),
    Case("decode group 1", (1, 1), (40, 600), heads=(3, 3)),
    Case("decode group 7", (1, 1), (40, 600), heads=(14, 2)),
    Case("decode group 20", (1, 1), (40, 600), heads=(20, 1)),
    Case("prefill", (40,), (40,)),
    Case("prefill batch", (17, 40, 3), (17, 40, 3)),
    Case("chunk", (9, 20), (70, 100)),
    Case("chunk window", (9, 30), (70, 100), window=24),
    Case("window 1", (9, 1, 30), (70, 8, 30), window=1),
    Case("prefill group 40", (9, 2), (70, 10), heads=(40, 1)),
    Case("mixed", (1, 12, 1, 30), (700, 50, 7, 30), heads=(14, 2)),
    Case("mixed with padding", (1, 12, 1, 5), (30, 50, 0, 0), tail=3),
    Case("mixed with empty sequences", (0, 12, 0, 1, 0), (0, 50, 0, 200, 0)),
    Case("padded step", (12, 1, 5, 0, 0, 0), (12, 70, 40, 0, 0, 0), tail=9, max_query_len=27, max_seq_len=1500),
    Case("one decode under a loose query bound", (1,), (50,), max_query_len=8),
    Case("many short sequences", (2,) * 19, tuple(range(2, 21)), heads=(2, 2), head_dim=16),
    Case("head major", (1, 12, 30), (600, 50, 30), head_major=True),
    # The interpreter multiplies bfloat16 as if it were integers; that dtype is for the GPU tests.
    Case("float16", (1, 12, 30), (600, 50, 30), dtype="float16"),
    *(Case(f"head dim {d}", (1, 12), (600, 50), head_dim=d, block_size=32) for d in (16, 64, 80, 96, 128, 256)),
    *(Case(f"group {g}", (1, 12), (30, 50), heads=(g * 2, 2)) for g in (1, 2, 4, 6, 7, 8)),
    *(random_case(seed) for seed in range(8)),
]
# Compiling takes a second or more a kernel. Those named here share most of theirs; they also run as both variants.
_SHARED = ("decode one", "decode many", "decode past", "decode with", "decode window over", "mixed", "head dim 80")
_NOT_BFLOAT16 = ("float16", "group 4", "group 6", "random5", "random6", "random7")
COMPILED = [
    *(replace(case, dtype="bfloat16") for case in CASES if case.name not in _NOT_BFLOAT16),
    *(replace(case, dtype="float32") for case in CASES if case.name.startswith(_SHARED)),
    *(case for case in CASES if case.name == "float16"),
]
TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


class Batch:
    """The tensors of a case. Slots that hold no key, and the output, start as NaN."""

    def __init__(self, case: Case, device: str, seed: int = 0) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(seed)
        heads, kv_heads = case.heads
        dtype = getattr(torch, case.dtype)
        pages = [-(-n // case.block_size) for n in case.seq_lens]
        blocks = sum(pages) + 2
        order = torch.randperm(blocks, generator=generator).tolist()
        tables = torch.full((len(pages), max(*pages, 1)), blocks - 1, dtype=torch.int32)
        slots: list[list[int]] = []
        for i, count in enumerate(pages):
            owned = [order.pop() for _ in range(count)]
            tables[i, :count] = torch.tensor(owned, dtype=torch.int32)
            slots.append(
                [owned[p // case.block_size] * case.block_size + p % case.block_size for p in range(case.seq_lens[i])]
            )
        caches = torch.full((2, blocks * case.block_size, kv_heads, case.head_dim), float("nan"), dtype=dtype)
        for own in slots:
            caches[:, own] = torch.randn((2, len(own), kv_heads, case.head_dim), generator=generator).to(dtype)
        self.slots = slots
        tokens = sum(case.q_lens) + case.tail
        shape = (heads, tokens, case.head_dim) if case.head_major else (tokens, heads, case.head_dim)
        query = torch.randn(shape, generator=generator).to(dtype).to(device)
        self.query = query.transpose(0, 1) if case.head_major else query
        self.caches = caches.to(device)
        self.k_cache, self.v_cache = self.caches.view(2, blocks, case.block_size, kv_heads, case.head_dim)
        self.out = torch.full_like(self.query, float("nan"))
        starts = [sum(case.q_lens[:i]) for i in range(len(case.q_lens) + 1)]
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
        self.block_tables = tables.to(device)
        self.scale = case.head_dim**-0.5

    def attend(self, **options: object) -> torch.Tensor:
        triton_paged = kernels()
        case = self.case
        triton_paged.paged_attention(
            self.query,
            self.k_cache,
            self.v_cache,
            self.out,
            self.query_start_loc,
            self.seq_lens,
            self.block_tables,
            scale=self.scale,
            max_query_len=case.max_query_len or max(case.q_lens),
            max_seq_len=case.max_seq_len or max(case.seq_lens),
            sliding_window=case.window,
            **options,
        )
        return self.out

    def take_new(self, seq_lens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This step's keys, values and slots, taken out of the caches; NaN and -1 in the rows of no sequence."""
        slots = torch.full(self.query.shape[:1], -1)
        for i, (count, length) in enumerate(zip(self.case.q_lens, seq_lens, strict=True)):
            if length:
                slots[self.rows(i)] = torch.tensor(self.slots[i][length - count : length], dtype=torch.int64)
        slots = slots.to(self.query.device)
        new = torch.where((slots < 0)[None, :, None, None], float("nan"), self.caches[:, slots.clamp(min=0)])
        self.caches[:, slots[slots >= 0]] = float("nan")
        return new[0], new[1], slots

    def counters(self) -> torch.Tensor:
        count = len(self.case.q_lens) * self.case.heads[1]
        return torch.zeros(count, dtype=torch.int32, device=self.query.device)

    def attend_writing(self) -> tuple[torch.Tensor, bool]:
        """The result with this step's keys and values handed over; whether caches and counters end as they should."""
        full, counters = self.caches.clone(), self.counters()
        new = self.take_new(self.case.seq_lens)
        self.out.fill_(float("nan"))
        out = self.attend(new=new, counters=counters).clone()
        return out, same_values(self.caches, full) and not counters.any().item()

    def attend_alone(self, index: int) -> torch.Tensor:
        """Sequence `index` as a batch of one, with bounds as tight as they can be."""
        triton_paged = kernels()
        rows = self.rows(index)
        query, out = self.query[rows], torch.full_like(self.query[rows], float("nan"))
        starts = torch.tensor([0, query.shape[0]], dtype=torch.int32, device=query.device)
        triton_paged.paged_attention(
            query,
            self.k_cache,
            self.v_cache,
            out,
            starts,
            self.seq_lens[index : index + 1],
            self.block_tables[index : index + 1],
            scale=self.scale,
            max_query_len=query.shape[0],
            max_seq_len=self.case.seq_lens[index],
            sliding_window=self.case.window,
        )
        return out

    def rows(self, index: int) -> slice:
        start = sum(self.case.q_lens[:index])
        return slice(start, start + self.case.q_lens[index])

    def reference(self, seq_lens: tuple[int, ...] | None = None) -> torch.Tensor:
        """[rows of sequences, heads, head_dim] in float64 on the CPU; zero for padding."""
        case = self.case
        group = case.heads[0] // case.heads[1]
        expected = torch.zeros((sum(case.q_lens), case.heads[0], case.head_dim), dtype=torch.float64)
        for i, length in enumerate(seq_lens or case.seq_lens):
            if length == 0:
                continue
            keys, values = self.caches[:, self.slots[i][:length]].double().cpu().repeat_interleave(group, dim=2)
            scores = torch.einsum("qhd,khd->hqk", self.query[self.rows(i)].double().cpu(), keys) * self.scale
            position = torch.arange(length)
            q_position = (position[-case.q_lens[i] :] if case.q_lens[i] else position[:0])[:, None]
            seen = position <= q_position
            if case.window is not None:
                seen &= position > q_position - case.window
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            expected[self.rows(i)] = torch.einsum("hqk,khd->qhd", weights, values)
        return expected


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN, which no bound accepts, where `actual` has any."""
    return ((actual.double().cpu() - expected).abs().max() / expected.abs().max().clamp_min(1e-9)).item()


def same_values(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bit for bit, and NaN in the same places."""
    return torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))


def run_case(case: Case, device: str, variants: bool = True) -> Result:
    """`variants`: also the kernels that write keys, and those whose programs take several splits."""
    batch = Batch(case, device)
    out = batch.attend().clone()
    covered = sum(case.q_lens)
    # Where a lone decode may be sent either way, only the error is promised.
    judged = [i for i, n in enumerate(case.q_lens) if n and case.max_query_len is None]
    if case.max_seq_len is not None and case.max_seq_len < max(case.seq_lens):
        judged = []
    alone = all(torch.equal(out[batch.rows(i)], batch.attend_alone(i)) for i in judged)
    error = relative_error(out[:covered], batch.reference())
    clean = bool(out[covered:].isnan().all())
    if not variants:
        return Result(error, alone, clean, fused=True, looped=True)
    written, intact = batch.attend_writing()
    fused = intact and torch.equal(written[:covered], out[:covered])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[f"{PACKAGE}.triton_decode"], "MAX_PROGRAMS", 2)
        looped = torch.equal(batch.attend()[:covered], out[:covered])
    return Result(error, alone, clean, fused, looped)


def run_write(device: str, dtype: str, kv_heads: int, head_dim: int) -> bool:
    """True if exactly the mapped slots of both caches changed, to the right values."""
    triton_paged = kernels()
    torch.manual_seed(1)
    caches = torch.randn((2, 6, 16, kv_heads, head_dim), dtype=getattr(torch, dtype), device=device)
    # A fused projection's output: keys and values are strided views of it.
    fused = torch.randn((9, 2, kv_heads, head_dim), dtype=caches.dtype, device=device)
    slots = torch.tensor([95, -1, 0, 17, 16, -1, 33, 32, -1], dtype=torch.int64, device=device)
    expected = caches.clone()
    expected.view(2, 96, kv_heads, head_dim)[:, slots[slots >= 0]] = fused[slots >= 0].transpose(0, 1)
    triton_paged.write_kv(fused[:, 0], fused[:, 1], caches[0], caches[1], slots)
    return torch.equal(caches, expected)


WRITES = [(dtype, heads, dim) for dtype in TOLERANCE for heads, dim in ((1, 16), (3, 80), (4, 128))]


def interpret_everything() -> None:
    """What the child process does."""
    attention = {case.name: asdict(run_case(case, "cpu")) for case in CASES}
    writes = {str(args): run_write("cpu", *args) for args in WRITES}
    print(json.dumps({"attention": attention, "writes": writes}))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, dict[str, float]]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, dict[str, dict[str, float]]] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_matches_the_reference(interpreted: dict[str, dict[str, dict[str, float]]], case: Case) -> None:
    assert interpreted["attention"][case.name]["error"] < TOLERANCE[case.dtype]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(
    interpreted: dict[str, dict[str, dict[str, float]]], case: Case
) -> None:
    assert interpreted["attention"][case.name]["alone"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_of_no_sequence_are_left_alone(interpreted: dict[str, dict[str, dict[str, float]]], case: Case) -> None:
    assert interpreted["attention"][case.name]["clean"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_keys_written_by_attention_give_the_bits_of_keys_written_before(
    interpreted: dict[str, dict[str, dict[str, float]]], case: Case
) -> None:
    assert interpreted["attention"][case.name]["fused"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_program_that_takes_several_splits_gives_the_same_bits(
    interpreted: dict[str, dict[str, dict[str, float]]], case: Case
) -> None:
    assert interpreted["attention"][case.name]["looped"]


@pytest.mark.slow
@pytest.mark.parametrize("args", WRITES, ids=str)
def test_write_kv_changes_the_mapped_slots_only(
    interpreted: dict[str, dict[str, dict[str, float]]], args: tuple[str, int, int]
) -> None:
    assert interpreted["writes"][str(args)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splits_follow_the_bounds_and_not_the_batch(dtype: torch.dtype) -> None:
    kernels()
    decode = sys.modules[f"{PACKAGE}.triton_decode"]
    config = decode.decode_config(128, dtype, torch.device("cpu"))
    past = config.min_split  # a step's own key, the one after these, needs no split
    assert decode.split_count(1, 0, config) == 1
    assert decode.split_count(past + 1, 0, config) == 1
    assert decode.split_count(past + 2, 0, config) == 2
    assert decode.split_count(10**6, 0, config) == decode.MAX_SPLITS
    assert decode.split_count(10**6, past, config) == 1
    assert config.min_split % config.keys == 0


def test_tensors_that_do_not_agree_are_refused() -> None:
    batch = Batch(Case("refused", (1,), (20,)), "cpu")
    batch.query = batch.query[:, :3]
    with pytest.raises(ValueError, match="do not agree"):
        batch.attend()


def test_too_few_new_keys_and_counters_are_refused() -> None:
    batch = Batch(Case("refused", (1, 1), (20, 30)), "cpu")
    key, value, slots = batch.take_new(batch.case.seq_lens)
    with pytest.raises(ValueError, match="do not agree"):
        batch.attend(new=(key[:1], value[:1], slots[:1]))
    with pytest.raises(ValueError, match="3 counters for 2 sequences of 2 KV heads"):
        batch.attend(counters=batch.counters()[:3])


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: f"{case.name} {case.dtype}")
def test_compiled_attention_matches_the_reference(case: Case) -> None:
    result = run_case(case, "cuda", variants=case.name.startswith(_SHARED))
    assert result.error < TOLERANCE[case.dtype]
    assert result.alone
    assert result.clean
    assert result.fused
    assert result.looped


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("args", WRITES, ids=str)
def test_compiled_write_kv_changes_the_mapped_slots_only(args: tuple[str, int, int]) -> None:
    assert run_write("cuda", *args)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("window", [None, 1100])
def test_a_captured_decode_follows_the_lengths_it_is_replayed_with(window: int | None) -> None:
    full = (1500, 700, 514, 40)
    case = Case("graph", (1, 1, 1, 1), full, (28, 4), 128, window=window, dtype="bfloat16", max_seq_len=4096)
    batch = Batch(case, "cuda")
    caches, counters, new = batch.caches.clone(), batch.counters(), batch.take_new(full)
    batch.attend(new=new, counters=counters)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.attend(new=new, counters=counters)
    for lengths in (full, (1, 699, 513, 0), (1024, 0, 0, 0), full):
        batch.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        for static, fresh in zip(new, batch.take_new(lengths), strict=True):
            static.copy_(fresh)
        batch.out.fill_(float("nan"))
        graph.replay()
        replayed = batch.out.clone()
        assert same_values(batch.caches, caches)
        assert not counters.any()
        assert relative_error(replayed, batch.reference(lengths)) < TOLERANCE["bfloat16"]
        assert torch.equal(batch.attend(), replayed)  # outside the graph, with counters of its own


@pytest.mark.gpu
@needs_gpu
def test_splits_are_summed_only_after_other_programs_have_written_them() -> None:
    lengths = tuple(range(2000, 3600, 100))
    batch = Batch(Case("race", (1,) * 16, lengths, (28, 4), 128, dtype="bfloat16", max_seq_len=4096), "cuda")
    counters = batch.counters()
    first = batch.attend(counters=counters).clone()
    assert relative_error(first, batch.reference()) < TOLERANCE["bfloat16"]
    # Two queries in turn: partial sums that are read too early are those of the other one.
    queries = (batch.query, batch.query.flip(0))
    batch.query = queries[1]
    expected = (first, batch.attend(counters=counters).clone())
    assert relative_error(expected[1], batch.reference()) < TOLERANCE["bfloat16"]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(400):
        batch.query = queries[i % 2]
        wrong += (batch.attend(counters=counters) != expected[i % 2]).any()
    assert wrong.item() == 0
    assert not counters.any()


@pytest.mark.gpu
@needs_gpu
def test_a_cache_of_more_than_two_to_the_31_elements_is_addressed() -> None:
    triton_paged = kernels()
    blocks = 2**31 // (16 * 4 * 128) + 64
    k_cache = torch.zeros((blocks, 16, 4, 128), dtype=torch.bfloat16, device="cuda")
    v_cache = torch.zeros_like(k_cache)
    last = blocks - 1
    key, value, query = (torch.randn((16, heads, 128), device="cuda").bfloat16() for heads in (4, 4, 28))
    triton_paged.write_kv(key, value, k_cache, v_cache, last * 16 + torch.arange(16, device="cuda"))
    assert torch.equal(v_cache[last], value)
    tables = torch.tensor([[last]], dtype=torch.int32, device="cuda")
    ends = torch.tensor([0, 16], dtype=torch.int32, device="cuda")
    out = torch.empty_like(query)
    triton_paged.paged_attention(
        query, k_cache, v_cache, out, ends, ends[1:], tables, scale=0.1, max_query_len=16, max_seq_len=16
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1).double(),
        key.transpose(0, 1).double().repeat_interleave(7, 0),
        value.transpose(0, 1).double().repeat_interleave(7, 0),
        is_causal=True,
        scale=0.1,
    )
    expected = expected.transpose(0, 1).cpu()
    assert relative_error(out, expected) < TOLERANCE["bfloat16"]
    v_cache[last, 15] = float("nan")
    triton_paged.paged_attention(
        query[15:], k_cache, v_cache, out[15:], torch.arange(2, dtype=torch.int32, device="cuda"), ends[1:], tables,
        scale=0.1, max_query_len=1, max_seq_len=16,
        new=(key[15:], value[15:], torch.tensor([last * 16 + 15], device="cuda")),
    )  # fmt: skip
    assert torch.equal(v_cache[last], value)
    assert relative_error(out[15:], expected[15:]) < TOLERANCE["bfloat16"]


if __name__ == "__main__":
    interpret_everything()

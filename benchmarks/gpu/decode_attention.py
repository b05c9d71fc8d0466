"""Compares configurations of the paged decode kernel, at the shapes of Qwen2.5-7B; the first is the chosen one.

    python benchmarks/gpu/decode_attention.py

Needs a CUDA device, and the package installed or PYTHONPATH set to the repository. What is timed is a step's work per
layer: a small kernel that produces this step's query, key and value, then the one that writes these to the cache and
attends. A CUDA graph runs 28 such layers, each over memory of its own, after the L2 cache has been overwritten. The
row "producer" is that small kernel alone. Every row is checked against attention in float32 first.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from omnistage.engines.ar.attention.triton_decode import DecodeConfig, decode_config, new_counters, paged_decode

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS = 28, 4, 128, 16, 28
SCALE = HEAD_DIM**-0.5
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
COPY_BANDWIDTH = 4.3e12  # bytes a second that a large copy reaches on an H200
CASES = ((64, 192, 192), (256, 384, 384), (1, 200, 200), (8, 4096, 4096), (24, 512, 512), (64, 64, 1000))
"""Sequences, and the range that their lengths are spread over."""
VARIANTS = [
    DecodeConfig(64, 4, 3, 256),
    DecodeConfig(64, 4, 2, 512),
    DecodeConfig(64, 4, 4, 512),
    DecodeConfig(64, 8, 4, 512),
    DecodeConfig(64, 4, 3, 1024),
    DecodeConfig(32, 4, 3, 256),
    DecodeConfig(32, 4, 4, 512),
    DecodeConfig(128, 8, 2, 512),
]


@dataclass(slots=True)
class Layer:
    """One layer's tensors. The cache has every key but this step's."""

    source: torch.Tensor
    fused: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    tables: torch.Tensor
    slots: torch.Tensor

    @property
    def new(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.fused[:, Q_HEADS : Q_HEADS + KV_HEADS], self.fused[:, Q_HEADS + KV_HEADS :], self.slots

    def produce(self) -> None:
        torch.mul(self.source, 1, out=self.fused)


class Case:
    """The layers of a step and the metadata that they share."""

    def __init__(self, seqs: int, shortest: int, longest: int, layers: int = LAYERS) -> None:
        self.seqs, self.name = seqs, f"{seqs}x{shortest}" + (f"-{longest}" if longest > shortest else "")
        lengths = [shortest + (longest - shortest) * i // max(1, seqs - 1) for i in range(seqs)]
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.starts = torch.arange(seqs + 1, dtype=torch.int32, device=DEVICE)
        self.counters = new_counters(seqs, KV_HEADS, DEVICE)
        self.bound = 1024 if longest <= 1024 else 4096  # the graph's length bucket, and with it the width of its tables
        self.bytes = 2 * sum(lengths) * KV_HEADS * HEAD_DIM * 2
        self.layers = [self._layer(-(-longest // BLOCK_SIZE)) for _ in range(layers)]
        self.expected = self._reference(self.layers[0])

    def _layer(self, pages: int) -> Layer:
        random = partial(torch.randn, dtype=DTYPE, device=DEVICE)
        source = random((self.seqs, Q_HEADS + 2 * KV_HEADS, HEAD_DIM))
        k_cache, v_cache = (random((self.seqs * pages, BLOCK_SIZE, KV_HEADS, HEAD_DIM)) for _ in range(2))
        tables = torch.zeros((self.seqs, self.bound // BLOCK_SIZE), dtype=torch.int32, device=DEVICE)
        tables[:, :pages] = torch.randperm(self.seqs * pages, device=DEVICE).view(self.seqs, pages)
        last = self.lengths.long() - 1
        slots = tables.long().gather(1, (last // BLOCK_SIZE)[:, None])[:, 0] * BLOCK_SIZE + last % BLOCK_SIZE
        out = torch.empty((self.seqs, Q_HEADS, HEAD_DIM), dtype=DTYPE, device=DEVICE)
        return Layer(source, torch.empty_like(source), k_cache, v_cache, out, tables, slots)

    def _reference(self, layer: Layer) -> torch.Tensor:
        """Attention in float32 over gathered keys, and this step's key and value."""
        out = torch.empty(layer.out.shape, dtype=torch.float32, device=DEVICE)
        layer.produce()
        query, (key, value, _) = layer.source[:, :Q_HEADS].float(), layer.new
        group = Q_HEADS // KV_HEADS
        for i, length in enumerate(self.lengths.tolist()):
            blocks = layer.tables[i, : -(-length // BLOCK_SIZE)].long()
            parts = []
            for cache, fresh in ((layer.k_cache, key), (layer.v_cache, value)):
                rows = torch.cat((cache[blocks].flatten(0, 1)[: length - 1], fresh[i : i + 1]))
                parts.append(rows.float().repeat_interleave(group, 1))
            weights = (torch.einsum("hd,khd->hk", query[i], parts[0]) * SCALE).softmax(-1)
            out[i] = torch.einsum("hk,khd->hd", weights, parts[1])
        return out


Attend = Callable[[Case, Layer], None]


def attend_with(config: DecodeConfig, case: Case, layer: Layer) -> None:
    paged_decode(
        layer.fused[:, :Q_HEADS], layer.k_cache, layer.v_cache, layer.out, case.starts, case.lengths, layer.tables,
        case.counters, scale=SCALE, max_seq_len=case.bound, new=layer.new, config=config,
    )  # fmt: skip


def check(case: Case, attend: Attend) -> float:
    """Largest error relative to the largest value; NaN if anything was not written."""
    layer = case.layers[0]
    layer.k_cache.view(-1, KV_HEADS, HEAD_DIM)[layer.slots] = float("nan")
    layer.v_cache.view(-1, KV_HEADS, HEAD_DIM)[layer.slots] = float("nan")
    for _ in range(2):  # the second finds the counters as the first left them
        layer.out.fill_(float("nan"))
        attend(case, layer)
    key, value, _ = layer.new
    for cache, fresh in ((layer.k_cache, key), (layer.v_cache, value)):
        if not torch.equal(cache.view(-1, KV_HEADS, HEAD_DIM)[layer.slots], fresh) or case.counters.any():
            return math.nan
    return float((layer.out - case.expected).abs().max() / case.expected.abs().max())


def microseconds(case: Case, attend: Attend | None, flush: torch.Tensor) -> float:
    """Median time of a layer, over replays of a graph of all of them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in case.layers:
            layer.produce()
            if attend is not None:
                attend(case, layer)
    times = []
    for _ in range(12):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()  # type: ignore[no-untyped-call]  # not annotated by torch
        graph.replay()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()  # type: ignore[no-untyped-call]
        times.append(begin.elapsed_time(end) * 1e3 / len(case.layers))
    return statistics.median(times[2:])


def compile_variant(config: DecodeConfig) -> str:
    """Into Triton's cache on disk; the reason where the device cannot take it."""
    case = Case(2, 300, 300, layers=1)
    try:
        attend_with(config, case, case.layers[0])
        torch.cuda.synchronize()
    except Exception as error:  # a variant that does not fit the device is left out of the table
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    began = time.perf_counter()
    chosen = decode_config(HEAD_DIM, DTYPE, DEVICE)
    variants = [chosen, *(variant for variant in VARIANTS if variant != chosen)]
    with ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as pool:
        reasons = list(pool.map(compile_variant, variants))
    for variant, reason in zip(variants, reasons, strict=True):
        if reason:
            print(f"{variant}: {reason}")
    rows: dict[str, Attend | None] = {"producer": None}
    for variant, reason in zip(variants, reasons, strict=True):
        if not reason:
            name = f"{variant.keys:3} w{variant.warps} s{variant.stages} split {variant.min_split}"
            rows[name] = partial(attend_with, variant)
    times: dict[str, list[float]] = {name: [] for name in rows}
    floors: list[float] = []
    errors: dict[str, float] = {}
    flush = torch.empty(512 * 2**20, dtype=torch.uint8, device=DEVICE)
    for numbers in CASES:
        case = Case(*numbers)
        floors.append(case.bytes / COPY_BANDWIDTH * 1e6)
        for name, attend in rows.items():
            if attend is not None:
                errors[name] = max(errors.get(name, 0.0), check(case, attend), key=lambda e: math.inf if e != e else e)
            times[name].append(microseconds(case, attend, flush))
        del case
    print_table(times, floors, errors)
    print(f"{torch.cuda.get_device_name()}, {time.perf_counter() - began:.0f} s")


def print_table(times: dict[str, list[float]], floors: list[float], errors: dict[str, float]) -> None:
    names = [f"{s}x{a}" + (f"-{b}" if b > a else "") for s, a, b in CASES]
    width = max(20, *map(len, times)) + 1
    print(f"microseconds a layer{'':{width - 20}}" + "".join(f"{name:>11}" for name in names) + "      error")
    print(f"{'K and V at 4.3 TB/s':{width}}" + "".join(f"{floor:11.1f}" for floor in floors))
    for name, row in times.items():
        error = f"  {errors[name]:.1e}" + ("" if errors[name] < 2e-2 else " WRONG") if name in errors else ""
        print(f"{name:{width}}" + "".join(f"{us:11.1f}" for us in row) + error)


if __name__ == "__main__":
    main()

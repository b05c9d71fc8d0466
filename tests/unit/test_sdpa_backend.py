"""The reference attention against a plain float64 computation, over random layouts of the paged pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnistage.core.errors import ConfigError, StageError
from omnistage.engines.ar.attention import (
    AttentionPlan,
    BatchLayout,
    PagedContext,
    ScoreOptions,
    attention_modules,
    bind_caches,
    current,
    make_backend,
    paged_attention,
)
from omnistage.engines.ar.attention.sdpa import SdpaBackend, SdpaPlan
from omnistage.engines.ar.attention.triton_backend import TritonBackend

SLOW_MACHINE = [HealthCheck.too_slow]

CPU = torch.device("cpu")


@dataclass
class Scene:
    """A pool with some sequences' earlier keys and values in it, and a step's queries."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: tuple[torch.Tensor, torch.Tensor]
    paged: PagedContext
    histories: list[tuple[torch.Tensor, torch.Tensor]]
    """Per sequence all its keys and values, in order."""
    counts: list[int]
    slots: list[np.ndarray]

    def run(self, *, scale: float, window: int | None, **extras: Any) -> torch.Tensor:
        scores = ScoreOptions(scale, window, **extras)
        return self.paged.backend.attend(self.query, self.key, self.value, self.cache, self.paged, scores)

    def expected(
        self, *, scale: float, window: int | None, softcap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Row by row in float64, without a mask, a batch or a pool."""
        rows, offset = [], 0
        for (keys, values), count in zip(self.histories, self.counts, strict=True):
            length, kv_heads, _ = keys.shape
            group = self.query.shape[1] // kv_heads
            for i in range(count):
                position = length - count + i
                first = 0 if window is None else max(0, position - window + 1)
                k = keys[first : position + 1].double().repeat_interleave(group, dim=1)
                v = values[first : position + 1].double().repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,khd->hk", self.query[offset + i].double(), k) * scale
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None:
                    scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
                rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1)[:, : len(k)], v))
            offset += count
        return torch.stack(rows)


def make_scene(
    sequences: list[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 8,
    size: int = 4,
    seed: int = 0,
    in_order: bool = False,
) -> Scene:
    """`sequences` are (tokens computed earlier, queries now). Blocks are dealt out in random order or `in_order`."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(past + count) // size) for past, count in sequences]
    blocks = torch.randperm(sum(needed) + 3, generator=generator).numpy()
    blocks = np.sort(blocks) if in_order else blocks
    cache = tuple(torch.randn(len(blocks), size, kv_heads, dim, generator=generator) for _ in range(2))
    slots, tables, histories, mapping = [], [], [], []
    news: list[list[torch.Tensor]] = [[], []]
    taken = 0
    for (past, count), blocks_needed in zip(sequences, needed, strict=True):
        table = blocks[taken : taken + blocks_needed].astype(np.int32)
        taken += blocks_needed
        own = (table[:, None].astype(np.int64) * size + np.arange(size)).reshape(-1)
        history = tuple(torch.randn(past + count, kv_heads, dim, generator=generator) for _ in range(2))
        for store, rows, new in zip(cache, history, news, strict=True):
            store.view(-1, kv_heads, dim)[own[:past]] = rows[:past]
            new.append(rows[past:])
        histories.append(history)
        slots.append(own)
        tables.append(table)
        mapping.append(own[past : past + count])
    counts = np.asarray([count for _, count in sequences], dtype=np.int32)
    lengths = np.asarray([past + count for past, count in sequences], dtype=np.int32)
    backend = SdpaBackend()
    plan = backend.plan(BatchLayout(counts, lengths, slots, tables), CPU)
    paged = PagedContext(backend, torch.from_numpy(np.concatenate(mapping)), plan)
    query = torch.randn(int(counts.sum()), kv_heads * group, dim, generator=generator)
    return Scene(query, torch.cat(news[0]), torch.cat(news[1]), cache, paged, histories, counts.tolist(), slots)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("past", [1, 9, 30])
def test_one_sequence_whose_blocks_lie_in_order_is_read_in_place(past: int, window: int | None) -> None:
    for in_order in (True, False):
        scene = make_scene([(past, 1)], in_order=in_order, seed=past)
        plan = scene.paged.plan
        assert isinstance(plan, SdpaPlan)
        assert (plan.first_slot is not None) == (in_order or past < 4)  # within one block they always do
        got = scene.run(scale=0.3, window=window)
        assert torch.allclose(got.double(), scene.expected(scale=0.3, window=window), atol=1e-5)


def assert_matches(scene: Scene, *, scale: float = 0.3, window: int | None = None) -> None:
    got = scene.run(scale=scale, window=window)
    assert got.shape == scene.query.shape
    torch.testing.assert_close(got.double(), scene.expected(scale=scale, window=window), rtol=1e-5, atol=1e-5)


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([4, 8, 16]),
    size=st.sampled_from([1, 2, 4, 8]),
    window=st.none() | st.integers(1, 24),
    scale=st.sampled_from([0.05, 0.35, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_any_layout_matches_plain_attention(
    sequences: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    size: int,
    window: int | None,
    scale: float,
    seed: int,
) -> None:
    scene = make_scene(sequences, kv_heads=kv_heads, group=group, dim=dim, size=size, seed=seed)
    assert_matches(scene, scale=scale, window=window)


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(
    pasts=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    group=st.integers(1, 4),
    window=st.none() | st.integers(1, 32),
    seed=st.integers(0, 2**31),
)
def test_a_batch_of_single_queries_matches_plain_attention(
    pasts: list[int], group: int, window: int | None, seed: int
) -> None:
    assert_matches(make_scene([(past, 1) for past in pasts], group=group, seed=seed), window=window)


@pytest.mark.parametrize(
    ("sequences", "window"),
    [
        ([(0, 1)], None),
        ([(0, 7)], None),
        ([(0, 7)], 7),
        ([(0, 7)], 6),
        ([(5, 1), (5, 1)], None),
        ([(5, 1), (5, 1)], 3),
        ([(9, 1), (0, 4), (3, 1), (6, 2)], None),
        ([(9, 1), (0, 4), (3, 1), (6, 2)], 1),
    ],
)
def test_named_layouts_match_plain_attention(sequences: list[tuple[int, int]], window: int | None) -> None:
    assert_matches(make_scene(sequences), window=window)


@pytest.mark.parametrize("window", [None, 4])
def test_tokens_of_a_range_see_all_of_it_where_attention_looks_ahead(window: int | None) -> None:
    """Ranges of two sequences, beside one that generates; keys by a mask over all of them."""
    scene = make_scene([(3, 7), (9, 1), (0, 4)])
    ends = [np.array([4, 8, 8, 8, 8, 9, 10]), None, np.array([2, 2, 4, 4])]
    counts = np.array(scene.counts, dtype=np.int32)
    lengths = np.array([len(keys) for keys, _ in scene.histories], dtype=np.int32)
    layout = BatchLayout(counts, lengths, scene.slots, [np.zeros(1, dtype=np.int32)] * 3, ends)
    scene.paged.plan = scene.paged.backend.plan(layout, CPU)
    causal = scene.run(scale=0.3, window=window)
    torch.testing.assert_close(causal.double(), scene.expected(scale=0.3, window=window), rtol=1e-5, atol=1e-5)
    got, offset = scene.run(scale=0.3, window=window, ahead=True), 0
    for (keys, values), count, own in zip(scene.histories, scene.counts, ends, strict=True):
        places = torch.arange(len(keys))
        rows = places[-count:, None]
        seen = places < (rows + 1 if own is None else torch.from_numpy(own)[:, None])
        seen &= places > rows - (window or len(keys))
        k, v = (part.repeat_interleave(2, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", scene.query[offset : offset + count], k) * 0.3
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v)
        torch.testing.assert_close(got[offset : offset + count], expected, rtol=1e-4, atol=1e-5)
        offset += count
    assert not torch.equal(got, causal)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_triton_backend_leaves_steps_that_look_ahead_to_the_reference(ahead: bool) -> None:
    scene = make_scene([(3, 7), (9, 1)])
    counts, lengths = np.array([7, 1], dtype=np.int32), np.array([10, 10], dtype=np.int32)
    ends = [np.array([4, 8, 8, 8, 8, 9, 10]), None]
    layout = BatchLayout(counts, lengths, scene.slots, [np.zeros(1, dtype=np.int32)] * 2, ends)
    got = []
    for backend in (SdpaBackend(), TritonBackend()):
        scene.paged.backend, scene.paged.plan = backend, backend.plan(layout, CPU)
        current.paged = scene.paged
        got.append(scene.run(scale=0.3, window=5, ahead=ahead))
    torch.testing.assert_close(got[0], got[1], rtol=0, atol=0)


def test_one_plan_serves_layers_with_and_without_a_window() -> None:
    scene = make_scene([(9, 1), (4, 1), (3, 5)])
    for window in (None, 3, None, 4, 3):
        assert_matches(scene, window=window)


def test_keys_and_values_are_written_into_their_slots_and_nowhere_else() -> None:
    scene = make_scene([(3, 2), (0, 3)])
    before = [store.clone().view(-1, 2, 8) for store in scene.cache]
    scene.run(scale=1.0, window=None)
    where = scene.paged.slot_mapping
    for store, old, new in zip(scene.cache, before, (scene.key, scene.value), strict=True):
        flat = store.view(-1, 2, 8)
        torch.testing.assert_close(flat[where], new)
        others = torch.ones(len(flat), dtype=torch.bool)
        others[where] = False
        assert torch.equal(flat[others], old[others])


def test_a_sequence_does_not_see_its_neighbours() -> None:
    alone = make_scene([(6, 1), (9, 1), (2, 4)], seed=3)
    got = alone.run(scale=0.3, window=None)
    changed = make_scene([(6, 1), (9, 1), (2, 4)], seed=3)
    changed.key[1:] = 5.0
    changed.value[1:] = -5.0
    assert torch.equal(changed.run(scale=0.3, window=None)[0], got[0])


def test_a_plan_of_another_backend_is_refused() -> None:
    scene = make_scene([(0, 2)])
    scene.paged.plan = AttentionPlan()
    with pytest.raises(TypeError, match="another backend"):
        scene.run(scale=1.0, window=None)


def test_nan_in_a_neighbours_keys_and_values_stays_with_the_neighbour() -> None:
    scenes = (make_scene([(6, 1), (9, 1)], seed=seed) for seed in range(100))
    scene = next(scene for scene in scenes if not any(0 in own for own in scene.slots))
    others = np.setdiff1d(np.arange(scene.cache[0].shape[0] * scene.cache[0].shape[1]), np.concatenate(scene.slots))
    for store in scene.cache:
        store.view(-1, 2, 8)[torch.from_numpy(others)] = float("nan")
    assert torch.isfinite(scene.run(scale=0.3, window=None)).all()


# ------------------------------------------------------------------------------------------------- glue


def test_auto_takes_the_reference_backend_on_the_cpu() -> None:
    assert make_backend("auto", CPU).name == "sdpa"


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="auto, sdpa, triton"):
        make_backend("flash", CPU)


class _Layer(torch.nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.self_attn = torch.nn.Module()
        self.self_attn.layer_idx = index  # type: ignore[assignment]


def test_every_attention_module_gets_its_own_layers_cache() -> None:
    caches = [(torch.zeros(1), torch.zeros(1)) for _ in range(3)]
    layers = torch.nn.ModuleList([_Layer(2), _Layer(0), _Layer(1)])
    bind_caches(attention_modules(layers), caches)
    assert [layer.self_attn.kv_cache is caches[i] for layer, i in zip(layers, (2, 0, 1), strict=True)] == [True] * 3


def test_a_decoder_with_fewer_attention_modules_than_layers_is_refused() -> None:
    with pytest.raises(StageError, match="1 attention modules for 2 layers"):
        bind_caches(attention_modules(torch.nn.ModuleList([_Layer(0)])), [(torch.zeros(1), torch.zeros(1))] * 2)


def _call(**options: object) -> None:
    scene = make_scene([(0, 2)])
    module = torch.nn.Module()
    module.kv_cache = scene.cache  # type: ignore[assignment]
    parts = [t.transpose(0, 1)[None] for t in (scene.query, scene.key, scene.value)]
    out, weights = paged_attention(module, *parts, None, **{"paged": scene.paged, **options})  # type: ignore[arg-type]
    assert weights is None
    scale = 8**-0.5
    torch.testing.assert_close(out[0].double(), scene.expected(scale=scale, window=None), rtol=1e-5, atol=1e-5)


def test_the_default_scale_is_that_of_the_head_dimension() -> None:
    _call()


def test_a_module_that_drops_keyword_arguments_attends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = make_scene([(0, 2)])  # as `_call` makes it
    monkeypatch.setattr(current, "paged", scene.paged, raising=False)
    _call(paged=None)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sequences", [[(0, 2)], [(9, 1)], [(3, 4), (9, 1), (0, 7), (2, 1)]], ids=str)
@pytest.mark.parametrize("extras", ["softcap", "sinks", "both"])
def test_soft_caps_and_sinks(extras: str, sequences: list[tuple[int, int]], window: int | None) -> None:
    scene = make_scene(sequences, in_order=True)
    options: dict[str, Any] = {"softcap": 0.7, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}
    if extras != "both":
        options = {extras: options[extras]}
    got = scene.run(scale=0.3, window=window, **options)
    expected = scene.expected(scale=0.3, window=window, **options)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_attention_that_is_not_plain_takes_the_reference_backend() -> None:
    assert make_backend("auto", torch.device("cuda"), plain=False).name == "sdpa"
    with pytest.raises(ConfigError, match="attention: sdpa"):
        make_backend("triton", torch.device("cuda"), plain=False)

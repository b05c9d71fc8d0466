"""What Prometheus reads: the right numbers under few names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from omnistage.core.stage import STEP_BUCKETS
from omnistage.core.types import FinishReason
from omnistage.omni import AsyncOmni
from omnistage.pipeline.outputs import OmniRequestOutput, Usage
from omnistage.pipeline.timing import StepTimer
from omnistage.server.observe.metrics import RequestMetrics
from omnistage.server.service import Service
from tests.server.harness import Running, serving

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
CHAT: dict[str, Any] = {
    "model": "lm",
    "messages": [{"role": "user", "content": "Tell me a story of a lighthouse that stands in the middle of a town."}],
    "max_tokens": 5,
    "ignore_eos": True,
}


def test_step_times_fall_into_buckets() -> None:
    timer = StepTimer()
    for seconds in (0.0, 0.0005, 0.0006, 59.0, 61.0):
        timer.add(seconds)
    read = timer.read()
    assert (read.counts[0], read.counts[1], read.counts[-2], read.counts[-1]) == (2, 1, 1, 1)
    assert len(read.counts) == len(STEP_BUCKETS) + 1
    assert read.total == pytest.approx(120.0011)


@pytest.fixture
def fresh(models: dict[str, AsyncOmni]) -> Iterator[Running]:
    """A service whose engines have been used before, as those of a test session are."""
    service = Service()
    for name, omni in models.items():
        service.add(name, omni)
    service.loading = False
    with serving(service) as running:
        yield running


def scraped(server: Running) -> Samples:
    for model in server.service.models.values():
        model.omni.orchestrator.check_idle()  # a stage's numbers are those of its last turn
    answer = httpx.get(f"{server.url}/metrics", timeout=60)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def reader(before: Samples, after: Samples) -> Callable[..., float]:
    """How much a number has grown."""

    def grown(name: str, **labels: str) -> float:
        key = (name, frozenset(labels.items()))
        return after[key] - before.get(key, 0.0)

    return grown


def post(server: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def test_text_is_counted(fresh: Running) -> None:
    before = scraped(fresh)
    usages = [post(fresh, "chat/completions", CHAT)["usage"] for _ in range(2)]
    grown = reader(before, after := scraped(fresh))
    assert grown("omnistage_requests_admitted_total", model="lm") == 2
    assert grown("omnistage_requests_finished_total", model="lm", reason="length") == 2
    assert grown("omnistage_prompt_tokens_total", model="lm") == sum(usage["prompt_tokens"] for usage in usages)
    assert grown("omnistage_generated_tokens_total", model="lm") == 10
    assert grown("omnistage_time_to_first_token_seconds_count", model="lm") == 2
    assert grown("omnistage_http_responses_total", endpoint="POST /v1/chat/completions", status="200") == 2
    (stage,) = {
        dict(labels)["stage"] for name, labels in after if name == "omnistage_kv_blocks" and "lm" in str(labels)
    }
    own = {"model": "lm", "stage": stage}
    assert grown("omnistage_stage_queue_seconds_count", **own) == 2
    # The same prompt again: all of its full blocks were there.
    assert grown("omnistage_prefix_cache_lookups_total", **own) > 0
    assert grown("omnistage_prefix_cache_hits_total", **own) > 0
    assert (
        after[("omnistage_kv_blocks_free", frozenset(own.items()))]
        == after[("omnistage_kv_blocks", frozenset(own.items()))]
    )
    model = frozenset({("model", "lm")})
    for name in ("omnistage_requests_inflight", "omnistage_requests_waiting", "omnistage_utilization"):
        assert after[(name, model)] == 0
    assert after[("omnistage_stage_capacity", frozenset(own.items()))] > 0


def test_steps_are_timed(fresh: Running) -> None:
    before = scraped(fresh)
    post(fresh, "chat/completions", CHAT)
    after = scraped(fresh)
    grown = reader(before, after)
    stages = {tuple(sorted(labels)) for name, labels in after if name == "omnistage_stage_step_seconds_count"}
    assert len(stages) == sum(len(m.omni.stats().stages) for m in fresh.service.models.values())
    for labels in stages:
        own = dict(labels)
        count = grown("omnistage_stage_step_seconds_count", **own)
        assert count == grown("omnistage_stage_steps_total", **own)
        assert (count > 0) is (own["model"] == "lm")
        assert grown("omnistage_stage_step_seconds_bucket", **own, le="+Inf") == count
        assert (grown("omnistage_stage_step_seconds_sum", **own) > 0) is (count > 0)
        values = [
            after[("omnistage_stage_step_seconds_bucket", frozenset({*labels, ("le", str(b))}))] for b in STEP_BUCKETS
        ]
        assert values == sorted(values)


def test_pictures_and_their_caches_are_counted(fresh: Running) -> None:
    body: dict[str, Any] = {"model": "draw", "prompt": "a hat on a hill", "size": "64x64", "steps": 3}
    before = scraped(fresh)
    post(fresh, "images/generations", body)
    between = scraped(fresh)
    post(fresh, "images/generations", body)
    grown, again = reader(before, after := scraped(fresh)), reader(between, after)
    assert grown("omnistage_denoising_steps_total", model="draw") == 6
    assert grown("omnistage_generated_images_total", model="draw") == 2
    encoding = next(
        dict(labels)
        for name, labels in after
        if name == "omnistage_encoder_cache_hits_total" and ("model", "draw") in labels
    )
    assert grown("omnistage_encoder_cache_misses_total", **encoding) > 0
    assert again("omnistage_encoder_cache_misses_total", **encoding) == 0
    assert again("omnistage_encoder_cache_hits_total", **encoding) > 0
    assert after[("omnistage_encoder_cache_bytes", frozenset(encoding.items()))] > 0


def test_speech_is_measured(fresh: Running) -> None:
    before = scraped(fresh)
    body: dict[str, Any] = {
        "model": "omni",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "modalities": ["text", "audio"],
    }
    seconds = post(fresh, "chat/completions", body)["usage"]["completion_tokens_details"]["audio_seconds"]
    grown = reader(before, after := scraped(fresh))
    assert grown("omnistage_generated_audio_seconds_total", model="omni") == pytest.approx(seconds)
    assert grown("omnistage_time_to_first_audio_seconds_count", model="omni") == 1
    assert grown("omnistage_real_time_factor_count", model="omni") == 1
    given = [
        reader(before, after)(name, **dict(labels))
        for name, labels in after
        if name == "omnistage_stage_audio_seconds_total"
    ]
    assert sum(given) == pytest.approx(seconds)
    asked = {dict(labels)["stage"] for name, labels in after if name == "omnistage_stage_queue_seconds_count"}
    assert len(asked) == 3  # each stage of the pipeline has had its turn


@pytest.mark.parametrize("reason", FinishReason)
def test_answers_that_were_cut_short_have_no_real_time_factor(reason: FinishReason) -> None:
    metrics = RequestMetrics()
    metrics.observe_output("m", OmniRequestOutput("r", finish_reason=reason, usage=Usage(audio_seconds=0.25)), 1.5)

    def read(name: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model": "m"})

    whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert read("omnistage_real_time_factor_count") == (1 if whole else None)
    assert read("omnistage_real_time_factor_sum") == (6.0 if whole else None)
    assert read("omnistage_generated_audio_seconds_total") == 0.25  # made it was


def test_the_process_and_the_build_are_there(fresh: Running) -> None:
    after = scraped(fresh)
    names = {name for name, _ in after}
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "omnistage_build_info"} <= names
    assert after[("process_resident_memory_bytes", frozenset())] > 1e6


def test_no_text_of_a_client_becomes_a_label(fresh: Running) -> None:
    marker = "xq7marker"
    client = httpx.Client(base_url=fresh.url, timeout=60)
    client.get(f"/v1/{marker}")
    client.get(f"/v1/models/{marker}")
    client.get(f"/v1/requests/{marker}", headers={"Authorization": f"Bearer {marker}", "User-Agent": marker})
    client.post("/v1/chat/completions", json={**CHAT, "model": marker})
    client.post("/v1/chat/completions", json={**CHAT, "user": marker})
    client.request(marker.upper(), "/v1/models")
    before = scraped(fresh)
    assert not any(marker in str(key).lower() for key in before)
    client.get(f"/v1/{marker}-again")
    assert scraped(fresh).keys() == before.keys()  # the number of series does not grow with what is asked


def test_a_scrape_of_nothing_but_a_loading_service() -> None:
    service = Service()
    with serving(service) as server:
        answer = httpx.get(f"{server.url}/metrics")
    assert answer.status_code == 200
    assert not np.isnan(
        [s.value for family in text_string_to_metric_families(answer.text) for s in family.samples]
    ).any()


def test_the_page_has_every_metric_and_no_other(fresh: Running) -> None:
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
    table = page[page.index("## Metrics") : page.index("```yaml")]
    listed = set(re.findall(r"`(omnistage_\w+)`", table))
    text = httpx.get(f"{fresh.url}/metrics", timeout=60).text
    shown = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in text_string_to_metric_families(text)
        if family.name.startswith("omnistage_")
    }
    assert {name for name in listed if not name.startswith("omnistage_cuda_")} == shown - {
        name for name in shown if name.endswith("_created")
    }
    alerts = set(re.findall(r"\b(omnistage_\w+?)(?:_bucket)?[\[{ )]", page[page.index("groups:") :]))
    assert alerts <= listed

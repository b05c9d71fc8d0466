"""A service whose stages fail or hang: what clients, probes and Prometheus are told, and that it recovers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from omnistage.core.stage import Stage
from omnistage.omni import AsyncOmni
from omnistage.pipeline import supervision
from omnistage.pipeline.loop import MAX_FAILED_STEPS
from omnistage.server.service import Service
from tests.hang_guard import HANG_SECONDS
from tests.server.harness import SERVE_LIMITS, SHORT, Held, Running, make, serving, until

pytestmark = pytest.mark.timeout(300)

SPOKEN: dict[str, Any] = {
    "model": "omni",
    "messages": [{"role": "user", "content": "Hello"}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "Chelsie", "format": "pcm16"},
    "max_tokens": 4,
    "temperature": 0,
    "seed": 1,
}
WRITTEN = {**SPOKEN, "modalities": ["text"], "audio": None}


class Panic(BaseException):
    """Like the panic of a Rust extension."""


@contextmanager
def served(name: str, folder: Path, *overrides: str) -> Iterator[Running]:
    omni = AsyncOmni(folder, device="cpu", dtype="float32", overrides=(*SERVE_LIMITS, *overrides), progress=False)
    service = Service()
    service.add(name, omni)
    service.loading = False
    with serving(service) as running:
        yield running
    asyncio.run(omni.shutdown(drain=False, timeout=1.0))


def stage_of(server: Running, stage: str) -> Stage:
    (model,) = server.service.models.values()
    return model.omni.orchestrator.stages[stage]


def break_steps(stage: Stage, error: type[BaseException], message: str, patch: pytest.MonkeyPatch) -> None:
    def step() -> object:
        raise error(message)

    patch.setattr(stage, "step", step)


def post(server: Running, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def probe(server: Running, path: str) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"{server.url}{path}", timeout=60)
    return answer.status_code, answer.json()


def metric(server: Running, name: str, stage: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    (value,) = (
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels.get("stage") == stage
    )
    return value


def test_a_stage_that_keeps_failing_is_refused_by_name_and_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "REBUILD_PAUSES", (0.0,))
    with served("omni", make("qwen2_5_omni", tmp_path / "omni"), "talker.max_tokens=8") as server:
        before = post(server, SPOKEN)
        assert before.status_code == 200
        supervisor = server.service.models["omni"].omni.orchestrator._supervisor
        rebuild, go = supervisor._rebuilds["talker"], threading.Event()
        monkeypatch.setitem(
            supervisor._rebuilds,  # type: ignore[arg-type]
            "talker",
            lambda attempt: rebuild(attempt) if go.wait(HANG_SECONDS) else None,
        )
        broken = stage_of(server, "talker")
        break_steps(broken, Panic, "a user's words", monkeypatch)
        failures = [post(server, SPOKEN) for _ in range(MAX_FAILED_STEPS)]
        assert [failure.status_code for failure in failures] == [500] * MAX_FAILED_STEPS
        assert probe(server, "/ready") == (
            503,
            {"status": "unavailable", "stages": [{"model": "omni", "stage": "talker", "state": "rebuilding"}]},
        )
        refused = post(server, SPOKEN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stage_unavailable")
        assert "Retry-After" in refused.headers
        assert post(server, WRITTEN).status_code == 200
        assert probe(server, "/health") == (200, {"status": "ok"})
        assert metric(server, "omnistage_stage_up", "talker") == 0
        assert metric(server, "omnistage_stage_up", "thinker") == 1
        assert metric(server, "omnistage_stage_failures_total", "talker") == 1
        go.set()
        until(lambda: probe(server, "/ready") == (200, {"status": "ready"}), "the rebuild")
        after = post(server, SPOKEN)
        assert after.status_code == 200
        assert (
            after.json()["choices"][0]["message"]["audio"]["data"]
            == (before.json()["choices"][0]["message"]["audio"]["data"])
        )
        assert stage_of(server, "talker") is not broken
        assert metric(server, "omnistage_stage_up", "talker") == 1
        assert metric(server, "omnistage_stage_rebuilds_total", "talker") == 1
        server.service.models["omni"].omni.orchestrator.check_idle()


def test_a_lost_device_fails_the_liveness_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served("lm", make("causal_lm", tmp_path / "lm")) as server:
        message = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported asynchronously"
        break_steps(stage_of(server, "thinker"), RuntimeError, message, monkeypatch)
        assert post(server, SHORT, "/v1/completions").status_code == 500
        assert probe(server, "/health") == (503, {"status": "failed"})
        status, body = probe(server, "/ready")
        assert (status, body["stages"]) == (503, [{"model": "lm", "stage": "thinker", "state": "failed"}])
        refused = post(server, SHORT, "/v1/completions")
        assert refused.status_code == 503
        assert "restart the service" in refused.json()["error"]["message"]


def test_a_stage_that_is_stuck_in_a_step_is_not_ready_until_the_step_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "WARM_UP_FACTOR", 1)
    monkeypatch.setattr(supervision, "HUNG_FACTOR", 10**6)
    with served("lm", make("causal_lm", tmp_path / "lm"), "deployment.max_step_seconds=0.5") as server:
        held = Held(stage_of(server, "thinker"), monkeypatch)
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(post(server, SHORT, "/v1/completions")))
        waiting.start()
        until(lambda: probe(server, "/ready")[0] == 503, "the report")
        assert probe(server, "/ready")[1]["stages"] == [{"model": "lm", "stage": "thinker", "state": "overdue"}]
        assert probe(server, "/health")[0] == 200
        assert metric(server, "omnistage_step_overdue", "thinker") == 1
        assert post(server, SHORT, "/v1/completions").json()["error"]["code"] == "stage_unavailable"
        held.go.set()
        waiting.join(HANG_SECONDS)
        assert answers[0].status_code == 200
        until(lambda: probe(server, "/ready")[0] == 200, "the end of the step")
        assert metric(server, "omnistage_step_overdue", "thinker") == 0

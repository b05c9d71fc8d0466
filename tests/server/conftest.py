"""Small real models, a service over them, and OpenAI's own client to talk to it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from omnistage.core.params import SamplingParams
from omnistage.engines.ar.stage import ARStage
from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Keyring
from omnistage.server.observe.audit import AUDIT_LOGGER
from omnistage.server.service import Service
from tests.server.harness import SERVE_LIMITS, Held, Running, make, serving, until


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AsyncOmni]]:
    """One small model of each kind: text, speech, pictures."""
    place = tmp_path_factory.mktemp("served")
    made = {}
    for name, family in (("lm", "causal_lm"), ("omni", "qwen2_5_omni"), ("draw", "stable_diffusion_3")):
        folder = make(family, place / name)
        # A random talker never ends by itself: without a bound each spoken answer takes a minute.
        limits = (*SERVE_LIMITS, "talker.max_tokens=96") if name == "omni" else SERVE_LIMITS
        made[name] = AsyncOmni(folder, device="cpu", dtype="float32", overrides=limits, progress=False)
    yield made
    for omni in made.values():
        asyncio.run(omni.shutdown(drain=False))


@pytest.fixture
def ending(models: dict[str, AsyncOmni], monkeypatch: pytest.MonkeyPatch) -> AsyncOmni:
    """The model "omni", whose text ends after 8 tokens: one of random weights never ends by itself."""
    orchestrator = models["omni"].orchestrator
    stage, default = orchestrator.stages["thinker"], orchestrator.default_params["thinker"]
    assert isinstance(stage, ARStage)
    assert isinstance(default, SamplingParams)
    end = SamplingParams(min_tokens=8, logit_bias={min(stage.component.eos_token_ids): 100.0})
    monkeypatch.setitem(orchestrator._planner.defaults, "thinker", default.merged(end))
    return models["omni"]


@pytest.fixture
def service(models: dict[str, AsyncOmni]) -> Service:
    made = Service(keyring=Keyring())
    for name, omni in models.items():
        made.add(name, omni)
    made.loading = False
    return made


@pytest.fixture
def server(service: Service) -> Iterator[Running]:
    with serving(service) as running:
        yield running
    for model in service.models.values():
        model.omni.orchestrator.check_idle()


@pytest.fixture(scope="module")
def empty() -> Iterator[Running]:
    """A service without models, for requests that never reach one."""
    service = Service()
    service.loading = False
    with serving(service) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


@pytest.fixture
def lm(models: dict[str, AsyncOmni]) -> AsyncOmni:
    return models["lm"]


@pytest.fixture
def held(lm: AsyncOmni, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Held]:
    free: int = getattr(request, "param", 0)
    made = Held(lm.orchestrator.stages[lm.orchestrator.graph.entry], monkeypatch, free)
    yield made
    made.go.set()
    until(lambda: lm.stats().inflight == 0, "the end of held requests")


@pytest.fixture
def audit(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The audit log as it grows."""
    lines: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(record.getMessage()))

    caplog.set_level(logging.INFO, logger=AUDIT_LOGGER)
    logging.getLogger(AUDIT_LOGGER).addHandler(handler := Keep())
    lines.clear()
    yield lines  # type: ignore[misc]
    logging.getLogger(AUDIT_LOGGER).removeHandler(handler)

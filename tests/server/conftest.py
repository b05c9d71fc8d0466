"""A real HTTP server on a free port, over small real models, and OpenAI's own client to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn

from omnistage.core.params import SamplingParams
from omnistage.engines.ar.stage import ARStage
from omnistage.models.registry import REGISTRY
from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Keyring
from omnistage.server.http.app import create_app
from omnistage.server.http.run import server_config
from omnistage.server.service import Service

SERVE_LIMITS = ("limits.media.allow_paths=false",)


@dataclass
class Running:
    """A server and the address of its API."""

    service: Service
    url: str
    loop: asyncio.AbstractEventLoop

    def client(self, **options: object) -> openai.OpenAI:
        given = {"api_key": "none", "max_retries": 0, "timeout": 60.0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)  # type: ignore[arg-type]

    def async_client(self, **options: object) -> openai.AsyncOpenAI:
        given = {"api_key": "none", "max_retries": 0, "timeout": 60.0, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **given)  # type: ignore[arg-type]


@contextlib.contextmanager
def serving(service: Service, **options: Any) -> Iterator[Running]:
    """Run the application in a thread of its own until the block ends."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # as the command's is
    listening.bind(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # a slow reader is noticed soon
    server = uvicorn.Server(server_config(create_app(service, **options)))
    started = threading.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        task = asyncio.ensure_future(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0)
        started.set()
        await task

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield Running(service, f"http://127.0.0.1:{listening.getsockname()[1]}", loop)
    finally:
        server.should_exit = True
        thread.join(30)
        loop.close()


def awaited(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that runs in an event loop of its own."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        async def main() -> None:
            await test(**given)

        asyncio.run(main())

    return run


def make(family: str, folder: Path) -> Path:
    folder.mkdir()
    tiny = REGISTRY.family(family).tiny
    assert tiny is not None
    tiny(folder, seed=0)
    return folder


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
    stage, default = orchestrator.stages["thinker"], orchestrator.default_params("thinker")
    assert isinstance(stage, ARStage)
    assert isinstance(default, SamplingParams)
    end = SamplingParams(min_tokens=8, logit_bias={min(stage.component.eos_token_ids): 100.0})
    monkeypatch.setitem(orchestrator._defaults, "thinker", default.merged(end))
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


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made

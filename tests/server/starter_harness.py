"""The small starter behind a service: fixtures for the tests of its endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from omnistage_starter import tiny
from omnistage_starter.tiny_speech_to_text import write_speech_to_text

from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Keyring
from omnistage.server.moderation.filters import ContentFilter
from omnistage.server.service import Service
from tests.server.harness import SERVE_LIMITS, Running, serving

HEARD = "the cat sees a bird"
SHORT: dict[str, Any] = {"model": "starter", "max_tokens": 8, "temperature": 0}
HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    folder = tmp_path_factory.mktemp("served") / "starter"
    tiny.write(folder, seed=1)
    write_speech_to_text(folder / "hear", script=(*HEARD.split(), "</s>"))
    overrides = (*SERVE_LIMITS, "think.kv_blocks=256")
    omni = AsyncOmni(folder, device="cpu", dtype="float32", overrides=overrides, progress=False)
    yield omni
    asyncio.run(omni.shutdown(drain=False))


def service_of(omni: AsyncOmni, content_filter: ContentFilter | None = None, keyring: Keyring | None = None) -> Service:
    made = Service(content_filter=content_filter, keyring=keyring)
    made.add("starter", omni)
    made.loading = False
    return made


@pytest.fixture
def server(starter: AsyncOmni) -> Iterator[Running]:
    with serving(service_of(starter)) as running:
        yield running
    starter.orchestrator.check_idle()

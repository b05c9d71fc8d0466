"""Two thousand requests of every temper at four times what the service takes, and nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.omni import AsyncOmni, Omni
from omnistage.pipeline.health import OrchestratorStats
from omnistage.pipeline.request import RequestRun
from omnistage.pipeline.stream import OutputStream
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.http.connection import Connection, Exchange
from omnistage.server.observe.audit import AUDIT_LOGGER, AuditRecord
from omnistage.server.openai.audio import speech, transcriptions
from omnistage.server.realtime.session import Session
from omnistage.server.service import Service
from tests.hang_guard import HANG_SECONDS
from tests.server.chaos import LONG, MAX_BODY, MAX_PIXELS, MAX_SECONDS, PICTURES, SOUND, TAG, TEXTS, Expected, Storm
from tests.server.harness import Running, make, serving, until

REQUESTS = 2000
WARM_UP = 250
ROOM = {"lm": 8, "omni": 3, "draw": 3, "film": 2}
OFFERED = 4 * sum(ROOM.values())
STALL_SECONDS = 6.0
AT_ONCE_STEPS = int(LONG["max_tokens"])  # type: ignore[call-overload]
"""Steps of the engine within which a short request is answered when the last client of the storm has gone: fewer than
an abandoned request would take to its end. Steps, not seconds: other load makes both sides of a clock slow."""
GROWTH_MIB = 128
"""How much more memory the process may hold after the storm: what the allocator does not give back comes and goes by
some fifty, and a leak of 64 KiB a request would be as much as this. Tensors are counted by themselves, exactly."""
KEYS = {"main": "a-key-for-all", "rated": "a-key-with-a-rate", "painter": "a-key-for-one-model"}
FAMILIES = {"lm": "causal_lm", "omni": "qwen2_5_omni", "draw": "stable_diffusion_3", "film": "wan"}
LIMITS = (
    "limits.media.allow_paths=false",
    f"limits.media.max_image_pixels={MAX_PIXELS}",
    f"limits.media.max_audio_seconds={MAX_SECONDS}",
)
ENDINGS = {
    101: {"stop", "length", "abort", "disconnected", "done"},
    200: {"stop", "length", "abort", "deadline", "done"},
    408: {"deadline", "refused"},
    429: {"refused"},
    499: {"disconnected", "slow_reader", "abort"},
}
"""How a request may have ended, by its status; any other status is a refusal."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("chaos")
    return {name: make(family, place / name) for name, family in FAMILIES.items()}


# The end token of the small models of this family, after a few others: a transcription that does not end is an error.
ENDING = ("thinker.min_tokens=2", "thinker.logit_bias={877: 100}")
# Spoken answers go on to their bound: random weights know no end. Caches are so small that all of them has been used
# when the memory is measured for the first time.
SMALL = {
    "lm": ("thinker.kv_blocks=320",),
    "omni": ("thinker.kv_blocks=192", "talker.kv_blocks=192", "thinker.max_tokens=8", *ENDING, "talker.max_tokens=16"),
}


def options(name: str) -> dict[str, Any]:
    given = (*LIMITS, *SMALL.get(name, ()))
    return {"device": "cpu", "dtype": "float32", "overrides": given, "progress": False}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> Expected:
    """Answers without a server, each request alone, from engines of their own on the same weights."""
    greedy = SamplingParams(max_tokens=8, temperature=0)
    with Omni(folders["lm"], **options("lm")) as omni:
        completion = {text: omni.generate(text, greedy, progress=False)[0].text for text in TEXTS}
        chat = {text: omni.chat([{"role": "user", "content": text}], greedy, progress=False).text for text in TEXTS}
    with Omni(folders["omni"], **options("omni")) as omni:
        said = [{"role": "user", "content": f"{speech._READ_ALOUD}{TEXTS[0]}"}]
        seeds = {name: {"seed": 3} for name in ("thinker", "talker", "token2wav")}
        spoken = omni.chat(said, seeds, modalities=["audio"], progress=False)
        assert spoken.audio is not None
        asked = [{"type": "audio", "audio": SOUND}, {"type": "text", "text": transcriptions._INSTRUCTION}]
        written = omni.chat([{"role": "user", "content": asked}], {"thinker": {"temperature": 0}}, progress=False)
    with Omni(folders["draw"], **options("draw")) as omni:
        size = DiffusionParams(width=32, height=32, steps=2, seed=5)
        drawn = {prompt: omni.generate(prompt, size, progress=False)[0].image for prompt in PICTURES}
    pictures = {prompt: np.asarray(picture.pixels) for prompt, picture in drawn.items() if picture is not None}
    return Expected(completion, chat, np.asarray(spoken.audio.samples), pictures, written.text.strip())


@pytest.fixture
def service(folders: dict[str, Path]) -> Iterator[Service]:
    holders = [
        Holder("main", digest_of(KEYS["main"])),
        Holder("rated", digest_of(KEYS["rated"]), rate=20.0, max_concurrent=2),
        Holder("painter", digest_of(KEYS["painter"]), models=frozenset({"draw"})),
    ]
    made = Service(keyring=Keyring(holders))
    for name, folder in folders.items():
        omni = AsyncOmni(folder, **options(name))
        omni.orchestrator.max_inflight = ROOM[name]
        made.add(name, omni)
    made.loading = False
    yield made
    for model in made.models.values():
        asyncio.run(model.omni.shutdown(drain=False))


class Ledger(logging.Filter):
    """What came in and how each of it ended: the audit log's lines, and what was really sent, by the client's tag."""

    _tag: ContextVar[str | None] = ContextVar("chaos_tag", default=None)

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        self.came: Counter[str] = Counter()
        self.statuses: dict[str, list[int]] = {}
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.jobs: list[dict[str, Any]] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Take a line. Nobody else gets it: a failure's report would hold all of them, and nothing else to read."""
        line = json.loads(record.getMessage())
        if line["endpoint"] in ("background", "WS /v1/realtime response"):  # work of its own within another's request
            self.jobs.append(line)
        else:
            self.lines.setdefault(self._tag.get() or "", []).append(line)
        return False

    async def count(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, with notes."""
        if not scope["path"].startswith("/v1/"):  # what is not worth a line
            await app(scope, receive, send)
            return
        tag = dict(scope["headers"]).get(TAG.lower().encode(), b"").decode()
        self.came[tag] += 1
        started = self.statuses.setdefault(tag, [])

        async def noted(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                started.append(message["status"])
            elif message["type"] == "websocket.accept":
                started.append(101)
            await send(message)

        token = self._tag.set(tag)
        try:
            await app(scope, receive, noted)
        finally:
            self._tag.reset(token)


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    made, log = Ledger(), logging.getLogger(AUDIT_LOGGER)
    answer = Exchange.__call__

    async def counted(self: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        await made.count(partial(answer, self), scope, receive, send)

    monkeypatch.setattr(Exchange, "__call__", counted)
    monkeypatch.setattr(log, "level", logging.INFO)
    log.addFilter(made)
    yield made
    log.removeFilter(made)


def memory() -> float:
    """What the process holds, in MiB, once everything that can be given back has been."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process().memory_info().rss) / 2**20


def tensors() -> float:
    """What all tensors hold, in MiB."""
    gc.collect()
    held: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            with contextlib.suppress(RuntimeError):  # what a compiler traced in an earlier test has no memory
                storage = thing.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
    held.pop(0, None)  # the same
    return sum(held.values()) / 2**20


def objects_of(*kinds: type) -> list[object]:
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]


def alive(server: Running, others: list[object], *kinds: type) -> Counter[str]:
    """Objects of these kinds that something still holds, without `others`: those there were before this service."""

    async def forget_timers() -> None:
        # The loop keeps timers that were cancelled, and with them their contexts, until they are most of all it has.
        loop = asyncio.get_running_loop()
        for timer in [loop.call_later(3600, gc.collect) for _ in range(2000)]:
            timer.cancel()
        await asyncio.sleep(0)

    asyncio.run_coroutine_threadsafe(forget_timers(), server.loop).result(HANG_SECONDS)
    known = {id(thing) for thing in others}  # `others` holds them, so that no id is used again
    return Counter(type(thing).__name__ for thing in objects_of(*kinds) if id(thing) not in known)


def rest(server: Running) -> None:
    """Wait until nothing runs and nobody is connected, then check that nothing is left anywhere."""
    for model in server.service.models.values():
        orchestrator = model.omni.orchestrator
        until(lambda o=orchestrator: o.stats().inflight == 0, f"the end of {model.name}'s requests")  # type: ignore[misc]
        orchestrator.check_idle()
        for name, stage in orchestrator.stages.items():
            check = getattr(stage, "check_integrity", None)
            if check is not None:
                check()
            extra = orchestrator.stats().stages[name].extra
            assert extra.get("blocks") == extra.get("blocks_free"), (model.name, name)
    port = int(server.url.rpartition(":")[2])

    def connected() -> list[str]:
        sockets = psutil.Process().net_connections("tcp")
        return [one.status for one in sockets if one.laddr.port == port and one.status != psutil.CONN_LISTEN]

    until(lambda: not connected(), "the end of all connections")
    until(lambda: len(tasks(server)) <= 2, f"the end of the tasks {tasks(server)}")  # the server's and ours


def tasks(server: Running) -> list[str]:
    async def listed() -> list[str]:
        return [repr(task.get_coro()) for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    return asyncio.run_coroutine_threadsafe(listed(), server.loop).result(HANG_SECONDS)


def finished(service: Service) -> dict[str, OrchestratorStats]:
    return {name: model.omni.stats() for name, model in service.models.items()}


def steps(service: Service) -> int:
    """How many steps the engine of "lm" has run."""
    return service.models["lm"].omni.stats().stages["thinker"].steps


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_storm_leaves_nothing_behind(
    service: Service, expected: Expected, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = (OutputStream, RequestRun, AuditRecord, Connection, Session)
    others = objects_of(*kinds)  # of the process: what an earlier test's failure or fixture still holds is not ours
    with serving(service, max_body_bytes=MAX_BODY, stall_seconds=STALL_SECONDS) as server, caplog.at_level("ERROR"):
        logging.getLogger("uvicorn").addHandler(caplog.handler)  # it hands nothing on
        warm = Storm(server.url, expected, random.Random(1), KEYS, ledger.lines)
        asyncio.run(warm.run(WARM_UP, OFFERED))
        rest(server)
        before, held, start = finished(service), tensors(), memory()
        ledger.forget()

        storm = Storm(server.url, expected, random.Random(0), KEYS, ledger.lines)
        asyncio.run(storm.run(REQUESTS, OFFERED))
        asyncio.run(storm.is_cut_off())
        done = steps(service)
        asyncio.run(storm.is_served_afterwards())
        assert steps(service) - done < AT_ONCE_STEPS
        rest(server)
        check_ends(storm, ledger)
        check_engines(service, before, ledger)
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

        assert not service.sessions
        # A thread of the service may be about to let the last one go; what leaks stays for good.
        until(lambda: not alive(server, others, *kinds), f"the end of {dict(alive(server, others, *kinds))}")
        del storm, warm  # their notes are no memory of the service
        ledger.forget()
        assert tensors() - held < 1
        grown = memory() - start
        print(f"memory: {start:.0f} MiB at first, {grown:+.1f} in the end")
        assert grown < GROWTH_MIB


def check_ends(storm: Storm, ledger: Ledger) -> None:
    """Every request that reached the service has one line, one status, and the right one."""
    assert len(storm.seen) >= REQUESTS
    assert set(ledger.came) <= set(storm.seen)
    assert set(ledger.came.values()) == {1}
    assert set(ledger.lines) == set(ledger.came)
    for tag, seen in storm.seen.items():
        if tag not in ledger.came:
            # Only who leaves at once may not have been noticed.
            assert seen.kind.startswith("left"), tag
            continue
        (line,), sent = ledger.lines[tag], ledger.statuses[tag]
        assert len(sent) <= 1, tag
        assert line["status"] in seen.allowed, (tag, line)
        assert line["ended"] in ENDINGS.get(line["status"], {"refused"}), (tag, line)
        if seen.status is not None:
            assert seen.status == line["status"] == sent[0], (tag, line, sent)
    kinds = Counter(seen.kind for seen in storm.seen.values())
    statuses = Counter(line["status"] for (line,) in ledger.lines.values())
    print(f"\nkinds: {dict(kinds)}\nstatuses: {dict(statuses)}\ncompared: {storm.compared}")
    assert {101, 200, 400, 401, 403, 404, 405, 408, 413, 429, 499} == set(statuses)
    assert {"disconnected", "slow_reader"} <= {line["ended"] for (line,) in ledger.lines.values()}
    assert len(storm.compared) == 12, storm.compared


def check_engines(service: Service, before: dict[str, OrchestratorStats], ledger: Ledger) -> None:
    """What the engines took they finished, each request once, and every one of them stands in the audit log once."""
    names = [name for lines in ledger.lines.values() for line in lines for name in line["requests"]]
    names += [name for line in ledger.jobs for name in line["requests"]]
    assert len(names) == len(set(names))
    taken = 0
    for name, now in finished(service).items():
        assert now.admitted == sum(now.finished.values()), name
        taken += now.admitted - before[name].admitted
    assert taken == len(names)

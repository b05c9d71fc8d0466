"""Load on a scripted service: what is sent, what is counted, how a run ends and what is written of it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from omnistage.bench.load import Generator, Load, Run, calibrate, choose_models, connect
from omnistage.bench.measure import Outcome, Spread
from omnistage.bench.plot import plot
from omnistage.bench.report import SCHEMA, GeneratorLoad, Report, build, redact_key
from omnistage.bench.tables import compare, print_report, read_report
from omnistage.bench.workload import Kind, Workload, arrivals, parse_mix
from omnistage.core.errors import InvalidRequestError, MissingDependencyError
from omnistage.core.http_client import Client
from tests.hang_guard import HANG_SECONDS

Reply = Callable[["Service", str, dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
MODELS = {"data": [{"id": "chat", "modalities": {"output": ["text"]}}, {"id": "all", "modalities": {"output": []}}]}


class Service:
    """A listening socket that answers as a test says, and notes what it was asked."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.connections = 0
        self.busy = self.most_busy = 0
        self.go = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                sizes = [int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length")]
                data = await reader.readexactly(sizes[0]) if sizes else b"{}"
                path = first.split()[1]
                self.asked.append((path, json.loads(data)))
                self.busy += 1
                self.most_busy = max(self.most_busy, self.busy)
                try:
                    await self.reply(self, path, json.loads(data), writer)
                finally:
                    self.busy -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[tuple[Service, Client]]:
    service = Service(reply)
    server = await asyncio.start_server(service.handle, "127.0.0.1", 0)
    client = connect(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "a-key")
    try:
        yield service, client
    finally:
        await client.close()
        server.close()


def page(writer: asyncio.StreamWriter, value: object, status: int = 200, headers: str = "") -> None:
    data = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n{headers}\r\n".encode() + data)


def stream(
    writer: asyncio.StreamWriter, events: list[dict[str, Any]], *, complete: bool = True, last: str = "data: [DONE]\n\n"
) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    for data in map(str.encode, [*lines, last] if complete and last else lines):
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    if complete:
        writer.write(b"0\r\n\r\n")


def text_events(words: int = 3, prompt: int = 5) -> list[dict[str, Any]]:
    deltas = [{"choices": [{"delta": {"content": f"w{n} "}}]} for n in range(words)]
    return [*deltas, {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": words}}]


async def answers(_service: Service, _path: str, _body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    stream(writer, text_events())


def work(mix: str = "text") -> Workload:
    return Workload(parse_mix(mix), dict.fromkeys(Kind, "chat"))


def run(reply: Reply, load: Load, mix: str = "text") -> tuple[Run, Service]:
    async def main() -> tuple[Run, Service]:
        async with serving(reply) as (service, client):
            return await Generator(client, work(mix), load).run(), service

    return asyncio.run(main())


def report_of(made: Run, load: Load | None = None, **settings: Any) -> Report:
    return build(made, load or Load(), {"load": "1 at a time", "player_buffer": 0.1, **settings}, 0.1, None)


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_report(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


# ----------------------------------------------------------------------------------------------------- load


def test_workers_send_every_request_once_and_keep_their_connections() -> None:
    made, service = run(answers, Load(concurrency=3, count=12))
    assert [outcome.number for outcome in made.outcomes] == list(range(12))
    bodies = [work().request(n).body for n in range(12)]
    assert sorted(json.dumps(b) for _, b in service.asked) == sorted(json.dumps(json.loads(b)) for b in bodies)
    assert service.connections <= 3
    assert all((o.ok, o.text_tokens, len(o.token_times)) == (True, 3, 3) for o in made.outcomes)
    assert all(o.sent <= o.token_times[0] <= o.ended for o in made.outcomes)


def test_no_more_are_under_way_than_there_are_workers_and_no_fewer() -> None:
    async def when_all_are_there(service: Service, _path: str, _body: object, writer: asyncio.StreamWriter) -> None:
        if service.busy == 4:
            service.go.set()
        await asyncio.wait_for(service.go.wait(), HANG_SECONDS)
        stream(writer, text_events())

    made, service = run(when_all_are_there, Load(concurrency=4, count=10))
    assert service.most_busy == 4
    assert made.outcomes
    assert all(outcome.ok for outcome in made.outcomes)


def test_an_open_loop_sends_at_its_own_times_whoever_still_waits() -> None:
    async def when_all_are_there(service: Service, _path: str, _body: object, writer: asyncio.StreamWriter) -> None:
        if len(service.asked) == 10:
            service.go.set()
        await asyncio.wait_for(service.go.wait(), HANG_SECONDS)
        stream(writer, text_events())

    made, service = run(when_all_are_there, Load(rate=200.0, count=10))
    assert service.most_busy == 10  # nobody waited for an answer before asking
    moments = [moment for moment, _ in zip(arrivals(200.0, 0), range(10), strict=False)]
    assert [outcome.due for outcome in made.outcomes] == moments
    assert all(outcome.sent >= outcome.due for outcome in made.outcomes)


def test_a_run_of_seconds_ends_with_the_last_answer() -> None:
    made, _ = run(answers, Load(concurrency=2, seconds=0.05))
    assert made.outcomes
    assert all(outcome.ok for outcome in made.outcomes)
    assert all(outcome.sent < 0.05 + 5 for outcome in made.outcomes)
    open_loop, _ = run(answers, Load(rate=100.0, seconds=0.05))
    assert all(outcome.due < 0.05 for outcome in open_loop.outcomes)


def test_a_connection_that_the_service_closed_is_opened_again() -> None:
    async def closing(_service: Service, _path: str, _body: object, writer: asyncio.StreamWriter) -> None:
        stream(writer, text_events())
        await writer.drain()
        writer.close()

    made, service = run(closing, Load(concurrency=1, count=5))
    assert [outcome.error for outcome in made.outcomes] == [None] * 5
    assert service.connections == 5


# --------------------------------------------------------------------------------------------------- errors


async def troubled(service: Service, _path: str, _body: object, writer: asyncio.StreamWriter) -> None:
    turn = (len(service.asked) - 1) % 6
    if turn == 0:
        page(writer, {"error": {"message": "full", "code": "queue_full"}}, 429, "Retry-After: 0.001\r\n")
    elif turn == 1:
        page(writer, {"error": {"message": "a defect", "code": "internal_error"}}, 500)
    elif turn == 2:
        stream(writer, text_events()[:1], complete=False)
        await writer.drain()
        writer.close()
    elif turn == 3:
        stream(writer, [{"error": {"message": "broke", "code": "stage_failed"}}])
    elif turn == 4:
        page(writer, "no error body", 502)
    else:
        stream(writer, text_events())


def test_every_way_to_fail_is_counted_by_its_name() -> None:
    made, _ = run(troubled, Load(concurrency=1, count=6))
    report = report_of(made)
    assert report.summary.by_status == {"200": 3, "429": 1, "500": 1, "502": 1}
    assert report.summary.errors == {
        "200 broken_response": 1,
        "200 stage_failed": 1,
        "429 queue_full": 1,
        "500 internal_error": 1,
        "502 status_502": 1,
    }
    assert (report.summary.sent, report.summary.succeeded, report.summary.refused, report.summary.failed) == (
        6,
        1,
        1,
        4,
    )
    assert report.exit_code == 1
    text = printed(report)
    assert "429 queue_full" in text
    assert "a defect" in text


def test_a_service_that_never_ends_an_answer_runs_into_the_timeout() -> None:
    async def silent(service: Service, _path: str, _body: object, writer: asyncio.StreamWriter) -> None:
        stream(writer, text_events()[:2], complete=False)
        await service.go.wait()

    made, _ = run(silent, Load(concurrency=1, count=1, timeout=0.2))
    assert made.outcomes[0].error == "timeout"
    assert report_of(made).exit_code == 1


@pytest.mark.parametrize(
    ("reason", "last", "error"),
    [
        (None, "", "broken_response"),
        (None, "data: [DO", "broken_response"),
        (None, "data: [DONE]", "broken_response"),
        (None, "data: [DONE]\n\n", None),
        ("length", "", None),
    ],
)
def test_a_stream_that_only_stops_is_no_answer(reason: str | None, last: str, error: str | None) -> None:
    """Whoever cuts a stream (a proxy, a worker that died) may end the HTTP message in good form."""

    async def cut(_service: Service, _path: str, _body: object, writer: asyncio.StreamWriter) -> None:
        stream(writer, [*text_events()[:2], {"choices": [{"delta": {}, "finish_reason": reason}]}], last=last)

    made, _ = run(cut, Load(count=2))
    assert [outcome.error for outcome in made.outcomes] == [error] * 2
    assert report_of(made).exit_code == (0 if error is None else 1)


@pytest.mark.parametrize(("kind", "error"), [("image", "no_picture"), ("speech", "no_sound"), ("text", None)])
def test_what_was_asked_for_and_never_came_is_an_error(kind: str, error: str | None) -> None:
    made, _ = run(answers, Load(count=1), kind)
    assert made.outcomes[0].error == error
    assert made.outcomes[0].failed == (error is not None)


@pytest.mark.parametrize(("size", "error"), [(0, "no_sound"), (480, None)])
def test_speech_without_a_sample_is_an_error(size: int, error: str | None) -> None:
    async def speaks(_service: Service, _path: str, _body: object, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode() + b"\0" * size)

    made, _ = run(speaks, Load(count=1), "tts")
    assert made.outcomes[0].error == error


def test_nonsense_in_a_stream_is_named() -> None:
    async def nonsense(_service: Service, _path: str, _body: object, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\ndata: {nono}\n\n")

    made, _ = run(nonsense, Load(count=1))
    assert made.outcomes[0].error == "broken_response"


def test_nobody_there_is_named() -> None:
    async def main() -> Run:
        async with serving(answers) as (_, client):
            address = client.address
        return await Generator(Client(address), work(), Load(count=2)).run()

    made = asyncio.run(main())
    assert [outcome.error for outcome in made.outcomes] == ["ConnectionRefusedError"] * 2
    assert report_of(made).summary.by_status == {"none": 2}


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([(Kind.TEXT, 200, None)], 0),
        ([(Kind.TEXT, 200, None), (Kind.TEXT, 429, "queue_full")], 0),
        ([(Kind.TEXT, 429, "queue_full")], 1),
        ([(Kind.TEXT, 200, None), (Kind.TEXT, 400, "invalid_request")], 0),
        ([(Kind.TEXT, 200, None), (Kind.IMAGE, 400, "invalid_request")], 1),
        ([(Kind.TEXT, 200, None), (Kind.TEXT, 500, "internal_error")], 1),
        ([], 1),
    ],
)
def test_the_exit_code_says_whether_the_service_did_its_part(outcomes: list[Any], code: int) -> None:
    made = [Outcome(n, kind, 0.0, 0.0, 1.0, status, error) for n, (kind, status, error) in enumerate(outcomes)]
    assert report_of(Run(made, 1.0)).exit_code == code


def test_ctrl_c_gives_what_there_is() -> None:
    async def then_interrupt(service: Service, _path: str, _body: object, writer: asyncio.StreamWriter) -> None:
        if len(service.asked) <= 3:
            stream(writer, text_events())
            return
        os.kill(os.getpid(), signal.SIGINT)
        await service.go.wait()

    made, _ = run(then_interrupt, Load(concurrency=1, count=100))
    report = report_of(made)
    assert len(made.outcomes) == 3
    assert (made.interrupted, made.unfinished, report.exit_code) == (True, 1, 130)
    assert "interrupted: 1 requests" in printed(report)


# --------------------------------------------------------------------------------------------- before a run


async def models(_service: Service, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    if path == "/v1/models":
        page(writer, MODELS)
    elif path == "/ready":
        page(writer, {})
    else:
        words = len(body["messages"][0]["content"].split())
        stream(writer, text_events(1, prompt=10 + 3 * words))


def prepared(chosen: dict[Kind, str], kinds: list[Kind], reply: Reply = models) -> dict[Kind, str]:
    async def main() -> dict[Kind, str]:
        async with serving(reply) as (_, client):
            return await choose_models(client, kinds, chosen, 0.0)

    return asyncio.run(main())


def test_a_model_that_can_is_found_and_one_that_is_named_is_used() -> None:
    assert prepared({}, [Kind.TEXT]) == {Kind.TEXT: "chat"}
    assert prepared({Kind.TEXT: "all", Kind.IMAGE: "all"}, [Kind.TEXT, Kind.IMAGE]) == {
        Kind.TEXT: "all",
        Kind.IMAGE: "all",
    }
    with pytest.raises(InvalidRequestError, match="lists image as output; name one with --model image=NAME"):
        prepared({}, [Kind.IMAGE])
    with pytest.raises(InvalidRequestError, match="no model 'other'; models: chat, all"):
        prepared({Kind.TEXT: "other"}, [Kind.TEXT])


def test_what_the_service_says_against_us_is_passed_on() -> None:
    async def locked(_service: Service, _path: str, _body: object, writer: asyncio.StreamWriter) -> None:
        page(writer, {"error": {"message": "the key is not known"}}, 401)

    with pytest.raises(InvalidRequestError, match="status 401: the key is not known"):
        prepared({}, [Kind.TEXT], locked)

    async def refusing(service: Service, _path: str, _body: object, writer: asyncio.StreamWriter) -> None:
        page(writer, {"error": {"message": "max_tokens is too large", "code": "prompt_too_long"}}, 400)

    async def main() -> None:
        async with serving(refusing) as (_, client):
            await Generator(client, work(), Load()).warm_up(1)

    with pytest.raises(InvalidRequestError, match=r"status 400, prompt_too_long.*max_tokens is too large"):
        asyncio.run(main())


def test_a_service_that_still_loads_is_waited_for() -> None:
    async def loading(service: Service, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        asked = [asked for asked, _ in service.asked]
        if path == "/ready" and asked.count("/ready") == 1:
            page(writer, {"status": "loading"}, 503)
        elif asked.count("/ready") == 1:
            page(writer, {"data": []})  # it has no models yet
        else:
            await models(service, path, body, writer)

    async def main() -> dict[Kind, str]:
        async with serving(loading) as (_, client):
            return await choose_models(client, [Kind.TEXT], {}, 30.0)

    assert asyncio.run(main()) == {Kind.TEXT: "chat"}


def test_prompts_are_as_long_as_asked_in_the_model_s_tokens() -> None:
    async def main() -> tuple[Workload, Workload]:
        async with serving(models) as (_, client):
            counted = await calibrate(client, work(), Load())
        async with serving(troubled) as (_, client):
            return counted, await calibrate(client, work(), Load())

    counted, uncounted = asyncio.run(main())
    assert (counted.tokens_per_word, counted.template_tokens) == (3.0, 10.0)
    assert uncounted.tokens_per_word == 1.0  # the service refused to count: a word is a token


# --------------------------------------------------------------------------------------------------- report


def spoken(number: int, late: float) -> Outcome:
    made = Outcome(number, Kind.SPEECH, 0.0, 0.0, 3.0, 200, token_times=[0.1, 0.2, 0.4], text_tokens=3)
    made.audio_chunks, made.audio_seconds = [(0.5, 100), (1.6 + late, 100)], 2.0
    return made


def test_the_figures_of_speech() -> None:
    broken = spoken(2, 9.0)
    broken.error = "broken_response"
    summary = report_of(Run([spoken(0, 0.0), spoken(1, 0.5), broken], 3.0)).summary
    assert summary.stutter is not None
    assert summary.stutter.underrun_seconds == pytest.approx(0.5)
    assert summary.stutter.underrun_share == pytest.approx(0.125)
    assert summary.stutter.requests_share == 0.5
    assert summary.rtf_overall == pytest.approx(2.1 / 4.0)
    assert summary.throughput["audio_seconds"] == pytest.approx(4.0 / 3.0)
    assert summary.throughput["output_tokens"] == pytest.approx(2.0)


def test_a_report_survives_its_file_and_holds_no_key(tmp_path: Path) -> None:
    made = Run([spoken(0, 0.5), Outcome(1, Kind.TEXT, 0.0, 0.1, 2.0, 429, "queue_full")], 3.0, 0.1)
    report = report_of(made)
    file = tmp_path / "r.json"
    file.write_text(report.dumps(0.1))
    value = read_report(file)
    assert value == json.loads(json.dumps(report.to_json(0.1)))
    assert value["schema"] == SCHEMA
    assert [row["kind"] for row in value["requests"]] == ["speech", "text"]
    assert value["requests"][0]["underrun_seconds"] == pytest.approx(0.5)
    assert value["kinds"]["speech"]["spreads"]["ttfa"]["p50"] == pytest.approx(0.5)
    assert {"date", "omnistage", "python", "cpu", "command"} <= set(value["environment"])
    assert redact_key(["x", "--api-key", "secret", "--api-key=secret", "--out", "y"]) == [
        "x",
        "--api-key",
        "***",
        "--api-key=***",
        "--out",
        "y",
    ]


def test_every_gap_can_be_found_again_in_the_report() -> None:
    made = [spoken(0, 0.5), spoken(1, 0.0)]
    made[1].sent = -0.25
    value = json.loads(report_of(Run(made, 3.0)).dumps(0.1))
    rows, found = value["requests"], value["summary"]["spreads"]
    pairs = {"token_gap": [pairwise(row["token_times"]) for row in rows]}
    pairs["sound_gap"] = [pairwise(moment for moment, _ in row["sounds"]) for row in rows]
    for name, gaps in pairs.items():
        again = Spread.of([later - earlier for own in gaps for earlier, later in own])
        assert again is not None
        assert asdict(again) == pytest.approx(found[name], abs=1e-5)
    assert [row["ttft"] for row in rows] == pytest.approx([row["token_times"][0] for row in rows], abs=1e-5)
    assert [sum(size for _, size in row["sounds"]) for row in rows] == [200, 200]
    text = report_of(Run(made, 3.0)).dumps(0.1)
    assert sum('"token_times"' in line for line in text.splitlines()) == 2  # a line for each request
    assert json.loads(report_of(Run()).dumps(0.1))["requests"] == []


def test_an_older_report_is_set_beside_a_newer_one() -> None:
    old = report_of(Run([spoken(0, 0.0)], 3.0), seed=1).to_json(0.1)
    console = Console(file=io.StringIO(), width=120)
    compare(json.loads(json.dumps(old)), report_of(Run([spoken(0, 1.0)], 6.0), seed=2), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    gaps = next(line for line in text.splitlines() if "gap between audio chunks, p50" in line)
    assert gaps.split()[-1] == "1.91"  # 2.1 s after 1.1 s
    assert next(line for line in text.splitlines() if "requests/s" in line).split()[-1] == "0.50"
    assert "differ in: seed" in text


@pytest.mark.parametrize("content", ["nonsense", "{}", '{"schema": "omnistage.bench_serve/0"}', "[]"])
def test_what_is_no_report_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(content)
    with pytest.raises(InvalidRequestError) as raised:
        read_report(tmp_path / "old.json")
    assert raised.value.param == "--compare"


def test_a_generator_that_is_late_says_so() -> None:
    def spread(p99: float) -> Spread:
        return Spread(10, 0.0, 0.0, 0.0, p99, p99)

    assert GeneratorLoad(spread(0.01), 0.1).warnings() == []
    assert "did not keep up" in GeneratorLoad(spread(0.2), 0.1).warnings()[0]
    assert "used 95% of a core" in GeneratorLoad(None, 0.95).warnings()[0]
    late = Run([Outcome(0, Kind.TEXT, due=0.0, sent=0.2, ended=1.0, status=200)], 1.0)
    assert "warning: 1 of 100" in printed(report_of(late, Load(rate=1.0)))
    assert report_of(late, Load(concurrency=1)).generator.lag is None  # a worker sends when it is free


def test_a_plot_is_a_picture_and_its_absence_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Run([spoken(0, 0.0), Outcome(1, Kind.IMAGE, 0.0, 0.0, 1.0, 200, pictures=1)], 3.0)
    plot(report_of(made), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match="pip install matplotlib"):
        plot(report_of(made), tmp_path / "q.png")

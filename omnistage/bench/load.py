"""Sends the requests: one after another by a number of workers, or at their own times, whoever is still waiting."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace

from omnistage.bench.client import Address, BrokenAnswerError, Client, EventReader
from omnistage.bench.measure import PCM_BYTES, Outcome, count_event, error_of
from omnistage.bench.workload import Kind, Request, Workload, arrivals
from omnistage.core.errors import InvalidRequestError

_PAUSE_SECONDS = 0.2
_LONGEST_RETRY = 5.0
_PROBES = (16, 80)
Notice = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much load there is. `rate` requests a second, or `concurrency` workers; `count` requests or `seconds`."""

    rate: float | None = None
    concurrency: int = 1
    count: int | None = None
    seconds: float | None = None
    timeout: float = 600.0
    sample_rate: int = 24_000


@dataclass(slots=True)
class Run:
    """What a run gave."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    """From the first request to the last end."""
    cpu_seconds: float = 0.0
    """Of this process, meanwhile."""
    interrupted: bool = False
    """Someone pressed Ctrl-C."""
    unfinished: int = 0
    """Requests that were cut off by that."""


class Generator:
    """The process that makes the load. `notice` is told of every outcome."""

    def __init__(self, client: Client, workload: Workload, plan: Plan, notice: Notice | None = None) -> None:
        self._client = client
        self._workload = workload
        self._plan = plan
        self._notice = notice
        self._start = 0.0
        self._run = Run()

    async def warm_up(self, count: int) -> None:
        """Send `count` requests of each kind that nobody measures. Raises what the service says against them."""
        for kind in self._workload.mix:
            for number in range(count):
                outcome = await self._one(-1 - number, self._workload.of_kind(kind, -1 - number), self.now())
                if not outcome.ok and not outcome.refused:
                    said = f": {outcome.message}" if outcome.message else ""
                    status = f"status {outcome.status}, " if outcome.status is not None else ""
                    raise InvalidRequestError(f"a {kind} request to warm up failed ({status}{outcome.error}){said}")

    async def run(self) -> Run:
        """Send everything. Ctrl-C ends it early: what there is then is what it gives."""
        self._run = Run()
        cpu, self._start = time.process_time(), time.perf_counter()
        load = asyncio.ensure_future(self._open_loop() if self._plan.rate is not None else self._closed_loop())
        with _on_interrupt(load.cancel):
            await asyncio.wait({load})
        run = self._run
        run.interrupted = load.cancelled()
        if not run.interrupted:
            load.result()
        run.cpu_seconds = time.process_time() - cpu
        if run.outcomes:
            run.seconds = max(o.ended for o in run.outcomes) - min(o.sent for o in run.outcomes)
        run.outcomes.sort(key=lambda outcome: outcome.number)
        return run

    def now(self) -> float:
        return time.perf_counter() - self._start

    def _numbers(self) -> Iterator[int]:
        """Which requests are still to be sent."""
        for number in itertools.count():
            if self._plan.count is not None and number >= self._plan.count:
                return
            if self._plan.seconds is not None and self.now() >= self._plan.seconds:
                return
            yield number

    async def _closed_loop(self) -> None:
        numbers = self._numbers()

        async def worker() -> None:
            for number in numbers:
                request = self._workload.request(number)
                outcome = await self._one(number, request, self.now())
                self._add(outcome)
                if outcome.refused:
                    # A client with manners: asking again at once would measure refusals only.
                    await asyncio.sleep(min(outcome.retry_after or 1.0, _LONGEST_RETRY))

        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.concurrency):
                group.create_task(worker())

    async def _open_loop(self) -> None:
        async def at(number: int, request: Request, due: float) -> None:
            self._add(await self._one(number, request, due))

        async with asyncio.TaskGroup() as group:
            moments = arrivals(self._plan.rate or 1.0, self._workload.seed)
            for number, due in zip(self._numbers(), moments, strict=False):
                if self._plan.seconds is not None and due >= self._plan.seconds:
                    return
                request = self._workload.request(number)  # made while there is time
                await asyncio.sleep(due - self.now())
                group.create_task(at(number, request, due))

    def _add(self, outcome: Outcome) -> None:
        self._run.outcomes.append(outcome)
        if self._notice is not None:
            self._notice(outcome)

    async def _one(self, number: int, request: Request, due: float) -> Outcome:
        outcome = Outcome(number, request.kind, due, self.now())
        try:
            async with asyncio.timeout(self._plan.timeout):
                await self._exchange(request, outcome)
        except TimeoutError:
            outcome.error = "timeout"
        except BrokenAnswerError as error:
            outcome.error = "broken_answer"
            outcome.message = str(error)
        except OSError as error:
            outcome.error = type(error).__name__
            outcome.message = str(error) or None
        except asyncio.CancelledError:
            self._run.unfinished += 1
            raise
        outcome.ended = self.now()
        return outcome

    async def _exchange(self, request: Request, outcome: Outcome) -> None:
        async with self._client.ask(request.path, request.body) as answer:
            outcome.status = answer.status
            if answer.status >= 400:
                outcome.error, outcome.message = error_of(_json(await answer.read()), f"status_{answer.status}")
                with contextlib.suppress(KeyError, ValueError):
                    outcome.retry_after = float(answer.headers["retry-after"])
                return
            if request.kind is Kind.TTS:
                async for moment, piece in answer.pieces():
                    outcome.sounds.append((moment - self._start, len(piece)))
            else:
                await self._read_events(answer.pieces(), outcome)
        if outcome.sounds and not outcome.audio_seconds:
            outcome.audio_seconds = sum(size for _, size in outcome.sounds) / (PCM_BYTES * self._plan.sample_rate)
        if outcome.ok:
            outcome.error = _missing(outcome)

    async def _read_events(self, pieces: AsyncIterator[tuple[float, bytes]], outcome: Outcome) -> None:
        reader = EventReader()
        async for moment, piece in pieces:
            try:
                for event in reader.push(piece):
                    count_event(outcome, moment - self._start, event)
            except (ValueError, AttributeError, TypeError) as error:
                raise BrokenAnswerError("an event is not what OpenAI's API says") from error
        outcome.whole = outcome.whole or reader.done
        if outcome.ok and outcome.kind is not Kind.IMAGE and not outcome.whole:
            raise BrokenAnswerError("the stream ended with neither a finish_reason nor [DONE]")


def _missing(outcome: Outcome) -> str | None:
    """What was asked for and never came."""
    if outcome.kind is Kind.IMAGE and not outcome.pictures:
        return "no_picture"  # each picture says itself that it is whole
    if outcome.kind in (Kind.SPEECH, Kind.TTS) and not outcome.sounds:
        return "no_sound"
    return None


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return None


@contextlib.contextmanager
def _on_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, stop)
    except (NotImplementedError, RuntimeError, ValueError):
        yield  # Windows, or a thread that is not the main one: Ctrl-C is for someone else to handle
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


# ----------------------------------------------------------------------------------------------- before a run


async def models_for(client: Client, kinds: list[Kind], chosen: dict[Kind, str], patience: float) -> dict[Kind, str]:
    """A model for each kind: the chosen one, or the first that gives what the kind needs. Raises what to change."""
    described = await _models(client, patience)
    found: dict[Kind, str] = {}
    for kind in kinds:
        if kind in chosen:
            if described and chosen[kind] not in described:
                known = ", ".join(described)
                raise InvalidRequestError(f"there is no model {chosen[kind]!r}; models: {known}", param="--model")
            found[kind] = chosen[kind]
            continue
        able = [name for name, gives in described.items() if kind.modality in gives]
        if not able:
            raise InvalidRequestError(
                f"no model of the service says that it gives {kind.modality}; name one with --model {kind}=NAME, "
                f"or take {kind} out of --mix",
                param="--model",
            )
        found[kind] = able[0]
    return found


async def _models(client: Client, patience: float) -> dict[str, list[str]]:
    """What each model gives; a service that is still loading is waited for."""
    give_up = time.monotonic() + patience
    while True:
        try:
            ready, _ = await client.get("/ready")
            status, body = await client.get("/v1/models")
        except (OSError, BrokenAnswerError) as error:
            where = client.address.netloc
            raise InvalidRequestError(f"no answer from {where} ({error}); is the service up?", param="URL") from error
        if ready != 503 or time.monotonic() > give_up:
            break
        await asyncio.sleep(_PAUSE_SECONDS)
    if status != 200:
        _, message = error_of(body, "")
        raise InvalidRequestError(f"/v1/models answered {status}: {message or 'no reason given'}", param="URL")
    try:
        return {str(m["id"]): list((m.get("modalities") or {}).get("output") or ["text"]) for m in body["data"]}
    except (TypeError, KeyError, AttributeError) as error:
        raise InvalidRequestError("/v1/models does not list models as OpenAI's API does", param="URL") from error


async def calibrated(client: Client, workload: Workload, plan: Plan) -> Workload:
    """The workload with prompts of the asked lengths: how many tokens a word is, the service's usage tells."""
    kind = next((kind for kind in (Kind.TEXT, Kind.SPEECH) if kind in workload.mix), None)
    if kind is None or workload.lines:
        return workload
    generator = Generator(client, workload, plan)
    counts = []
    for words in _PROBES:
        outcome = await generator._one(-1, workload.probe(kind, words), 0.0)
        if not outcome.ok or not outcome.prompt_tokens:
            return workload  # a service that does not count: a word is then taken for a token
        counts.append(outcome.prompt_tokens)
    per_word = (counts[1] - counts[0]) / (_PROBES[1] - _PROBES[0])
    if per_word <= 0:
        return workload
    return replace(workload, tokens_per_word=per_word, tokens_around=max(0.0, counts[0] - per_word * _PROBES[0]))


def connect(url: str, api_key: str | None) -> Client:
    return Client(Address.parse(url), api_key)

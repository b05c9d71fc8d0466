"""Sends the requests: one after another by a number of workers, or at given times whatever is still running."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace

from omnistage.bench.measure import PCM_BYTES, Outcome, count_event, error_of
from omnistage.bench.workload import Kind, Request, Workload, arrivals
from omnistage.core.errors import InvalidRequestError
from omnistage.core.http_client import Address, BrokenResponseError, Client, EventReader

_POLL_SECONDS = 0.2
_MAX_RETRY_SECONDS = 5.0
_PROBE_WORDS = (16, 80)
OnOutcome = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class Load:
    """`rate` requests per second, or `concurrency` workers; for `count` requests or `seconds`."""

    rate: float | None = None
    concurrency: int = 1
    count: int | None = None
    seconds: float | None = None
    timeout: float = 600.0
    sample_rate: int = 24_000

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s" if self.rate is not None else f"{self.concurrency} at a time"


@dataclass(slots=True)
class Run:
    """The outcomes of a run."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    """From sending the first request to the end of the last."""
    cpu_seconds: float = 0.0
    """CPU time of this process."""
    interrupted: bool = False
    """By Ctrl-C."""
    unfinished: int = 0
    """Requests that this cancelled."""


class Generator:
    """Sends the load. `on_outcome` is called with every outcome."""

    def __init__(self, client: Client, workload: Workload, load: Load, on_outcome: OnOutcome | None = None) -> None:
        self._client = client
        self._workload = workload
        self._load = load
        self._on_outcome = on_outcome
        self._start = 0.0
        self._run = Run()

    async def warm_up(self, count: int) -> None:
        """Send `count` requests of each kind that are not measured. Raises if one of them fails."""
        for kind in self._workload.mix:
            for number in range(count):
                outcome = await self.send(-1 - number, self._workload.of_kind(kind, -1 - number), self.now())
                if not outcome.ok and not outcome.refused:
                    message = f": {outcome.message}" if outcome.message else ""
                    status = f"status {outcome.status}, " if outcome.status is not None else ""
                    raise InvalidRequestError(f"a {kind} warm-up request failed ({status}{outcome.error}){message}")

    async def run(self) -> Run:
        """Send everything. Ctrl-C ends it early, with the outcomes so far."""
        self._run = Run()
        cpu, self._start = time.process_time(), time.perf_counter()
        task = asyncio.ensure_future(self._open_loop() if self._load.rate is not None else self._closed_loop())
        with _on_interrupt(task.cancel):
            await asyncio.wait({task})
        run = self._run
        run.interrupted = task.cancelled()
        if not run.interrupted:
            task.result()
        run.cpu_seconds = time.process_time() - cpu
        if run.outcomes:
            run.seconds = max(o.ended for o in run.outcomes) - min(o.sent for o in run.outcomes)
        run.outcomes.sort(key=lambda outcome: outcome.number)
        return run

    def now(self) -> float:
        return time.perf_counter() - self._start

    def _numbers(self) -> Iterator[int]:
        """Numbers of the requests to send."""
        for number in itertools.count():
            if self._load.count is not None and number >= self._load.count:
                return
            if self._load.seconds is not None and self.now() >= self._load.seconds:
                return
            yield number

    async def _closed_loop(self) -> None:
        numbers = self._numbers()

        async def worker() -> None:
            for number in numbers:
                request = self._workload.request(number)
                outcome = await self.send(number, request, self.now())
                self._add(outcome)
                if outcome.refused:
                    # As a client should: retrying at once would measure refusals only.
                    await asyncio.sleep(min(outcome.retry_after or 1.0, _MAX_RETRY_SECONDS))

        async with asyncio.TaskGroup() as group:
            for _ in range(self._load.concurrency):
                group.create_task(worker())

    async def _open_loop(self) -> None:
        async def at(number: int, request: Request, due: float) -> None:
            self._add(await self.send(number, request, due))

        async with asyncio.TaskGroup() as group:
            times = arrivals(self._load.rate or 1.0, self._workload.seed)
            for number, due in zip(self._numbers(), times, strict=False):
                if self._load.seconds is not None and due >= self._load.seconds:
                    return
                request = self._workload.request(number)  # before it is due
                await asyncio.sleep(due - self.now())
                group.create_task(at(number, request, due))

    def _add(self, outcome: Outcome) -> None:
        self._run.outcomes.append(outcome)
        if self._on_outcome is not None:
            self._on_outcome(outcome)

    async def send(self, number: int, request: Request, due: float) -> Outcome:
        """Send one request and wait for its end, whatever that is."""
        outcome = Outcome(number, request.kind, due, self.now())
        try:
            async with asyncio.timeout(self._load.timeout):
                await self._exchange(request, outcome)
        except TimeoutError:
            outcome.error = "timeout"
        except BrokenResponseError as error:
            outcome.error = "broken_response"
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
        async with self._client.request(request.path, request.body) as response:
            outcome.status = response.status
            if response.status >= 400:
                outcome.error, outcome.message = error_of(await response.read_json(), f"status_{response.status}")
                with contextlib.suppress(KeyError, ValueError):
                    outcome.retry_after = float(response.headers["retry-after"])
                return
            if request.kind is Kind.TTS:
                async for arrival, data in response.stream():
                    outcome.audio_chunks.append((arrival - self._start, len(data)))
            else:
                await self._read_events(response.stream(), outcome)
        if outcome.audio_chunks and not outcome.audio_seconds:
            outcome.audio_seconds = sum(size for _, size in outcome.audio_chunks) / (PCM_BYTES * self._load.sample_rate)
        if outcome.ok:
            outcome.error = _missing(outcome)

    async def _read_events(self, body: AsyncIterator[tuple[float, bytes]], outcome: Outcome) -> None:
        reader = EventReader()
        async for arrival, data in body:
            try:
                for event in reader.push(data):
                    count_event(outcome, arrival - self._start, event)
            except (ValueError, AttributeError, TypeError) as error:
                raise BrokenResponseError("an event does not follow OpenAI's API") from error
        outcome.complete = outcome.complete or reader.done
        if outcome.ok and outcome.kind is not Kind.IMAGE and not outcome.complete:
            raise BrokenResponseError("the stream ended with neither a finish_reason nor [DONE]")


def _missing(outcome: Outcome) -> str | None:
    """An error where the response lacks what was requested."""
    if outcome.kind is Kind.IMAGE and not outcome.pictures:
        return "no_picture"  # an event marks each picture as complete
    if outcome.kind in (Kind.SPEECH, Kind.TTS) and not outcome.audio_chunks:
        return "no_sound"
    return None


@contextlib.contextmanager
def _on_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, stop)
    except (NotImplementedError, RuntimeError, ValueError):
        yield  # Windows, or a thread that is not the main one: Ctrl-C is handled elsewhere
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


# ----------------------------------------------------------------------------------------------- before a run


async def choose_models(client: Client, kinds: list[Kind], names: dict[Kind, str], timeout: float) -> dict[Kind, str]:
    """A model for each kind: the one in `names`, or the first with the modality that the kind needs."""
    modalities = await _output_modalities(client, timeout)
    models: dict[Kind, str] = {}
    for kind in kinds:
        if kind in names:
            if modalities and names[kind] not in modalities:
                choices = ", ".join(modalities)
                raise InvalidRequestError(f"there is no model {names[kind]!r}; models: {choices}", param="--model")
            models[kind] = names[kind]
            continue
        fitting = [name for name, outputs in modalities.items() if kind.modality in outputs]
        if not fitting:
            raise InvalidRequestError(
                f"no model of the service lists {kind.modality} as output; name one with --model {kind}=NAME, "
                f"or remove {kind} from --mix",
                param="--model",
            )
        models[kind] = fitting[0]
    return models


async def _output_modalities(client: Client, timeout: float) -> dict[str, list[str]]:
    """The output modalities of each model, when the service has loaded them."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            ready, _ = await client.get("/ready")
            status, body = await client.get("/v1/models")
        except (OSError, BrokenResponseError) as error:
            where = client.address.netloc
            raise InvalidRequestError(
                f"no response from {where} ({error}); start the service or check the address", param="URL"
            ) from error
        if ready != 503 or time.monotonic() > deadline:
            break
        await asyncio.sleep(_POLL_SECONDS)
    if status != 200:
        _, message = error_of(body, "")
        raise InvalidRequestError(f"/v1/models responded with status {status}: {message or 'no message'}", param="URL")
    try:
        return {str(m["id"]): list((m.get("modalities") or {}).get("output") or ["text"]) for m in body["data"]}
    except (TypeError, KeyError, AttributeError) as error:
        raise InvalidRequestError("/v1/models does not list models as OpenAI's API does", param="URL") from error


async def calibrate(client: Client, workload: Workload, load: Load) -> Workload:
    """The workload with prompts of the right lengths in tokens, from the usage that the service reports for two."""
    kind = next((kind for kind in (Kind.TEXT, Kind.SPEECH) if kind in workload.mix), None)
    if kind is None or workload.prompts:
        return workload
    generator = Generator(client, workload, load)
    counts = []
    for words in _PROBE_WORDS:
        outcome = await generator.send(-1, workload.probe(kind, words), 0.0)
        if not outcome.ok or not outcome.prompt_tokens:
            return workload  # without usage a word counts as a token
        counts.append(outcome.prompt_tokens)
    per_word = (counts[1] - counts[0]) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
    if per_word <= 0:
        return workload
    return replace(workload, tokens_per_word=per_word, template_tokens=max(0.0, counts[0] - per_word * _PROBE_WORDS[0]))


def connect(url: str, api_key: str | None) -> Client:
    return Client(Address.parse(url), api_key)

"""The remote stage: requests wait for their turn, are sent to the server, and their streams become chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from omnistage.config.remote import RemoteStageConfig
from omnistage.core.errors import ConfigError, InvalidRequestError, OmniError, PromptTooLongError, StageError
from omnistage.core.failures import stage_failure
from omnistage.core.http_client import BrokenResponseError
from omnistage.core.params import SamplingParams
from omnistage.core.stage import StageStats
from omnistage.core.types import ARInput, RequestInfo, StageChunk, StageInput, TokenChunk
from omnistage.engines.ageing import AGEING_STEPS
from omnistage.engines.diffusion.request_queue import RequestQueue
from omnistage.engines.remote.connection import AWAY, RemoteConnection
from omnistage.engines.remote.events import StreamReader
from omnistage.engines.remote.failures import broken_response, unreachable
from omnistage.engines.remote.wire import Body, RemotePayload, check_params, check_payload, request_body
from omnistage.engines.stage import BatchedStage

Progress = Callable[[str, float], None]


@dataclass(slots=True, eq=False)
class _Call:
    """One request on its way to the server and back."""

    path: str
    body: Body
    reader: StreamReader
    response: Future[None] | None = None
    """None while it waits."""


class RemoteStage(BatchedStage[RemotePayload, SamplingParams]):
    """A text stage on a server.

    Tokens arrive in the connection's thread, which leaves them in `_inbox` and wakes the stage's loop.
    """

    params_type = SamplingParams
    uses_torch = False

    def __init__(self, name: str, config: RemoteStageConfig, progress: Progress | None = None) -> None:
        super().__init__(name)
        try:
            check_params(config.params, config)
        except InvalidRequestError as error:
            raise ConfigError(error.message, param=f"pipeline.stages.{name}.params.{error.param}") from error
        self._config = config
        self._waiting: RequestQueue[_Call] = RequestQueue(AGEING_STEPS)
        self._calls: dict[str, _Call] = {}
        self._inbox: deque[tuple[str, _Call, object]] = deque()
        """Request, call, and an event of its stream; None at the end of it, else the error that ended it."""
        self._tokens = 0
        self._failed = 0
        self._connection = RemoteConnection(name, config, self._availability_changed)
        try:
            self._connection.start(progress)
        except BaseException:
            self.close()
            raise

    def _availability_changed(self) -> None:
        self.unavailable = AWAY if self._connection.away else None
        if self.wake is not None:
            self.wake()

    # ------------------------------------------------------------------------------------------- requests

    def _typed(self, stage_input: StageInput) -> tuple[SamplingParams, RemotePayload]:
        payload = stage_input.payload
        if not isinstance(payload, RemotePayload):
            raise StageError(f"stage {self.name!r} takes ARInput or ChatInput, not {type(payload).__name__}")
        return self._typed_params(stage_input.params), payload

    def _check_params(self, params: SamplingParams) -> None:
        check_params(params, self._config)

    def _check(self, info: RequestInfo, params: SamplingParams, payload: RemotePayload) -> None:
        check_payload(payload)
        longest = self._connection.max_length
        if isinstance(payload, ARInput) and longest is not None and len(payload.token_ids) >= longest:
            raise PromptTooLongError(
                f"the prompt has {len(payload.token_ids)} tokens; the server of stage {self.name!r} holds {longest} "
                "with at least one for the answer: shorten it",
                param="prompt",
            )

    def _add(self, stage_input: StageInput, params: SamplingParams, payload: RemotePayload) -> None:
        request_id = stage_input.info.request_id
        if self._connection.away:
            raise unreachable(self.name)
        path, body = request_body(payload, params, self._config, self._connection.max_length)
        prompt = payload if isinstance(payload, ARInput) else None
        call = _Call(path, body, StreamReader(request_id, self.name, prompt, params))
        self._calls[request_id] = call
        if prompt is not None and prompt.num_tokens == 0:
            self._inbox.append((request_id, call, None))  # nothing is to be generated, and nobody need be asked
        else:
            self._waiting.put(request_id, call, stage_input.info.priority)

    def _remove(self, request_id: str) -> None:
        call = self._calls.pop(request_id)
        if call.response is None:
            self._waiting.remove(request_id)
        else:
            call.response.cancel()  # closes the connection, which ends the server's work on it

    # ------------------------------------------------------------------------------------------- stepping

    @property
    def _running(self) -> int:
        return len(self._calls) - len(self._waiting)

    def has_work(self) -> bool:
        return bool(self._inbox) or (len(self._waiting) > 0 and self._running < self._config.budget.max_running)

    def step(self) -> list[StageChunk]:
        chunks: list[StageChunk] = []
        for _ in range(len(self._inbox)):
            request_id, call, event = self._inbox.popleft()
            if self._calls.get(request_id) is call:  # else it was aborted meanwhile
                chunks += self._take(request_id, call, event)
        free = self._config.budget.max_running - self._running
        for request_id, call in self._waiting.take(free, lambda _: None) if free > 0 else ():
            deliver = partial(self._deliver, request_id, call)
            call.response = self._connection.send(call.path, call.body, deliver)
            call.body = {}  # it has been sent
            chunks += self._mark_started([request_id])
        self._steps += 1
        return chunks

    def _deliver(self, request_id: str, call: _Call, event: object) -> None:
        """From the connection's thread."""
        self._inbox.append((request_id, call, event))
        if self.wake is not None:
            self.wake()

    def _take(self, request_id: str, call: _Call, event: object) -> list[StageChunk]:
        """The chunks of one event; the end of the request where it is the last, or the response is broken."""
        if isinstance(event, OmniError):
            return [self._fail_call(request_id, event)]
        try:
            chunks = list(call.reader.end() if event is None else call.reader.read(event))
        except BrokenResponseError:
            return [self._fail_call(request_id, broken_response(self.name))]
        except Exception as error:  # the boundary of one request: what breaks in it ends it alone
            return [self._fail_call(request_id, stage_failure(error, f"a response in stage {self.name!r}"))]
        for chunk in chunks:
            if isinstance(chunk.payload, TokenChunk):
                self._tokens += len(chunk.payload.token_ids) + chunk.payload.unlisted_tokens
        if event is None:
            self.abort(request_id)
        return chunks

    def _fail_call(self, request_id: str, error: OmniError) -> StageChunk:
        self._failed += 1
        return self._fail(request_id, error)

    # -------------------------------------------------------------------------------------------- insight

    def stats(self) -> StageStats:
        waiting = len(self._waiting)
        process = self._connection.process
        return StageStats(
            waiting=waiting,
            running=max(0, len(self._calls) - waiting),
            steps=self._steps,
            tokens=self._tokens,
            capacity=self._config.budget.max_running,
            extra={"remote_errors": self._failed, "server_restarts": process.restarts if process is not None else 0},
        )

    def close(self) -> None:
        self._connection.close()

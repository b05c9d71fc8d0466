"""The base of the stages: what all of them do with a request before and after their own schedule, run and emit."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from omnistage.core.errors import InvalidRequestError, OmniError, StageError
from omnistage.core.params import StageParams
from omnistage.core.stage import Stage
from omnistage.core.types import ChunkPayload, FinishReason, RequestInfo, StageChunk, StageFeed, StageInput

if TYPE_CHECKING:
    import torch

Payload = TypeVar("Payload")
Params = TypeVar("Params", bound=StageParams)


class BatchedStage(Stage, Generic[Payload, Params]):
    """A stage that runs many requests in batches.

    It checks what a request brings, knows which requests are in the stage and which have started, and ends them. A
    subclass names `payload_type` and `params_type`, keeps its own state in `_add` and `_remove`, and implements `step`.
    `isolate` (core/failures.py) runs a batch so that only what is at fault fails.
    """

    params_type: type[Params]
    payload_type: type[Payload]

    def __init__(self, name: str, device: torch.device | None = None, *, stream_priority: int = 0) -> None:
        """With a `device` the stage gets a `stream` there. Modules do without torch, so it is imported only then."""
        self.name = name
        if device is not None:
            from omnistage.engines.streams import DeviceStream

            self.stream = DeviceStream(device, priority=stream_priority)
        self._started: dict[str, bool] = {}
        """The requests in the stage; True for those that have run."""
        self._steps = 0

    # ------------------------------------------------------------------------------------------- requests

    def check(self, stage_input: StageInput) -> None:
        self._check(stage_input.info, *self._typed(stage_input))

    def check_params(self, params: StageParams) -> None:
        self._check_params(self._typed_params(params))

    def submit(self, stage_input: StageInput) -> None:
        info, (params, payload) = stage_input.info, self._typed(stage_input)
        if info.request_id in self._started:
            raise InvalidRequestError(
                f"request {info.request_id!r} is in stage {self.name!r} already", param="request_id"
            )
        payload = self._prepare(info, payload)
        self._check(info, params, payload)
        self._add(stage_input, params, payload)
        self._started[info.request_id] = False

    def feed(self, request_id: str, feed: StageFeed) -> None:
        if request_id in self._started:
            raise self._wrong_feed(feed)

    def abort(self, request_id: str) -> None:
        if self._started.pop(request_id, None) is not None:
            self._remove(request_id)

    def _typed(self, stage_input: StageInput) -> tuple[Params, Payload]:
        params, payload = self._typed_params(stage_input.params), stage_input.payload
        if not isinstance(payload, self.payload_type):  # a processor or bridge made it: no caller can be at fault
            raise StageError(f"stage {self.name!r} takes {self.payload_type.__name__}, not {type(payload).__name__}")
        return params, payload

    def _typed_params(self, params: StageParams) -> Params:
        if not isinstance(params, self.params_type):
            expected = self.params_type.__name__
            raise InvalidRequestError(f"stage {self.name!r} takes {expected}, not {type(params).__name__}")
        return params

    def _wrong_feed(self, feed: StageFeed) -> StageError:
        return StageError(f"stage {self.name!r} cannot be fed {type(feed).__name__} after its first input")

    # ------------------------------------------------------------------------------- what a subclass provides

    def _check(self, info: RequestInfo, params: Params, payload: Payload) -> None:
        """Raise an `OmniError` for input that can never run. Thread-safe, changes nothing."""

    def _check_params(self, params: Params) -> None:
        """The same for parameters alone. Always called before `submit`, which may rely on it."""

    def _prepare(self, info: RequestInfo, payload: Payload) -> Payload:
        """Complete an input that came over a bridge, before it is checked."""
        return payload

    @abstractmethod
    def _add(self, stage_input: StageInput, params: Params, payload: Payload) -> None:
        """Take a request that was checked. What raises here must leave nothing behind."""

    @abstractmethod
    def _remove(self, request_id: str) -> None:
        """Forget a request that is in the stage."""

    # --------------------------------------------------------------------------------------------- chunks

    def _mark_started(self, request_ids: Iterable[str]) -> list[StageChunk]:
        """The markers of those that run for the first time."""
        chunks = []
        for request_id in request_ids:
            if not self._started.get(request_id, True):
                self._started[request_id] = True
                chunks.append(StageChunk(request_id, self.name))
        return chunks

    def _finish(self, request_id: str, payload: ChunkPayload | None = None) -> StageChunk:
        """Forget a request that is done; its last chunk."""
        self.abort(request_id)
        return StageChunk(request_id, self.name, payload, finish=FinishReason.STOP)

    def _fail(self, request_id: str, error: OmniError) -> StageChunk:
        """Forget a request that failed; its last chunk."""
        self.abort(request_id)
        return StageChunk(request_id, self.name, finish=FinishReason.ERROR, error=error)

"""Running requests, as the routes use them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol, Self, TypeVar

from omnistage.core.errors import InvalidRequestError, StageError
from omnistage.core.params import SamplingParams
from omnistage.core.types import Modality
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk, Usage
from omnistage.pipeline.stream import OutputStream
from omnistage.server.http.json_body import run_json
from omnistage.server.http.sse import LastPiece, event
from omnistage.server.openai.response_models import TokenUsage, usage_of
from omnistage.server.openai.tools import ExactSchema, check_schemas
from omnistage.server.service import ServedModel

Running = AbstractAsyncContextManager[OutputStream]


Writer = Callable[[OutputChunk], bytes]
"""The events that an item makes, as they are sent."""


def writes(events: Callable[[OutputChunk], Sequence[Mapping[str, object]]], *, named: bool = False) -> Writer:
    """The writer of `events`. `named`: each by its type."""
    return lambda item: b"".join([event(data, str(data["type"]) if named else None) for data in events(item)])


async def events_of(
    running: Running, writer: Callable[[OutputStream], Writer], *, last: bytes = b""
) -> AsyncGenerator[bytes]:
    """A request as server-sent events, by the writer for its stream. Raises an error that comes before the first."""
    piece, begun = b"", False
    async with running as stream:
        write = writer(stream)
        while items := await stream.take():
            if (final := items[-1].final) is not None and final.error is not None and not begun:
                raise final.error  # it can still have its HTTP status
            piece = b"".join(map(write, items))
            if final is not None:
                break
            if piece:
                begun = True
                yield piece
    yield LastPiece(piece + last)


class RunningUsage:
    """Usage up to here, of requests that still run: their prompts, and the tokens of their text."""

    def __init__(self, streams: Sequence[OutputStream]) -> None:
        self._streams = streams
        self._usage = Usage()

    def add(self, tokens: int) -> TokenUsage:
        """What has been used after so many more tokens."""
        self._usage.completion_tokens += tokens
        self._usage.prompt_tokens = sum(stream.prompt_tokens for stream in self._streams)
        return usage_of(self._usage)


class Nameless(Protocol):
    """A request that may leave out its model's name."""

    @property
    def model(self) -> str | None: ...

    def model_copy(self, *, update: Mapping[str, object] | None = None, deep: bool = False) -> Self: ...


NamedT = TypeVar("NamedT", bound=Nameless)


def with_model_name(body: NamedT, model: ServedModel) -> NamedT:
    """The request, with the name of its model also where it left it out."""
    return body if body.model is not None else body.model_copy(update={"model": model.name})


async def require_enforceable(schemas: Sequence[ExactSchema], owner: str | None) -> None:
    """Raise `InvalidRequestError` for a schema that cannot be enforced; in a thread, as long patterns take a while."""
    if schemas:
        await run_json(partial(check_schemas, schemas), small=False, owner=owner)


async def final_output(running: Running) -> OmniRequestOutput:
    """Run a request to its end. Raises its error; a client that leaves meanwhile cancels this task."""
    async with running as stream:
        return await final_of(stream)


async def final_of(stream: OutputStream) -> OmniRequestOutput:
    """The output of a running request at its end. Raises its error."""
    async for item in stream:
        if item.final is not None:
            if item.final.error is not None:
                raise item.final.error
            return item.final
    raise StageError("the request ended without its last item")


def text_stage(model: ServedModel) -> str:
    """The stage that samples text. Raises for a model without one."""
    stage = model.stage_for_params(SamplingParams)
    if stage is None or Modality.TEXT not in model.omni.modalities:
        raise InvalidRequestError(
            "this model has no text output; use the images, videos or audio endpoint", param="model"
        )
    return stage

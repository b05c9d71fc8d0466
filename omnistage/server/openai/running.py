"""Running requests, as the routes use them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from omnistage.core.errors import InvalidRequestError, OmniError, StageError
from omnistage.core.params import SamplingParams
from omnistage.core.types import Modality
from omnistage.pipeline.outputs import OmniRequestOutput
from omnistage.pipeline.stream import OutputStream
from omnistage.server.service import ServedModel

Running = AbstractAsyncContextManager[OutputStream]
Rename = Callable[[str], str] | Mapping[str, str]
"""From the names that engines have for fields to those that clients know."""


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


def rename_param(error: OmniError, rename: Rename) -> OmniError:
    """The error, with its field named as the client knows it."""
    if error.param is not None and isinstance(rename, Mapping):
        head = error.param.partition(".")[0]
        error.param = rename.get(error.param) or rename.get(head) or error.param
    elif error.param is not None and not isinstance(rename, Mapping):
        error.param = rename(error.param)
    return error


@asynccontextmanager
async def renaming(running: Running, rename: Rename) -> AsyncIterator[OutputStream]:
    """A running request whose errors name fields as the client knows them."""
    try:
        async with running as stream:
            yield stream
    except OmniError as error:
        rename_param(error, rename)
        raise


def text_stage(model: ServedModel) -> str:
    """The stage that samples text. Raises for a model without one."""
    stage = model.stage_for_params(SamplingParams)
    if stage is None or Modality.TEXT not in model.omni.modalities:
        raise InvalidRequestError("this model has no text output; use the images or videos endpoint", param="model")
    return stage

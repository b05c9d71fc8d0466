"""`/v1/images/generations` and `/v1/images/edits`, and the files that they may be fetched from."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Form, Request, Response, UploadFile
from fastapi.responses import JSONResponse
from pydantic import Field

from omnistage.core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OmniError,
    StageError,
    UnsupportedModalityError,
)
from omnistage.core.family import DrawingProcessor
from omnistage.core.params import DiffusionParams, StageParams
from omnistage.core.types import FinishReason, ImageChunk, Modality, Progress
from omnistage.media.image_output import ImageOutput
from omnistage.pipeline.intake import RequestOptions
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import NotFoundError, body_of
from omnistage.server.http.openapi import answers
from omnistage.server.http.sse import event, stream_response
from omnistage.server.openai.files import CONTENT_TYPES
from omnistage.server.openai.request_models import ImageRequest
from omnistage.server.openai.response_models import PictureEvent, Pictures
from omnistage.server.service import ServedModel, Service, final_output

router = APIRouter()

_KINDS = tuple(CONTENT_TYPES.values())
_FIELDS = {"images": "image", "width": "size", "height": "size"}
# Where neither the request nor the model's YAML says how many steps there are, as few as a distilled model takes.
_FEW_STEPS = 4
# Pictures are not counted in tokens here; OpenAI's clients expect the numbers nevertheless.
_NO_TOKENS = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}


class ImageEditForm(ImageRequest):
    """`POST /v1/images/edits`: several pictures come as `image[]`."""

    image: list[UploadFile] = Field(default=[])
    image_list: list[UploadFile] = Field(default=[], alias="image[]")
    mask: UploadFile | None = None


@router.post("/v1/images/generations", response_model=None, responses=answers(Pictures, events=PictureEvent))
async def generations(body: ImageRequest, request: Request) -> Response:
    """Draw a prompt."""
    model = _drawing_model(body, request)
    return await _draw(body, model, {"prompt": body.prompt}, request, "image_generation")


@router.post("/v1/images/edits", response_model=None, responses=answers(Pictures, events=PictureEvent))
async def edits(form: Annotated[ImageEditForm, Form(media_type="multipart/form-data")], request: Request) -> Response:
    """Change pictures as a prompt says."""
    files = [*form.image, *form.image_list]
    if not files:
        raise InvalidRequestError("is missing; send the picture to change", param="image")
    model = _drawing_model(form, request)
    _check_changes(model)
    prompt: dict[str, object] = {"prompt": form.prompt, "images": [await file.read() for file in files]}
    if form.mask is not None:
        prompt["mask"] = await form.mask.read()
    return await _draw(form, model, prompt, request, "image_edit")


@router.get("/files/{name}", response_class=Response, responses=answers(files=_KINDS), name="get_file")
async def get_file(name: str, request: Request) -> Response:
    """A picture that was asked for with `response_format: url`. It needs no key: only its name leads to it."""
    found = await asyncio.to_thread(service_of(request).files.get, name)
    if found is None:
        raise NotFoundError("there is no such file, or no more; draw it again")
    data, kind = found
    headers = {"Cache-Control": "private, max-age=3600, immutable", "X-Content-Type-Options": "nosniff"}
    return Response(data, media_type=kind, headers=headers)


def renamed(error: OmniError, fields: dict[str, str]) -> OmniError:
    """The error under the name that the field at fault has on the wire."""
    head = (error.param or "").partition(".")[0]
    if head in fields:
        error.param = fields[head]
    return error


def _drawing_model(body: ImageRequest, request: Request) -> ServedModel:
    model = service_of(request).model(body.model)
    if Modality.IMAGE not in model.modalities:
        raise UnsupportedModalityError("this model gives no pictures; use one that draws", param="model")
    return model


def _check_changes(model: ServedModel) -> None:
    processor = model.omni.processor
    # One that chats may see pictures, but what it draws is new.
    if not isinstance(processor, DrawingProcessor) or Modality.IMAGE not in processor.input_modalities:
        raise UnsupportedModalityError(
            "this model changes no pictures; use one that does, or draw a new one with /v1/images/generations",
            param="image",
        )


async def _draw(
    body: ImageRequest, model: ServedModel, prompt: dict[str, object], request: Request, kind: str
) -> Response:
    service = service_of(request)
    holder = caller(request)
    try:
        options = RequestOptions(["image"], None, body.priority, body.timeout)
        running = service.run_request(holder, model, prompt, _params(body, model), options)
        if body.stream:

            async def items() -> AsyncIterator[bytes]:
                async with running as stream:
                    writer = _StreamWriter(body, model, kind)
                    async for item in stream:
                        for data in await asyncio.to_thread(writer.events, item):
                            yield event(data, data.get("type", "error"))

            return await stream_response(items())
        async with running as stream:
            final = await final_output(stream)
    except OmniError as error:
        raise renamed(error, _FIELDS) from error
    if (failed := _failure(final)) is not None:
        raise failed
    pictures = await asyncio.to_thread(_pictures, final, body, model, service, request)
    return JSONResponse(
        {
            "created": int(time.time()),
            "data": pictures,
            "background": "opaque",
            "output_format": body.output_format,
            "size": f"{final.images[0].width}x{final.images[0].height}",
        }
    )


def _params(body: ImageRequest, model: ServedModel) -> dict[str, StageParams]:
    stage = model.stage_for_params(DiffusionParams)
    if stage is None:
        raise UnsupportedModalityError("this model draws in conversations only; use chat completions", param="model")
    asked = body.drawing()
    if body.stream and body.partial_images:
        steps = asked.steps or _default_steps(model, stage)
        every = max(1, int(steps * (asked.strength or 1.0)) // (body.partial_images + 1))
        asked = asked.merged(DiffusionParams(preview_every=every))
    return {stage: asked}


def _default_steps(model: ServedModel, stage: str) -> int:
    default = model.omni.orchestrator.default_params(stage)
    return (default.steps if isinstance(default, DiffusionParams) else None) or _FEW_STEPS


def _failure(final: OmniRequestOutput) -> OmniError | None:
    if final.error is not None or final.images:
        return final.error
    if final.finish_reason is FinishReason.DEADLINE:
        return DeadlineExceededError("the deadline passed before a picture was there; give it more time or less to do")
    return StageError("the request was ended before a picture was there")


def _pictures(
    final: OmniRequestOutput, body: ImageRequest, model: ServedModel, service: Service, request: Request
) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for image in final.images:
        data = _encoded(image, body, model)
        entry: dict[str, Any] = {"seed": image.metadata.get("seed")}
        if body.response_format == "url":
            name = service.files.put(data, body.output_format)
            entry["url"] = str(request.url_for("get_file", name=name))
        else:
            entry["b64_json"] = _b64(data)
        made.append(entry)
    return made


def _encoded(image: ImageOutput, body: ImageRequest, model: ServedModel) -> bytes:
    """A file that says what made it, under the name by which the client knows the model."""
    quality = None if body.output_format == "png" or body.output_compression is None else body.output_compression
    if quality is not None:
        quality = max(1, quality)
    named = replace(image, metadata={**image.metadata, "model": model.name} if image.metadata else {})
    try:
        return named.to_bytes(body.output_format, quality=quality)
    except InvalidRequestError as error:
        if error.param != "metadata":
            raise
        # A prompt that is too long for EXIF is no reason to withhold its picture.
        return named.to_bytes(body.output_format, quality=quality, metadata=False)


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class _StreamWriter:
    """The events of one streamed request: at most as many previews as were asked for, pictures, progress if wished."""

    def __init__(self, body: ImageRequest, model: ServedModel, kind: str) -> None:
        self._body = body
        self._model = model
        self._kind = kind
        self._shown: Counter[int] = Counter()
        """Previews of each picture so far."""

    def events(self, item: OutputChunk) -> list[dict[str, Any]]:
        if item.final is not None:
            failed = _failure(item.final)
            return [] if failed is None else [body_of(renamed(failed, _FIELDS))]
        if item.progress is not None:
            return [self._step(item.progress)] if self._body.progress else []
        if item.image is None:
            return []
        return self._preview(item.image) if item.image.preview else [self._picture(item.image, "completed")]

    def _step(self, done: Progress) -> dict[str, Any]:
        """No event of OpenAI's: its client would take it for a picture, so it comes only where it is asked for."""
        return {"type": f"{self._kind}.progress", "step": done.step, "steps": done.steps}

    def _preview(self, chunk: ImageChunk) -> list[dict[str, Any]]:
        shown = self._shown[chunk.index]
        if shown >= (self._body.partial_images or 0):
            return []
        self._shown[chunk.index] += 1
        return [{**self._picture(chunk, "partial_image"), "partial_image_index": shown}]

    def _picture(self, chunk: ImageChunk, what: str) -> dict[str, Any]:
        picture = ImageOutput(chunk.pixels)
        return {
            "type": f"{self._kind}.{what}",
            "created_at": int(time.time()),
            "b64_json": _b64(_encoded(picture, self._body, self._model)),
            "size": f"{picture.width}x{picture.height}",
            "output_format": self._body.output_format,
            "background": "opaque",
            "quality": "auto",
            "image_index": chunk.index,
            "seed": chunk.seed,
            **({"usage": _NO_TOKENS} if what == "completed" else {}),
        }

"""`/v1/images/generations` and `/v1/images/edits`, and the files that the results may be fetched from."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Annotated, Literal, NotRequired, Self

from fastapi import Form, Request, Response, UploadFile
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from omnistage.core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OmniError,
    SizeError,
    StageError,
    UnsupportedModalityError,
)
from omnistage.core.family import DrawingProcessor
from omnistage.core.params import DiffusionParams, StageParams
from omnistage.core.types import FinishReason, ImageChunk, Modality
from omnistage.core.validation import field_error
from omnistage.media.image_output import ImageOutput
from omnistage.pipeline.intake import RequestOptions
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from omnistage.pipeline.stream import OutputStream
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import ErrorBody, NotFoundError, body_of, rename_param
from omnistage.server.http.openapi import bounds_of, response_docs
from omnistage.server.http.routing import api_router
from omnistage.server.http.sse import event, stream_response
from omnistage.server.observe.audit import note_ignored
from omnistage.server.openai.files import CONTENT_TYPES
from omnistage.server.openai.request_models import DrawingFields, Finite, diffusion_params
from omnistage.server.openai.response_models import TokenCounts
from omnistage.server.openai.running import Running, final_output
from omnistage.server.service import ServedModel, Service

router = api_router()
_FIELDS = {"images": "image", "width": "size", "height": "size"}
"""Fields as the engines name them, and as clients know them."""
_OTHER_NAMES = {"num_inference_steps": "steps", "guidance_scale": "guidance", "true_cfg_scale": "true_cfg"}
_WITHOUT_EFFECT = ("quality", "moderation", "input_fidelity")
_PREFERENCES = frozenset(
    {"256x256", "512x512", "1024x1024", "1536x1024", "1024x1536", "1792x1024", "1024x1792"},
)
"""OpenAI's sizes: clients send one where they cannot say another. So the nearest that a model can draw will do."""
_MAX_SIZES = 6
"""Tries: each corrects one side for one reason."""
_FEW_STEPS = 4
"""Where neither the request nor the model's YAML sets the steps: as few as a distilled model takes."""

# ------------------------------------------------------------------------------------------------------- models


class ImageRequest(DrawingFields):
    """`POST /v1/images/generations`, and the fields of `/v1/images/edits` that are not files."""

    model_config = ConfigDict(json_schema_extra=bounds_of(DiffusionParams))

    model: str | None = Field(default=None, description="May be left out where one model is served.")
    n: int | None = Field(default=None, ge=1, le=10)
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: int | None = Field(default=None, ge=0, le=100)
    stream: bool | None = False
    partial_images: int | None = Field(default=None, ge=0, le=3)
    # OpenAI's, without effect here
    user: str | None = None
    safety_identifier: str | None = None
    quality: str | None = None
    moderation: str | None = None
    input_fidelity: str | None = None
    background: Literal["opaque", "auto"] | None = None
    # Ours
    strength: Finite | None = None
    control_scale: Finite | None = None
    strict_size: bool = Field(default=False, description="Refuse OpenAI's sizes, too, that the model cannot draw.")
    # vLLM-Omni's and diffusers' names of ours
    num_inference_steps: int | None = Field(default=None, description="As steps.")
    guidance_scale: Finite | None = Field(default=None, description="As guidance.")
    true_cfg_scale: Finite | None = Field(default=None, description="As true_cfg.")
    progress: bool = Field(default=False, description="A stream also reports each step.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.output_format == "png" and self.output_compression not in (None, 100):
            raise field_error("output_compression", "is for jpeg and webp; png is lossless, leave it out")
        if self.stream and self.response_format == "url":
            raise field_error("response_format", "a stream carries the images themselves; leave it out")
        for name in ("partial_images", "progress"):
            if getattr(self, name) and not self.stream:
                raise field_error(name, "is for streams; send stream: true, or leave it out")
        for other, name in _OTHER_NAMES.items():
            if getattr(self, other) is not None and getattr(self, name) is not None:
                raise field_error(other, f"is another name for {name}; send one of them")
        return self

    def params(self) -> DiffusionParams:
        """What the request sets of the drawing. Raises `InvalidRequestError`, by the names that were sent."""
        others = {name: value for other, name in _OTHER_NAMES.items() if (value := getattr(self, other)) is not None}
        try:
            return diffusion_params(self, self.size, **others)
        except InvalidRequestError as error:
            error.param = self.sent_names().get(error.param or "", error.param)
            raise

    def note_ignored(self) -> None:
        """Name the fields that were sent and have no effect in a header of the response."""
        note_ignored(*(name for name in _WITHOUT_EFFECT if getattr(self, name) not in (None, "auto")))

    def sent_names(self) -> Mapping[str, str]:
        """Fields as the engines name them, and as this request does."""
        return _FIELDS | {name: other for other, name in _OTHER_NAMES.items() if getattr(self, other) is not None}


class ImageEditForm(ImageRequest):
    """`POST /v1/images/edits`: several images come as `image[]`."""

    image: list[UploadFile] = Field(default=[])
    image_list: list[UploadFile] = Field(default=[], alias="image[]")
    mask: UploadFile | None = None


class Image(TypedDict):
    """Base64 or a URL, as `response_format` says."""

    seed: int | None
    b64_json: NotRequired[str]
    url: NotRequired[str]


class Images(TypedDict):
    created: int
    data: list[Image]
    background: Literal["opaque"]
    output_format: Literal["png", "jpeg", "webp"]
    size: str


class ImageTokens(TypedDict):
    image_tokens: int
    text_tokens: int


class ImageUsage(TokenCounts):
    """Images are not counted in tokens here; OpenAI's clients expect the numbers nevertheless."""

    input_tokens_details: ImageTokens


class ImageEvent(TypedDict):
    """One event of streamed images: `image_generation.` or `image_edit.`, then `partial_image` or `completed`.

    With `progress: true` there are also those of the kind `progress`, which have `step` and `steps`.
    """

    type: str
    step: NotRequired[int]
    steps: NotRequired[int]
    created_at: NotRequired[int]
    b64_json: NotRequired[str]
    size: NotRequired[str]
    output_format: NotRequired[Literal["png", "jpeg", "webp"]]
    background: NotRequired[Literal["opaque"]]
    quality: NotRequired[Literal["auto"]]
    image_index: NotRequired[int]
    partial_image_index: NotRequired[int]
    seed: NotRequired[int | None]
    usage: NotRequired[ImageUsage]


# ------------------------------------------------------------------------------------------------------- routes

_DOCS = response_docs(Images, events=ImageEvent)


@router.post("/v1/images/generations", response_model=None, responses=_DOCS)
async def generations(body: ImageRequest, request: Request) -> Response:
    """Generate images from a prompt."""
    model = _drawing_model(body, request)
    return await _draw(body, model, {"prompt": body.prompt}, request, "image_generation")


@router.post("/v1/images/edits", response_model=None, responses=_DOCS)
async def edits(form: Annotated[ImageEditForm, Form(media_type="multipart/form-data")], request: Request) -> Response:
    """Edit images as a prompt says."""
    files = [*form.image, *form.image_list]
    if not files:
        raise InvalidRequestError("is missing; send the image to edit", param="image")
    model = _drawing_model(form, request)
    processor = model.omni.processor
    # A chat model may see images, but what it draws is new.
    if not isinstance(processor, DrawingProcessor) or Modality.IMAGE not in processor.input_modalities:
        raise UnsupportedModalityError(
            "this model does not edit images; use one that does, or generate one with /v1/images/generations",
            param="image",
        )
    prompt: dict[str, object] = {"prompt": form.prompt, "images": [await file.read() for file in files]}
    if form.mask is not None:
        prompt["mask"] = await form.mask.read()
    return await _draw(form, model, prompt, request, "image_edit")


@router.get(
    "/files/{name}",
    response_class=Response,
    responses=response_docs(files=tuple(CONTENT_TYPES.values())),
    name="get_file",
)
async def get_file(name: str, request: Request) -> Response:
    """An image that was requested with `response_format: url`. It needs no key: its name cannot be guessed."""
    file = await asyncio.to_thread(service_of(request).files.get, name)
    if file is None:
        raise NotFoundError("file not found or expired; generate it again")
    data, kind = file
    headers = {"Cache-Control": "private, max-age=3600, immutable", "X-Content-Type-Options": "nosniff"}
    return Response(data, media_type=kind, headers=headers)


# ------------------------------------------------------------------------------------------------------ private


def _drawing_model(body: ImageRequest, request: Request) -> ServedModel:
    model = service_of(request).model(body.model)
    body.note_ignored()
    if Modality.IMAGE not in model.omni.modalities:
        raise UnsupportedModalityError("this model has no image output; use one that has", param="model")
    return model


async def _draw(
    body: ImageRequest, model: ServedModel, prompt: dict[str, object], request: Request, kind: str
) -> Response:
    service = service_of(request)
    options = RequestOptions(["image"], None, body.priority, body.timeout)
    params = _params(body, model)
    holder = caller(request)
    fields = body.sent_names()

    def run(params: dict[str, StageParams]) -> Running:
        return service.run_request(holder, model, prompt, params, options, rename=fields)

    flexible = body.size in _PREFERENCES and not body.strict_size
    running = _run_nearest(run, params, model) if flexible else run(params)
    if body.stream:

        async def events() -> AsyncGenerator[bytes]:
            async with running as stream:
                writer = _StreamWriter(body, model, kind)
                async for item in stream:
                    for data in await asyncio.to_thread(writer.events, item):
                        yield event(data, str(data.get("type", "error")))

        return await stream_response(events())
    final = await final_output(running)
    if (failure := _failure(final)) is not None:
        raise failure
    images: Images = {
        "created": int(time.time()),
        "data": await asyncio.to_thread(_images, final, body, model, service, request),
        "background": "opaque",
        "output_format": body.output_format,
        "size": f"{final.images[0].width}x{final.images[0].height}",
    }
    return JSONResponse(images)


@asynccontextmanager
async def _run_nearest(
    run: Callable[[dict[str, StageParams]], Running], params: dict[str, StageParams], model: ServedModel
) -> AsyncIterator[OutputStream]:
    """A request whose size is a preference: the model draws the nearest that it can."""
    ((stage, drawing),) = params.items()
    if not isinstance(drawing, DiffusionParams):
        raise StageError("the request's parameters are not those of a picture")
    size = drawing.width, drawing.height
    width, height = model.nearest_sizes.get(size, size)
    async with AsyncExitStack() as stack:
        for _ in range(_MAX_SIZES):
            sized = drawing.model_copy(update={"width": width, "height": height})
            try:
                stream = await stack.enter_async_context(run({stage: sized}))
                break
            except SizeError as error:
                if error.side == "width":
                    width = error.nearest
                else:
                    height = error.nearest
        else:
            stream = await stack.enter_async_context(run(params))
        model.nearest_sizes[size] = width, height
        yield stream


def _params(body: ImageRequest, model: ServedModel) -> dict[str, StageParams]:
    stage = model.stage_for_params(DiffusionParams)
    if stage is None:
        raise UnsupportedModalityError("this model draws in conversations only; use chat completions", param="model")
    params = body.params()
    if body.stream and body.partial_images:
        default = model.omni.orchestrator.default_params[stage]
        default_steps = default.steps if isinstance(default, DiffusionParams) else None
        steps = params.steps or default_steps or _FEW_STEPS
        every = max(1, int(steps * (params.strength or 1.0)) // (body.partial_images + 1))
        params = params.merged(DiffusionParams(preview_every=every))
    return {stage: params}


def _failure(final: OmniRequestOutput) -> OmniError | None:
    if final.error is not None or final.images:
        return final.error
    if final.finish_reason is FinishReason.DEADLINE:
        return DeadlineExceededError("the timeout passed before an image was complete; allow more time or fewer steps")
    return StageError("the request ended before an image was complete")


def _images(
    final: OmniRequestOutput, body: ImageRequest, model: ServedModel, service: Service, request: Request
) -> list[Image]:
    images: list[Image] = []
    for output in final.images:
        data = _encoded(output, body, model)
        seed = output.metadata.get("seed")
        image: Image = {"seed": seed if isinstance(seed, int) else None}
        if body.response_format == "url":
            name = service.files.put(data, body.output_format)
            image["url"] = file_url(request, name)
        else:
            image["b64_json"] = base64.b64encode(data).decode()
        images.append(image)
    return images


def file_url(request: Request, name: str) -> str:
    """Where a file can be fetched from: below `--public-url`, else at the address that the client is connected to.

    What the `Host` header says is used only where the service checks it: it is the client's word, or that of a page.
    """
    state = request.app.state
    if state.public_url is not None:
        return f"{state.public_url}/files/{name}"
    if state.checks_host:
        return str(request.url_for("get_file", name=name))
    host, port = request.scope["server"]
    return f"{request.url.scheme}://{f'[{host}]' if ':' in host else host}:{port}/files/{name}"


def _encoded(image: ImageOutput, body: ImageRequest, model: ServedModel) -> bytes:
    """A file whose metadata says how it was generated, under the name by which the client knows the model."""
    quality = None if body.output_format == "png" or body.output_compression is None else body.output_compression
    if quality is not None:
        quality = max(1, quality)
    output = replace(image, metadata={**image.metadata, "model": model.name} if image.metadata else {})
    try:
        return output.to_bytes(body.output_format, quality=quality)
    except InvalidRequestError as error:
        if error.param != "metadata":
            raise
        # A prompt that is too long for EXIF is no reason to withhold its image.
        return output.to_bytes(body.output_format, quality=quality, metadata=False)


class _StreamWriter:
    """The events of one streamed request: images, at most as many previews as requested, progress if requested."""

    def __init__(self, body: ImageRequest, model: ServedModel, kind: str) -> None:
        self._body = body
        self._model = model
        self._kind = kind
        self._previews: Counter[int] = Counter()
        """Of each image so far."""

    def events(self, item: OutputChunk) -> list[ImageEvent | ErrorBody]:
        if item.final is not None:
            failure = _failure(item.final)
            return [] if failure is None else [body_of(rename_param(failure, self._body.sent_names()))]
        if item.progress is not None and self._body.progress:
            # OpenAI has no such event: its client would take it for an image, so it is sent only on request.
            return [{"type": f"{self._kind}.progress", "step": item.progress.step, "steps": item.progress.steps}]
        if item.progress is not None or item.image is None:
            return []
        if not item.image.preview:
            usage: ImageUsage = {
                "input_tokens": 0,
                "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
                "output_tokens": 0,
                "total_tokens": 0,
            }
            return [{**self._image(item.image, "completed"), "usage": usage}]
        number = self._previews[item.image.index]
        if number >= (self._body.partial_images or 0):
            return []
        self._previews[item.image.index] += 1
        return [{**self._image(item.image, "partial_image"), "partial_image_index": number}]

    def _image(self, chunk: ImageChunk, what: str) -> ImageEvent:
        image = ImageOutput(chunk.pixels)
        return {
            "type": f"{self._kind}.{what}",
            "created_at": int(time.time()),
            "b64_json": base64.b64encode(_encoded(image, self._body, self._model)).decode(),
            "size": f"{image.width}x{image.height}",
            "output_format": self._body.output_format,
            "background": "opaque",
            "quality": "auto",
            "image_index": chunk.index,
            "seed": chunk.seed,
        }

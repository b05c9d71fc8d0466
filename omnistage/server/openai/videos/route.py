"""`/v1/videos`: jobs that generate videos. They outlive their request, and the service if it has a state folder."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Annotated, Literal

from fastapi import Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import Field, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import TypedDict

from omnistage.core.errors import InvalidRequestError, UnsupportedModalityError
from omnistage.core.params import DiffusionParams, StageParams
from omnistage.core.types import Modality
from omnistage.core.validation import first_problem, short_repr
from omnistage.pipeline.intake import RequestOptions
from omnistage.server.access.keys import Holder
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import (
    FIELD_WORDS,
    ErrorBody,
    NotFoundError,
    RangeError,
    body_kind,
    response_of,
)
from omnistage.server.http.openapi import Json, response_docs
from omnistage.server.http.routing import api_router
from omnistage.server.observe.audit import CURRENT_RECORD
from omnistage.server.openai.base import WireModel
from omnistage.server.openai.request_models import DrawingFields, Finite, diffusion_params
from omnistage.server.openai.videos.jobs import Job, Status, new_job
from omnistage.server.service import ServedModel

router = api_router()

_FIELDS = {"image": "input_reference", "images": "input_reference", "width": "size", "height": "size"}
"""Fields as the engines name them, and as clients know them."""
_FRAME_GROUP = 4
"""A video's autoencoder takes the first frame by itself and then groups of four."""
_DEFAULT_FPS = 16.0
_POLL_HEADERS = {"openai-poll-after-ms": "500"}


class ImageReference(WireModel):
    image_url: str = Field(description="A data URL.")


class VideoRequest(DrawingFields):
    """`POST /v1/videos`, as JSON or as a form; in a form `input_reference` may be a file."""

    model: str
    seconds: Finite | None = Field(default=None, gt=0, le=3600)
    input_reference: ImageReference | None = Field(default=None, description="The first frame.")
    # Ours
    num_frames: int | None = Field(default=None, description="Instead of seconds.")
    fps: Finite | None = None

    def diffusion_params(self, native_fps: float) -> DiffusionParams:
        if self.seconds is None:
            return diffusion_params(self, self.size)
        if self.num_frames is not None:
            raise InvalidRequestError("send seconds or num_frames, not both", param="seconds")
        groups = round(self.seconds * (self.fps or native_fps) / _FRAME_GROUP)
        # The parameter of that name is the length of a sound.
        return diffusion_params(self, self.size, num_frames=groups * _FRAME_GROUP + 1, seconds=None)


class VideoError(TypedDict):
    code: str
    message: str


class Video(TypedDict):
    """A video job."""

    id: str
    object: Literal["video"]
    model: str
    status: Status
    progress: int
    created_at: int
    completed_at: int | None
    expires_at: int | None
    prompt: str
    size: str
    seconds: str
    remixed_from_video_id: str | None
    error: VideoError | None


class VideoList(TypedDict):
    object: Literal["list"]
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedVideo(TypedDict):
    id: str
    object: Literal["video.deleted"]
    deleted: Literal[True]


def _schema(image: Json) -> Json:
    """The body's schema, which refers to what other endpoints put into the OpenAPI document."""
    schema = VideoRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    schema["properties"]["input_reference"] = image
    return {"schema": schema}


_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": _schema(ImageReference.model_json_schema()),
            "multipart/form-data": _schema({"type": "string", "format": "binary"}),
        },
    }
}
_MP4 = response_docs(files=("video/mp4",))
_CONTENT = {
    **_MP4,
    206: {**_MP4[200], "description": "The part that the header Range asks for."},
    416: {"model": ErrorBody, "description": "The range is not satisfiable."},
}

# ------------------------------------------------------------------------------------------------------- routes


@router.post("/v1/videos", response_model=None, responses=response_docs(Video), openapi_extra=_BODY)
async def create_video(request: Request) -> Response:
    """Start a job. An invalid request is refused now; later failures are in the job."""
    service = service_of(request)
    holder = caller(request)
    body, image = await _parsed(request)
    model = service.model(body.model)
    stage = model.stage_for_params(DiffusionParams)
    if Modality.VIDEO not in model.omni.modalities or stage is None:
        raise UnsupportedModalityError("this model has no video output; use one that has", param="model")
    prompt: dict[str, object] = {"prompt": body.prompt}
    if image is not None:
        prompt["images"] = [image]
    params: dict[str, StageParams] = {stage: body.diffusion_params(_native_fps(model))}
    options = RequestOptions(["video"], None, body.priority, body.timeout)
    async with AsyncExitStack() as stack:
        with _separate_audit_record():
            running = service.run_request(holder, model, prompt, params, options, rename=_FIELDS)
            stream = await stack.enter_async_context(running)
        # What is known before the video exists; then the job has its own length.
        seconds = f"{body.seconds:g}" if body.seconds is not None else "auto"
        job = new_job(_owner(holder), model.name, body.prompt, body.size or "auto", seconds)
        await service.jobs.start(job, stream, stack)
    return JSONResponse(_video(job), headers=_POLL_HEADERS)


@router.get("/v1/videos")
async def list_videos(
    request: Request,
    after: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> VideoList:
    """This key's jobs, page by page."""
    owner = _owner(caller(request))
    jobs = service_of(request).jobs
    if after is not None and await jobs.get(after, owner) is None:
        raise InvalidRequestError(f"there is no video {short_repr(after)} to continue after", param="after")
    page = await jobs.page(owner, after, limit + 1, newest_first=order == "desc")
    visible = page[:limit]
    return {
        "object": "list",
        "data": [_video(job) for job in visible],
        "first_id": visible[0].id if visible else None,
        "last_id": visible[-1].id if visible else None,
        "has_more": len(page) > limit,
    }


@router.get("/v1/videos/{video_id}", response_model=None, responses=response_docs(Video))
async def get_video(video_id: str, request: Request) -> Response:
    """A job's status and progress."""
    job = await _job(video_id, request)
    return JSONResponse(_video(job), headers=_POLL_HEADERS)


@router.get("/v1/videos/{video_id}/content", response_class=FileResponse, responses=_CONTENT)
async def get_content(video_id: str, request: Request, variant: Literal["video"] = "video") -> Response:
    """A completed job's video, as MP4."""
    job = await _job(video_id, request)
    not_found = NotFoundError(f"there is no video: the job is {job.status.replace('_', ' ')}", param="video_id")
    if job.status != "completed":
        raise not_found
    path = service_of(request).jobs.path(job)
    try:
        stat = await asyncio.to_thread(path.stat)
    except FileNotFoundError as error:  # dropped or deleted just now
        raise not_found from error
    headers = {"Cache-Control": "private, no-store", "X-Content-Type-Options": "nosniff"}
    return _VideoFile(path, media_type="video/mp4", stat_result=stat, filename=f"{job.id}.mp4", headers=headers)


@router.delete("/v1/videos/{video_id}")
async def delete_video(video_id: str, request: Request) -> DeletedVideo:
    """Delete a job and its video; a running one is aborted."""
    job = await _job(video_id, request)
    await service_of(request).jobs.delete(job)
    return {"id": job.id, "object": "video.deleted", "deleted": True}


# ------------------------------------------------------------------------------------------------- private


class _VideoFile(FileResponse):
    """Starlette's, with an invalid Range refused in OpenAI's form."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal: JSONResponse | None = None

        async def forward(message: Message) -> None:
            nonlocal refusal
            if message["type"] == "http.response.start" and message["status"] in (400, 416):
                kind = RangeError if message["status"] == 416 else InvalidRequestError
                refusal = response_of(kind("the header Range names no part of this file; correct it", param="Range"))
                refusal.headers.update(
                    {k: v for k, v in Headers(raw=message["headers"]).items() if k == "content-range"}
                )
            if refusal is None:
                await send(message)

        await super().__call__(scope, receive, forward)
        if refusal is not None:
            await refusal(scope, receive, send)


@contextmanager
def _separate_audit_record() -> Iterator[None]:
    """The job outlives this HTTP request, so it is audited by itself, when it ends."""
    token = CURRENT_RECORD.set(None)
    try:
        yield
    finally:
        CURRENT_RECORD.reset(token)


async def _job(video_id: str, request: Request) -> Job:
    owner = _owner(caller(request))
    job = await service_of(request).jobs.get(video_id, owner)
    if job is None:
        raise NotFoundError(f"there is no video {short_repr(video_id)}, or it was deleted", param="video_id")
    return job


def _owner(holder: Holder) -> str:
    """The same for a key after a restart, whatever its position in the list; it reveals nothing of the key."""
    return hashlib.sha256(holder.digest or holder.name.encode()).hexdigest()


def _native_fps(model: ServedModel) -> float:
    """The model's frame rate: its decoder's, or that of a stage that does everything."""
    for stage in model.omni.orchestrator.stages.values():
        component = getattr(stage, "decoder", None) or getattr(stage, "component", None)
        rate = getattr(component, "fps", None)
        if isinstance(rate, float | int):
            return float(rate)
    return _DEFAULT_FPS


async def _parsed(request: Request) -> tuple[VideoRequest, bytes | str | None]:
    """The body, and the image to begin with."""
    kind = body_kind(request.headers.get("content-type"))
    if kind is None:
        raise InvalidRequestError(
            "the body is sent neither as JSON nor as a form; send Content-Type: application/json or multipart/form-data"
        )
    values, image = await _json(request) if kind == "json" else await _form(request)
    try:
        body = VideoRequest.model_validate(values)
    except ValidationError as error:
        raise first_problem(error, values, words=FIELD_WORDS).error() from error
    return body, image if body.input_reference is None else body.input_reference.image_url


async def _json(request: Request) -> tuple[dict[str, object], None]:
    values = await request.json()
    if not isinstance(values, dict):
        raise InvalidRequestError("the body must be a JSON object; send one with model and prompt")
    return values, None


async def _form(request: Request) -> tuple[dict[str, object], bytes | None]:
    image: bytes | None = None
    values: dict[str, object] = {}
    async with request.form(max_files=1, max_fields=50) as form:
        for name, value in form.multi_items():
            if not isinstance(value, UploadFile):
                values[name] = value
            elif name == "input_reference":
                image = await value.read()
            else:
                raise InvalidRequestError("unknown file field; send input_reference", param=name[:80])
    url = values.pop("input_reference[image_url]", None)
    if url is not None:
        values["input_reference"] = {"image_url": url}
    return values, image


def _video(job: Job) -> Video:
    error: VideoError | None = None
    if job.error_code is not None:
        error = {"code": job.error_code, "message": job.error_message or ""}
    return {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "status": job.status,
        "progress": job.progress,
        "created_at": job.created_at,
        "completed_at": job.completed_at,
        "expires_at": None,
        "prompt": job.prompt,
        "size": job.size,
        "seconds": job.seconds,
        "remixed_from_video_id": None,
        "error": error,
    }

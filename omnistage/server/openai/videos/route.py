"""`/v1/videos`: jobs that make videos. They outlive their request, and the service where it has a state folder."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import Field, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.types import Message, Receive, Scope, Send

from omnistage.core.errors import InvalidRequestError, OmniError, UnsupportedModalityError
from omnistage.core.params import DiffusionParams, StageParams
from omnistage.core.types import Modality
from omnistage.core.validation import invalid_params, short_repr
from omnistage.pipeline.intake import RequestOptions
from omnistage.server.access.keys import Holder
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import NotFoundError, RangeError, announced, response_of
from omnistage.server.http.openapi import answers
from omnistage.server.observe.audit import CURRENT_RECORD
from omnistage.server.openai.images import renamed
from omnistage.server.openai.request_models import Finite, Size, WireModel
from omnistage.server.openai.response_models import DeletedVideo, ErrorBody, Video, VideoList
from omnistage.server.openai.videos.jobs import Job, new_job
from omnistage.server.service import ServedModel

router = APIRouter()

_FIELDS = {"image": "input_reference", "images": "input_reference", "width": "size", "height": "size"}
_DRAWING = ("steps", "guidance", "true_cfg", "negative_prompt", "seed", "scheduler", "num_frames", "fps")
# A video's autoencoder takes the first frame by itself and then groups of four.
_FRAME_GROUP = 4
_DEFAULT_FPS = 16.0
_POLL_AFTER_MS = "500"


class ImageReference(WireModel):
    image_url: str = Field(description="A data URL.")


class VideoRequest(WireModel):
    """`POST /v1/videos`, as JSON or as a form; in a form `input_reference` may be a file."""

    model: str
    prompt: str = Field(min_length=1, max_length=32_000)
    size: Size | None = Field(default=None, description="WIDTHxHEIGHT.")
    seconds: Finite | None = Field(default=None, gt=0, le=3600)
    input_reference: ImageReference | None = Field(default=None, description="A picture to begin with.")
    # Ours
    steps: int | None = None
    guidance: Finite | None = None
    true_cfg: Finite | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    scheduler: str | None = None
    num_frames: int | None = Field(default=None, description="Instead of seconds.")
    fps: Finite | None = None
    priority: int = 0
    timeout: Finite | None = None

    def drawing(self, native_fps: float) -> DiffusionParams:
        values: dict[str, object] = {name: getattr(self, name) for name in _DRAWING}
        if self.seconds is not None:
            if self.num_frames is not None:
                raise InvalidRequestError("give seconds or num_frames, not both", param="seconds")
            groups = round(self.seconds * (self.fps or native_fps) / _FRAME_GROUP)
            values["num_frames"] = groups * _FRAME_GROUP + 1
        if self.size not in (None, "auto"):
            width, _, height = str(self.size).partition("x")
            values |= {"width": int(width), "height": int(height)}
        return DiffusionParams.parse({name: value for name, value in values.items() if value is not None})


def _schema(picture: dict[str, Any]) -> dict[str, Any]:
    """The body's schema in one piece: a reference into itself would point nowhere inside the OpenAPI document."""
    made = VideoRequest.model_json_schema()
    made.pop("$defs", None)
    made["properties"]["input_reference"] = picture
    return {"schema": made}


_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": _schema(ImageReference.model_json_schema()),
            "multipart/form-data": _schema({"type": "string", "format": "binary"}),
        },
    }
}


_MP4 = answers(files=("video/mp4",))
_CONTENT = {
    **_MP4,
    206: {**_MP4[200], "description": "The part that the header Range asks for."},
    416: {"model": ErrorBody, "description": "The file has no such part."},
}


@router.post("/v1/videos", response_model=None, responses=answers(Video), openapi_extra=_BODY)
async def create_video(request: Request) -> Response:
    """Begin a video. What is wrong with the request is said now; the rest is found by asking for the job."""
    service = service_of(request)
    holder = caller(request)
    body, picture = await _parsed(request)
    model = service.model(body.model)
    if Modality.VIDEO not in model.modalities:
        raise UnsupportedModalityError("this model makes no videos; use one that does", param="model")
    prompt: dict[str, object] = {"prompt": body.prompt}
    if picture is not None:
        prompt["images"] = [picture]
    try:
        options = RequestOptions(["video"], None, body.priority, body.timeout)
        async with AsyncExitStack() as stack:
            params = _params(body, model)
            with _own_record():
                stream = await stack.enter_async_context(service.run_request(holder, model, prompt, params, options))
            job = new_job(_owner(holder), model.name, body.prompt, body.size or "auto", _seconds(body))
            await service.jobs.start(job, stream, stack)
    except OmniError as error:
        raise renamed(error, _FIELDS) from error
    return JSONResponse(_described(job), headers={"openai-poll-after-ms": _POLL_AFTER_MS})


@router.get("/v1/videos", responses=answers(VideoList))
async def list_videos(
    request: Request,
    after: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """This key's jobs, page by page."""
    owner = _owner(caller(request))
    jobs = service_of(request).jobs
    if after is not None and await jobs.get(after, owner) is None:
        raise InvalidRequestError(f"there is no video {short_repr(after)} to go on behind", param="after")
    found = await jobs.page(owner, after, limit + 1, newest_first=order == "desc")
    shown = found[:limit]
    return {
        "object": "list",
        "data": [_described(job) for job in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(found) > limit,
    }


@router.get("/v1/videos/{video_id}", response_model=None, responses=answers(Video))
async def get_video(video_id: str, request: Request) -> Response:
    """How far a job is."""
    job = await _job(video_id, request)
    return JSONResponse(_described(job), headers={"openai-poll-after-ms": _POLL_AFTER_MS})


@router.get("/v1/videos/{video_id}/content", response_class=FileResponse, responses=_CONTENT)
async def get_content(video_id: str, request: Request, variant: Literal["video"] = "video") -> Response:
    """A completed job's video, as MP4."""
    job = await _job(video_id, request)
    gone = NotFoundError(f"there is no video: the job is {job.status.replace('_', ' ')}", param="video_id")
    if job.status != "completed":
        raise gone
    path = service_of(request).jobs.path(job)
    try:
        stat = await asyncio.to_thread(path.stat)
    except FileNotFoundError as error:  # dropped or deleted just now
        raise gone from error
    headers = {"Cache-Control": "private, no-store", "X-Content-Type-Options": "nosniff"}
    return _VideoFile(path, media_type="video/mp4", stat_result=stat, filename=f"{job.id}.mp4", headers=headers)


@router.delete("/v1/videos/{video_id}", responses=answers(DeletedVideo))
async def delete_video(video_id: str, request: Request) -> dict[str, Any]:
    """Forget a job and its video; one that runs ends."""
    job = await _job(video_id, request)
    await service_of(request).jobs.delete(job)
    return {"id": job.id, "object": "video.deleted", "deleted": True}


# ------------------------------------------------------------------------------------------------- private


class _VideoFile(FileResponse):
    """Starlette's, but that a wrong Range is refused in OpenAI's form."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal: JSONResponse | None = None

        async def passed_on(message: Message) -> None:
            nonlocal refusal
            if message["type"] == "http.response.start" and message["status"] in (400, 416):
                wrong = RangeError if message["status"] == 416 else InvalidRequestError
                refusal = response_of(wrong("the header Range names no part of this file; correct it", param="Range"))
                refusal.headers.update(
                    {k: v for k, v in Headers(raw=message["headers"]).items() if k == "content-range"}
                )
            if refusal is None:
                await send(message)

        await super().__call__(scope, receive, passed_on)
        if refusal is not None:
            await refusal(scope, receive, send)


@contextmanager
def _own_record() -> Iterator[None]:
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
        raise NotFoundError(f"there is no video {short_repr(video_id)}, or no more", param="video_id")
    return job


def _owner(holder: Holder) -> str:
    """The same for a key after a restart, whatever its place in the list; and nothing of the key itself."""
    return hashlib.sha256(holder.digest or holder.name.encode()).hexdigest()


def _params(body: VideoRequest, model: ServedModel) -> dict[str, StageParams]:
    stage = model.stage_for_params(DiffusionParams)
    if stage is None:
        raise UnsupportedModalityError("this model makes no videos; use one that does", param="model")
    return {stage: body.drawing(_native_fps(model))}


def _native_fps(model: ServedModel) -> float:
    """The frame rate that the model was made for: its decoder's, or that of a stage that does everything."""
    for stage in model.omni.orchestrator.stages.values():
        made_by = getattr(stage, "decoder", None) or getattr(stage, "component", None)
        rate = getattr(made_by, "fps", None)
        if isinstance(rate, float | int):
            return float(rate)
    return _DEFAULT_FPS


def _seconds(body: VideoRequest) -> str:
    """What is known before the video is there; the job says its own length then."""
    return f"{body.seconds:g}" if body.seconds is not None else "auto"


async def _parsed(request: Request) -> tuple[VideoRequest, bytes | str | None]:
    """The body, and the picture to begin with."""
    values: Any
    picture: bytes | str | None = None
    kind = announced(request.headers.get("content-type"))
    if kind is None:
        raise InvalidRequestError(
            "the body is sent neither as JSON nor as a form; send Content-Type: application/json or multipart/form-data"
        )
    if kind == "json":
        try:
            values = await request.json()
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError("the body is not valid JSON; check it") from error
        if not isinstance(values, dict):
            raise InvalidRequestError("the body must be a JSON object; send one with model and prompt")
    else:
        async with request.form(max_files=1, max_fields=50) as form:
            values = {name: value for name, value in form.multi_items() if isinstance(value, str)}
            for name, value in form.multi_items():
                if isinstance(value, UploadFile):
                    if name != "input_reference":
                        raise InvalidRequestError("there is no such file; send input_reference", param=name[:80])
                    picture = await value.read()
        url = values.pop("input_reference[image_url]", None)
        if url is not None:
            values["input_reference"] = {"image_url": url}
    try:
        body = VideoRequest.model_validate(values)
    except ValidationError as error:
        raise invalid_params(error) from error
    if body.input_reference is not None:
        picture = body.input_reference.image_url
    return body, picture


def _described(job: Job) -> dict[str, Any]:
    error = None
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

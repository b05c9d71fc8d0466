"""Video jobs: requests and results in SQLite, videos beside it as files, running jobs as tasks."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from omnistage.core.errors import (
    ConfigError,
    DeadlineExceededError,
    InternalError,
    LimitExceededError,
    OmniError,
    ShutdownError,
)
from omnistage.core.failures import log_defect
from omnistage.core.storage import is_storage_full, storage_errors
from omnistage.core.types import FinishReason, Progress
from omnistage.pipeline.outputs import OmniRequestOutput
from omnistage.pipeline.stream import OutputStream
from omnistage.server.http.errors import body_of
from omnistage.server.openai.files import private_folder, write_whole

Status = Literal["queued", "in_progress", "completed", "failed"]
DEFAULT_MAX_JOBS = 1000
DEFAULT_MAX_BYTES = 16 * 2**30

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    model TEXT NOT NULL,
    prompt TEXT NOT NULL,
    size TEXT NOT NULL,
    seconds TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    status TEXT NOT NULL,
    completed_at INTEGER,
    error_code TEXT,
    error_message TEXT,
    bytes INTEGER NOT NULL DEFAULT 0
)
"""
_COLUMNS = "id, owner, model, prompt, size, seconds, created_at, status, completed_at, error_code, error_message, bytes"
_INTERRUPTED = "the service stopped before the video was complete; send the request again"
_TRY_LATER = "send the request again later"
_OPEN = "status IN ('queued', 'in_progress')"


class JobInterruptedError(OmniError, status=503, code="interrupted"):
    """The service stopped before the job was complete."""


@dataclass(frozen=True, slots=True)
class Job:
    """One requested video."""

    id: str
    owner: str
    model: str
    prompt: str
    size: str
    seconds: str
    created_at: int
    status: Status = "queued"
    completed_at: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    bytes: int = 0
    progress: int = 0
    """Percent. Not stored: it is 100 once the job is completed, and an interrupted job does not continue."""


def new_job(owner: str, model: str, prompt: str, size: str, seconds: str) -> Job:
    return Job(f"video_{uuid.uuid4().hex}", owner, model, prompt, size, seconds, int(time.time()))


class JobStore:
    """Jobs in a folder: `jobs.sqlite` and a file `ID.mp4` for each that is completed. Thread-safe; it blocks.

    Only one process may have it open. Opening it marks interrupted jobs as failed. The oldest finished jobs are
    dropped, with their files, where there are too many or they are too large together.
    """

    def __init__(self, folder: Path, *, max_jobs: int = DEFAULT_MAX_JOBS, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._folder = private_folder(folder)
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        try:
            self._db = self._connect()
        except sqlite3.Error as error:
            raise ConfigError(
                f"cannot use {folder / 'jobs.sqlite'} ({error}); stop the other service, or choose another --state"
            ) from error
        self._recover()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._folder / "jobs.sqlite", timeout=1.0, check_same_thread=False, isolation_level=None)
        # A second service would mark the jobs of the first as interrupted.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("BEGIN EXCLUSIVE")
        db.execute(_SCHEMA)
        db.execute("COMMIT")
        return db

    def _recover(self) -> None:
        error = JobInterruptedError(_INTERRUPTED)
        with self._lock:
            self._db.execute(
                f"UPDATE jobs SET status = 'failed', error_code = ?, error_message = ?, completed_at = ? WHERE {_OPEN}",
                (error.code, error.message, int(time.time())),
            )
            ids = {row[0] for row in self._db.execute("SELECT id FROM jobs WHERE status = 'completed'")}
            present = {path.stem for path in self._folder.glob("*.mp4")}
            for job_id in present - ids:
                self.path(job_id).unlink(missing_ok=True)
            for part in self._folder.glob("*.part"):
                part.unlink(missing_ok=True)
            for job_id in ids - present:
                self._db.execute(
                    "UPDATE jobs SET status = 'failed', error_code = 'file_lost', bytes = 0, "
                    "error_message = 'the file is gone from the state folder' WHERE id = ?",
                    (job_id,),
                )
            self._make_room(0, 0)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def path(self, job_id: str) -> Path:
        """Where a completed job's video is. The id must come out of the database."""
        return self._folder / f"{job_id}.mp4"

    def add(self, job: Job) -> None:
        with self._lock, storage_errors(_TRY_LATER):
            self._make_room(0, 1)
            values = tuple(getattr(job, name) for name in _COLUMNS.split(", "))
            self._db.execute(f"INSERT INTO jobs ({_COLUMNS}) VALUES ({', '.join('?' * len(values))})", values)

    def get(self, job_id: str, owner: str) -> Job | None:
        with self._lock:
            query = f"SELECT {_COLUMNS} FROM jobs WHERE id = ? AND owner = ?"
            row = self._db.execute(query, (job_id, owner)).fetchone()
        return None if row is None else Job(*row)

    def page(self, owner: str, after: str | None, limit: int, *, newest_first: bool) -> list[Job]:
        """Up to `limit` jobs of an owner, those after the job `after`."""
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        position = f"AND seq {sign} (SELECT seq FROM jobs WHERE id = ? AND owner = ?)" if after is not None else ""
        query = f"SELECT {_COLUMNS} FROM jobs WHERE owner = ? {position} ORDER BY seq {order} LIMIT ?"
        values = (owner, limit) if after is None else (owner, after, owner, limit)
        with self._lock:
            return [Job(*row) for row in self._db.execute(query, values)]

    def complete(self, job_id: str, data: bytes, seconds: str, size: str) -> None:
        """Write the video, then the status: a completed job has its file. Raises if it alone is over the limit."""
        if len(data) > self._max_bytes:
            raise LimitExceededError(f"the video has {len(data)} bytes, over the limit of {self._max_bytes}")
        with self._lock, storage_errors(_TRY_LATER):
            if self._db.execute("SELECT 1 FROM jobs WHERE id = ?", (job_id,)).fetchone() is None:
                return  # deleted meanwhile
            self._make_room(len(data), 0)
            write_whole(self.path(job_id), data)
            try:
                self._db.execute(
                    "UPDATE jobs SET status = 'completed', bytes = ?, seconds = ?, size = ?, completed_at = ? "
                    "WHERE id = ?",
                    (len(data), seconds, size, int(time.time()), job_id),
                )
            except sqlite3.Error:
                self.path(job_id).unlink(missing_ok=True)  # no row refers to it
                raise

    def fail(self, job_id: str, error: OmniError) -> None:
        detail = body_of(error)["error"]
        with self._lock:
            self._db.execute(
                "UPDATE jobs SET status = 'failed', error_code = ?, error_message = ?, completed_at = ? WHERE id = ?",
                (detail["code"], detail["message"], int(time.time()), job_id),
            )

    def delete(self, job_id: str) -> None:
        with self._lock, storage_errors(_TRY_LATER):
            self._drop(job_id)

    def _make_room(self, size: int, count: int) -> None:
        jobs, total = self._db.execute("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM jobs").fetchone()
        if jobs + count <= self._max_jobs and total + size <= self._max_bytes:
            return
        # Running jobs are limited by the engine's queue, and stay.
        for job_id, size_of_job in self._db.execute(
            f"SELECT id, bytes FROM jobs WHERE NOT {_OPEN} ORDER BY seq"
        ).fetchall():
            if jobs + count <= self._max_jobs and total + size <= self._max_bytes:
                return
            if jobs + count > self._max_jobs or size_of_job:
                self._drop(job_id)
                jobs, total = jobs - 1, total - size_of_job

    def _drop(self, job_id: str) -> None:
        # The row first: a file without a row is deleted at the next start, a completed row must have its file.
        self._db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
        self.path(job_id).unlink(missing_ok=True)


@dataclass(slots=True)
class _Running:
    reading: asyncio.Task[OmniRequestOutput]
    """Cancelling it ends the job's request."""
    whole: asyncio.Task[None]
    """Never cancelled: it writes the result and how the job ended."""
    progress: Progress | None = None


class VideoJobs:
    """The jobs of a service: those in the store, and the tasks of those that run. Used from the event loop only."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._running: dict[str, _Running] = {}
        self._unsaved: dict[str, OmniError] = {}
        """Why jobs failed, where the disk was too full to say so."""
        self._closed = False

    async def start(self, job: Job, stream: OutputStream, stack: contextlib.AsyncExitStack) -> None:
        """Store a job and read its admitted request in a task. `stack`, which ends the request, passes to the task."""
        adding = asyncio.ensure_future(asyncio.to_thread(self._store.add, job))
        reading = asyncio.ensure_future(self._read(job, stream))
        whole = asyncio.ensure_future(self._run(job, adding, reading, stack.pop_all()))
        self._running[job.id] = _Running(reading, whole)
        whole.add_done_callback(lambda _: self._running.pop(job.id, None))
        # A client that leaves now keeps its job: it is in the store, or will be.
        await asyncio.shield(adding)

    async def get(self, job_id: str, owner: str) -> Job | None:
        self._check_open()
        job = await asyncio.to_thread(self._store.get, job_id, owner)
        return None if job is None else self._current(job)

    async def page(self, owner: str, after: str | None, limit: int, *, newest_first: bool) -> list[Job]:
        self._check_open()
        page = self._store.page
        jobs = await asyncio.to_thread(page, owner, after, limit, newest_first=newest_first)
        return [self._current(job) for job in jobs]

    def path(self, job: Job) -> Path:
        return self._store.path(job.id)

    async def delete(self, job: Job) -> None:
        """Delete a job and its video; a running one is aborted first."""
        await self._end([self._running[job.id]] if job.id in self._running else [])
        await asyncio.to_thread(self._store.delete, job.id)
        self._unsaved.pop(job.id, None)

    async def close(self) -> None:
        """Abort running jobs as interrupted, and release the database."""
        self._closed = True
        await self._end(list(self._running.values()))
        await asyncio.to_thread(self._store.close)

    def _check_open(self) -> None:
        if self._closed:
            raise ShutdownError("the service is stopping; try again once it is back")

    @staticmethod
    async def _end(running: Sequence[_Running]) -> None:
        for one in running:
            one.reading.cancel()
        if running:
            await asyncio.wait([one.whole for one in running])

    def _current(self, job: Job) -> Job:
        if job.status == "completed":
            return replace(job, progress=100)
        if (error := self._unsaved.get(job.id)) is not None:
            return replace(job, status="failed", error_code=error.code, error_message=error.message)
        running = self._running.get(job.id)
        if job.status == "failed" or running is None or running.progress is None:
            return job
        progress = running.progress
        # The last percent is the encoding.
        return replace(job, status="in_progress", progress=min(99, 100 * progress.step // max(1, progress.steps)))

    async def _run(
        self,
        job: Job,
        adding: asyncio.Future[None],
        reading: asyncio.Task[OmniRequestOutput],
        stack: contextlib.AsyncExitStack,
    ) -> None:
        try:
            async with stack:
                await asyncio.wait({adding})
                if adding.exception() is not None:
                    reading.cancel()
                await asyncio.wait({reading})
            if adding.exception() is not None:  # `start` raises it
                return
            if reading.cancelled():
                raise JobInterruptedError(_INTERRUPTED)
            await asyncio.to_thread(self._finish, job, reading.result())
        except OmniError as error:
            await self._fail(job, error)
        except Exception as error:  # the boundary of one job
            log_defect("a video job", error)
            await self._fail(job, InternalError("an internal error; the service's log has it"))

    async def _fail(self, job: Job, error: OmniError) -> None:
        try:
            await asyncio.to_thread(self._store.fail, job.id, error)
        except sqlite3.Error as failure:
            self._unsaved[job.id] = error
            if len(self._unsaved) > DEFAULT_MAX_JOBS:
                del self._unsaved[next(iter(self._unsaved))]
            if not is_storage_full(failure):
                log_defect("a video job", failure)

    async def _read(self, job: Job, stream: OutputStream) -> OmniRequestOutput:
        async for item in stream:
            running = self._running.get(job.id)
            if item.progress is not None and running is not None:
                running.progress = item.progress
            if item.final is not None:
                return item.final
        raise InternalError("a request ended without its last item")

    def _finish(self, job: Job, final: OmniRequestOutput) -> None:
        if final.error is not None:
            raise final.error
        if final.video is None:
            if final.finish_reason is FinishReason.DEADLINE:
                raise DeadlineExceededError("the timeout passed before the video was complete; allow more time")
            raise JobInterruptedError("the request ended before the video was complete; send it again")
        # The engine's name of the model may be a path on this machine.
        video = replace(final.video, metadata={**final.video.metadata, "model": job.model})
        self._store.complete(job.id, video.to_bytes("mp4"), f"{video.seconds:g}", f"{video.width}x{video.height}")

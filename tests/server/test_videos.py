"""Video jobs with OpenAI's own client, and what is left of them after a restart."""

from __future__ import annotations

import asyncio
import base64
import io
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from omnistage.core.errors import ConfigError, LimitExceededError
from omnistage.media.video_output import read_video_metadata
from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.openai.videos.jobs import Job, JobStore, new_job
from omnistage.server.service import Service
from tests.hang_guard import HANG_SECONDS
from tests.server.harness import SERVE_LIMITS, Running, make, serving

# OpenAI has ended its own service behind this part of its client.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SMALL: dict[str, Any] = {"model": "film", "prompt": "a red cat", "size": "32x32"}
FAST = {"steps": 3, "seed": 1, "num_frames": 5}
ENDLESS = {"steps": 1000, "num_frames": 81, "seed": 1}


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    folder = make("wan", tmp_path_factory.mktemp("videos") / "wan")
    omni = AsyncOmni(folder, device="cpu", dtype="float32", overrides=SERVE_LIMITS, progress=False)
    yield omni
    asyncio.run(omni.shutdown(drain=False))


def service_over(film: AsyncOmni, state: Path | None = None, keyring: Keyring | None = None) -> Service:
    service = Service(keyring=keyring or Keyring(), state=state)
    service.add("film", film)
    service.loading = False
    return service


@pytest.fixture
def server(film: AsyncOmni, tmp_path: Path) -> Iterator[Running]:
    service = service_over(film, tmp_path / "state")
    with serving(service) as running:
        yield running
        stop_jobs(running)
    film.orchestrator.check_idle()


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


def stop_jobs(running: Running) -> None:
    """What a stopping service does, but for its models, which other tests still need."""
    asyncio.run_coroutine_threadsafe(running.service.jobs.close(), running.loop).result(HANG_SECONDS)


def made(client: openai.OpenAI, **change: Any) -> Any:
    given = {**SMALL, **change}
    extra = given.pop("extra_body", FAST)
    job = client.videos.create(**given, extra_body=extra)
    return client.videos.poll(job.id, poll_interval_ms=20)


def frames_of(data: bytes) -> tuple[int, int, int]:
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        return sum(1 for _ in container.decode(stream)), stream.width, stream.height


# ---------------------------------------------------------------------------------------------------- jobs


def test_a_video_is_made_and_fetched(client: openai.OpenAI) -> None:
    job = client.videos.create(**SMALL, extra_body=FAST)
    assert job.object == "video"
    assert job.status == "queued"
    assert job.prompt == "a red cat"
    done = client.videos.poll(job.id, poll_interval_ms=20)
    assert done.id == job.id
    assert (done.status, done.progress, done.error) == ("completed", 100, None)
    assert done.completed_at is not None
    assert done.size == "32x32"
    assert float(done.seconds) == pytest.approx(5 / 16, abs=1e-3)
    answer = client.videos.download_content(job.id)
    assert answer.response.headers["content-type"] == "video/mp4"
    data = answer.read()
    assert frames_of(data) == (5, 32, 32)
    assert read_video_metadata(data)["model"] == "film"


def test_seconds_become_frames(client: openai.OpenAI) -> None:
    done = made(client, seconds="1", extra_body={"steps": 1, "seed": 1})
    assert done.status == "completed"
    assert frames_of(client.videos.download_content(done.id).read())[0] == 17


def test_a_part_of_the_file(client: openai.OpenAI, server: Running) -> None:
    done = made(client)
    whole = client.videos.download_content(done.id).read()
    url = f"{server.url}/v1/videos/{done.id}/content"
    part = httpx.get(url, headers={"Range": "bytes=10-19"})
    assert part.status_code == 206
    assert part.content == whole[10:20]


def test_jobs_are_listed_page_by_page(client: openai.OpenAI) -> None:
    ids = [made(client, extra_body={**FAST, "steps": 1}).id for _ in range(3)]
    assert [job.id for job in client.videos.list(limit=2).data] == [ids[2], ids[1]]
    assert [job.id for job in client.videos.list(limit=2)] == ids[::-1]  # the client asks for the next pages
    assert [job.id for job in client.videos.list(order="asc", limit=1)] == ids
    with pytest.raises(openai.BadRequestError):
        client.videos.list(after="video_nobody")


def test_the_same_as_json(server: Running, client: openai.OpenAI) -> None:
    answer = httpx.post(f"{server.url}/v1/videos", json={**SMALL, **FAST})
    assert answer.status_code == 200, answer.text
    assert answer.headers["openai-poll-after-ms"]
    one = client.videos.poll(answer.json()["id"], poll_interval_ms=20)
    two = made(client)
    other = made(client, extra_body={**FAST, "seed": 2})
    first, second, third = (frames(client.videos.download_content(job.id).read()) for job in (one, two, other))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, third)  # another seed is another video


def frames(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_progress_rises(client: openai.OpenAI) -> None:
    job = client.videos.create(**SMALL, extra_body=ENDLESS)
    seen = client.videos.retrieve(job.id)
    while seen.progress < 1:
        seen = client.videos.retrieve(job.id)
    assert seen.status == "in_progress"
    assert seen.progress < 100
    with pytest.raises(openai.NotFoundError, match="in progress"):
        client.videos.download_content(job.id)
    client.videos.delete(job.id)


def test_deleting_ends_a_running_job(client: openai.OpenAI, film: AsyncOmni) -> None:
    job = client.videos.create(**SMALL, extra_body=ENDLESS)
    gone = client.videos.delete(job.id)
    assert (gone.id, gone.deleted, gone.object) == (job.id, True, "video.deleted")
    for ask in (client.videos.retrieve, client.videos.delete, client.videos.download_content):
        with pytest.raises(openai.NotFoundError):
            ask(job.id)
    assert film.stats().inflight == 0


def test_deleting_takes_the_file_away(client: openai.OpenAI, tmp_path: Path) -> None:
    done = made(client)
    file = tmp_path / "state" / "videos" / f"{done.id}.mp4"
    assert file.exists()
    client.videos.delete(done.id)
    assert not file.exists()


def test_a_passed_deadline_is_a_failed_job(client: openai.OpenAI) -> None:
    done = made(client, extra_body={**ENDLESS, "timeout": 0.5})
    assert done.status == "failed"
    assert done.error is not None
    assert done.error.code == "deadline_exceeded"


def test_the_async_client(server: Running) -> None:
    async def one() -> Any:
        async with server.async_client() as client:
            return await client.videos.create_and_poll(**SMALL, extra_body=FAST, poll_interval_ms=20)

    assert asyncio.run(one()).status == "completed"


def test_a_key_sees_its_own_jobs_only(film: AsyncOmni, tmp_path: Path) -> None:
    holders = [Holder(name, digest_of(f"key-of-{name}")) for name in ("ann", "bob")]
    with serving(service_over(film, tmp_path, Keyring(holders))) as running:
        with running.client(api_key="key-of-ann") as ann, running.client(api_key="key-of-bob") as bob:
            done = made(ann)
            assert [job.id for job in ann.videos.list()] == [done.id]
            assert list(bob.videos.list()) == []
            for ask in (bob.videos.retrieve, bob.videos.delete, bob.videos.download_content):
                with pytest.raises(openai.NotFoundError):
                    ask(done.id)
        with running.client(api_key="key-of-eve") as eve, pytest.raises(openai.AuthenticationError):
            eve.videos.list()
        stop_jobs(running)


# ------------------------------------------------------------------------------------------------- restart


def test_a_restart_keeps_what_is_done_and_marks_what_was_interrupted(film: AsyncOmni, tmp_path: Path) -> None:
    with serving(service_over(film, tmp_path)) as running, running.client() as client:
        done = made(client)
        data = client.videos.download_content(done.id).read()
        lost = client.videos.create(**SMALL, extra_body=ENDLESS)
        stop_jobs(running)
        with pytest.raises(openai.InternalServerError, match="stopping"):
            client.videos.list()
    film.orchestrator.check_idle()
    with serving(service_over(film, tmp_path)) as running, running.client() as client:
        assert client.videos.retrieve(done.id) == done
        assert client.videos.download_content(done.id).read() == data
        failed = client.videos.retrieve(lost.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert failed.error.code == "interrupted"
        assert [job.id for job in client.videos.list()] == [lost.id, done.id]
        assert made(client).status == "completed"
        stop_jobs(running)


def job(store: JobStore, size: int | None = None) -> Job:
    """A job in the store; with a size it is completed."""
    added = new_job("me", "film", "a cat", "32x32", "1")
    store.add(added)
    if size is not None:
        store.complete(added.id, b"x" * size, "1", "32x32")
    return added


KILLED = """
import os, sys, threading
from pathlib import Path
from omnistage.server.openai.videos.jobs import JobStore, new_job

store = JobStore(Path(sys.argv[1]))
jobs = [new_job("me", "film", "a red cat", "32x32", "1") for _ in range(4)]
for job in jobs:
    store.add(job)
running, writing, done, bereft = (job.id for job in jobs)
for job_id in (done, bereft):
    store.complete(job_id, b"x" * 10, "1", "32x32")


def never(*_):
    print(running, writing, done, bereft, flush=True)
    threading.Event().wait()


os.replace = never  # it dies between a video's last byte and its name
store.complete(writing, b"x" * 10, "1", "32x32")
"""


def test_a_crash_leaves_no_job_open_and_no_stray_file(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        running, writing, done, bereft = killed.stdout.readline().split()
        assert (tmp_path / f"{writing}.mp4.part").exists()
        killed.kill()
    assert killed.returncode == -signal.SIGKILL
    (tmp_path / f"{bereft}.mp4").unlink()
    for stray in ("video_unknown.mp4", f"{running}.mp4"):
        (tmp_path / stray).write_bytes(b"half")
    again = JobStore(tmp_path)
    states = {one.id: (one.status, one.error_code) for one in again.page("me", None, 10, newest_first=False)}
    assert states == {
        running: ("failed", "interrupted"),
        writing: ("failed", "interrupted"),
        done: ("completed", None),
        bereft: ("failed", "file_lost"),
    }
    beside = {path.name for path in tmp_path.iterdir() if not path.name.startswith("jobs.sqlite")}
    assert beside == {f"{done}.mp4"}
    again.close()


def test_two_services_cannot_share_a_folder(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    with pytest.raises(ConfigError, match="--state"):
        JobStore(tmp_path)
    store.close()
    JobStore(tmp_path).close()


def test_a_database_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite").write_bytes(b"not a database at all, but long enough to look" * 100)
    with pytest.raises(ConfigError, match=r"jobs\.sqlite"):
        JobStore(tmp_path)


def test_the_oldest_finished_jobs_make_room(tmp_path: Path) -> None:
    store = JobStore(tmp_path, max_jobs=3, max_bytes=100)
    running = job(store)
    first, second = job(store, 30), job(store, 30)
    third = job(store, 30)  # a fourth job: the first finished one goes, the running one stays
    kept = [one.id for one in store.page("me", None, 10, newest_first=False)]
    assert kept == [running.id, second.id, third.id]
    assert not store.path(first.id).exists()
    store.complete(running.id, b"x" * 60, "1", "32x32")  # too many bytes with both others
    assert {one.id for one in store.page("me", None, 10, newest_first=False)} == {running.id, third.id}
    with pytest.raises(LimitExceededError):
        store.complete(third.id, b"x" * 101, "1", "32x32")
    store.close()
    with pytest.raises(sqlite3.ProgrammingError):
        store.page("me", None, 1, newest_first=True)


def test_a_job_deleted_while_its_video_is_written_stays_deleted(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    added = job(store)
    store.delete(added.id)
    store.complete(added.id, b"late", "1", "32x32")
    assert store.get(added.id, "me") is None
    assert not store.path(added.id).exists()
    store.close()


# --------------------------------------------------------------------------------------------------- wrong


def picture() -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(encoded, "PNG")
    return encoded.getvalue()


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"prompt": ""}, 400, "prompt"),
        ({"size": "wide"}, 400, "size"),
        ({"size": "33x32"}, 400, "size"),
        ({"seconds": 0}, 400, "seconds"),
        ({"seconds": "4"}, 400, "seconds"),
        ({"seconds": "long"}, 400, "seconds"),
        ({"num_frames": 6}, 400, "num_frames"),
        ({"steps": 0}, 400, "steps"),
        ({"unknown_field": 1}, 400, "unknown_field"),
        ({"input_reference": {"file_id": "file-1"}}, 400, None),
        ({"input_reference": {"image_url": "http://127.0.0.1/x.png"}}, 400, "input_reference"),
        ({"input_reference": {"image_url": "/etc/passwd"}}, 400, "input_reference"),
    ],
)
def test_what_is_wrong_is_named(server: Running, change: dict[str, object], status: int, param: str | None) -> None:
    answer = httpx.post(f"{server.url}/v1/videos", json={**SMALL, **FAST, **change})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert param is None or error["param"] == param, error
    assert httpx.get(f"{server.url}/v1/videos").json()["data"] == []


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b'"text"'])
def test_a_body_that_is_no_request(server: Running, body: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/videos", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text


def test_pictures_for_a_model_that_takes_none(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.videos.create(**SMALL, input_reference=("first.png", picture(), "image/png"), extra_body=FAST)
    assert refused.value.param == "input_reference"
    url = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
    form = {**SMALL, **FAST, "input_reference[image_url]": url}
    fields = [(name, (None, str(value))) for name, value in form.items()]
    answer = httpx.post(f"{server.url}/v1/videos", files=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_reference")


def test_a_file_of_another_name(server: Running) -> None:
    answer = httpx.post(f"{server.url}/v1/videos", data=SMALL, files={"mask": ("m.png", picture(), "image/png")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mask")


def test_a_model_that_makes_no_videos(film: AsyncOmni, models: dict[str, AsyncOmni]) -> None:
    service = service_over(film)
    service.add("lm", models["lm"])
    with serving(service) as running, running.client() as client, pytest.raises(openai.BadRequestError) as refused:
        client.videos.create(**{**SMALL, "model": "lm"})
    assert refused.value.param == "model"


def test_the_openapi_document_holds_together(server: Running) -> None:
    text = httpx.get(f"{server.url}/openapi.json").text
    assert "#/$defs" not in text
    assert "/v1/videos/{video_id}/content" in text

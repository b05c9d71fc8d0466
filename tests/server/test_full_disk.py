"""A disk without space: clients are told so, nothing half-written stays, and the audit log is not lost in silence."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from omnistage.cli.serve_options import ObservabilityOptions
from omnistage.core.errors import ConfigError, InvalidRequestError, StorageFullError
from omnistage.server.observe.audit import AUDIT_LOGGER, AuditFile, AuditRecord, log_to
from omnistage.server.openai.files import FileStore
from omnistage.server.openai.videos.jobs import JobStore, VideoJobs, new_job
from omnistage.server.service import Service
from tests.server.harness import SHORT, Running, serving, until

FULL = Path("/dev/full")
DRAWING = {"model": "draw", "prompt": "a cat", "size": "32x32", "steps": 1}


def no_space(*_args: object, **_options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_written(path: Path, data: bytes) -> int:
    with path.open("wb") as file:
        file.write(data[: len(data) // 2])
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


# ------------------------------------------------------------------------------------------------- files, uploads


def test_an_image_that_cannot_be_kept_is_answered_with_507(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "write_bytes", half_written)
    url = f"{server.url}/v1/images/generations"
    refused = httpx.post(url, json={**DRAWING, "response_format": "url"}, timeout=60)
    assert refused.status_code == 507
    assert refused.json()["error"]["code"] == "storage_full"
    assert "b64_json" in refused.json()["error"]["message"]
    assert list(server.service.files._folder.iterdir()) == []
    assert httpx.post(url, json=DRAWING, timeout=60).status_code == 200
    assert "failed with" not in caplog.text


def test_a_file_that_cannot_be_kept_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, max_files=2)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half_written)
        for _ in range(3):
            with pytest.raises(StorageFullError, match="no space is left"):
                store.put(b"image", "png")
    names = [store.put(b"image", "png") for _ in range(2)]
    assert all(store.get(name) is not None for name in names)


@pytest.mark.parametrize("path", ["/v1/images/edits", "/v1/videos"])
def test_an_upload_that_finds_no_space_is_answered_with_507(
    server: Running, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "write", no_space)
    name = "image" if path.endswith("edits") else "input_reference"
    answer = httpx.post(f"{server.url}{path}", data={"model": "draw", "prompt": "x"}, files={name: b"x" * 10})
    assert answer.status_code == 507
    assert answer.json()["error"]["code"] == "storage_full"
    assert "failed with" not in caplog.text


# --------------------------------------------------------------------------------------------------------- videos


class Filled(JobStore):
    """A store whose database cannot grow from some moment on."""

    def fill(self) -> None:
        (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        self._db.execute(f"PRAGMA max_page_count = {pages}")


def large_job() -> Any:
    return new_job("ann", "film", "x" * 30_000, "32x32", "auto")


def test_a_video_job_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    store = Filled(tmp_path)
    store.fill()
    with pytest.raises(StorageFullError, match="no space is left"):
        store.add(large_job())
    assert store.page("ann", None, 10, newest_first=True) == []


def test_a_video_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, job = Filled(tmp_path), large_job()
    store.add(job)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half_written)
        with pytest.raises(StorageFullError):
            store.complete(job.id, b"video", "1", "32x32")
    store.fill()
    with pytest.raises(StorageFullError):
        store.complete(job.id, b"video", "1" * 10_000, "32x32")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("jobs.sqlite")] == []


def test_a_failed_job_is_failed_also_where_that_cannot_be_stored(tmp_path: Path) -> None:
    async def main() -> None:
        store, job = Filled(tmp_path), large_job()
        jobs = VideoJobs(store)
        store.add(job)
        store.fill()
        await jobs._fail(job, StorageFullError("no space is left " + "x" * 10_000))
        found = await jobs.get(job.id, "ann")
        assert found is not None
        assert (found.status, found.error_code) == ("failed", "storage_full")

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------ the audit log


@pytest.fixture
def quiet_log() -> Iterator[None]:
    logger = logging.getLogger(AUDIT_LOGGER)
    before = (logger.level, logger.propagate, list(logger.handlers))
    yield
    for handler in set(logger.handlers) - set(before[2]):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(before[0])
    logger.propagate = before[1]


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_is_told_once_and_counted(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    file = log_to(FULL)
    for _ in range(5):
        AuditRecord("POST /v1/completions").close()
    assert (file.failing, file.lost_lines) == (True, 5)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No space left" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.usefixtures("quiet_log")
def test_a_line_is_in_the_audit_log_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = log_to(tmp_path / "audit.jsonl")
    AuditRecord("first").close()
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
        AuditRecord("second").close()
        patch.setattr(os, "ftruncate", no_space)
        AuditRecord("third").close()
    AuditRecord("fourth").close()
    assert (file.failing, file.lost_lines) == (False, 2)
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert [json.loads(lines[0])["endpoint"], json.loads(lines[-1])["endpoint"]] == ["first", "fourth"]
    assert '"second"' not in "".join(lines)
    assert len(lines) == 3  # the third could not be taken back, and is no part of the next


@pytest.mark.usefixtures("quiet_log")
def test_requests_are_refused_without_an_audit_log_where_it_is_required(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ObservabilityOptions(audit_log=tmp_path / "audit.jsonl", audit_on_error="stop").open_audit_log(service)
    file = service.audit_file
    assert file is not None
    with serving(service) as server:
        with monkeypatch.context() as patch:
            patch.setattr(AuditFile, "_append", no_space)
            assert httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=60).status_code == 200
            until(lambda: file.failing, "the first line that is lost")
            for method in ("POST", "GET"):
                refused = httpx.request(method, f"{server.url}/v1/models", timeout=60)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "audit_unavailable"
            until(lambda: file.lost_lines == 3, "the loss of three lines")
            assert "omnistage_audit_lost_lines_total 3.0" in httpx.get(f"{server.url}/metrics").text
        assert httpx.get(f"{server.url}/v1/models").status_code == 503  # its line can be written
        until(lambda: not file.failing, "a line that is written again")
        assert httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=60).status_code == 200


@pytest.mark.usefixtures("quiet_log")
def test_requests_go_on_without_an_audit_log_by_default(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ObservabilityOptions(audit_log=tmp_path / "audit.jsonl").open_audit_log(service)
    monkeypatch.setattr(AuditFile, "_append", no_space)
    with serving(service) as server:
        for _ in range(2):
            assert httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=60).status_code == 200


def test_options_of_the_audit_log_are_checked(service: Service, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="--audit-on-error: must be warn or stop"):
        ObservabilityOptions(audit_on_error="ignore").open_audit_log(service)
    with pytest.raises(InvalidRequestError, match="requires --audit-log"):
        ObservabilityOptions(audit_on_error="stop").open_audit_log(service)
    with pytest.raises(ConfigError, match="cannot open the audit log"):
        ObservabilityOptions(audit_log=tmp_path).open_audit_log(service)

"""Media are decoded in processes that can be killed: the same results and errors, and an end to every item."""

from __future__ import annotations

import contextvars
import errno
import gc
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omnistage.core.cancellation import Cancellation, cancellation_scope
from omnistage.core.clips import AudioClip, VideoClip
from omnistage.core.errors import (
    CancelledRequestError,
    DeadlineExceededError,
    InvalidRequestError,
    LimitExceededError,
    MediaError,
    OverloadedError,
    ShutdownError,
)
from omnistage.media import MediaLimits, decode_audio, decode_image, decode_pool, decode_video
from omnistage.media.context import decode_for
from omnistage.media.decode_pool import DecodePool, decode_processes, use_decode_pool
from omnistage.media.decode_process import DecodeProcess, ProcessEndedError

ROOT = Path(__file__).parents[2]
if (folder := str(ROOT / "tools")) not in sys.path:
    sys.path.append(folder)

from fuzz_media import FORMATS, audio, fuzz, image, resident_mib, video  # noqa: E402

from tests.hang_guard import HANG_SECONDS, until  # noqa: E402
from tests.slow_media import slow_jpeg  # noqa: E402

LIMITS = MediaLimits()
ANY_SCANS = MediaLimits(max_image_scans=1_000_000)
linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def shared() -> Iterator[DecodePool]:
    pool = DecodePool(2)
    yield pool
    pool.close()


@pytest.fixture
def pool(shared: DecodePool) -> Iterator[DecodePool]:
    use_decode_pool(shared)
    yield shared
    use_decode_pool(None)


def in_process(decode: Callable[[], object]) -> object:
    """The result, or the error, without the pool."""
    use_decode_pool(None)
    return outcome(decode)


def outcome(decode: Callable[[], object]) -> object:
    try:
        return decode()
    except InvalidRequestError as error:
        return type(error), error.message, error.param


def assert_equal(first: object, second: object) -> None:
    assert type(first) is type(second)
    if isinstance(first, Image.Image) and isinstance(second, Image.Image):
        assert (first.mode, first.size, first.tobytes()) == (second.mode, second.size, second.tobytes())
    elif isinstance(first, AudioClip) and isinstance(second, AudioClip):
        assert first.sample_rate == second.sample_rate
        assert first.samples.dtype == second.samples.dtype
        assert first.samples.tobytes() == second.samples.tobytes()
    elif isinstance(first, VideoClip) and isinstance(second, VideoClip):
        assert (first.fps, first.seconds, first.frames.shape) == (second.fps, second.seconds, second.frames.shape)
        assert first.frames.tobytes() == second.frames.tobytes()
        assert first.audio is not None
        assert second.audio is not None
        assert_equal(first.audio, second.audio)
    else:
        assert first == second


class Decoding:
    """An item that is decoded in a thread, for a request of its own."""

    def __init__(self, data: bytes, limits: MediaLimits = ANY_SCANS) -> None:
        self.cancellation = Cancellation()
        self._done: Future[object] = Future()

        def run() -> None:
            try:
                with cancellation_scope(self.cancellation):
                    self._done.set_result(decode_image(data, limits))
            except BaseException as error:  # raised again by `result`
                self._done.set_exception(error)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(run,), daemon=True).start()

    def result(self) -> object:
        return self._done.result(HANG_SECONDS)

    @property
    def done(self) -> bool:
        return self._done.done()


def ordinary() -> bytes:
    return FORMATS["jpeg"][1]()


class TestResults:
    @pytest.mark.parametrize("name", FORMATS)
    def test_every_format_gives_the_same_pixels_and_samples(self, name: str, pool: DecodePool) -> None:
        decode, encode = FORMATS[name]
        data = encode()
        result = decode(data)
        assert pool.processes()
        use_decode_pool(None)
        assert_equal(result, decode(data))

    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"])
    def test_every_mode_gives_the_same_pixels(self, mode: str, pool: DecodePool) -> None:
        file = io.BytesIO()
        Image.linear_gradient("L").resize((40, 30)).convert(mode).save(file, "TIFF")
        result = decode_image(file.getvalue(), LIMITS)
        assert_equal(result, in_process(lambda: decode_image(file.getvalue(), LIMITS)))

    @pytest.mark.parametrize("decode", [image, audio, video])
    @pytest.mark.parametrize("name", ["noise", "png", "wav", "mp4"])
    def test_errors_are_the_same(self, name: str, decode: Callable[[bytes], object], pool: DecodePool) -> None:
        data = b"no media at all " * 8 if name == "noise" else FORMATS[name][1]()
        for broken in (data, data[: len(data) // 2], data[:40]):
            result = outcome(lambda data=broken: decode(data))  # type: ignore[misc]
            use_decode_pool(None)
            assert_equal(result, outcome(lambda data=broken: decode(data)))  # type: ignore[misc]
            use_decode_pool(pool)

    def test_limits_reach_the_process(self, pool: DecodePool) -> None:
        few = MediaLimits(max_image_pixels=100, max_audio_seconds=0.1, max_video_seconds=0.1)
        decoders: list[Callable[[], object]] = [
            lambda: decode_image(ordinary(), few),
            lambda: decode_audio(FORMATS["mp3"][1](), few),
            lambda: decode_video(FORMATS["webm"][1](), few),
        ]
        for decode in decoders:
            use_decode_pool(pool)
            result = outcome(decode)
            assert isinstance(result, tuple)
            assert result[0] is LimitExceededError
            assert result == in_process(decode)

    def test_arrays_clips_and_pictures_need_no_process(self) -> None:
        with decode_processes(1) as pool:
            assert pool is not None
            pool.close()  # nothing can be decoded in it any longer
            with pytest.raises(ShutdownError):
                decode_image(ordinary(), LIMITS)
            self.decode_arrays()

    def decode_arrays(self) -> None:
        decode_image(Image.new("RGB", (2, 2)), LIMITS)
        decode_image(np.zeros((2, 2, 3), np.uint8), LIMITS)
        decode_audio((np.zeros(100, np.float32), 16_000), LIMITS)
        decode_video((np.zeros((4, 2, 2, 3), np.uint8), 2.0), LIMITS)

    def test_results_can_be_written_to(self, pool: DecodePool) -> None:
        clip = decode_video(FORMATS["mp4"][1](), LIMITS, with_audio=True)
        clip.frames[0] = 0
        assert clip.audio is not None
        clip.audio.samples[0] = 0
        decode_image(ordinary(), LIMITS).putpixel((0, 0), (1, 2, 3))


class TestLimits:
    def test_a_jpeg_with_too_many_scans_is_refused_before_it_is_decoded(self) -> None:
        with pytest.raises(LimitExceededError, match="over 100 scans, the limit; save it with fewer"):
            decode_image(slow_jpeg(), LIMITS)

    def test_scans_of_other_files_inside_a_jpeg_do_not_count(self) -> None:
        data = ordinary()
        scans = b"\xff\xda" * 30_000
        segment = b"\xff\xe5" + (len(scans) + 2).to_bytes(2, "big") + scans
        expected = decode_image(data, LIMITS)
        assert_equal(decode_image(data[:2] + segment + data[2:] + scans, LIMITS), expected)

    def test_an_item_that_takes_too_much_processor_time_is_ended_and_the_next_one_is_decoded(
        self, pool: DecodePool
    ) -> None:
        with pytest.raises(LimitExceededError, match="decoding this image takes more than 1 seconds of processor time"):
            decode_image(slow_jpeg(), MediaLimits(max_image_scans=1_000_000, max_decode_seconds=1.0))
        decode_image(ordinary(), LIMITS)

    @linux
    def test_an_item_that_takes_too_much_memory_is_refused(self, pool: DecodePool) -> None:
        file = io.BytesIO()
        Image.new("RGB", (6000, 6000)).save(file, "PNG")
        with pytest.raises(LimitExceededError, match="over 67108864 bytes of memory"):
            decode_image(file.getvalue(), MediaLimits(max_decode_memory=64 * 2**20))
        decode_image(ordinary(), MediaLimits(max_decode_memory=64 * 2**20))

    @linux
    @pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
    def test_a_decoder_that_crashes_fails_its_item_only(self, number: int) -> None:
        with decode_processes(1) as pool:
            assert pool is not None
            decode_image(ordinary(), LIMITS)
            [process] = pool.processes()
            before = ticks(process)
            decoding = Decoding(slow_jpeg())
            until(lambda: ticks(process) > before + 5)  # it is at work on it
            os.kill(process, number)
            with pytest.raises(MediaError, match="the decoder crashed on this image; it may be damaged"):
                decoding.result()
            decode_image(ordinary(), LIMITS)

    def test_a_process_that_was_killed_while_idle_is_replaced(self) -> None:
        with decode_processes(1) as pool:
            assert pool is not None
            decode_image(ordinary(), LIMITS)
            [process] = pool._idle
            os.kill(process.pid, signal.SIGKILL)
            until(lambda: not process.reusable)  # all of its threads have ended
            decode_image(ordinary(), LIMITS)
            assert pool.processes() != [process.pid]

    @linux
    def test_an_item_whose_process_is_killed_before_it_begins_gets_another_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, killed = DecodeProcess.decode, []

        def decode(process: DecodeProcess, *arguments: Any) -> Any:
            if len(killed) < 2:
                os.kill(process.pid, signal.SIGSTOP if killed else signal.SIGKILL)
                killed.append(process.pid)
                if len(killed) == 2:  # while the task is in its pipe
                    threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL)).start()
            return real(process, *arguments)

        monkeypatch.setattr(DecodeProcess, "decode", decode)
        with decode_processes(1):
            assert decode_image(ordinary(), LIMITS).size
        assert len(killed) == 2

    def test_processes_that_never_begin_are_not_started_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DecodeProcess, "decode", lambda process, *_: ended(process))

        def ended(process: DecodeProcess) -> None:
            process.kill()
            raise ProcessEndedError(-signal.SIGKILL, began=False)

        with decode_processes(1), pytest.raises(OverloadedError, match="end before they begin"):
            decode_image(ordinary(), LIMITS)

    def test_a_process_that_cannot_be_started_is_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real, failures = DecodeProcess.__init__, [errno.EMFILE, errno.ENOMEM]

        def start(process: DecodeProcess) -> None:
            if failures:
                raise OSError(failures.pop(), "none left")
            real(process)

        monkeypatch.setattr(decode_pool, "_RETRY_SECONDS", 0.001)
        monkeypatch.setattr(DecodeProcess, "__init__", start)
        with decode_processes(1):
            assert decode_image(ordinary(), LIMITS).size
            failures += [errno.EMFILE] * 10
        with decode_processes(1) as pool:
            assert pool is not None
            with pytest.raises(OverloadedError, match="no process can be started to decode media") as caught:
                decode_image(ordinary(), LIMITS)
            assert (caught.value.status, caught.value.code) == (503, "overloaded")
            assert not pool._running


def ticks(process: int) -> int:
    """Processor time of a process, in hundredths of a second."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def is_running(process: int) -> bool:
    """Whether a process of this number runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between the opening and the reading
        return False


class TestCancellation:
    def test_cancelling_ends_the_item_at_once(self, pool: DecodePool) -> None:
        before = set(pool.processes())
        decoding = Decoding(slow_jpeg())
        until(lambda: bool(pool._busy))
        [process] = pool._busy
        decoding.cancellation.cancel()
        with pytest.raises(CancelledRequestError):
            decoding.result()
        assert process.pid not in pool.processes()
        assert before - {process.pid} <= set(pool.processes())

    def test_a_deadline_ends_the_item(self, pool: DecodePool) -> None:
        with cancellation_scope(Cancellation(time.monotonic() + 0.2)), pytest.raises(DeadlineExceededError):
            decode_image(slow_jpeg(), ANY_SCANS)

    def test_an_item_that_waits_for_a_process_can_be_cancelled(self) -> None:
        with decode_processes(1) as pool:
            assert pool is not None
            first = Decoding(slow_jpeg())
            until(lambda: bool(pool._running))
            second = Decoding(ordinary())
            until(lambda: bool(pool._waiting))
            second.cancellation.cancel()
            with pytest.raises(CancelledRequestError):
                second.result()
            assert not first.done
            third = Decoding(ordinary())
            first.cancellation.cancel()
            assert isinstance(third.result(), Image.Image)

    def test_a_cancelled_request_starts_nothing(self, pool: DecodePool) -> None:
        cancellation = Cancellation()
        cancellation.cancel()
        with cancellation_scope(cancellation), pytest.raises(CancelledRequestError):
            decode_image(ordinary(), LIMITS)

    def test_closing_the_pool_ends_what_is_decoded_and_what_waits(self) -> None:
        with decode_processes(1) as pool:
            assert pool is not None
            running = Decoding(slow_jpeg())
            until(lambda: bool(pool._busy))
            waiting = Decoding(ordinary())
            until(lambda: bool(pool._waiting))
            processes = pool.processes()
        for decoding in (running, waiting):
            with pytest.raises(ShutdownError):
                decoding.result()
        assert not any(is_running(process) for process in processes)


class TestOwners:
    def test_one_owner_has_at_most_half_of_the_processes(self) -> None:
        with decode_processes(2) as pool:
            assert pool is not None
            with decode_for("ann"):
                slow = [Decoding(slow_jpeg()) for _ in range(3)]
            until(lambda: len(pool._waiting) == 2)
            with decode_for("bob"):
                decode_image(ordinary(), LIMITS)
            assert not any(decoding.done for decoding in slow)

    def test_without_owners_all_processes_are_used(self) -> None:
        with decode_processes(2) as pool:
            assert pool is not None
            slow = [Decoding(slow_jpeg()) for _ in range(2)]
            until(lambda: len(pool._running) == 2)
            assert not any(decoding.done for decoding in slow)


class TestProcesses:
    def test_one_can_be_started_ahead_of_the_first_item(self) -> None:
        with decode_processes(2) as pool:
            assert pool is not None
            pool.start_process()
            processes = pool.processes()
            decode_image(ordinary(), LIMITS)
            assert pool.processes() == processes
        pool.start_process()  # a closed pool keeps none
        assert not pool.processes()

    @linux
    def test_a_process_has_no_sockets_no_secrets_and_no_torch(
        self, pool: DecodePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OMNISTAGE_API_KEYS", "a-secret-key")
        left, right = socket.socketpair()
        left.set_inheritable(True)
        with left, right, decode_processes(1) as own:
            assert own is not None
            decode_image(ordinary(), LIMITS)
            [process] = own.processes()
            folder = Path(f"/proc/{process}")
            files = [os.readlink(entry) for entry in (folder / "fd").iterdir()]
            assert not [name for name in files if name.startswith("socket")]
            assert b"a-secret-key" not in (folder / "environ").read_bytes()
            assert "libtorch" not in (folder / "maps").read_text()

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signals_to_the_whole_group_are_for_the_service(self, number: int) -> None:
        with decode_processes(1) as pool:
            assert pool is not None
            decode_image(ordinary(), LIMITS)
            processes = pool.processes()
            os.kill(processes[0], number)
            decode_image(ordinary(), LIMITS)
            assert pool.processes() == processes

    def test_ctrl_c_does_not_reach_processes_that_still_start(self) -> None:
        """They ignore it once they run; until then Python would print where they were."""
        process = DecodeProcess()
        try:
            assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
        finally:
            process.kill()
            process.close()

    @linux
    def test_the_memory_of_a_large_item_is_given_back_whatever_came_of_it(self) -> None:
        with decode_processes(1) as pool:
            assert pool is not None
            with pytest.raises(MediaError):
                decode_image(bytes(32 * 2**20), LIMITS)
            [process] = pool.processes()
            files = [file for file in Path(f"/proc/{process}/fd").iterdir() if "memfd" in os.readlink(file)]
            assert [os.stat(file).st_size for file in files] == [0, 0]

    @linux
    def test_processes_end_with_the_one_that_started_them(self) -> None:
        code = (
            "import sys, threading, time\n"
            "from omnistage.media import MediaLimits, decode_image\n"
            "from omnistage.media.decode_pool import DecodePool, use_decode_pool\n"
            "from tests.slow_media import slow_jpeg\n"
            "pool = DecodePool(1)\n"
            "use_decode_pool(pool)\n"
            "decode_image(slow_jpeg(0), MediaLimits())\n"
            "limits = MediaLimits(max_image_scans=1_000_000)\n"
            "threading.Thread(target=decode_image, args=(slow_jpeg(), limits), daemon=True).start()\n"
            "while not pool._busy: time.sleep(0.001)\n"
            "print(*pool.processes(), flush=True)\n"
            "time.sleep(600)\n"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
            assert parent.stdout is not None
            process = int(parent.stdout.readline())
            assert is_running(process)
            parent.kill()
        until(lambda: not is_running(process))

    @linux
    def test_nothing_is_left_behind(self) -> None:
        shared_memory = set(os.listdir("/dev/shm"))
        files = len(os.listdir("/proc/self/fd"))
        with decode_processes(2) as pool:
            assert pool is not None
            decode_video(FORMATS["mp4"][1](), LIMITS)
            slow = Decoding(slow_jpeg())
            until(lambda: len(pool._busy) == 1)
            slow.cancellation.cancel()
            with pytest.raises(CancelledRequestError):
                slow.result()
        assert set(os.listdir("/dev/shm")) <= shared_memory
        assert len(os.listdir("/proc/self/fd")) == files

    @linux
    @pytest.mark.parametrize("failing", ["os.memfd_create", "os.pipe", "subprocess.Popen"])
    @pytest.mark.parametrize("before", [0, 1])
    def test_a_process_that_cannot_be_started_leaves_no_descriptor(
        self, failing: str, before: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module, _, name = failing.rpartition(".")
        original = getattr(sys.modules[module], name)
        calls = iter(range(10))

        def limited(*args: object, **options: object) -> object:
            if next(calls) == before or name == "Popen":
                raise OSError(errno.EMFILE, "Too many open files")
            return original(*args, **options)

        files = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(sys.modules[module], name, limited)
        with pytest.raises(OSError, match="Too many open files"):
            DecodeProcess()
        assert len(os.listdir("/proc/self/fd")) == files


class TestDamagedFiles:
    @pytest.mark.parametrize("name", FORMATS)
    def test_damaged_files_give_errors_of_ours_in_time(self, name: str, pool: DecodePool) -> None:
        report = fuzz(name, 40, seed=1)
        assert not report.defects
        assert sum(report.outcomes.values()) == 40

    @linux
    def test_their_memory_is_given_back(self, pool: DecodePool) -> None:
        fuzz("gif", 40, seed=2)
        before = resident_mib()
        fuzz("gif", 200, seed=3)
        assert resident_mib() - before < 50


def test_an_error_of_an_item_keeps_nothing_of_its_request(pool: DecodePool) -> None:
    class Body:
        """Stands for what the frames of a request hold, to which its error refers."""

    def failed() -> weakref.ref[Body]:
        body = Body()
        try:
            decode_image(b"no picture" * 100, LIMITS)
        except MediaError:
            return weakref.ref(body)
        raise ValueError("it decodes")

    gc.collect()
    gc.disable()  # reference counts alone: cycles are looked for rarely
    try:
        assert failed()() is None
    finally:
        gc.enable()

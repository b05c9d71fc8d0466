"""One budget for the memory of all requests' media: reserved before decoding, given back however a request ends."""

from __future__ import annotations

import io
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from omnistage.core.cancellation import Cancellation, cancellation_scope
from omnistage.core.errors import (
    CancelledRequestError,
    DeadlineExceededError,
    InvalidRequestError,
    LimitExceededError,
    MediaError,
    QueueFullError,
)
from omnistage.media import MediaLimits, budget, decode_audio, decode_image, decode_pool, decode_video
from omnistage.media import audio as audio_module
from omnistage.media.budget import MediaBudget, MediaHold, media_budget, media_hold
from omnistage.media.context import decode_for
from omnistage.media.decode_pool import DecodePool, decode_processes
from omnistage.media.limits import MIB
from omnistage.pipeline.messages.chat import parse_messages

if (folder := str(Path(__file__).parents[2] / "tools")) not in sys.path:
    sys.path.append(folder)

from fuzz_media import FORMATS

from tests.hang_guard import HANG_SECONDS, until
from tests.slow_media import video_of_many_samples

LIMITS = MediaLimits()


def waits(limits: MediaBudget, count: int = 1) -> None:
    """Return once so many requests wait for memory."""
    until(lambda: limits.waiting >= count, f"the wait of {count}")


@contextmanager
def started(work: object, *arguments: object) -> Iterator[Future[None]]:
    with ThreadPoolExecutor() as threads:
        yield threads.submit(work, *arguments)  # type: ignore[arg-type]


def png(width: int, height: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), (1, 2, 3)).save(data, "PNG")
    return data.getvalue()


class TestBudget:
    def test_a_request_waits_for_what_another_holds(self) -> None:
        limits = MediaBudget(100)
        first, second, third = (MediaHold(limits, None) for _ in range(3))
        first.reserve(50)
        second.reserve(40)  # of the other half, which one may use alone
        with started(third.reserve, 10) as waiting:
            waits(limits)
            assert limits.used_bytes == 90
            first.close()
            waiting.result(HANG_SECONDS)
        assert limits.used_bytes == 50

    def test_a_request_that_holds_little_does_not_keep_a_large_one_waiting(self) -> None:
        """It may be waiting for its next picture, from a slow host."""
        limits = MediaBudget(100)
        small, large = MediaHold(limits, None), MediaHold(limits, None)
        small.reserve(1)
        cancellation = Cancellation(time.monotonic() + HANG_SECONDS)
        with cancellation_scope(cancellation):
            large.reserve(50)
        assert limits.used_bytes == 51

    def test_what_alone_is_over_the_limit_is_refused_at_once(self) -> None:
        limits = MediaBudget(100)
        hold = MediaHold(limits, None)
        hold.reserve(30)
        with pytest.raises(LimitExceededError, match="51 bytes of memory up to here, over the limit of 50"):
            hold.reserve(21)
        assert limits.used_bytes == 30

    def test_it_is_given_back_when_nothing_refers_to_it(self) -> None:
        limits = MediaBudget(100)
        hold = MediaHold(limits, "somebody")
        hold.reserve(30)
        hold.settle(20)
        assert limits.used_bytes == 20
        del hold
        assert limits.used_bytes == 0

    def test_requests_that_hold_some_and_need_more_do_not_wait_for_each_other(self) -> None:
        limits = MediaBudget(100)
        first, second = MediaHold(limits, None), MediaHold(limits, None)
        first.reserve(25)
        second.reserve(25)
        second.reserve(25)  # it needed more first: it has all that is left
        with started(first.reserve, 25) as waiting:
            waits(limits)
            second.settle(10)
            waiting.result(HANG_SECONDS)
        assert limits.used_bytes == 60

    def test_an_owner_with_a_quarter_starts_no_more_and_others_do(self) -> None:
        limits = MediaBudget(100)
        running, further, other = MediaHold(limits, "a"), MediaHold(limits, "a"), MediaHold(limits, "b")
        running.reserve(30)
        running.settle()
        with started(further.reserve, 5) as waiting:
            waits(limits)
            other.reserve(40)
            assert not waiting.done()
            running.close()
            waiting.result(HANG_SECONDS)
        assert limits.used_bytes == 45

    def test_waiting_ends_with_the_request(self) -> None:
        limits = MediaBudget(100)
        first, second = MediaHold(limits, None), MediaHold(limits, None)
        first.reserve(50)
        second.reserve(40)

        def prepare(cancellation: Cancellation) -> None:
            with cancellation_scope(cancellation):
                MediaHold(limits, None).reserve(10)

        cancellation = Cancellation()
        with started(prepare, cancellation) as waiting:
            waits(limits)
            cancellation.cancel()
            with pytest.raises(CancelledRequestError):
                waiting.result(HANG_SECONDS)
        with pytest.raises(DeadlineExceededError):
            prepare(Cancellation(time.monotonic() + 0.05))
        assert limits.used_bytes == 90
        assert limits.waiting == 0

    def test_nobody_waits_for_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(budget, "MAX_WAIT_SECONDS", 0.02)
        limits = MediaBudget(100)
        first, second, third = (MediaHold(limits, None) for _ in range(3))
        first.reserve(50)
        second.reserve(40)
        with pytest.raises(QueueFullError, match="other requests hold the memory for media"):
            third.reserve(1)
        assert limits.waiting == 0
        first.close()
        third.reserve(1)

    def test_many_threads_never_hold_more_and_all_of_them_end(self) -> None:
        limits, lock = MediaBudget(1000), threading.Lock()
        highest = 0

        def request(seed: int) -> None:
            nonlocal highest
            values = random.Random(seed)
            with decode_for(values.choice(("a", "b", "c", None))):
                hold = MediaHold(limits, None if seed % 3 else "a")
            for _ in range(values.randint(1, 5)):
                hold.reserve(values.randint(1, 100))
                with lock:
                    highest = max(highest, limits.used_bytes)
            hold.settle(values.randint(0, hold.size))
            if values.random() < 0.5:
                hold.close()

        with ThreadPoolExecutor(24) as threads:
            jobs = [threads.submit(request, seed) for seed in range(600)]
            assert not wait(jobs, timeout=HANG_SECONDS).not_done
            for job in jobs:
                job.result()
        assert 0 < highest <= 1000
        assert limits.used_bytes == 0


@pytest.fixture(scope="module")
def pool() -> Iterator[DecodePool]:
    with decode_processes(1) as processes:
        assert processes is not None
        processes.start_process()
        yield processes


@pytest.mark.usefixtures("pool")
class TestDecoding:
    def test_decoded_media_are_held_until_they_are_gone(self) -> None:
        with media_budget(256 * MIB) as limits:
            with media_hold() as hold:
                image = decode_image(png(300, 200), LIMITS)
                assert image.size == (300, 200)
                assert limits.used_bytes == 300 * 200 * 4
                clip = decode_audio((np.zeros(16_000, np.float32), 16_000), LIMITS)
                assert limits.used_bytes == 300 * 200 * 4 + clip.samples.nbytes
            del hold
            assert limits.used_bytes == 0

    def test_a_large_picture_is_the_same_with_and_without_a_budget(self) -> None:
        values = np.random.default_rng(0).integers(0, 256, (1900, 2600, 3), np.uint8)
        data = io.BytesIO()
        Image.fromarray(values).save(data, "PNG", compress_level=1)
        with media_budget(512 * MIB):
            image = decode_image(data.getvalue(), LIMITS)
        assert np.array_equal(np.asarray(image), values)

    def test_a_picture_waits_for_memory_without_a_process(self, pool: DecodePool) -> None:
        """The pool's only process goes on with what is small."""
        with media_budget(240 * MIB) as limits:
            other, running = MediaHold(limits, None), MediaHold(limits, None)
            other.reserve(110 * MIB)
            running.reserve(20 * MIB)  # it may use the other half, until it is prepared
            other.close()
            with started(decode_image, png(3000, 3000), LIMITS) as large:  # 108 MB while it is decoded
                waits(limits)
                assert decode_image(png(20, 20), LIMITS).size == (20, 20)
                assert not large.done()
                running.close()
                assert large.result(HANG_SECONDS).size == (3000, 3000)  # type: ignore[attr-defined]

    def test_what_needs_more_than_a_request_may_hold_is_refused_from_its_header(self) -> None:
        with media_budget(64 * MIB) as limits:
            with pytest.raises(LimitExceededError, match="of memory up to here, over the limit of 33554432"):
                decode_image(png(3000, 3000), LIMITS)
            assert limits.used_bytes == 0
            assert decode_image(png(1000, 1000), LIMITS).size == (1000, 1000)

    def test_a_video_reserves_its_frames_and_its_audio(self) -> None:
        data = FORMATS["mp4"][1]()
        with media_budget(256 * MIB) as limits, media_hold() as hold:
            clip = decode_video(data, LIMITS, with_audio=True)
            assert clip.audio is not None
            assert hold.size == limits.used_bytes == clip.frames.nbytes + clip.audio.samples.nbytes


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_small_file_cannot_take_the_memory_that_large_ones_may() -> None:
    with decode_processes(1) as processes, media_budget(256 * MIB):
        assert processes is not None
        with pytest.raises(MediaError):
            decode_video(video_of_many_samples(40_000_000), LIMITS)
        [process] = processes.processes()
        status = Path(f"/proc/{process}/status").read_text().splitlines()
        highest = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        assert highest * 1024 < 1024 * MIB


def test_what_takes_much_memory_is_decoded_with_what_it_can_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_pool, "FREE_MEMORY", 64 * MIB)
    values = np.arange(3000 * 3000, dtype=np.uint16).reshape(3000, 3000)
    data = io.BytesIO()
    Image.fromarray(values).save(data, "PNG", compress_level=1)  # grey of 16 bits is converted through floats
    with decode_processes(1):
        with media_budget(2048 * MIB) as limits:
            image = decode_image(data.getvalue(), LIMITS)
            assert np.array_equal(np.asarray(image)[..., 0], np.rint(values / 257.0).astype(np.uint8))
            assert limits.used_bytes == 0
        with media_budget(300 * MIB), pytest.raises(LimitExceededError, match=r"takes over .* bytes of memory"):
            decode_image(data.getvalue(), LIMITS)


def test_audio_that_a_model_cannot_take_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.BytesIO()
    soundfile.write(data, np.zeros(80_000, np.float32), 8_000, format="WAV")
    monkeypatch.setattr(audio_module, "_to_mono", lambda block: pytest.fail("decoded"))
    message = {"role": "user", "content": [{"type": "audio", "audio": data.getvalue()}]}
    with pytest.raises(LimitExceededError, match="over the limit of 2"):
        parse_messages([message], LIMITS, max_clip_seconds=2.0)


@pytest.mark.parametrize("moment", range(8))
def test_a_hold_may_be_collected_in_the_middle_of_any_call(moment: int) -> None:
    """As by a collection of garbage: one of the same owner, while the bytes of that owner are counted."""
    pool = MediaBudget(100)
    others = [MediaHold(pool, "a")]
    others[0].reserve(10)
    left = moment

    class Owner(str):
        __slots__ = ()

        def __hash__(self) -> int:
            nonlocal left
            left -= 1
            if left < 0:
                others.clear()
            return super().__hash__()

    hold = MediaHold(pool, Owner("a"))
    hold.reserve(20)
    hold.release(20)
    others.clear()
    assert (pool.used_bytes, dict(pool._held_by_owner)) == (0, {})


def test_freed_memory_goes_back_to_the_system_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = threading.Event()
    monkeypatch.setattr(budget, "_TRIM_SECONDS", 0.01)
    monkeypatch.setattr(budget, "_trim", trimmed.set)
    monkeypatch.setattr(budget, "_trimming", False)
    limits = MediaBudget(1024 * MIB)
    small, large = MediaHold(limits, None), MediaHold(limits, None)
    with small.decoding() as item:  # what is reserved for an item, and never was memory of this process
        assert item.begin() == 16 * MIB
        item.need(100 * MIB)
        item.keep(MIB)
    small.close()
    assert not budget._trimming
    large.reserve(100 * MIB)
    large.close()
    assert budget._trimming or sys.platform != "linux"
    assert trimmed.wait(HANG_SECONDS) or sys.platform != "linux"


def test_an_error_does_not_keep_what_was_decoded_before_it() -> None:
    def decode() -> None:
        image = decode_image(np.zeros((8, 8, 3), np.uint8), LIMITS)
        kept.append(weakref.ref(image))
        decode_image(np.zeros((8, 8, 7), np.uint8), LIMITS)

    kept: list[weakref.ref[Image.Image]] = []
    with pytest.raises(InvalidRequestError) as caught, media_hold():
        decode()
    assert caught.value.__traceback__ is not None
    assert kept[0]() is None


def test_a_request_without_media_is_unknown_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with media_budget(100 * MIB) as limits:
        changes: list[object] = []
        monkeypatch.setattr(limits, "resize", lambda *args, **options: changes.append(args))
        monkeypatch.setattr(limits, "drop", changes.append)
        with media_hold() as hold:
            hold.settle(0)
        hold.close()
        del hold
        assert not changes


def test_bytes_that_were_there_already_are_given_back() -> None:
    with media_budget(100 * MIB) as limits:
        with media_hold() as hold:
            hold.settle(MIB)  # embeddings that the caller sent: nothing was reserved for them
        assert limits.used_bytes == MIB
        del hold
        assert limits.used_bytes == 0

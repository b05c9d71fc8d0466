"""Cancellation of a request's preparation, and the threads that it runs in."""

from __future__ import annotations

import asyncio
import functools
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from types import SimpleNamespace

import pytest

from omnistage.core.cancellation import Cancellation, cancellation_scope, current_cancellation
from omnistage.core.errors import CancelledRequestError, DeadlineExceededError, InternalError, InvalidRequestError
from omnistage.core.threads import DaemonThreads, interpreter_released
from omnistage.core.types import OmniTokensPrompt
from omnistage.pipeline.preparation import SHORT_CHARS, Lane, lane_of, prepare
from tests.hang_guard import HANG_SECONDS


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: object) -> None:
        async def main() -> None:
            await test(**arguments)

        asyncio.run(main())

    return run


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_check_raises_once_the_deadline_has_passed_or_the_request_was_cancelled() -> None:
    clock = Clock()
    cancellation = Cancellation(5.0, clock=clock)
    cancellation.check()
    assert cancellation.remaining() == 5.0
    clock.now = 5.0
    assert cancellation.remaining() == 0.0
    with pytest.raises(DeadlineExceededError):
        cancellation.check()
    other = Cancellation()
    assert other.remaining() is None
    assert not other.cancelled
    other.cancel()
    assert other.cancelled
    with pytest.raises(CancelledRequestError):
        other.check()


def test_abort_is_called_by_cancel_inside_the_block_and_never_after_it() -> None:
    cancellation, calls = Cancellation(), []
    with cancellation.on_cancel(lambda: calls.append("left")):
        pass
    with cancellation.on_cancel(lambda: calls.append("inside")):
        cancellation.cancel()
    with cancellation.on_cancel(lambda: calls.append("already")):
        pass
    assert calls == ["inside", "already"]


def test_result_ends_with_the_work_its_time_the_deadline_or_the_abort() -> None:
    done: Future[int] = Future()
    done.set_result(3)
    pending: Future[int] = Future()
    assert Cancellation().result(done) == 3
    with pytest.raises(TimeoutError):
        Cancellation().result(pending, timeout=0.01)
    with pytest.raises(DeadlineExceededError):
        Cancellation(time.monotonic() + 0.01).result(pending, timeout=60)
    cancellation = Cancellation()
    threading.Timer(0.01, cancellation.cancel).start()
    with pytest.raises(CancelledRequestError):
        cancellation.result(pending, timeout=60)


def test_a_scope_is_used_by_the_scopes_inside_it_and_cancelled_at_its_end() -> None:
    with cancellation_scope() as outer:
        assert current_cancellation() is outer
        with cancellation_scope() as inner:
            assert inner is outer
        assert not outer.cancelled
        with cancellation_scope(Cancellation()) as own:
            assert current_cancellation() is own
        assert own.cancelled
        assert not outer.cancelled
    assert outer.cancelled
    assert not current_cancellation().cancelled


def test_idle_callbacks_wait_for_all_work() -> None:
    cancellation, calls = Cancellation(), []
    cancellation.when_idle(lambda: calls.append("at once"))
    cancellation.begin_work()
    cancellation.begin_work()
    cancellation.when_idle(lambda: calls.append("later"))
    cancellation.end_work()
    assert calls == ["at once"]
    assert not cancellation.idle
    cancellation.end_work()
    assert calls == ["at once", "later"]
    assert cancellation.idle


# --------------------------------------------------------------------------------------------------- threads


@pytest.fixture
def threads() -> Iterator[DaemonThreads]:
    pool = DaemonThreads(2, "test")
    yield pool
    pool.shutdown()


def test_a_thread_with_a_share_of_a_core_rests_after_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the first job 0.5 s are no work of the interpreter's; the second takes 7 s.
    clock, rests = iter((1.0, 1.0, 1.5, 1.75, 2.0, 9.0, 9.0, 9.0)), list[float]()
    module = SimpleNamespace(thread_time=lambda: next(clock), sleep=rests.append)
    monkeypatch.setattr("omnistage.core.threads.time", module)
    pool = DaemonThreads(1, "test", max_share=0.5)

    def tokenise() -> int:
        with interpreter_released():
            return 1

    assert pool.submit(tokenise).result(HANG_SECONDS) == 1
    assert pool.submit(lambda: 2).result(HANG_SECONDS) == 2
    assert pool.submit(lambda: 3).result(HANG_SECONDS) == 3  # once it is there, the first two have rested
    assert rests[:2] == [0.25, 1.0]  # but not for long


def test_a_thread_is_started_while_all_others_work(threads: DaemonThreads) -> None:
    meet = threading.Barrier(2)
    jobs = [threads.submit(meet.wait, HANG_SECONDS) for _ in range(2)]
    assert sorted(job.result(HANG_SECONDS) for job in jobs) == [0, 1]
    assert threads.submit(threading.get_ident).result(HANG_SECONDS)
    meet.reset()  # both threads are idle: two jobs still run side by side
    jobs = [threads.submit(meet.wait, HANG_SECONDS) for _ in range(2)]
    assert sorted(job.result(HANG_SECONDS) for job in jobs) == [0, 1]


def test_work_of_one_owner_leaves_half_of_the_threads_to_others() -> None:
    pool, go = DaemonThreads(2, "test"), threading.Event()
    held = [pool.submit_for("ann", go.wait, HANG_SECONDS) for _ in range(4)]
    assert pool.submit_for("bob", lambda: 1).result(HANG_SECONDS) == 1
    assert pool.submit(lambda: 2).result(HANG_SECONDS) == 2
    assert not any(job.done() for job in held)
    pool.shutdown()  # what is queued still runs
    go.set()
    assert all(job.result(HANG_SECONDS) for job in held)


def test_what_a_job_raises_is_raised_where_it_is_awaited_and_the_thread_lives_on(threads: DaemonThreads) -> None:
    def fail() -> None:
        raise LookupError

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(LookupError):
        threads.submit(fail).result(HANG_SECONDS)
    # An event loop that awaits this would end if it were SystemExit itself.
    with pytest.raises(InternalError, match="SystemExit"):
        threads.submit(leave).result(HANG_SECONDS)
    assert threads.submit(lambda: 1).result(HANG_SECONDS) == 1


def test_after_shutdown_nothing_is_taken_and_what_was_queued_still_runs() -> None:
    pool, go = DaemonThreads(1, "test"), threading.Event()
    first, second = pool.submit(go.wait, HANG_SECONDS), pool.submit(lambda: 2)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(lambda: 3)
    go.set()
    assert first.result(HANG_SECONDS)
    assert second.result(HANG_SECONDS) == 2


def test_a_job_that_is_cancelled_in_the_queue_leaves_it_with_its_data() -> None:
    pool, go = DaemonThreads(1, "test"), threading.Event()
    first = pool.submit(go.wait, HANG_SECONDS)
    body = {"a body"}
    data = weakref.ref(body)
    job = pool.submit(len, body)
    del body
    assert data() is not None
    assert job.cancel()
    assert job.cancel()  # again
    assert data() is None
    assert job in wait([job], timeout=HANG_SECONDS).done
    last = pool.submit(lambda: 3)
    go.set()
    assert first.result(HANG_SECONDS)
    assert last.result(HANG_SECONDS) == 3
    pool.shutdown()


def test_a_result_that_is_kept_does_not_keep_what_it_was_made_from() -> None:
    pool, body = DaemonThreads(1, "test"), {"a body"}
    data = weakref.ref(body)
    job = pool.submit(len, body)
    del body
    assert job.result(HANG_SECONDS) == 1
    assert pool.submit(lambda: 2).result(HANG_SECONDS) == 2  # the thread is done with the first
    assert data() is None
    pool.shutdown()


def test_what_is_dropped_at_the_shutdown_is_cancelled() -> None:
    pool, begun, go = DaemonThreads(1, "test"), threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return go.wait(HANG_SECONDS)

    first, second = pool.submit(work), pool.submit(lambda: 2)
    assert begun.wait(HANG_SECONDS)
    pool.shutdown(cancel_futures=True)
    assert second.cancelled()
    go.set()
    assert first.result(HANG_SECONDS)


def test_where_no_thread_can_be_started_others_take_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, go = DaemonThreads(2, "test"), threading.Event()

    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(lambda: 1)
    first = pool.submit(go.wait, HANG_SECONDS)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        second = pool.submit(lambda: 2)
    go.set()
    assert second.result(HANG_SECONDS) == 2
    assert first.result(HANG_SECONDS)
    pool.shutdown()


def test_the_process_ends_while_a_thread_still_works() -> None:
    code = (
        "import time; from omnistage.core.threads import DaemonThreads\nDaemonThreads(1, 'x').submit(time.sleep, 600)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ----------------------------------------------------------------------------------------------- preparation


@in_loop
async def test_work_runs_in_the_callers_context() -> None:
    with cancellation_scope() as cancellation:
        assert await prepare(current_cancellation, cancellation, Lane.SHORT) is cancellation


@in_loop
async def test_the_deadline_ends_the_wait_and_reaches_the_thread() -> None:
    for seconds in (0.05, 0.5, 5.0, 50.0):  # again with more where no thread had begun by then
        began, seen, cancellation = threading.Event(), Future[str](), Cancellation(time.monotonic() + seconds)

        def work(
            began: threading.Event = began, seen: Future[str] = seen, cancellation: Cancellation = cancellation
        ) -> None:
            began.set()
            try:
                while True:
                    cancellation.check()
                    time.sleep(0.005)
            except DeadlineExceededError:
                seen.set_result("deadline")
                raise

        with pytest.raises(DeadlineExceededError):
            await prepare(work, cancellation, Lane.LONG)
        if began.is_set():
            break
    assert await asyncio.wrap_future(seen) == "deadline"


@pytest.mark.parametrize("by", ["task", "abort"])
@in_loop
async def test_leaving_early_cancels_the_work_which_counts_until_it_ends(by: str) -> None:
    go, idle, cancellation = threading.Event(), asyncio.Event(), Cancellation()
    loop, began = asyncio.get_running_loop(), asyncio.Event()

    def work() -> bool:
        loop.call_soon_threadsafe(began.set)
        return go.wait(HANG_SECONDS)

    waiting = asyncio.ensure_future(prepare(work, cancellation, Lane.SHORT))
    await began.wait()
    if by == "task":
        waiting.cancel()
    else:
        cancellation.cancel()
    with pytest.raises(asyncio.CancelledError if by == "task" else CancelledRequestError):
        await waiting
    assert cancellation.cancelled
    assert not cancellation.idle
    cancellation.when_idle(lambda: loop.call_soon_threadsafe(idle.set))
    go.set()
    await idle.wait()


@in_loop
async def test_a_failure_as_late_as_the_deadline_is_not_left_to_asyncio(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()

    async def wait_past_the_deadline(_awaited: object, timeout: float | None) -> None:
        ended.wait(HANG_SECONDS)  # blocks the loop: it learns of the end of the work only after the deadline

    def work() -> None:
        raise DeadlineExceededError("late")

    monkeypatch.setattr("omnistage.pipeline.preparation.asyncio.wait", wait_past_the_deadline)
    cancellation = Cancellation(time.monotonic())
    threading.Timer(0.05, ended.set).start()
    with pytest.raises(DeadlineExceededError):
        await prepare(work, cancellation, Lane.SHORT)
    await asyncio.sleep(0.05)
    gc.collect()
    assert not caplog.records


@in_loop
async def test_where_no_thread_can_be_started_nothing_counts_as_working(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("omnistage.pipeline.preparation._short.submit", submit)
    cancellation = Cancellation()
    with pytest.raises(RuntimeError, match="thread"):
        await prepare(lambda: 1, cancellation, Lane.SHORT)
    assert cancellation.idle


@in_loop
async def test_long_work_does_not_keep_short_work_waiting() -> None:
    go = threading.Event()
    blocked = [
        asyncio.ensure_future(prepare(lambda: go.wait(HANG_SECONDS), Cancellation(), Lane.LONG)) for _ in range(64)
    ]
    assert await prepare(lambda: 1, Cancellation(), Lane.SHORT) == 1
    go.set()
    assert all(await asyncio.gather(*blocked))


@pytest.mark.parametrize(
    ("prompt", "lane"),
    [
        ("a" * SHORT_CHARS, Lane.SHORT),
        ("a" * (SHORT_CHARS + 1), Lane.LONG),
        ([{"role": "user", "content": "hello"}], Lane.SHORT),
        ([{"role": "user", "content": [{"type": "text", "text": "hello"}]}], Lane.SHORT),
        ([{"role": "user", "content": "a" * SHORT_CHARS}, {"role": "user", "content": "b"}], Lane.LONG),
        ([{"role": "user", "content": "a"}] * 200, Lane.SHORT),
        ([{"role": "user", "content": "a"}] * 2000, Lane.LONG),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}], Lane.SHORT),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": " " * SHORT_CHARS}}]}], Lane.LONG),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}], Lane.MEDIA),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "a" * (SHORT_CHARS + 1)}}]}], Lane.LONG),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "a" * (SHORT_CHARS + 1)}]}], Lane.LONG),
        ({"prompt": "a cat"}, Lane.SHORT),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "https://x/y.png", "text": ""}]}],
            Lane.MEDIA,
        ),
        ({"prompt": "a cat", "image": b"..."}, Lane.MEDIA),
        ({"prompt": "a cat", "images": [b"..."]}, Lane.MEDIA),
        ({"prompt": "a cat", "mask": "data:image/png;base64,AA"}, Lane.MEDIA),
        ({"prompt_token_ids": [1, 2, 3]}, Lane.SHORT),
        ({"prompt_token_ids": [1] * (SHORT_CHARS + 1)}, Lane.LONG),
        (OmniTokensPrompt((1, 2, 3)), Lane.SHORT),
        (OmniTokensPrompt((1,) * (SHORT_CHARS + 1)), Lane.LONG),
        (
            [
                {"role": "user", "content": "a" * (SHORT_CHARS + 1)},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]},
            ],
            Lane.LONG_MEDIA,
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "https://x/y.png"}]}] * 300,
            Lane.LONG_MEDIA,
        ),
        (None, Lane.SHORT),
        ([None, 3, {"content": 4}], Lane.SHORT),
    ],
)
def test_media_and_long_texts_have_threads_of_their_own(prompt: object, lane: Lane) -> None:
    assert lane_of(prompt) is lane


def test_token_ids_are_not_looked_at_one_by_one() -> None:
    class Ids(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError

    assert lane_of({"prompt_token_ids": Ids([1])}) is Lane.SHORT


@pytest.mark.parametrize(
    ("properties", "lane"),
    [({"a": {"type": "string"}}, Lane.SHORT), ({"a": {"description": "x" * SHORT_CHARS}}, Lane.LONG)]
    + [({f"p{i}": {} for i in range(count)}, Lane.LONG if count > 100 else Lane.SHORT) for count in (100, 5000)],
)
def test_large_tools_make_a_prompt_long(properties: dict[str, object], lane: Lane) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    assert lane_of([{"role": "user", "content": "hello"}], [tool]) is lane
    drawn = [{"role": "user", "content": [{"type": "image", "image": b"..."}]}]
    assert lane_of(drawn, [tool]) is (Lane.LONG_MEDIA if lane is Lane.LONG else Lane.MEDIA)


@pytest.mark.parametrize("lane", Lane)
def test_the_data_of_a_request_that_is_refused_are_freed_at_once(lane: Lane) -> None:
    """Not by a collection: its body may have many megabytes."""

    class Body:
        pass

    async def refused() -> weakref.ref[Body]:
        body = Body()

        def work(body: Body = body) -> None:
            raise InvalidRequestError("refused")

        try:  # `pytest.raises` would keep the error
            await prepare(work, Cancellation(), lane)
        except InvalidRequestError:
            return weakref.ref(body)
        raise AssertionError

    async def main() -> None:
        left = await asyncio.ensure_future(refused())
        while left() is not None:  # its thread may be about to drop it
            await asyncio.sleep(0.001)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(main(), HANG_SECONDS))
    finally:
        gc.enable()

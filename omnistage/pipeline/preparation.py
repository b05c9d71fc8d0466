"""Where requests are prepared: threads in which prompts are checked, media decoded and text tokenised.

Five groups of threads. Short prompts never wait for others; they have two threads, as they need the interpreter. Media
and constraints have threads of their own, half of them for one owner, which mostly wait for the processes that decode
and the threads that compile. Long texts, and large bodies before them, have one thread, which rests between them: they
need the interpreter, which one thread at a time can use, and others need it too. Long texts with media have two, one
for each owner: a slow host may keep one of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from enum import Enum
from functools import partial
from typing import TypeVar

from omnistage.core.cancellation import Cancellation
from omnistage.core.errors import DeadlineExceededError
from omnistage.core.threads import DaemonThreads
from omnistage.core.types import OmniTokensPrompt, SpeechPrompt, TextBatch
from omnistage.media.context import current_owner
from omnistage.pipeline.event_loop import call_soon

_Result = TypeVar("_Result")

SHORT_CHARS = 16_384
"""Text up to here is tokenised in a few milliseconds."""
_VALUE_CHARS = 64
"""What a message or a value of a tool counts as, beside its text."""
_TEXT_KEYS = ("prompt", "prompt_token_ids")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_cores = os.cpu_count() or 1
_short = DaemonThreads(2, "omnistage-prepare")
_media = DaemonThreads(_cores + 4, "omnistage-prepare-media")
_constraints = DaemonThreads(_cores + 4, "omnistage-prepare-constraint")
_long = DaemonThreads(1, "omnistage-long", max_share=1 / 3)
_long_media = DaemonThreads(2, "omnistage-long-media", max_share=1 / 4)


class Lane(Enum):
    """What preparing a request mostly takes: little, decoding, compiling, time of the interpreter, or that
    and decoding."""

    SHORT = "short"
    MEDIA = "media"
    CONSTRAINT = "constraint"
    LONG = "long"
    LONG_MEDIA = "long_media"


_THREADS = {Lane.MEDIA: _media, Lane.CONSTRAINT: _constraints, Lane.LONG: _long, Lane.LONG_MEDIA: _long_media}


def submit_long(owner: str | None, work: Callable[[], _Result]) -> Future[_Result]:
    """Run what keeps the interpreter busy, after what others have submitted before; owners take turns."""
    return _long.submit_for(owner, work)


async def prepare(work: Callable[[], _Result], cancellation: Cancellation, lane: Lane) -> _Result:
    """The result of `work`, which runs in a thread and in the caller's context.

    Left before its end, at the request's deadline, its abort or because the task was cancelled, it cancels the work and
    waits no longer. `cancellation.when_idle` tells when the thread is really done.
    """
    context, over = copy_context(), asyncio.Event()
    wake = partial(call_soon, asyncio.get_running_loop(), over.set)

    def run() -> _Result:
        cancellation.check()  # it may have waited in the queue
        return context.run(work)

    def ended(_: Future[_Result]) -> None:
        cancellation.end_work()
        wake()

    if lane is Lane.SHORT:
        job = _short.submit(run)
    else:
        job = _THREADS[lane].submit_for(current_owner(), run)
    cancellation.begin_work()  # only now: where no thread can be started, nothing would ever end it
    job.add_done_callback(ended)
    try:
        with cancellation.on_cancel(wake), suppress(TimeoutError):
            async with asyncio.timeout(cancellation.remaining()):
                await over.wait()
        if job.done() and not cancellation.cancelled:
            return job.result()
        cancellation.check()
        raise DeadlineExceededError("the deadline passed while the request was prepared", param="timeout")
    finally:
        if not job.done():
            job.cancel()
            cancellation.cancel()
        # An error that is raised refers to this frame: with this it would be a cycle, and keep the data of a request.
        del job


def lane_of(prompt: object, tools: object = ()) -> Lane:
    """Where a prompt is prepared: by its media, and by its text, messages and tools.

    What is no prompt is refused at once.
    """
    if isinstance(prompt, Mapping):  # of a drawing with images, or text
        if any(key not in _TEXT_KEYS for key in prompt):
            return Lane.MEDIA
        return Lane.LONG if any(map(_is_long, prompt.values())) else Lane.SHORT
    if isinstance(prompt, OmniTokensPrompt):
        return Lane.LONG if _is_long(prompt.prompt_token_ids) else Lane.SHORT
    if isinstance(prompt, SpeechPrompt):
        return Lane.MEDIA
    if isinstance(prompt, TextBatch):
        return Lane.LONG if sum(map(len, (*prompt.texts, *prompt.seconds))) > SHORT_CHARS else Lane.SHORT
    if not isinstance(prompt, list | tuple):
        return Lane.LONG if _is_long(prompt) else Lane.SHORT
    chars, has_media = 0, False
    for message in prompt:  # all of them: media may come last, and a slow host must not keep the thread of long texts
        chars += _VALUE_CHARS  # what is left of a message, which templates render piece by piece
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else (content,):
            if isinstance(part, Mapping) and part.get("type") not in _TEXT_PARTS:
                has_media = True
                continue
            text = part.get("text") or part.get("refusal") if isinstance(part, Mapping) else part
            chars += len(text) if isinstance(text, str) else 0
        calls = message.get("tool_calls")
        chars += _weight(calls, SHORT_CHARS - chars) if calls else 0
    if tools and chars <= SHORT_CHARS:
        chars += _weight(tools, SHORT_CHARS - chars)
    if has_media:
        return Lane.LONG_MEDIA if chars > SHORT_CHARS else Lane.MEDIA
    return Lane.LONG if chars > SHORT_CHARS else Lane.SHORT


def _is_long(value: object) -> bool:
    """Whether a text, or a prompt's token ids, are many."""
    return isinstance(value, str | list | tuple) and len(value) > SHORT_CHARS


def _weight(value: object, enough: int) -> int:
    """The characters of all texts in a value, and some for each value in it; counted until they are enough."""
    total, stack = 0, [value]
    while stack and total <= enough:
        item = stack.pop()
        total += _VALUE_CHARS + (len(item) if isinstance(item, str) else 0)
        if isinstance(item, Mapping):
            stack += item  # its keys
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
    return total

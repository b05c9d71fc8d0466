"""Several requests of one call: what the caller gives, their outputs as they come, and a progress bar."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from omnistage.core.errors import InvalidRequestError
from omnistage.pipeline.intake import ParamsLike, Prompt
from omnistage.pipeline.output_assembler import Sink
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk

Conversation = Sequence[Mapping[str, object]]


class Batch:
    """The outputs of one call, in its order, as stage threads deliver them."""

    def __init__(self, size: int) -> None:
        self.outputs: list[OmniRequestOutput | None] = [None] * size
        self.num_done = 0
        self.tokens = 0
        self.steps: dict[int, tuple[int, int]] = {}
        """Denoising steps of each request, done and in all, for those that have any."""
        self.changed = threading.Condition()

    def sink(self, index: int) -> Sink:
        def take(item: OutputChunk) -> None:
            with self.changed:
                self.tokens += len(item.token_ids)
                if item.progress is not None:
                    self.steps[index] = (item.progress.step, item.progress.steps)
            if item.final is not None:
                self.put(index, item.final)

        return take

    def put(self, index: int, output: OmniRequestOutput) -> None:
        with self.changed:
            self.outputs[index] = output
            self.num_done += 1
            self.changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait for the last output; whether all are there."""
        with self.changed:
            return self.changed.wait_for(lambda: self.num_done == len(self.outputs), timeout)


class BatchBar:
    """A progress bar over a batch: requests done, tokens a second or denoising steps. Silent where no one watches."""

    def __init__(self, batch: Batch, show: bool) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
            TimeElapsedColumn(),
        )
        self._batch = batch
        self._start = time.monotonic()
        self._bar = Progress(*columns, console=console, disable=not (show and console.is_terminal))
        self._task = self._bar.add_task("requests", total=len(batch.outputs), pace="")

    def refresh(self) -> None:
        batch, elapsed = self._batch, max(time.monotonic() - self._start, 1e-9)
        if batch.steps:
            with batch.changed:
                steps_done, total = (sum(part) for part in zip(*batch.steps.values(), strict=True))
            # The bar moves with the steps: a single picture would otherwise show nothing until it is there.
            self._bar.update(self._task, completed=steps_done, total=total, pace=f"steps, {batch.num_done} done")
        else:
            self._bar.update(self._task, completed=batch.num_done, pace=f"{batch.tokens / elapsed:.0f} tokens/s")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh()
        self._bar.stop()


def prompt_list(prompts: object) -> list[Prompt]:
    """The prompts of a batch. Raises `InvalidRequestError` for what is neither a prompt nor several."""
    try:
        items = None if isinstance(prompts, bytes | bytearray | memoryview) else iter(prompts)  # type: ignore[call-overload]
    except TypeError:
        items = None
    if items is None:
        raise InvalidRequestError(
            f"must be a prompt or a list of prompts, got {type(prompts).__name__}", param="prompts"
        )
    return list(items)


def params_for_each(params: ParamsLike | Sequence[ParamsLike], count: int) -> list[ParamsLike]:
    """Parameters of each prompt of a batch: one for all, or a list of as many."""
    if not isinstance(params, list | tuple):
        return [params] * count  # type: ignore[list-item]
    if len(params) != count:
        raise InvalidRequestError(
            f"{len(params)} parameters for {count} prompts; give one for all or one for each", param="sampling_params"
        )
    return list(params)


def conversation_list(messages: object) -> tuple[list[Conversation], bool]:
    """The conversations given, and whether it was one by itself."""
    if isinstance(messages, list | tuple) and messages:
        if isinstance(messages[0], Mapping):
            return [messages], True
        if all(isinstance(conversation, list | tuple) for conversation in messages):
            return list(messages), False
    raise InvalidRequestError(
        "must be a conversation (a list of messages with role and content) or a list of conversations", param="messages"
    )

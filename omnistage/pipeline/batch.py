"""Several requests of one call: their outputs as they come, and a bar that shows how far they are."""

from __future__ import annotations

import threading
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from omnistage.pipeline.output import Sink
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk


class Batch:
    """The outputs of one call, in its order, as stage threads deliver them."""

    def __init__(self, size: int) -> None:
        self.outputs: list[OmniRequestOutput | None] = [None] * size
        self.done = 0
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
            self.done += 1
            self.changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait for the last output; whether all are there."""
        with self.changed:
            return self.changed.wait_for(lambda: self.done == len(self.outputs), timeout)


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
                done, total = (sum(part) for part in zip(*batch.steps.values(), strict=True))
            # The bar moves with the steps: a single picture would otherwise show nothing until it is there.
            self._bar.update(self._task, completed=done, total=total, pace=f"steps, {batch.done} done")
        else:
            self._bar.update(self._task, completed=batch.done, pace=f"{batch.tokens / elapsed:.0f} tokens/s")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh()
        self._bar.stop()

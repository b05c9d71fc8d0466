"""A worker process with scripted stages in place of a model's: `python -m tests.unit.placement_worker HOLD SOCKET`.

While the file HOLD exists, its stages are in a step.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from omnistage.core.family import Bridge
from omnistage.core.types import SideRows, StageChunk, TokenChunk
from omnistage.pipeline.group_build import GroupParts
from omnistage.pipeline.worker import Worker
from omnistage.placement.messages import Start
from tests.unit.fakes import FakeStage, linear, stream_into

LOADING = ".loading"
"""While HOLD with this suffix exists, it loads."""
POISON = "poison"
"""The request of this id makes steps raise."""
prepared = ""
"""The file in which a fork notes whose it is, once `prepare` was told it."""


def real_rows(bridge: Bridge) -> Bridge:
    """The same bridge with tensors in place of what only has a length."""
    import torch

    def with_tensors(request, state, chunk: StageChunk):  # type: ignore[no-untyped-def]
        state, inputs = bridge(request, state, chunk)
        return state, [
            SideRows(torch.zeros(len(value.rows), 2), value.final) if isinstance(value, SideRows) else value
            for value in inputs
        ]

    return with_tensors


class TensorStage(FakeStage):
    """A step takes a moment, and its tokens come with hidden rows."""

    hold = ""

    def step(self) -> list[StageChunk]:
        import torch

        time.sleep(0.002)
        if POISON in self.jobs:
            raise RuntimeError("this request is poison")
        while os.path.exists(self.hold):
            time.sleep(0.01)
        return [
            StageChunk(
                chunk.request_id,
                chunk.stage,
                TokenChunk(chunk.payload.token_ids, chunk.payload.text, hidden=torch.zeros(1, 30_000)),
                chunk.index,
                chunk.finish,
            )
            if isinstance(chunk.payload, TokenChunk)
            else chunk
            for chunk in super().step()
        ]


class FakeWorker(Worker):
    def _build(self, message: Start) -> GroupParts:
        while os.path.exists(TensorStage.hold + LOADING):
            time.sleep(0.01)
        graph = linear()
        stages = {name: TensorStage(name, audio=name == "vocoder") for name in message.stages}
        bridges = {
            "talker": real_rows(stream_into()),
            "vocoder": stream_into(audio=True),
        }
        return GroupParts(graph, stages, bridges, None)


def prepare(arguments: str, stages: Sequence[str]) -> None:
    """What the arguments say to do in the process that forks come from."""
    global prepared
    task = json.loads(arguments)
    if task.get("thread"):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if "waits" in task:
        Path(task["waits"]).write_text(f"{os.getpid()} ")
        threading.Event().wait()
    if task.get("fail"):
        raise RuntimeError("this cannot be prepared")
    prepared = task.get("note", "")


def main(arguments: list[str]) -> None:
    if prepared:
        Path(prepared).write_text(str(os.getppid()))
    TensorStage.hold = arguments[0]
    os._exit(FakeWorker(socket.socket(fileno=int(arguments[1]))).run())


if __name__ == "__main__":
    main(sys.argv[1:])

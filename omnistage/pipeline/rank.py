"""A process that computes one rank of a stage: `python -m omnistage.pipeline.rank SOCKET`.

It is started by `pipeline.ranks`, does what rank 0 says, and ends when the other end of its socket does.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from omnistage.config import ARStageConfig, DiffusionStageConfig
from omnistage.config.checkpoint import read_model_config
from omnistage.core.checkpoint import Checkpoint
from omnistage.core.errors import InternalError, OmniError
from omnistage.core.failures import log_defect
from omnistage.core.family import LoadContext
from omnistage.engines.ar.step_plan import Forward, Logits
from omnistage.engines.diffusion.step_plan import TransformerCall
from omnistage.placement.channel import Channel
from omnistage.placement.messages import Beat, Failed, Message, Ready, Serve, StartRank, Stop

BEAT_SECONDS = 0.5
"""Between two signs of life."""
_FAILED_CODE = 3
"""The exit code of a rank whose step has failed."""


class Rank:
    """One rank, driven by the messages of its channel."""

    def __init__(self, sock: socket.socket) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._channel = Channel(sock, self._receive, lambda: os._exit(0), name="rank 0")

    def _receive(self, messages: list[Message]) -> None:
        for message in messages:
            self._messages.put(message)

    def run(self) -> int:
        """Until rank 0 says stop, or a step fails; the exit code."""
        self._channel.start()
        start = self._messages.get()
        if not isinstance(start, StartRank):
            return 0
        threading.Thread(target=self._beat, name="omnistage-beat", daemon=True).start()
        logging.basicConfig(level=start.log_level, format="%(levelname)s %(process)d %(name)s: %(message)s")
        try:
            self._serve(start)
        except OmniError as error:
            self._channel.send(Failed(error))
        except BaseException as error:  # the boundary of the process: its end says the rest
            log_defect(f"rank {start.rank} of stage {start.stage!r}", error)
            self._channel.send(Failed(InternalError(f"rank {start.rank} failed with {type(error).__name__}")))
            return _FAILED_CODE
        return 0

    def _beat(self) -> None:
        """Say that this process lives; it ends with the channel."""
        while True:
            self._channel.send(Beat())
            time.sleep(BEAT_SECONDS)

    def _serve(self, start: StartRank) -> None:
        import torch

        from omnistage.pipeline.ranks import following_rank

        torch.set_num_threads(start.torch_threads)
        stage, device = _stage_config(start.config), torch.device(start.device)
        if device.type == "cuda":  # pragma: no cover  (needs CUDA)
            torch.cuda.set_device(device)
        folder = Path(start.folder)
        model = Checkpoint(folder, read_model_config(folder), start.family, start.model)
        context = LoadContext(
            model,
            start.stage,
            stage,
            device,
            getattr(torch, start.dtype),
            torch_threads=start.torch_threads,
            requested_dtype=start.requested_dtype,
        )
        rank = following_rank(context, stage, start.rank)
        self._channel.send(Ready())
        while not isinstance(message := self._messages.get(), Stop):
            if isinstance(message, Serve):
                rank.group.connect(start.backend, start.store, device)
                rank.serve(message.kv_blocks)
            elif isinstance(message, Forward | Logits | TransformerCall):
                rank.run(message)


def _stage_config(data: str) -> ARStageConfig | DiffusionStageConfig:
    kind = ARStageConfig if json.loads(data)["engine"] == "autoregressive" else DiffusionStageConfig
    return kind.model_validate_json(data)


def main(arguments: list[str]) -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to whole groups: rank 0 decides
        signal.signal(name, signal.SIG_IGN)
    code = Rank(socket.socket(fileno=int(arguments[0]))).run()
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

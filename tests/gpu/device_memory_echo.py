"""A process that sends back the tensors that it is sent: `python -m tests.gpu.device_memory_echo SOCKET`."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence

import torch

from omnistage.core.types import SideRows
from omnistage.placement.channel import Channel
from omnistage.placement.device_memory import used_devices
from omnistage.placement.messages import Feed, Message, Ready


def main(descriptor: int) -> None:
    torch.zeros(1, device="cuda")
    channel: Channel

    def receive(messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Ready):
                channel.share_devices(message.devices)
                channel.send(Ready(used_devices()))
            elif isinstance(message, Feed) and isinstance(message.feed, SideRows):
                channel.send(Feed(str(message.feed.rows.device), message.key, "", SideRows(message.feed.rows + 1)))

    channel = Channel(socket.socket(fileno=descriptor), receive, lambda: os._exit(0), name="echo")
    channel.start()
    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))

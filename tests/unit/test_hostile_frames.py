"""What a channel does with bytes that no worker of ours would send: it closes, and nothing of them is believed."""

from __future__ import annotations

import json
import socket
import struct
import tempfile
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.core.errors import StageError
from omnistage.core.params import SamplingParams
from omnistage.core.stage import StageStats, StepSeconds
from omnistage.core.types import ARInput, RequestInfo, StageChunk, StageInput, TokenChunk
from omnistage.placement.messages import Beat, Chunks, Failed, Message, Submit, Taken
from tests.hang_guard import HANG_SECONDS
from tests.unit.test_placement_channel import End


def frame_of(*messages: Message) -> bytes:
    """The bytes of one frame, as they go over a socket."""
    pair = socket.socketpair()
    with pair[1]:
        source = End(pair[0])
        source.channel.send(*messages)
        frame = pair[1].recv(1 << 20)
        source.channel.close()
        assert source.closed.wait(HANG_SECONDS)
    return frame


TOKENS = TokenChunk((1, 2), "text", hidden=torch.ones(2, 8))
FRAMES = [
    frame_of(Chunks("talker", (1, 2), (StageChunk("a", "talker", TOKENS, time=1.0),) * 2)),
    frame_of(Beat({"talker": StageStats(running=1, extra={"a": 1.0})}, {"talker": StepSeconds()})),
    frame_of(Submit("talker", 3, StageInput(RequestInfo("a"), SamplingParams(), ARInput((1, 2, 3))))),
    frame_of(Failed(StageError("it cannot be built")), Taken("talker", 3)),
]


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(FRAMES), st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=9)), max_size=4)
)
def test_whatever_bytes_come_a_channel_gives_messages_or_closes(frame: bytes, edits: list[tuple[float, bytes]]) -> None:
    """Places of a frame are overwritten, then the other end is gone: nothing else is raised, and nobody waits."""
    data = bytearray(frame)
    for place, piece in edits:
        at = int(place * len(data))
        data[at : at + len(piece)] = piece
    pair = socket.socketpair()
    sink = End(pair[0])
    pair[1].sendall(data)
    pair[1].close()
    assert sink.closed.wait(HANG_SECONDS)
    assert all(type(message).__name__ in {kind.__name__ for kind in get_args(Message)} for message in sink.messages)


HOSTILE = [
    ["Taken", ["talker", "many"]],
    ["Taken", ["talker"]],
    ["Taken", ["talker", 3, 4]],
    ["Taken", [["talker"], 3]],
    ["Beat", [{"talker": ["1"] * 8}, {}, None]],
    ["Beat", [[], {}, None]],
    ["Beat", [{}, {}, 5]],
    ["Chunks", ["talker", "ab", []]],
    ["Chunks", ["talker", [[1]], []]],
    ["Failed", [["SystemExit", "x", None, None], 1]],
    ["Submit", ["talker", 1, None]],
    ["os.system", ["true"]],
    ["Feed", ["talker", 1, "r", ["SideRows", [["save", [1], 0, None], True]]]],
    ["Feed", ["talker", 1, "r", ["SideRows", [["float32", [1 << 40], 0, None], True]]]],
    ["Feed", ["talker", 1, "r", ["SideRows", [["float32", [1], 7, None], True]]]],
    "Taken",
    None,
    [],
]


@pytest.mark.parametrize("message", HOSTILE, ids=lambda message: json.dumps(message)[:40])
def test_a_message_of_other_types_than_declared_closes_the_channel(message: object) -> None:
    text, pair = json.dumps([[message], []]).encode(), socket.socketpair()
    sink = End(pair[0])
    with pair[1]:
        pair[1].sendall(struct.pack("<IIQQ", len(text), 0, 0, 0) + text)
        assert sink.closed.wait(HANG_SECONDS)
    assert not sink.messages


def test_a_file_that_is_announced_and_does_not_come_or_is_too_short_closes_the_channel() -> None:
    message = ["Feed", ["talker", 1, "r", ["SideRows", [["uint8", [1 << 20], 0, None], True]]]]
    text = json.dumps([[message], [1 << 20]]).encode()
    for sends_file in (False, True):
        pair = socket.socketpair()
        sink = End(pair[0])
        with pair[1], tempfile.TemporaryFile() as file:
            frame = struct.pack("<IIQQ", len(text), 1, 0, 1 << 20) + text
            socket.send_fds(pair[1], [frame], [file.fileno()] if sends_file else [])
            assert sink.closed.wait(HANG_SECONDS)
        assert not sink.messages

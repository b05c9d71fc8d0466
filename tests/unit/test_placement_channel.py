"""What crosses between processes: typed values, exact bytes, and nothing that stays behind."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from omnistage.core.clips import AudioClip, VideoClip
from omnistage.core.errors import InternalError, OmniError, QueueFullError, StageError
from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, TemplateOptions, TextPart, ToolCall, VideoPart
from omnistage.core.params import CodecParams, DiffusionParams, SamplingParams, StageParams, StructuredOutput
from omnistage.core.types import (
    ARInput,
    AudioChunk,
    ChatInput,
    CodecFrames,
    CodecInput,
    Condition,
    DiffusionInput,
    FinishReason,
    ImageChunk,
    Latents,
    LinkedInput,
    LinkedStage,
    MediaSpan,
    Modality,
    ModuleInput,
    ModuleOutput,
    Progress,
    RequestInfo,
    SideRows,
    StageChunk,
    StageFeed,
    StageInput,
    TokenChunk,
    TokenLogprob,
    TokenLogprobs,
    VideoChunk,
)
from omnistage.placement import channel as channel_module
from omnistage.placement import device_memory
from omnistage.placement.channel import INLINE_BYTES, Channel
from omnistage.placement.device_memory import DeviceMemory, Regions
from omnistage.placement.encoding import Buffers, decode, encode, to_json
from omnistage.placement.messages import Chunks, Feed, Message
from tests.hang_guard import HANG_SECONDS

TENSOR = torch.arange(6, dtype=torch.float32).reshape(2, 3)
ARRAY = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
DRAWING = DiffusionInput("a cat", (ARRAY,), ARRAY[..., 0], (1, 2), {"x": TENSOR})
PROMPT = ARInput(
    (1, 2, 3),
    embeds=TENSOR.to(torch.bfloat16),
    positions=torch.arange(9).reshape(3, 3).T,
    position_delta=1.5,
    num_tokens=4,
    seed=2**63 - 1,
    media=(MediaSpan(Modality.IMAGE, b"\x00\xff", torch.tensor([1, 2]), {"pixels": TENSOR}),),
    context={"grid": torch.tensor(3)},
    drawing=DRAWING,
    streaming=True,
    side_rows=torch.empty(0, 4),
)
CHAT = ChatInput(
    (
        ChatMessage(
            "user",
            (
                TextPart("hello \U0001f600 \ud800"),
                ImagePart(Image.fromarray(ARRAY)),
                AudioPart(AudioClip(np.ones(3, np.float32), 16_000)),
                VideoPart(VideoClip(ARRAY[None], 2.0, 0.5), use_audio=False),
            ),
        ),
        ChatMessage("assistant", (TextPart(""),), tool_calls=(ToolCall("f", {"a": [1, 10**30, None]}, "id"),)),
        ChatMessage("assistant", (TextPart(""),), tool_calls=(ToolCall("f", "not json"),)),
    ),
    tools=({"type": "function", "function": {"name": "f", "parameters": {}}},),
    template=TemplateOptions({"mode": "fast", "depth": 2, "plain": True}, continue_final=True),
)
LOGPROB = TokenLogprob(7, -0.1, "é", "é".encode()[:1])
INPUTS = [PROMPT, CodecInput((1, (2, 3)), True), DRAWING, CHAT, LinkedInput()]
INPUTS += [Condition({"a": TENSOR}, None, {}, 8, 8), Latents(TENSOR, 8, 8), ModuleInput({"x": ARRAY}, "text", False)]
FEEDS = [SideRows(TENSOR, True), CodecFrames(((1, 2),)), Latents(TENSOR, 8, 8, seed=3), ModuleInput()]
OUTPUTS = [
    None,
    TokenChunk((1,), "a", (TokenLogprobs(LOGPROB, (LOGPROB,)),), TENSOR, 3, PROMPT, ended_by=5, frames=((1, 2),)),
    AudioChunk(np.array([], np.float32), 24_000),
    Condition({"a": TENSOR}, {"b": TENSOR}),
    Latents(TENSOR, 8, 8, preview=True),
    Progress(1, 2),
    ImageChunk(ARRAY[:, ::-1], 1, seed=4),
    VideoChunk(ARRAY[None], 24.0, audio=AudioChunk(np.zeros(2, np.float32), 8000)),
    ModuleOutput({"x": np.array([1.5, np.nan])}, "text", PROMPT),
]


def assert_equal(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.to(torch.float64).equal(right.to(torch.float64))
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, Image.Image):
        assert_equal(np.asarray(left), np.asarray(right))
    elif isinstance(left, OmniError):
        assert_equal((left.message, left.param, left.status), (right.message, right.param, right.status))
    elif dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            assert_equal(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, tuple | list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


def round_trip(kind: object, value: object) -> Any:
    buffers = Buffers()
    text = to_json(encode(kind, value, buffers))
    return decode(kind, json.loads(text), Buffers(memoryview(bytearray(buffer)) for buffer in buffers))


@pytest.mark.parametrize("payload", INPUTS, ids=lambda value: type(value).__name__)
def test_every_input_comes_back_as_it_was(payload: Any) -> None:
    info = RequestInfo("id", frozenset(Modality), 3, 12.5, "Chelsie", 1.25, "owner")
    linked = (LinkedStage("vocoder", CodecParams(seed=1), True),)
    assert_equal(round_trip(StageInput, value := StageInput(info, SamplingParams(), payload, True, linked)), value)


@pytest.mark.parametrize("feed", FEEDS, ids=lambda value: type(value).__name__)
def test_every_feed_comes_back_as_it_was(feed: StageFeed) -> None:
    assert_equal(round_trip(StageFeed, feed), feed)


@pytest.mark.parametrize("payload", OUTPUTS, ids=lambda value: type(value).__name__)
def test_every_chunk_comes_back_as_it_was(payload: Any) -> None:
    chunk = StageChunk("id", "stage", payload, 1, FinishReason.LENGTH, time=0.1)
    assert_equal(round_trip(StageChunk, chunk), chunk)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={5: -1.5}, stop=("a",), structured=StructuredOutput(json_schema={"a": 1})),
        CodecParams(quality="fast"),
        DiffusionParams(width=64, early_stop=0.5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_parameters_come_back_with_what_was_set(params: StageParams) -> None:
    back = round_trip(StageParams, params)
    assert (type(back), back) == (type(params), params)
    assert back.model_fields_set == params.model_fields_set


def test_errors_keep_their_class_and_words() -> None:
    chunk = StageChunk("id", "s", finish=FinishReason.ERROR, error=QueueFullError("full", retry_after=3.0), time=1.0)
    back = round_trip(StageChunk, chunk).error
    assert_equal(back, chunk.error)
    assert back.retry_after == 3.0

    class Unheard(StageError):
        pass

    buffers = Buffers()
    data = encode(OmniError, Unheard("of"), buffers)
    data[0] = "NotAClassHere"
    assert type(decode(OmniError, data, buffers)) is StageError


@pytest.mark.parametrize("value", [SideRows([1, 2]), ModuleInput({"x": np.array([object()])}), object()])
def test_what_is_not_of_its_declared_type_is_refused(value: Any) -> None:
    with pytest.raises(InternalError, match="cannot be sent"):
        encode(StageFeed, value, Buffers())


# --------------------------------------------------------------------------------------------------- channel


class End:
    """One end of a channel, with what it has received."""

    def __init__(self, sock: socket.socket) -> None:
        self.messages: list[Message] = []
        self.changed = threading.Condition()
        self.closed = threading.Event()
        self.channel = Channel(sock, self._receive, self.closed.set, name="test")
        self.channel.start()

    def _receive(self, messages: Sequence[Message]) -> None:
        with self.changed:
            self.messages.extend(messages)
            self.changed.notify_all()

    def wait(self, count: int) -> list[Message]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.messages) >= count, HANG_SECONDS)
            return self.messages


@pytest.fixture(params=["unix", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    if request.param == "unix":
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = socket.create_connection(server.getsockname())
            pair = (client, server.accept()[0])
    left, right = map(End, pair)
    yield left, right
    left.channel.close()
    assert right.closed.wait(HANG_SECONDS)
    assert left.closed.wait(HANG_SECONDS)


def feed(number: int, rows: torch.Tensor) -> Feed:
    return Feed("talker", number, "id", SideRows(rows))


def test_messages_come_in_order_whatever_their_size(ends: tuple[End, End]) -> None:
    left, right = ends
    sizes = [0, 1, 17, INLINE_BYTES // 4, INLINE_BYTES // 4 + 1, 3_000_000, 5, 800_000] * 2
    sent = [feed(number, torch.rand(size)) for number, size in enumerate(sizes)]
    for number in range(0, len(sent), 2):
        left.channel.send(*sent[number : number + 2])
    assert_equal(right.wait(len(sent)), sent)


def test_a_frame_may_end_with_an_empty_tensor(ends: tuple[End, End]) -> None:
    left, right = ends
    sent = [feed(0, torch.rand(4)), feed(1, torch.rand(0))]
    threading.Thread(target=left.channel.send, args=sent, daemon=True).start()
    assert_equal(right.wait(2), sent)


def test_a_sender_never_waits_for_a_receiver(ends: tuple[End, End]) -> None:
    left, right = ends
    with right.changed:  # its thread is stuck: the socket fills
        for number in range(300):
            left.channel.send(feed(number, torch.zeros(8_000)))
    assert [message.key for message in right.wait(300)] == list(range(300))


def test_files_of_messages_that_are_lost_are_closed() -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = files()
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    left = End(pair[0])
    for number in range(50):
        left.channel.send(feed(number, torch.zeros(100_000)))
    pair[1].close()
    left.channel.close()
    assert left.closed.wait(HANG_SECONDS)
    left.channel.send(feed(51, torch.zeros(100_000)))
    del left
    _eventually(lambda: files() <= before)


def test_a_frame_that_cannot_be_sent_closes_the_channel(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise OSError(errno.ETOOMANYREFS, "too many references")

    left, right = ends
    monkeypatch.setattr(channel_module._Frame, "send", fail)
    left.channel.send(feed(1, torch.zeros(1)))
    assert left.closed.wait(HANG_SECONDS)
    assert right.closed.wait(HANG_SECONDS)


def test_without_a_thread_to_send_with_the_channel_is_closed(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    left, right = ends
    with right.changed, monkeypatch.context() as patch:  # its thread is stuck: the socket fills
        patch.setattr(threading.Thread, "start", fail)
        for number in range(300):
            left.channel.send(feed(number, torch.zeros(8_000)))
    assert left.closed.wait(HANG_SECONDS)


def test_a_channel_that_is_cut_in_a_frame_gives_nothing_of_it_and_closes() -> None:
    whole, cut = socket.socketpair(), socket.socketpair()
    source, sink = End(whole[0]), End(cut[0])
    source.channel.send(feed(1, torch.zeros(1_000)))
    frame = whole[1].recv(1 << 20)
    source.channel.close()
    cut[1].sendall(frame + frame[:-1])
    assert len(sink.wait(1)) == 1
    cut[1].close()
    assert sink.closed.wait(HANG_SECONDS)
    assert len(sink.messages) == 1


def test_received_tensors_own_their_memory(ends: tuple[End, End]) -> None:
    left, right = ends
    left.channel.send(Chunks("s", (1,), (StageChunk("r", "s", TokenChunk(hidden=torch.ones(100_000)), time=1.0),)))
    (message,) = right.wait(1)
    assert isinstance(message, Chunks)
    hidden = message.chunks[0].payload.hidden  # type: ignore[union-attr]
    right.messages.clear()
    left.channel.close()
    assert right.closed.wait(HANG_SECONDS)
    hidden += 1  # written to, as any tensor
    assert hidden.sum() == 200_000


# --------------------------------------------------------------------------------------------- device memory


@given(st.lists(st.one_of(st.integers(1, 3000), st.none()), max_size=60), st.randoms())
def test_regions_never_overlap_and_all_memory_comes_back(steps: list[int | None], chance: random.Random) -> None:
    regions, taken = Regions(8192), dict[int, int]()
    for size in steps:
        if size is None:
            if taken:
                begin = chance.choice(sorted(taken))
                del taken[begin]
                regions.give_back(begin)
        elif (begin := regions.take(size)) is not None:
            assert begin + size <= 8192
            assert all(begin >= other + length or begin + size <= other for other, length in taken.items())
            taken[begin] = size
    for begin in taken:
        regions.give_back(begin)
    assert regions.unused
    assert regions.take(8192) == 0


class HostRing:
    """Stands for shared device memory: a tensor that both ends find by its handle."""

    memory: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self, *_: object) -> None:
        self.regions = Regions(device_memory.RING_BYTES)
        self.handle = f"ring {len(self.memory)}"
        self.memory[self.handle] = torch.zeros(1 << 20, dtype=torch.uint8)
        self.closed = False

    def write(self, begin: int, tensor: torch.Tensor) -> None:
        flat = tensor.reshape(-1).view(torch.uint8)
        self.memory[self.handle][begin : begin + len(flat)] = flat

    def close(self) -> None:
        self.closed = True


class HostMapping:
    def __init__(self, _index: int, handle: str) -> None:
        self._memory = HostRing.memory[handle]

    def read(self, begin: int, size: int) -> torch.Tensor:
        return self._memory[begin : begin + size].clone()

    def close(self) -> None:
        pass


def test_tensors_stay_on_a_device_that_both_ends_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_Ring", HostRing)
    monkeypatch.setattr(device_memory, "_Mapping", HostMapping)
    monkeypatch.setattr(device_memory, "device_id", lambda _index: "GPU-1")
    monkeypatch.setattr(device_memory, "device_index", lambda _uuid: 0)
    monkeypatch.setattr(device_memory, "RING_BYTES", 300_000)
    left, right = DeviceMemory(), DeviceMemory()
    tensor = torch.rand(25_000)
    assert left.put(tensor) is None  # the other end does not use the device
    left.peer_devices = frozenset({"GPU-1"})
    assert left.put(torch.rand(10)) is None
    assert left.put(torch.rand(100_000)) is None
    first, second = left.put(tensor), left.put(-tensor)
    assert first is not None
    assert second is not None
    third = left.put(tensor)
    assert third is None or third.begin not in (first.begin, second.begin)
    assert right.take(second).view(torch.float32).equal(-tensor)
    assert right.take(first).view(torch.float32).equal(tensor)
    copied = right.copied()
    assert copied == (second, first)
    assert right.copied() == ()
    left.give_back(copied)
    assert left.put(tensor) is not None
    ring = left._rings["GPU-1"]
    left.close()
    assert ring.closed
    assert left.put(tensor) is None


def test_where_no_device_memory_can_be_shared_the_host_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_index: int) -> None:
        raise RuntimeError("CUDA error: cuIpcGetMemHandle failed with code 801")

    monkeypatch.setattr(device_memory, "_Ring", refuse)
    monkeypatch.setattr(device_memory, "device_id", lambda _index: "GPU-1")
    memory = DeviceMemory()
    memory.peer_devices = frozenset({"GPU-1"})
    assert memory.put(torch.rand(25_000)) is None
    assert memory.put(torch.rand(25_000)) is None


def _eventually(condition: Callable[[], bool]) -> None:
    from tests.unit.placement_harness import eventually

    eventually(condition)

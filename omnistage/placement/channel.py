"""A long-lived channel between two processes: frames of messages over a stream socket.

A frame is JSON, then the small buffers of its tensors. Between processes of one machine the large buffers travel in a
file in memory whose descriptor goes with the frame: the receiver maps it, nothing has a name, and the system frees it
with the last process that has it, however that one ends.
"""

from __future__ import annotations

import array
import errno
import json
import logging
import mmap
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from omnistage.core.failures import log_defect
from omnistage.media.decode_protocol import memory_file
from omnistage.placement.device_memory import DeviceMemory
from omnistage.placement.encoding import Buffers, decode, encode, to_json
from omnistage.placement.messages import Copied, Message
from omnistage.placement.silence import turns_of

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("<IIQQ")
"""Bytes of JSON, number of buffers, bytes of those that follow the JSON, bytes of those in the file."""
INLINE_BYTES = 64 * 1024
"""Buffers up to this size go with the frame: a file takes longer."""
_ALIGNMENT = 64
_READ_BYTES = 1 << 18
_MAX_FILES = 16
"""Of those that one read may bring."""


class _Frame:
    """Bytes to send, and the descriptor that goes with the first of them."""

    __slots__ = ("file", "views")

    def __init__(self, messages: Sequence[Message], devices: DeviceMemory | None) -> None:
        """`devices` is that of a channel inside one machine."""
        buffers = Buffers(devices=devices)
        data = [encode(Message, message, buffers) for message in messages]
        sizes = [len(buffer) for buffer in buffers]
        text = to_json([data, sizes])
        in_file = [devices is not None and size > INLINE_BYTES for size in sizes]
        inline = [buffer for buffer, large in zip(buffers, in_file, strict=True) if not large]
        large = [buffer for buffer, large in zip(buffers, in_file, strict=True) if large]
        self.file = _write_file(large) if large else None
        inline_bytes, file_bytes = sum(_padded(len(b)) for b in inline), sum(_padded(len(b)) for b in large)
        head = _HEADER.pack(len(text), len(buffers), inline_bytes, file_bytes)
        self.views = deque([memoryview(head + text)])
        for buffer in inline:
            if len(buffer):  # an empty one is never sent: nothing would count it
                self.views.append(buffer)
            if pad := _padded(len(buffer)) - len(buffer):
                self.views.append(memoryview(bytes(pad)))

    def send(self, sock: socket.socket, flags: int = 0) -> bool:
        """Send what is left, or with `MSG_DONTWAIT` what the socket takes; whether that was all."""
        while self.views:
            extra = (
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.file]))] if self.file is not None else []
            )
            views = [self.views[index] for index in range(min(len(self.views), 64))]
            try:
                count = sock.sendmsg(views, extra, flags)
            except BlockingIOError:
                return False
            self.close()
            while count:
                first = self.views.popleft()
                if count < len(first):
                    self.views.appendleft(first[count:])
                    break
                count -= len(first)
        return True

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


def readable(sock: socket.socket, seconds: float) -> bool:
    """Whether there is something to read within so many seconds, or the other end is gone."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _write_file(buffers: Sequence[memoryview]) -> int:
    """A new file in memory with these buffers; its descriptor."""
    with memory_file() as file:
        descriptor = os.dup(file.fileno())
    at = 0
    try:
        os.ftruncate(descriptor, sum(_padded(len(buffer)) for buffer in buffers))
        for buffer in buffers:
            end = at + _padded(len(buffer))
            while buffer:
                count = os.pwrite(descriptor, buffer, at)
                buffer, at = buffer[count:], at + count
            at = end
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Channel:
    """One end of a channel. `send` may be called from any thread and never waits for the other end.

    `receive` is called in the channel's own thread with the messages of each frame; `closed`, once and there, when the
    other end is gone or the channel is closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        receive: Callable[[list[Message]], None],
        closed: Callable[[], None],
        *,
        name: str,
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        """`arrived` is called for whatever comes, also for a part of a frame, which may take long between machines."""
        self._socket = sock
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._devices = DeviceMemory() if sock.family == getattr(socket, "AF_UNIX", None) else None
        self._receive = receive
        self._on_closed = closed
        self._arrived = arrived
        self._name = name
        self._changed = threading.Condition()
        self._frames: deque[_Frame] = deque()
        self._closed = False
        self._writer: threading.Thread | None = None
        """Sends what the socket does not take at once; started when there is such a frame."""
        self._writing = False
        self._data = bytearray()
        self._files: deque[int] = deque()
        self._reader = 0
        """The system's number of the thread that reads."""
        self._reader_turns: int | None = None

    def start(self) -> None:
        threading.Thread(target=self._read, name=f"omnistage-{self._name}-read", daemon=True).start()

    def send(self, *messages: Message) -> None:
        """Send messages in one frame; nothing happens once the channel is closed.

        Raises `InternalError` for a message that cannot be encoded.
        """
        frame = _Frame(messages, self._devices)
        with self._changed:
            if self._closed:
                frame.close()
                return
            self._frames.append(frame)
            if not self._writing:
                self._send_frames(socket.MSG_DONTWAIT)
            if self._frames and not self._writing:
                self._start_writing()

    def _start_writing(self) -> None:
        """Leave what the socket does not take at once to a thread."""
        try:
            if self._writer is None:
                writer = threading.Thread(target=self._write, name=f"omnistage-{self._name}-write", daemon=True)
                writer.start()
                self._writer = writer
        except RuntimeError:  # without it nothing would be sent any more, and nobody would know
            self._break_off(OSError(errno.EAGAIN, "the system gives this process no more threads"))
            return
        self._writing = True
        self._changed.notify_all()

    def _send_frames(self, flags: int) -> None:
        """Send waiting frames in their order; what is left waits."""
        try:
            while self._frames and self._frames[0].send(self._socket, flags):
                self._frames.popleft()
        except OSError as error:
            self._break_off(error)

    def _break_off(self, error: OSError) -> None:
        """A frame cannot be sent, so that none behind it may be: the reader finds the socket closed, and reports it."""
        if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF):
            _log.error("the channel %s is closed: %s", self._name, error)
        self._drop_frames()
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def _drop_frames(self) -> None:
        while self._frames:
            self._frames.popleft().close()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._writing or self._closed)
                if self._closed:
                    self._drop_frames()
                    return
                frame = self._frames[0] if self._frames else None
                if frame is None:
                    self._writing = False
                    continue
            try:
                frame.send(self._socket)  # without the lock: it waits
            except OSError as error:
                with self._changed:
                    self._break_off(error)
            with self._changed:
                if self._frames and self._frames[0] is frame:
                    self._frames.popleft().close()

    def _read(self) -> None:
        self._reader = threading.get_native_id()
        try:
            while True:
                data, files, _flags, _address = self._receive_bytes()
                self._files.extend(files)
                if not data:
                    break
                self._arrived()
                self._data += data
                while (messages := self._next_frame()) is not None:
                    self._take(messages)
        except OSError:
            pass  # the other end is gone, or `close` was called
        except BaseException as error:  # the boundary of this thread: without it the channel is of no use
            log_defect(f"the channel {self._name}", error)
        self.close()
        while self._files:
            os.close(self._files.popleft())
        self._socket.close()
        if self._devices is not None:
            self._devices.close()
        self._on_closed()

    def _take(self, messages: list[Message]) -> None:
        if self._devices is not None and (regions := self._devices.copied()):
            self.send(Copied(regions))
        for message in messages:
            if isinstance(message, Copied) and self._devices is not None:
                self._devices.give_back(message.regions)
        others: list[Message] = [message for message in messages if not isinstance(message, Copied)]
        if others:
            self._receive(others)

    def share_devices(self, devices: Iterable[str]) -> None:
        """The other end uses these GPUs: tensors on them need not leave them."""
        if self._devices is not None:
            self._devices.peer_devices = frozenset(devices)

    def is_drained(self) -> bool:
        """Whether `arrived` was called for all that has come. Called by one thread.

        Not where the channel's thread has run since the last call: it may have read something, and wait for Python's
        lock to say so.
        """
        try:
            unread = readable(self._socket, 0.0)
        except ValueError:  # it is closed
            unread = False
        before, self._reader_turns = self._reader_turns, turns_of(self._reader)
        return not unread and self._reader_turns == before

    def _receive_bytes(self) -> tuple[bytes, list[int], int, object]:
        if self._devices is not None:
            return socket.recv_fds(self._socket, _READ_BYTES, _MAX_FILES)
        return self._socket.recv(_READ_BYTES), [], 0, None

    def _next_frame(self) -> list[Message] | None:
        """The messages of the next frame; None until it is here."""
        if len(self._data) < _HEADER.size:
            return None
        text_bytes, count, inline_bytes, file_bytes = _HEADER.unpack_from(self._data)
        begin, end = _HEADER.size + text_bytes, _HEADER.size + text_bytes + inline_bytes
        if len(self._data) < end:
            return None
        data, sizes = json.loads(self._data[_HEADER.size : begin])
        inline = memoryview(self._data[begin:end])  # a copy, which the decoded tensors own
        del self._data[:end]
        mapped = memoryview(self._map(file_bytes) if file_bytes else b"")
        buffers, at = Buffers(devices=self._devices), [0, 0]
        for size in sizes:
            large = bool(file_bytes) and size > INLINE_BYTES
            buffers.append((mapped if large else inline)[at[large] : at[large] + size])
            at[large] += _padded(size)
        if len(buffers) != count:
            raise ValueError("a frame does not have the buffers that it should")
        return [decode(Message, item, buffers) for item in data]

    def _map(self, size: int) -> mmap.mmap:
        """The next file, mapped for as long as something that was decoded from it lives."""
        descriptor = self._files.popleft()
        try:
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Send and receive no more; from any thread. What was sent before may be lost."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if not self._writing:
                self._drop_frames()
            self._changed.notify_all()
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

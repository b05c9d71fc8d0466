"""What h11 lets pass in the head of a request and a proxy may read in another way."""

from __future__ import annotations

import h11
from h11._receivebuffer import ReceiveBuffer

HTTP_VERSIONS = ("1.1", "1.0")


class StrictBuffer(ReceiveBuffer):
    """h11's buffer, which refuses lines that end with LF alone, and headers that go on in the next line."""

    _head: bytearray | None = None
    """While one is read: what was taken out of the buffer for it."""

    def _extract(self, count: int) -> bytearray:
        extracted = super()._extract(count)
        if self._head is not None:  # else it is of a body, and would stay in memory with the connection
            self._head = extracted
        return extracted

    def maybe_extract_lines(self) -> list[bytearray] | None:
        self._head = bytearray()
        lines, head = super().maybe_extract_lines(), self._head
        self._head = None
        if head.count(b"\n") != head.count(b"\r\n"):
            raise h11.RemoteProtocolError("a line of the head ends with LF alone")
        if b"\n " in head or b"\n\t" in head:
            raise h11.RemoteProtocolError("a header is folded over several lines")
        return lines

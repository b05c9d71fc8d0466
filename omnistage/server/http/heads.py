"""What h11 lets pass in the head of a request and a proxy may read in another way."""

from __future__ import annotations

import h11
from h11._receivebuffer import ReceiveBuffer

HTTP_VERSIONS = ("1.1", "1.0")


class StrictBuffer(ReceiveBuffer):
    """h11's buffer, which refuses lines that end with LF alone, and headers that go on in the next line."""

    _extracted = bytearray()

    def _extract(self, count: int) -> bytearray:
        self._extracted = super()._extract(count)
        return self._extracted

    def maybe_extract_lines(self) -> list[bytearray] | None:
        lines = super().maybe_extract_lines()
        if lines is not None:
            head = self._extracted
            if head.count(b"\n") != head.count(b"\r\n"):
                raise h11.RemoteProtocolError("a line of the head ends with LF alone")
            if b"\n " in head or b"\n\t" in head:
                raise h11.RemoteProtocolError("a header goes on in the next line")
        self._extracted = bytearray()  # else it would stay in memory with the connection
        return lines

"""The socket that the service listens on."""

from __future__ import annotations

import asyncio
import socket

from omnistage.server.http.run import _listen
from tests.hang_guard import HANG_SECONDS


def test_nothing_waits_for_an_acknowledgement() -> None:
    """A connection sends small pieces at once: a head, an event, a sound."""

    async def main() -> int:
        found = asyncio.get_running_loop().create_future()

        async def accepted(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with _listen("127.0.0.1", 0) as listening:
            async with await asyncio.start_server(accepted, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname())
                writer.close()
                return int(await asyncio.wait_for(found, HANG_SECONDS))

    assert asyncio.run(main()) != 0

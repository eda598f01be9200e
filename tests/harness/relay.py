"""Relay of TCP connections: forwards the bytes of one address to another.

A separate script (python -IS relay.py ADDRESS PORT TARGET TARGET_PORT). It replaces kube-proxy: by it, pods reach the
API server at the address of Service `kubernetes`.

Guarantees: when one side closes a connection, the relay closes the other side, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

HTTPS = "443"
_PART_BYTES = 1 << 16


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while part := await source.read(_PART_BYTES):
            target.write(part)
            await target.drain()


async def serve(address: str, port: int, target: str, target_port: int) -> None:
    """Relay connections until cancelled."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward = await asyncio.open_connection(target, target_port)
        except OSError:
            writer.transport.abort()
            return
        ways = [asyncio.create_task(_pass_on(reader, onward[1])), asyncio.create_task(_pass_on(onward[0], writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (writer, onward[1]):
            end.close()

    server = await asyncio.start_server(relay, address, port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))

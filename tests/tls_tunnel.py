"""Connects peers that speak no TLS to a router that speaks only TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

_PART_BYTES = 1 << 16


@contextlib.asynccontextmanager
async def tunnel(address: str, ca: Path) -> AsyncGenerator[str, None]:
    """Yields an address for plain connections. The data of each plain connection goes to `address` over a separate TLS
    connection."""
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    carrying: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            while part := await reader.read(_PART_BYTES):
                writer.write(part)
                await writer.drain()
        writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        carrying.add(task)
        ends = [writer]
        try:
            # A router that has too many connections refuses this one.
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")
                ends.append(back)
                await asyncio.gather(pump(reader, back), pump(there, writer))
        finally:
            for end in ends:
                end.transport.abort()
            carrying.discard(task)

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(carrying):
            task.cancel()
        if carrying:
            await asyncio.wait(set(carrying))

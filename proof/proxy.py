"""A TCP proxy that cuts connections at critical moments: around one statement's commit, or at a random byte. It can
also delay data, hold it back, or refuse connections.

It runs in the event loop of the process that opens it, between a router and Postgres, or between a client and a router.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from psycopg.conninfo import conninfo_to_dict, make_conninfo

_CHUNK_BYTES = 1 << 16


class Moment(enum.Enum):
    """The moments at which a call's connection can be cut."""

    # Before the server receives the call.
    UNSENT = "unsent"
    # The server has received the call. The client does not know whether the server has executed it.
    SENT = "sent"
    # The server has executed the call, but its answer is lost.
    ANSWERED = "answered"


@dataclass(slots=True, kw_only=True)
class Cut:
    """A cut that will happen when a client sends `pattern` for the `nth` time."""

    pattern: bytes
    moment: Moment
    nth: int = 1
    done: bool = False
    seen: int = 0


@dataclass(slots=True, eq=False)
class _Link:
    """One proxied connection."""

    client: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    server: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    # The planned cut that will lose the current answer of the server. The proxy holds this answer back until it is
    # complete. None: no answer will be lost.
    losing: Cut | None = None
    held_back: bytearray = field(default_factory=bytearray)
    # The last bytes that the client sent. The proxy keeps them because a pattern may arrive in two pieces.
    tail: bytes = b""
    # The connection is cut after this many bytes; None: it is not cut.
    fuse: int | None = None

    def cut(self) -> None:
        for _, writer in (self.client, self.server):
            writer.transport.abort()


class Proxy:
    """A proxy. `open_proxy` makes it. `answered` gets the bytes that a server has sent, and returns whether the
    server's answer is complete."""

    def __init__(self, answered: Callable[[bytes], bool]) -> None:
        self.port = 0
        self.cuts_done = 0
        # The delay of all data, in both directions.
        self.delay_s = 0.0
        # True: new connections are cut at once.
        self.closed = False
        self._answered = answered
        self._cut: Cut | None = None
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fuses: Callable[[], int] | None = None
        self._one_more = asyncio.Event()
        self._flowing = asyncio.Event()
        self._flowing.set()

    def cut_at(self, pattern: bytes, moment: Moment, *, nth: int = 1) -> Cut:
        """Plans a cut: when clients send the pattern for the nth time from now, the connection on which this happens is
        cut."""
        self._cut = Cut(pattern=pattern, moment=moment, nth=nth)
        return self._cut

    def cut_at_random(self, luck: random.Random, *, bytes_max: int) -> None:
        """Cuts each present and future connection after a random number of bytes, at most `bytes_max`. The bytes of
        both directions count."""
        self._fuses = lambda: luck.randint(0, bytes_max)
        for link in self._links:
            link.fuse = self._fuses()

    async def until_cut(self, count: int) -> None:
        """Waits until this many connections have been cut."""
        while self.cuts_done < count:
            self._one_more.clear()
            await self._one_more.wait()

    def cut_all(self) -> None:
        """Cuts all present connections."""
        for link in self._links:
            link.cut()

    def hold(self) -> None:
        """Holds back all data, without closing connections, until `let_go`."""
        self._flowing.clear()

    def let_go(self) -> None:
        self._flowing.set()

    def cut_no_more(self) -> None:
        self._cut = self._fuses = None
        for link in self._links:
            link.fuse = None

    async def serve(self, host: str, port: int, client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            try:
                if self.closed:
                    raise ConnectionRefusedError
                server = await asyncio.open_connection(host, port)
            except OSError:
                writer.transport.abort()
                return
            link = _Link((client, writer), server, fuse=self._fuses() if self._fuses else None)
            self._links.add(link)
            try:
                await self._carry(link)
            finally:
                self._links.discard(link)
                link.cut()
        finally:
            self._tasks.discard(task)

    async def end(self) -> None:
        """Cuts all connections and waits until they have ended."""
        self.let_go()
        for link in self._links:
            link.cut()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=10)

    async def _carry(self, link: _Link) -> None:
        ways = [asyncio.create_task(self._upstream(link)), asyncio.create_task(self._downstream(link))]
        try:
            # If one side ends, end the other side too.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _upstream(self, link: _Link) -> None:
        while data := await _read(link.client[0]):
            cut = self._cut
            if cut is not None and not cut.done and self._strikes(link, cut, data):
                cut.done = True
                self._count()
                match cut.moment:
                    case Moment.UNSENT:
                        return
                    case Moment.SENT:
                        link.server[1].write(data)
                        await link.server[1].drain()
                        # Close this connection in an orderly way, so that the server still receives the data that was
                        # sent.
                        link.server[1].close()
                        link.client[1].transport.abort()
                        return
                    case Moment.ANSWERED:
                        link.losing = cut
            if not await self._pass_on(link, link.server[1], data):
                return

    async def _downstream(self, link: _Link) -> None:
        while data := await _read(link.server[0]):
            if link.losing is not None:
                link.held_back += data
                if self._answered(bytes(link.held_back)):
                    return
            elif not await self._pass_on(link, link.client[1], data):
                return

    async def _pass_on(self, link: _Link, writer: asyncio.StreamWriter, data: bytes) -> bool:
        """Forwards the bytes, or only as many of them as `link.fuse` allows. Returns whether the connection is to stay
        open."""
        await self._flowing.wait()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        burnt = link.fuse is not None and len(data) >= link.fuse
        if link.fuse is not None:
            data = data[: link.fuse]
            link.fuse -= len(data)
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        if burnt:
            self._count()
        return not burnt

    def _count(self) -> None:
        self.cuts_done += 1
        self._one_more.set()

    @staticmethod
    def _strikes(link: _Link, cut: Cut, data: bytes) -> bool:
        if cut.pattern in link.tail + data:
            cut.seen += 1
            link.tail = b""
        else:
            link.tail = (link.tail + data)[-len(cut.pattern) :]
        return cut.seen >= cut.nth


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(_CHUNK_BYTES)
    except ConnectionError:
        return b""


@contextlib.asynccontextmanager
async def open_proxy(host: str, port: int, answered: Callable[[bytes], bool]) -> AsyncGenerator[Proxy, None]:
    """Runs a proxy in front of host:port for this scope, on a free port of 127.0.0.1."""
    proxy = Proxy(answered)

    async def serve(client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await proxy.serve(host, port, client, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.end()


def open_proxy_before(dsn: str) -> contextlib.AbstractAsyncContextManager[Proxy]:
    """Opens a proxy in front of a database. Use `through` to get a DSN that leads through the proxy."""
    server = conninfo_to_dict(dsn)
    return open_proxy(str(server["host"]), int(server["port"] or 5432), postgres_answered)


def through(dsn: str, proxy: Proxy) -> str:
    """Returns a DSN that leads through the proxy, without TLS, so that the proxy can read the traffic."""
    return make_conninfo(dsn, host="127.0.0.1", port=proxy.port, sslmode="disable", gssencmode="disable")


def postgres_answered(data: bytes) -> bool:
    """Returns whether a statement has ended, that is, whether ReadyForQuery has arrived. A message begins with a letter
    and a length. The length includes the four bytes of the length itself."""
    at = 0
    while at + 5 <= len(data):
        end = at + 1 + int.from_bytes(data[at + 1 : at + 5], "big")
        if data[at : at + 1] == b"Z" and end <= len(data):
            return True
        at = end
    return False


def grpc_answered(data: bytes) -> bool:
    """Returns whether a call has ended, that is, whether its trailers have arrived. Trailers are a HEADERS frame with
    END_STREAM (RFC 9113, section 4.1)."""
    at = 0
    while at + 9 <= len(data):
        end = at + 9 + int.from_bytes(data[at : at + 3], "big")
        if data[at + 3] == 1 and data[at + 4] & 1 and end <= len(data):
            return True
        at = end
    return False

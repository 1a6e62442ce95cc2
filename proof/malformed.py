"""Malformed bytes for a gRPC port: bytes that are not HTTP/2, not gRPC, or not a protobuf message of the method.

`conversation` chooses at random what one client sends on one connection. `say` sends it, to loopback addresses only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import ssl
import struct
from collections.abc import Callable
from typing import NamedTuple

from hpack import Encoder
from hyperframe.frame import DataFrame, HeadersFrame, SettingsFrame

_MAGIC = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PREFACE = _MAGIC + SettingsFrame().serialize()
_BYTES_MAX = 4_096
# The frame types of RFC 9113 are 0 to 9. A server must ignore frames of other types.
_FRAME_TYPES = 12
_FRAMES_MAX = 40
_READ_BYTES = 1 << 16
# How long a connection stays open after its last byte has been sent, so that the server can react.
_STAY_S = 0.05
_QUEUE_METHODS = "Enqueue", "Dequeue", "Consume", "Ack", "GetJobs", "AlterJobs"
METHODS = (
    *(f"/windrow.v1.Queue/{name}" for name in _QUEUE_METHODS),
    *("/windrow.v1.Admin/UpdateQueue", "/windrow.v1.Admin/ListJobs", "/windrow.v1.Cluster/ListOrgs"),
    *("/grpc.health.v1.Health/Check", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
)


class Conversation(NamedTuple):
    kind: str
    sent: bytes


def conversation(luck: random.Random, *, valid: bytes) -> Conversation:
    """Chooses at random what one connection sends. `valid`: a valid message of some method. The chosen bytes may
    contain this message, whole or damaged."""
    kind = luck.choice(sorted(_KINDS))
    return Conversation(kind, _KINDS[kind](luck, valid))


async def say(address: str, sent: bytes, *, tls: ssl.SSLContext | None = None) -> bool:
    """Sends bytes on a new connection, in two parts. Returns whether the server ended the connection. Raises OSError if
    no connection is possible. Raises ValueError if the address is not a loopback address."""
    host, _, port = address.rpartition(":")
    if not ipaddress.ip_address(host.strip("[]")).is_loopback:
        raise ValueError(f"{address} is not a loopback address: attacks are for servers on this machine only")
    server = "localhost" if tls is not None else None
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=tls, server_hostname=server)
    try:
        for part in (sent[: len(sent) // 2], sent[len(sent) // 2 :]):
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(_STAY_S):
            while await reader.read(_READ_BYTES):
                pass
    except TimeoutError:
        return False
    except OSError:
        # The server ended the connection before everything was sent or read.
        pass
    finally:
        # Abort, because a close would wait up to 30 s for the server to end TLS.
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return True


def _noise(luck: random.Random, _valid: bytes) -> bytes:
    return luck.randbytes(luck.randrange(1, _BYTES_MAX))


def _noise_after_the_preface(luck: random.Random, _valid: bytes) -> bytes:
    return _PREFACE + luck.randbytes(luck.randrange(1, _BYTES_MAX))


def _another_protocol(luck: random.Random, _valid: bytes) -> bytes:
    http, tls, redis = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"*1\r\n$4\r\nPING\r\n"
    first = luck.choice((http, tls, redis, _MAGIC))
    return first * luck.randrange(1, 5) + luck.randbytes(luck.randrange(64))


def _frames_at_random(luck: random.Random, _valid: bytes) -> bytes:
    return _PREFACE + b"".join(_any_frame(luck) for _ in range(luck.randrange(1, _FRAMES_MAX)))


def _broken_header_blocks(luck: random.Random, _valid: bytes) -> bytes:
    frames = bytearray(_PREFACE)
    for at in range(luck.randrange(1, 8)):
        block = bytearray(Encoder().encode(_headers(luck.choice(METHODS))))
        _damage(luck, block)
        frames += _frame(1, luck.choice((0, 1, 4, 5, 0x2C)), 2 * at + 1, bytes(block))
    return bytes(frames)


def _broken_calls(luck: random.Random, valid: bytes) -> bytes:
    """Returns a whole call with a few bytes changed, anywhere after the magic."""
    sent = bytearray(_call(luck.choice(METHODS), _message(valid))[len(_MAGIC) :])
    _damage(luck, sent)
    return _MAGIC + bytes(sent)


def _broken_messages(luck: random.Random, valid: bytes) -> bytes:
    """Returns a call that is valid except for its gRPC messages: their prefixes have wrong lengths or unknown flags."""
    flags, lengths = (0, 0, 1, 2, 255), (0, 1, len(valid) - 1, len(valid) + 1, 2**32 - 1)
    return _call(
        luck.choice(METHODS),
        b"".join(
            struct.pack(">BL", luck.choice(flags), luck.choice(lengths)) + valid for _ in range(luck.randrange(1, 4))
        ),
    )


def _broken_protobuf(luck: random.Random, valid: bytes) -> bytes:
    """Returns a call whose only fault is that its message is not of the method's type."""
    damaged = bytearray(valid)
    _damage(luck, damaged)
    # Deeply nested groups, a field of 2 GiB, a varint of eleven bytes, and an empty field that is repeated 2,000 times.
    odd = b"\x0b" * 4_000, b"\x0a\xff\xff\xff\xff\x07", b"\xff" * 11, b"\x12\x00" * 2_000
    message = luck.choice((bytes(damaged), *odd))
    return _call(luck.choice(METHODS), _message(message))


def call_of(method: bytes, message: bytes = b"") -> bytes:
    """Returns the bytes of a whole connection that calls a method. The name of the method may be any bytes."""
    return _call(method, _message(message))


def _unknown_methods(luck: random.Random, valid: bytes) -> bytes:
    """Returns a call of a method that does not exist. The name of the method is damaged, and may be invalid UTF-8."""
    name = bytearray(luck.choice(METHODS).encode())
    _damage(luck, name)
    return call_of(bytes(name), valid)


_KINDS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "noise": _noise,
    "noise after the preface": _noise_after_the_preface,
    "another protocol": _another_protocol,
    "frames at random": _frames_at_random,
    "broken header blocks": _broken_header_blocks,
    "broken calls": _broken_calls,
    "broken gRPC messages": _broken_messages,
    "broken protobuf": _broken_protobuf,
    "unknown methods": _unknown_methods,
}
KINDS = tuple(sorted(_KINDS))


def _damage(luck: random.Random, data: bytearray) -> None:
    """Changes, inserts, repeats or removes a few bytes."""
    for _ in range(luck.randrange(1, 6)):
        at = luck.randrange(len(data) + 1)
        match luck.randrange(4):
            case 0 if at < len(data):
                data[at] = luck.randrange(256)
            case 1:
                data[at:at] = luck.randbytes(luck.randrange(1, 9))
            case 2:
                data[at:at] = data[at : at + luck.randrange(1, 65)]
            case _:
                del data[at : at + luck.randrange(1, 9)]


def _any_frame(luck: random.Random) -> bytes:
    body = luck.randbytes(luck.choice((0, 1, 4, 5, 6, 8, 9, luck.randrange(256))))
    # Most frames use one of a few streams, so that often several frames have the same stream.
    stream = luck.choice((0, 1, 3, 5, 2, 2**31 - 1, luck.randrange(2**31)))
    return _frame(luck.randrange(_FRAME_TYPES), luck.randrange(256), stream, body)


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">HBBBL", len(body) >> 8, len(body) & 0xFF, kind, flags, stream) + body


def _headers(path: str | bytes) -> list[tuple[str, str | bytes]]:
    return [
        *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")),
        *(("te", "trailers"), ("content-type", "application/grpc")),
    ]


def _message(content: bytes) -> bytes:
    return struct.pack(">BL", 0, len(content)) + content


def _call(path: str | bytes, body: bytes) -> bytes:
    headers = HeadersFrame(1, Encoder().encode(_headers(path)), flags=["END_HEADERS"])
    return _PREFACE + headers.serialize() + DataFrame(1, body, flags=["END_STREAM"]).serialize()

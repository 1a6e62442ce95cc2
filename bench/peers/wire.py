"""The frames that a client process and a peer's process exchange over a pipe. Pure: no I/O.

This module uses only the standard library, because the peers' own virtual environment imports it too. node/serve.mjs
and go/serve.go implement the same frames.

    frame     length of the body u32, kind u8, body        every number little-endian
    CALL      JSON {"id", "verb", arguments}                to the peer
    ENQUEUE   id u32, packed payloads                       to the peer
    ANSWER    JSON {"id", "value"} or {"id", "error"}       from the peer, to either
    TAKEN     packed payloads, then a nanosecond i64 each   from the peer, while it works
    FINISHED  how many u32                                  from the peer, while it works
    packed    count u32, the length of each u32, the bytes of all
"""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Sequence


class Kind(enum.IntEnum):
    CALL = 1
    ENQUEUE = 2
    ANSWER = 3
    TAKEN = 4
    FINISHED = 5


HEAD = struct.Struct("<IB")
U32 = struct.Struct("<I")


def frame(kind: Kind, *parts: bytes) -> bytes:
    return b"".join((HEAD.pack(sum(map(len, parts)), kind), *parts))


def pack(payloads: Sequence[bytes]) -> bytes:
    count = len(payloads)
    return b"".join((struct.pack(f"<{count + 1}I", count, *map(len, payloads)), *payloads))


def unpack(body: bytes, at: int = 0) -> tuple[list[bytes], int]:
    """Returns the payloads packed from the position `at` on, and the position after them."""
    (count,) = U32.unpack_from(body, at)
    lengths = struct.unpack_from(f"<{count}I", body, at + 4)
    ends = list(itertools.accumulate(lengths, initial=at + 4 + 4 * count))
    return [body[start:end] for start, end in itertools.pairwise(ends)], ends[-1]


def taken(payloads: Sequence[bytes], times_ns: Sequence[int]) -> bytes:
    return frame(Kind.TAKEN, pack(payloads), struct.pack(f"<{len(times_ns)}q", *times_ns))


def read_taken(body: bytes) -> tuple[list[bytes], Sequence[int]]:
    payloads, at = unpack(body)
    return payloads, struct.unpack_from(f"<{len(payloads)}q", body, at)

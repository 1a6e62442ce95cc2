"""Postgres arrays, made by joining: a fraction of the cost of psycopg's list dumpers, which do more for every element.

Literals for values that need no escape: numbers, UUIDs, and names whose characters are restricted. Postgres's binary
format, which needs none, for any text and any bytes. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from psycopg.postgres import types

# The binary format (array_recv in Postgres): dimensions, whether there may be NULLs, the elements' type, their number,
# the first one's index; then of each element its length in bytes, and the bytes.
_head = struct.Struct("!iiIii").pack
_length = struct.Struct("!i").pack
_NULL = _length(-1)
_BYTEA, _TEXT = types["bytea"].oid, types["text"].oid


class Blobs(NamedTuple):
    """A bytea[] in the binary format. Every connection of shard.database takes it as a parameter."""

    data: bytes


class Texts(NamedTuple):
    """Same, a text[]."""

    data: bytes


def plain(values: Iterable[str]) -> str:
    """UUIDs: hex digits and dashes only."""
    return "{" + ",".join(values) + "}"


def numbers(values: Iterable[int]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def names(values: Iterable[str]) -> str:
    """Queue names and kinds: A–Z a–z 0–9 . _ : / - only. Quoted, because an unquoted "null" is NULL."""
    inner = '","'.join(values)
    return '{"' + inner + '"}' if inner else "{}"


def sparse_numbers(values: Mapping[int, int], length: int) -> str:
    """A column of `length` in which most have no value; the empty array when none has (unnest pads it with NULLs)."""
    if not values:
        return "{}"
    get = values.get
    return "{" + ",".join("NULL" if (value := get(at)) is None else str(value) for at in range(length)) + "}"


def blobs(values: Sequence[bytes | None]) -> Blobs:
    parts = [_head(1, 1, _BYTEA, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts += _length(len(value)), value
    return Blobs(b"".join(parts))


def texts(values: Sequence[str]) -> Texts:
    parts = [_head(1, 0, _TEXT, len(values), 1)]
    for value in values:
        encoded = value.encode()
        parts += _length(len(encoded)), encoded
    return Texts(b"".join(parts))


def sparse_texts(values: Mapping[int, str], length: int) -> Texts:
    """As `sparse_numbers`."""
    if not values:
        return texts(())
    parts = [_NULL] * length
    for at, value in values.items():
        encoded = value.encode()
        parts[at] = _length(len(encoded)) + encoded
    return Texts(_head(1, 1, _TEXT, length, 1) + b"".join(parts))

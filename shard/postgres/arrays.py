"""Encodes lists as Postgres arrays. This is several times faster than psycopg's list dumpers, which do more work for
each element.

Values that need no escapes (numbers, UUIDs, and names whose characters are restricted) become array literals. Other
texts and bytes use Postgres's binary format, which needs no escapes. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from psycopg.postgres import types

# The binary format (array_recv in Postgres): the number of dimensions, a flag for NULLs, the type of the elements,
# their number, and the index of the first element. Each element follows as its length in bytes, and its bytes.
_head = struct.Struct("!iiIii").pack
_length = struct.Struct("!i").pack
_NULL = _length(-1)
_BYTEA, _TEXT = types["bytea"].oid, types["text"].oid


class Blobs(NamedTuple):
    """A bytea[] in the binary format. Connections of shard.postgres.pool take it as a parameter."""

    data: bytes


class Texts(NamedTuple):
    """A text[] in the binary format. Connections of shard.postgres.pool take it as a parameter."""

    data: bytes


def plain(values: Iterable[str]) -> str:
    """Encodes texts that need neither quotes nor escapes, such as UUIDs."""
    return "{" + ",".join(values) + "}"


def numbers(values: Iterable[int]) -> str:
    """Encodes integers."""
    return "{" + ",".join(map(str, values)) + "}"


def names(values: Iterable[str]) -> str:
    """Encodes queue names and kinds (A–Z a–z 0–9 . _ : / - only). The names are quoted, because the array literal
    {null} means NULL, and not the name `null`."""
    inner = '","'.join(values)
    return '{"' + inner + '"}' if inner else "{}"


def sparse_numbers(values: Mapping[int, int], length: int) -> str:
    """Encodes a column with `length` entries, most of which are NULL. `values` has the entries that are not NULL, by
    position. A column of NULLs becomes the empty array, which unnest fills with NULLs."""
    if not values:
        return "{}"
    get = values.get
    return "{" + ",".join("NULL" if (value := get(at)) is None else str(value) for at in range(length)) + "}"


def blobs(values: Sequence[bytes | None]) -> Blobs:
    """Encodes bytes, with None as NULL."""
    parts = [_head(1, 1, _BYTEA, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts += _length(len(value)), value
    return Blobs(b"".join(parts))


def texts(values: Sequence[str]) -> Texts:
    """Encodes any texts."""
    parts = [_head(1, 0, _TEXT, len(values), 1)]
    for value in values:
        encoded = value.encode()
        parts += _length(len(encoded)), encoded
    return Texts(b"".join(parts))


def sparse_texts(values: Mapping[int, str], length: int) -> Texts:
    """Encodes a column of texts, most of which are NULL, as `sparse_numbers` does for integers."""
    if not values:
        return texts(())
    parts = [_NULL] * length
    for at, value in values.items():
        encoded = value.encode()
        parts[at] = _length(len(encoded)) + encoded
    return Texts(_head(1, 1, _TEXT, length, 1) + b"".join(parts))

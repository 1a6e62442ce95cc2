"""Counts the fields of a message before it is decoded. An embedded empty message takes two bytes on the wire and
hundreds in memory, so a request of 16 MiB could take gigabytes and many seconds before it is refused. Pure.

For most messages it is enough to count certain bytes. Only the others are parsed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor

from router.codec.status import InvalidRequest, Violation

# The limit for fields at the top level of a request. The rules allow 1,000 in each of at most four lists.
FIELDS_MAX = 10_000
_BITS = 7
_MORE = 1 << _BITS
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
# The longest varint has ten bytes.
_SHIFT_MAX = 9 * _BITS


def bounded(decode: Callable[[bytes], Any], of: Descriptor) -> Callable[[bytes], Any]:
    """Returns a function that decodes messages of type `of` as `decode` does, but raises InvalidRequest if one has too
    many fields."""
    # For each repeated field, the first byte of its tag: in the shortest encoding, and in a longer one, which is
    # allowed.
    tags = {
        field.name: (field.number << 3 | _BYTES, field.number << 3 | _BYTES | _MORE)
        for field in of.fields
        if field.is_repeated and field.number << 3 < _MORE
    }

    def decode_bounded(raw: bytes) -> Any:
        # A field takes at least two bytes.
        if len(raw) > 2 * FIELDS_MAX and tags:
            counts = {name: raw.count(short) + raw.count(long) for name, (short, long) in tags.items()}
            if sum(counts.values()) > FIELDS_MAX and _count(raw) > FIELDS_MAX:
                longest = max(counts, key=lambda name: counts[name])
                raise InvalidRequest([Violation(longest, f"must have at most 1,000 items, not {FIELDS_MAX:,} or more")])
        return decode(raw)

    return decode_bounded


def _count(raw: bytes) -> int:
    """Returns the number of fields at the top level, or FIELDS_MAX + 1 if there are more. If `raw` is not a valid
    message, the result is any number."""
    at, count, end = 0, 0, len(raw)
    while at < end and count <= FIELDS_MAX:
        count += 1
        kind = raw[at] & 7
        while at < end and raw[at] & _MORE:
            at += 1
        at += 1
        if kind == _VARINT:
            while at < end and raw[at] & _MORE:
                at += 1
            at += 1
        elif kind == _BYTES:
            length = shift = 0
            while at < end and shift <= _SHIFT_MAX:
                length |= (raw[at] & ~_MORE) << shift
                shift += _BITS
                at += 1
                if not raw[at - 1] & _MORE:
                    break
            at += length
        elif kind == _FIXED_64:
            at += 8
        elif kind == _FIXED_32:
            at += 4
    return count

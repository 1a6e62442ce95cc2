"""Counts the fields of a message before it is decoded. An empty item of a list takes two bytes on the wire and up to a
hundred in memory, so a request of 16 MiB could take a gigabyte and many seconds before it is refused. Pure.

For most messages it is enough to count certain bytes. Only the others are parsed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from router.codec.status import InvalidRequest, Violation

# The limit for fields at the top level of a request. The rules allow 1,000 in each of at most four lists.
FIELDS_MAX = 10_000
# The limit for all fields of a request, those of its messages included. 1,000 jobs with everything that the rules allow
# have 128,000. Decoded, so many fields take at most 8 MiB.
ALL_FIELDS_MAX = 150_000
_BITS = 7
_MORE = 1 << _BITS
# How the wire tells where a field ends: the last bits of its tag.
_KIND_BITS = 3
_KINDS = (1 << _KIND_BITS) - 1
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
# The longest varint has ten bytes.
_SHIFT_MAX = 9 * _BITS


class _Shape(dict[int, "_Shape"]):
    """The fields of a message type that are messages or maps themselves, by number."""


def bounded(decode: Callable[[bytes], Any], of: Descriptor) -> Callable[[bytes], Any]:
    """Returns a function that decodes messages of type `of` as `decode` does, but raises InvalidRequest if one has too
    many fields."""
    lists = {field.name: _first_bytes(field) for field in of.fields if field.is_repeated}
    flat, shape, costly = _Shape(), _shape(of), bytes(_costly(of))

    def decode_bounded(raw: bytes) -> Any:
        # A field takes at least two bytes.
        if len(raw) > 2 * FIELDS_MAX and lists:
            counts = {name: sum(map(raw.count, firsts)) for name, firsts in lists.items()}
            if sum(counts.values()) > FIELDS_MAX and _count(raw, 0, len(raw), flat, FIELDS_MAX) > FIELDS_MAX:
                longest = max(counts, key=lambda name: counts[name])
                raise InvalidRequest([Violation(longest, f"must have at most 1,000 items, not {FIELDS_MAX:,} or more")])
        if (
            len(raw) > 2 * ALL_FIELDS_MAX
            and len(raw) - len(raw.translate(None, costly)) > ALL_FIELDS_MAX
            and _count(raw, 0, len(raw), shape, ALL_FIELDS_MAX) > ALL_FIELDS_MAX
        ):
            raise InvalidRequest([Violation("request", f"must have at most {ALL_FIELDS_MAX:,} fields in all")])
        return decode(raw)

    return decode_bounded


# The next two functions end because no message type of the contract contains itself.


def _shape(of: Descriptor) -> _Shape:
    return _Shape({field.number: _shape(field.message_type) for field in of.fields if field.message_type is not None})


def _costly(of: Descriptor) -> set[int]:
    """Returns the first bytes of all fields, at any depth, of which each occurrence takes memory: the items of lists
    and maps, and the messages of a oneof, because each replaces the one before. The occurrences of any other message
    are merged into one."""
    found: set[int] = set()
    for field in of.fields:
        inner = field.message_type
        if field.is_repeated or (inner is not None and field.containing_oneof is not None):
            found.update(_first_bytes(field))
        if inner is not None:
            found |= _costly(inner)
    return found


def _first_bytes(field: FieldDescriptor) -> tuple[int, ...]:
    """Returns the possible first bytes of a field that has a length: of its tag in the shortest encoding, and in longer
    ones, which are allowed."""
    tag = field.number << _KIND_BITS | _BYTES
    return (tag, tag | _MORE) if tag < _MORE else (tag % _MORE | _MORE,)


def _count(raw: bytes, at: int, end: int, shape: _Shape, most: int) -> int:
    """Returns the number of fields between `at` and `end` in a message of this shape, those of the messages in it
    included; or any number above `most` if there are more. If `raw` is not a valid message, the count goes wrong only
    where the decoder fails."""
    count = 0
    while at < end and count <= most:
        count += 1
        tag = raw[at]
        at += 1
        if tag & _MORE:
            tag, at = _varint(raw, at - 1, end)
        kind = tag & _KINDS
        if kind == _BYTES:
            length = raw[at] if at < end else 0
            at += 1
            if length & _MORE:
                length, at = _varint(raw, at - 1, end)
            inner = shape.get(tag >> _KIND_BITS)
            if inner is not None and length:
                count += _count(raw, at, min(at + length, end), inner, most - count)
            at += length
        elif kind == _VARINT:
            while at < end and raw[at] & _MORE:
                at += 1
            at += 1
        elif kind == _FIXED_64:
            at += 8
        elif kind == _FIXED_32:
            at += 4
    return count


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """Returns the number that begins at `at`, and where it ends."""
    value = shift = 0
    while at < end and shift <= _SHIFT_MAX:
        byte = raw[at]
        at += 1
        value |= (byte & ~_MORE) << shift
        shift += _BITS
        if not byte & _MORE:
            break
    return value, at

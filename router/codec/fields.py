"""Reads a message without decoding it: counts its fields, or finds one number in it. Pure.

An empty item of a list takes two bytes on the wire and up to 86 in memory, so a request of 16 MiB could take 700 MiB
before it is refused. So the fields are counted first. A message that has too many fields is not decoded at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor

from router.codec.status import InvalidRequest, Violation

# The limit for the fields of a request, including the fields of the messages in it. 1,000 jobs with everything that the
# rules allow have 128,000 fields. Decoded, 250,000 fields take at most 22 MiB. Most requests are too short to have so
# many fields.
FIELDS_MAX = 250_000
_BITS = 7
_MORE = 1 << _BITS
# The wire types, which say where a field ends. The last three bits of a field's tag are its wire type.
_KIND_BITS = 3
_KINDS = (1 << _KIND_BITS) - 1
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
# The longest varint has ten bytes.
_SHIFT_MAX = 9 * _BITS


class _Shape(dict[int, "_Shape"]):
    """The fields of a message type that are messages or maps themselves, by number."""


def bounded(decode: Callable[[bytes], Any], of: Descriptor, *, fields_max: int = FIELDS_MAX) -> Callable[[bytes], Any]:
    """Returns a function that decodes messages of type `of` as `decode` does, but raises InvalidRequest if a message
    has more than `fields_max` fields."""
    shape = _shape(of)

    def decode_bounded(raw: bytes) -> Any:
        # A field takes at least two bytes.
        if len(raw) > 2 * fields_max and _count(raw, 0, len(raw), shape, fields_max) > fields_max:
            raise InvalidRequest([Violation("request", f"must have at most {fields_max:,} fields in all")])
        return decode(raw)

    return decode_bounded


def _shape(of: Descriptor) -> _Shape:
    """Returns the shape of a message type. The recursion ends, because no message type contains itself."""
    return _Shape({field.number: _shape(field.message_type) for field in of.fields if field.message_type is not None})


def _count(raw: bytes, at: int, end: int, shape: _Shape, most: int) -> int:
    """Returns the number of fields between `at` and `end` in a message of this shape, including the fields of the
    messages in it. If there are more than `most`, returns any number above `most`. If `raw` is not a valid message, the
    count may be wrong, but then the decoder fails."""
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
                if at < end and not raw[at] & _MORE:
                    # Most lengths with more than one byte have two bytes.
                    length += (raw[at] - 1) << _BITS
                    at += 1
                else:
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


def number_in(raw: bytes, field: int, *, fields_max: int) -> int:
    """Returns the value of the first int64 field with this number, or 0 if the first `fields_max` fields of the message
    have none. Does not look into embedded messages."""
    wanted = field << _KIND_BITS | _VARINT
    at, end = 0, len(raw)
    for _ in range(fields_max):
        if at >= end:
            break
        tag, at = _varint(raw, at, end)
        kind = tag & _KINDS
        if kind in (_VARINT, _BYTES):
            value, at = _varint(raw, at, end)
            if tag == wanted:
                # A varint whose last byte says that more bytes follow is incomplete, so the field has no value.
                return 0 if raw[at - 1] & _MORE else _signed(value)
            at += value if kind == _BYTES else 0
        elif kind in (_FIXED_64, _FIXED_32):
            at += 8 if kind == _FIXED_64 else 4
        else:
            break
    return 0


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


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

"""Reads single rules of the contract from the protobuf descriptors, so that each limit is written in one place. No I/O.

The generated code does not know the rules' types (proto/gen.py), so this module reads them by field number. The numbers
are those of proto/buf/validate/validate.proto.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

# The extension of google.protobuf.FieldOptions that holds a field's rules.
_FIELD = 1159


class Rule(Enum):
    """A rule, as its path of field numbers within buf.validate.FieldRules."""

    INT32_LTE = (3, 3)
    STRING_MAX_BYTES = (14, 5)
    BYTES_MAX_LEN = (15, 3)
    REPEATED_MAX_ITEMS = (18, 2)
    MAP_MAX_PAIRS = (19, 2)


class SpanRule(Enum):
    """A rule whose value is a duration."""

    LTE = (21, 4)
    GTE = (21, 6)


def limit(message: type[Message], field: str, rule: Rule) -> int:
    """Returns the value of a rule. Raises LookupError if the field has no such rule."""
    value = _value(message, field, rule.value)
    assert isinstance(value, int)
    return value


def span_limit(message: type[Message], field: str, rule: SpanRule) -> Duration:
    """Returns the value of a rule that is a duration. Raises LookupError if the field has no such rule."""
    value = _value(message, field, rule.value)
    assert isinstance(value, bytes)
    return Duration.FromString(value)


def _value(message: type[Message], field: str, path: tuple[int, ...]) -> int | bytes:
    value: int | bytes = message.DESCRIPTOR.fields_by_name[field].GetOptions().SerializeToString()
    for number in (_FIELD, *path):
        assert isinstance(value, bytes)
        # A message of any type can be read as an Empty: all fields of the message are then unknown fields. The stubs of
        # protobuf leave out that a set of unknown fields can be iterated over.
        fields = cast("Iterable[Any]", UnknownFieldSet(Empty.FromString(value)))
        found = [one.data for one in fields if one.field_number == number]
        if not found:
            raise LookupError(f"{message.DESCRIPTOR.full_name}.{field} has no rule {path}")
        value = found[-1]
    return value

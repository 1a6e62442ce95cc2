"""The texts of array literals. The parser of psycopg reads the values back unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.adapt import Transformer
from psycopg.postgres import types
from psycopg.pq import Format

from shard.postgres import arrays

NAMES = st.lists(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", fullmatch=True), max_size=20)
BIGINTS = st.integers(-(2**63), 2**63 - 1)


def read(literal: str, of: str) -> object:
    return Transformer().get_loader(types[of].array_oid, Format.TEXT).load(literal.encode())


@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        (arrays.plain([]), "{}"),
        (arrays.plain(["0a-1", "0b-2"]), "{0a-1,0b-2}"),
        (arrays.numbers([]), "{}"),
        (arrays.numbers([1, -2, 2**63 - 1]), "{1,-2,9223372036854775807}"),
        (arrays.names([]), "{}"),
        (arrays.names(["mail"]), '{"mail"}'),
        # Without quotes Postgres would read these names as NULL, as two numbers, and as the bounds of a nested array.
        (arrays.names(["null", "NULL", "1", "a:b/c.d_e-f"]), '{"null","NULL","1","a:b/c.d_e-f"}'),
        (arrays.sparse_numbers({}, 5), "{}"),
        (arrays.sparse_numbers({1: 7}, 3), "{NULL,7,NULL}"),
        (arrays.sparse_numbers({0: 0}, 1), "{0}"),
    ],
)
def test_a_literal_is_what_postgres_expects(literal: str, expected: str) -> None:
    assert literal == expected


@given(NAMES)
def test_names_are_read_back_as_they_were(names: list[str]) -> None:
    assert read(arrays.names(names), "text") == names


@given(st.lists(BIGINTS, max_size=20))
def test_numbers_are_read_back_as_they_were(numbers: list[int]) -> None:
    assert read(arrays.numbers(numbers), "int8") == numbers


@given(st.lists(st.uuids(), max_size=20))
def test_ids_are_read_back_with_and_without_dashes(ids: list[object]) -> None:
    assert read(arrays.plain(str(name) for name in ids), "uuid") == ids
    assert read(arrays.plain(str(name).replace("-", "") for name in ids), "uuid") == ids


@given(st.lists(st.one_of(st.none(), BIGINTS), min_size=1, max_size=20))
def test_a_sparse_column_has_a_value_where_there_is_one(column: list[int | None]) -> None:
    values = {at: value for at, value in enumerate(column) if value is not None}
    read_back = read(arrays.sparse_numbers(values, len(column)), "int8")
    assert read_back == (column if values else [])


def read_binary(array: arrays.Blobs | arrays.Texts, of: str) -> object:
    return Transformer().get_loader(types[of].array_oid, Format.BINARY).load(array.data)


@given(st.lists(st.one_of(st.none(), st.text()), max_size=20))
def test_a_sparse_column_of_texts_has_a_text_where_there_is_one(column: list[str | None]) -> None:
    values = {at: value for at, value in enumerate(column) if value is not None}
    read_back = read_binary(arrays.sparse_texts(values, len(column)), "text")
    assert read_back == (column if values else [])


@given(st.lists(st.text(), max_size=20))
def test_texts_are_read_back_as_they_were(column: list[str]) -> None:
    assert read_binary(arrays.texts(column), "text") == column


@given(st.lists(st.one_of(st.none(), st.binary()), max_size=20))
def test_blobs_are_read_back_as_they_were(column: list[bytes | None]) -> None:
    assert read_binary(arrays.blobs(column), "bytea") == column

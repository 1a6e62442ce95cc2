"""Finds the call whose row Postgres refuses, by running the calls of a batch in halves. The calls beside a bad one then
cost a few more statements, not one each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import psycopg

Call = TypeVar("Call")
Result = TypeVar("Result")

# Errors that one row causes. The statement did nothing; without that row it would have succeeded.
ROW_ERRORS = (psycopg.DataError, psycopg.IntegrityError)


async def bisect_errors(
    act: Callable[[Sequence[Call]], Awaitable[Sequence[Result | Exception]]], calls: Sequence[Call]
) -> Sequence[Result | Exception]:
    """Returns what `act` returns for each call, or the call's error. If a row makes `act` fail, each half of the calls
    runs by itself, down to the call with that row: a bad call among n costs about 2 log2 n more acts."""
    try:
        return await act(calls)
    except ROW_ERRORS as error:
        if len(calls) == 1:
            return [error]
    except Exception as error:  # noqa: BLE001 - each caller raises it
        return [error] * len(calls)
    middle = len(calls) // 2
    return [*await bisect_errors(act, calls[:middle]), *await bisect_errors(act, calls[middle:])]

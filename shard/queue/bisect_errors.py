"""Finds the call whose row Postgres refuses, by running the calls of a batch in halves. So the other calls of the batch
need only a few more statements, and not one statement for each call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import psycopg

Call = TypeVar("Call")
Result = TypeVar("Result")

# Errors that one row causes. After such an error, the statement has done nothing. Without that row, it would have
# succeeded.
ROW_ERRORS = (psycopg.DataError, psycopg.IntegrityError)


async def bisect_errors(
    act: Callable[[Sequence[Call]], Awaitable[Sequence[Result | Exception]]], calls: Sequence[Call]
) -> Sequence[Result | Exception]:
    """Returns for each call what `act` returns, or the call's error. If a row makes `act` fail, each half of the calls
    runs by itself. A half that fails is halved again, until the call with that row is alone. So one bad call among n
    costs about 2 log2 n more acts."""
    try:
        return await act(calls)
    except ROW_ERRORS as error:
        if len(calls) == 1:
            return [error]
    except Exception as error:  # noqa: BLE001 - each caller raises it
        return [error] * len(calls)
    middle = len(calls) // 2
    return [*await bisect_errors(act, calls[:middle]), *await bisect_errors(act, calls[middle:])]

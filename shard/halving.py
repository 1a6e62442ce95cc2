"""Whose row it is that Postgres refuses: found by halves. A bad call costs those beside it a few statements, not one
each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import psycopg

Call = TypeVar("Call")
Result = TypeVar("Result")

# What Postgres says of a row. Nothing was done, and without that row it would have been.
ROW_ERRORS = (psycopg.DataError, psycopg.IntegrityError)


async def by_halves(
    act: Callable[[Sequence[Call]], Awaitable[Sequence[Result | Exception]]], calls: Sequence[Call]
) -> Sequence[Result | Exception]:
    """What `act` answers each of these calls, or why it did not. Calls that it refuses because of a row are done one
    half after the other, down to the one whose row it is: a bad call among n costs some 2 log2 n acts more."""
    try:
        return await act(calls)
    except ROW_ERRORS as error:
        if len(calls) == 1:
            return [error]
    except Exception as error:  # noqa: BLE001 - raised where the calls were made
        return [error] * len(calls)
    middle = len(calls) // 2
    return [*await by_halves(act, calls[:middle]), *await by_halves(act, calls[middle:])]

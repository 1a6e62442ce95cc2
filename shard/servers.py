"""The servers that a DSN names, and how one of them that says nothing does not hold up the others.

By libpq's own way a server that is silent costs its whole timeout before the next is tried: with four of them the last
would be tried when whoever asks has long given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

# A server that has not let us in after so long gets the next one tried beside it.
NEXT_S = 0.5
_Connection = TypeVar("_Connection", bound=psycopg.AsyncConnection[Any])


def each_of(dsn: str) -> list[str]:
    """A DSN for each server that this one names, in its order. One whose lists do not fit together is left to libpq,
    which says so."""
    named = conninfo_to_dict(dsn)
    lists = {key: str(named[key]).split(",") for key in ("host", "hostaddr", "port") if named.get(key) is not None}
    count = max(map(len, lists.values()), default=1)
    if any(len(values) not in ({1, count} if key == "port" else {count}) for key, values in lists.items()):
        return [dsn]
    return [
        make_conninfo(dsn, **{key: values[at % len(values)] for key, values in lists.items()}) for at in range(count)
    ]


async def first_of(dsn: str, connect: Callable[[str], Coroutine[Any, Any, _Connection]]) -> _Connection:
    """A connection to the first of a DSN's servers that lets us in: one after the other, and those that are slow beside
    each other. Raises what came of the last of them where none does."""
    left = each_of(dsn)
    if len(left) == 1:
        return await connect(dsn)
    begun: list[asyncio.Task[_Connection]] = []
    chosen: asyncio.Task[_Connection] | None = None
    try:
        while left or not all(task.done() for task in begun):
            if left:
                begun.append(asyncio.create_task(connect(left.pop(0))))
            going = [task for task in begun if not task.done()]
            await asyncio.wait(going, timeout=NEXT_S if left else None, return_when=asyncio.FIRST_COMPLETED)
            chosen = next((task for task in begun if task.done() and task.exception() is None), None)
            if chosen is not None:
                return chosen.result()
        return begun[-1].result()
    finally:
        # Waiting for them to end, a cancelled caller would lose the one that was chosen.
        for task in begun:
            if task is not chosen:
                task.cancel()
                task.add_done_callback(_hang_up)


def _hang_up(done: asyncio.Task[_Connection]) -> None:
    if not done.cancelled() and done.exception() is None:
        done.result().pgconn.finish()

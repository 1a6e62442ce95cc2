"""Finds rows that other sessions keep locked, so that the calls that need them can be refused.

A statement that serves many calls waits only a short time for a lock (shard/postgres/pool.py). If it does not get the
lock, it has done nothing. Then this module finds the locked rows without waiting. The calls that need these rows are
refused, and the other calls run again. Locked rows are remembered, so that the next call that needs one of them does
not make other calls wait. What is remembered is only a hint: each remembered row is checked again before a call is
refused because of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Generic, TypeVar

from shard.bounded import make_room
from shard.errors import RowLocked
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue import statements
from shard.vocabulary import OrgId, QueueName

# How many times a statement runs if it waits for another lock than a lock on these rows. For example, migrations and
# moves of slots lock a table for a short time. Each run waits for 0.2 s (shard/postgres/pool.py), which makes 10 s in
# all.
TRIES_MAX = 50
_ORGS_MAX = 1_000
_ROWS_OF_ORG_MAX = 1_000

# A job: its org, and its id as 32 hexadecimal digits.
JobRow = tuple[OrgId, str]
KeyRow = tuple[OrgId, QueueName, str]
# A queue that does not exist yet. To make it, a statement needs the rows of its org and of its name.
NameRow = tuple[OrgId, QueueName]

Row = TypeVar("Row", bound=tuple[object, ...])


class RowLocks(Generic[Row]):
    """Remembers which rows of one kind are locked. `find` returns the given rows that are locked, and waits for no
    lock. It may also return rows that have just been deleted."""

    def __init__(self, find: Callable[[Sequence[Row]], Awaitable[Collection[Row]]]) -> None:
        self._find = find
        self._remembered: dict[object, set[Row]] = {}

    async def expect(self, rows: Iterable[Row]) -> set[Row]:
        """Returns the rows that are locked. Asks the database only about orgs for which locked rows are remembered. If
        there is no such org, asks nothing."""
        if not self._remembered:
            return set()
        suspects = [row for row in rows if row[0] in self._remembered]
        if not suspects:
            return set()
        # Ask about the remembered rows too. If none of them is locked any more, the org is forgotten.
        remembered = [row for org in {row[0] for row in suspects} for row in self._remembered[org]]
        return await self.find([*suspects, *remembered]) & set(suspects)

    async def find(self, rows: Iterable[Row]) -> set[Row]:
        """Returns the rows that are locked. Returns no rows if the whole table is locked."""
        asked = list(dict.fromkeys(rows))
        if not asked:
            return set()
        try:
            locked = set(await self._find(asked))
            if locked:
                # A row that was deleted between the statement's snapshot and the try to lock it seems to be locked. The
                # second run no longer sees such a row.
                locked &= set(await self._find([row for row in asked if row in locked]))
        except RowLocked:
            return set()
        for row in asked:
            if row in locked:
                self._remember(row)
            else:
                self._forget(row)
        return locked

    def _remember(self, row: Row) -> None:
        if row[0] not in self._remembered:
            make_room(self._remembered, _ORGS_MAX)
        rows = self._remembered.setdefault(row[0], set())
        if len(rows) < _ROWS_OF_ORG_MAX:
            rows.add(row)

    def _forget(self, row: Row) -> None:
        rows = self._remembered.get(row[0])
        if rows is not None:
            rows.discard(row)
            if not rows:
                del self._remembered[row[0]]


def of_jobs(database: Database) -> RowLocks[JobRow]:
    """The row locks of live and dead jobs."""

    async def find(rows: Sequence[JobRow]) -> list[JobRow]:
        orgs = {org: position for position, org in enumerate(dict.fromkeys(org for org, _ in rows), start=1)}
        parameters = {
            "ids": arrays.plain([job_hex for _, job_hex in rows]),
            "orgs": arrays.texts(list(orgs)),
            "org_positions": arrays.numbers([orgs[org] for org, _ in rows]),
        }
        return [rows[place - 1] for (place,) in await database.run(statements.FIND_LOCKED_JOBS, parameters)]

    return RowLocks(find)


def of_keys(database: Database) -> RowLocks[KeyRow]:
    """The row locks of dedup keys."""

    async def find(rows: Sequence[KeyRow]) -> list[KeyRow]:
        parameters = {
            "orgs": arrays.texts([org for org, _, _ in rows]),
            "queues": arrays.names([queue for _, queue, _ in rows]),
            "keys": arrays.texts([key for _, _, key in rows]),
        }
        return [rows[place - 1] for (place,) in await database.run(statements.FIND_LOCKED_KEYS, parameters)]

    return RowLocks(find)


def of_names(database: Database) -> RowLocks[NameRow]:
    """The row locks of orgs and of queue names."""

    async def find(rows: Sequence[NameRow]) -> list[NameRow]:
        parameters = {
            "orgs": arrays.texts([org for org, _ in rows]),
            "queues": arrays.names([queue for _, queue in rows]),
        }
        return [rows[place - 1] for (place,) in await database.run(statements.FIND_LOCKED_NAMES, parameters)]

    return RowLocks(find)

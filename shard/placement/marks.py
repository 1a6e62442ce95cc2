"""Detects whether a shard's database lost history (docs/decisions/0028-a-shard-that-lost-history.md).

A mark is a row that is written on the shard first and confirmed in the catalog afterwards. If a database lacks the mark
that the catalog confirmed last, it was restored from a backup, or it is a standby that lagged when it was promoted.
This module writes nothing but marks, and decides nothing about jobs.
"""

from __future__ import annotations

from typing import NamedTuple

from shard.errors import LostHistory, ShardUnavailable
from shard.placement import statements
from shard.postgres import arrays
from shard.postgres import statements as postgres_statements
from shard.postgres.pool import NO_SCHEMA, Database, Mark
from shard.vocabulary import Micros, ShardName

# Each router that may write to a shard tries to write a mark there at this interval. If a shard loses the history of
# less than twice this time, the loss may remain unnoticed.
MARK_S = 5.0
_TRIES_MAX = 10


class Confirmed(NamedTuple):
    """A shard's newest confirmed mark, in the order of read_mark.sql's columns."""

    number: int
    token: str
    at: Micros

    @property
    def mark(self) -> Mark:
        return Mark(self.number, self.token)


class Made(NamedTuple):
    """A mark that was just written on a shard, in the order of make_mark.sql's columns."""

    number: int
    token: str
    at: Micros
    # The tokens of the earlier marks that the shard still has, and the number of the oldest of them. None: there are no
    # earlier marks.
    before: list[str] | None
    oldest: int | None


class Comparison(NamedTuple):
    """What a shard knows about a mark, in the order of compare_mark.sql's columns."""

    has_it: bool
    # Whether the shard has only newer marks. Then the catalog is far behind, for example because the catalog itself was
    # restored.
    is_past: bool

    @property
    def lost(self) -> bool:
        """Whether the shard once had this mark and does not have it any more."""
        return not self.has_it and not self.is_past


_NOTHING = Comparison(has_it=False, is_past=False)


async def confirmed(catalog: Database, shard: ShardName) -> Confirmed | None:
    """Returns the shard's newest confirmed mark, or None if the catalog has confirmed none yet."""
    rows = await catalog.run(statements.READ_MARK, {"shard": shard})
    return Confirmed._make(rows[0]) if rows else None


async def compare(shard: Database, mark: Mark) -> Comparison:
    """Returns what the shard knows about a mark."""
    try:
        rows = await shard.run(postgres_statements.COMPARE_MARK, mark._asdict())
    except NO_SCHEMA:
        # The backup is older than the table of marks.
        return _NOTHING
    return Comparison._make(rows[0])


async def last_before(shard: Database, at: Micros) -> tuple[int, Micros] | None:
    """Returns the number and the time of the newest mark that the shard made before a time, or None if there is no such
    mark."""
    try:
        rows = await shard.run(statements.FIND_MARK_BEFORE, {"before_us": at})
    except NO_SCHEMA:
        return None
    return tuple(rows[0]) if rows else None


async def refuse_lost(shard: Database, mark: Mark | None) -> None:
    """Raises LostHistory if the database lacks this mark. The mark must have been confirmed before the call."""
    if mark is not None and (await compare(shard, mark)).lost:
        raise LostHistory(shard.name, shard.address)


async def make(shard: Database, *, apart_s: float = 0.0) -> Made | None:
    """Writes a mark on the shard. Returns None if a mark was written within the last `apart_s` seconds, or if another
    process is writing a mark now."""
    rows = await shard.run(statements.MAKE_MARK, {"apart_s": apart_s, "above": 0})
    return Made._make(rows[0]) if rows else None


async def confirm(catalog: Database, shard: ShardName, made: Made) -> bool:
    """Records a mark in the catalog. Returns False if the catalog did not accept the mark, because the catalog knows a
    later mark, or a mark that the shard does not have."""
    return bool(await catalog.run(statements.CONFIRM_MARK, _parameters(shard, made)))


async def mark(shard: Database, catalog: Database) -> None:
    """Waits until the catalog has confirmed a mark that was written after this call began. Raises LostHistory,
    ShardUnavailable."""
    for _ in range(_TRIES_MAX):
        made = await make(shard)
        if made is None:
            continue
        if await confirm(catalog, shard.name, made):
            return
        known = await confirmed(catalog, shard.name)
        if known is None:
            # The catalog has no record of this shard.
            return
        await refuse_lost(shard, known.mark)
        if known.number > made.number:
            return
    raise ShardUnavailable(shard.name, "other processes keep marking its history; try again")


async def accept(shard: Database, catalog: Database, lost: Mark) -> None:
    """Begins a new history on a shard that lacks the mark `lost`: makes the catalog confirm a mark that the shard has.
    Changes nothing in the catalog if another process has already begun a new history there."""
    rows = await shard.run(statements.MAKE_MARK, {"apart_s": 0.0, "above": lost.number})
    if rows:
        made = Made._make(rows[0])
        await confirm(catalog, shard.name, made._replace(before=[*(made.before or ()), lost.token]))


def _parameters(shard: ShardName, made: Made) -> dict[str, object]:
    return {
        "shard": shard,
        "number": made.number,
        "token": made.token,
        "before": arrays.plain(made.before or ()),
        "oldest": made.oldest or 0,
    }

"""Sets, removes and reads the limits in the catalog. The parameter `database` is always the catalog's database.

Each change gets a version, and notifies all routers, which then read the limits again. If two routers draw from a
bucket by different limits, the versions tell which limit is newer.
"""

from __future__ import annotations

from shard.admin import statements
from shard.errors import TooManyLimits
from shard.limits import LIMITS_MAX, Limit, LimitKey, LimitTable, Measure
from shard.postgres.pool import Database
from shard.vocabulary import OrgId


async def set_limit(database: Database, key: LimitKey, *, amount: int, interval_us: int) -> Limit:
    """Sets a limit, and returns it. Raises TooManyLimits."""
    rows = await database.run(
        statements.SET_LIMIT,
        {**_named(key), "amount": amount, "interval_us": interval_us, "limits_max": LIMITS_MAX},
    )
    if not rows:
        raise TooManyLimits(limits_max=LIMITS_MAX)
    return Limit(key, amount, interval_us, rows[0][0])


async def clear(database: Database, key: LimitKey) -> bool:
    """Removes a limit. Returns whether the limit was set. Also returns True if an earlier run of the statement, whose
    answer was lost, may have removed the limit."""
    rows = await database.run(statements.CLEAR_LIMITS, _named(key))
    return bool(rows) or rows.ran_before


async def forget_org(database: Database, org: OrgId) -> None:
    """Removes all limits of an org: an erased org must leave no trace."""
    await database.run(statements.CLEAR_LIMITS, {"org": org, "queue": None, "measure": None})


async def read(database: Database, known: LimitTable | None = None) -> LimitTable:
    """Returns all limits. With `known`, an earlier copy, reads only the limits that have changed since that copy."""
    since = -1 if known is None else known.version
    rows = await database.run(statements.READ_LIMITS, {"since": since})
    version, cleared = rows[0][:2]
    if known is not None and version < since:
        # The version went back: the catalog was restored from a backup.
        return await read(database)
    found = [
        Limit(LimitKey(org, queue, Measure(measure)), amount, interval_us, max(changed, cleared))
        for _, _, org, queue, measure, amount, interval_us, changed in rows
        if org is not None
    ]
    before = () if known is None or cleared > since else known.limits.values()
    return LimitTable([*before, *found], version=version)


def _named(key: LimitKey) -> dict[str, object]:
    return {"org": key.org, "queue": key.queue, "measure": key.measure.value}

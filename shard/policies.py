"""What orgs are told about their history: for how long it is kept where their queues do not say, and whether it is
under legal hold.

The catalog has the say, and every shard a copy, under one version: each org's history may lie on several shards. A copy
is made when something changes, by each pass of the archiver, and before a shard is given slots; an older one never
overwrites a newer one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import NamedTuple

from shard import arrays, statements
from shard.connection import Connection
from shard.database import Database
from shard.errors import LegallyHeld, NotHeld
from shard.placement import slot_of
from shard.vocabulary import Micros, OrgId

_log = logging.getLogger(__name__)

# In days. 0: finished jobs are gone when their day has turned cold.
RETENTIONS = (0, 1, 7, 30, 90, 365, 2557)
RETENTION_BY_DEFAULT = 30
# Any numbers, the same in every release.
_CHANGES = 0x77696E64_706F6C63
_HOLDS = 0x77696E64_686F6C64


class Policy(NamedTuple):
    """What one org is told, in the order of read_policy.sql's columns."""

    org: OrgId
    # For how many days; None: 30, but for queues that say otherwise.
    retention: int | None = None
    # Under legal hold since then, and for this reason; None: it is not.
    held_since: Micros | None = None
    held_for: str | None = None


async def read(catalog: Database) -> list[Policy]:
    """What all orgs are told, by org; nothing of those who are told nothing."""
    return (await _read(catalog))[1]


async def read_one(catalog: Database, org: OrgId) -> Policy:
    """What one org is told."""
    rows = await catalog.run(statements.READ_POLICY, {"org": org})
    return Policy._make(rows[0]) if rows else Policy(org)


async def keep(catalog: Database, org: OrgId, *, days: int | None) -> Policy:
    """Has the org's jobs that finish from now on be kept for so many days, but for those of queues that say otherwise.
    None: by default."""
    async with _change(catalog) as connection:
        return await _write(connection, (await _read_one(connection, org))._replace(retention=days))


async def hold(catalog: Database, org: OrgId, *, reason: str) -> Policy:
    """Has nothing of the org's history be dropped. Raises LegallyHeld if it is so already."""
    async with _change(catalog) as connection:
        policy = await _read_one(connection, org)
        refuse_held(policy)
        return await _write(connection, policy._replace(held_for=reason))


async def release(catalog: Database, org: OrgId) -> Policy:
    """Has the org's history be dropped in its time again. Raises NotHeld."""
    async with _change(catalog) as connection:
        policy = await _read_one(connection, org)
        if policy.held_since is None:
            raise NotHeld(org)
        return await _write(connection, policy._replace(held_for=None))


async def forget(catalog: Database, org: OrgId) -> None:
    """Has the org be told nothing, of whom nothing is to be left. Raises LegallyHeld."""
    async with _change(catalog) as connection:
        refuse_held(await _read_one(connection, org))
        await connection.run(statements.DELETE_POLICY, {"org": org})


def refuse_held(policy: Policy) -> None:
    """Raises LegallyHeld, if it is."""
    if policy.held_since is not None:
        raise LegallyHeld(policy.org, policy.held_for)


async def copy(catalog: Database, shard: Database) -> None:
    """Has the shard tell orgs what the catalog tells them. When this is done, nothing is dropped there any more of the
    history of orgs that were held when it began. Raises ShardUnavailable."""
    version, policies = await _read(catalog)
    ((had,),) = await shard.run(statements.READ_POLICIES_VERSION, {})
    if had > version:
        # The catalog was restored from a backup: what has been said since is known to the shards alone.
        await _take_over(catalog, shard, had)
        version, policies = await _read(catalog)
    if had == version:
        return
    orgs = {policy.org: slot_of(policy.org) for policy in policies}
    async with shard.transaction() as connection:
        await connection.execute(statements.WAIT_TURN, {"lock": _HOLDS})
        if not await connection.run(statements.TAKE_POLICIES, {"version": version}):
            return
        # Who is not known there is made known: a hold is not to depend on who comes first.
        await connection.run(
            statements.INTERN_NAMES,
            {
                "orgs": arrays.texts(list(orgs)),
                "slots": arrays.numbers(orgs.values()),
                "queues": arrays.names(()),
            },
        )
        rows = await connection.run(
            statements.TELL_ORGS,
            {
                "orgs": arrays.texts(list(orgs)),
                "retentions": _retentions(policies),
                "held": arrays.plain("f" if policy.held_since is None else "t" for policy in policies),
            },
        )
        await connection.run(statements.TELL_QUEUES, {"orgs": arrays.texts([org for (org,) in rows])})


async def _take_over(catalog: Database, shard: Database, version: int) -> None:
    """Has the catalog tell orgs what this shard tells them, unless it has something newer to say by now."""
    rows = await shard.run(statements.READ_TOLD, {})
    told = [Policy(org, retention, None, held) for org, retention, held in rows]
    async with _change(catalog) as connection:
        rows = await connection.run(statements.READ_POLICIES, {})
        if rows[0][0] >= version:
            return
        known = {policy.org: policy for policy in _policies(row[1:] for row in rows)}
        for org in known.keys() - {policy.org for policy in told}:
            await connection.run(statements.DELETE_POLICY, {"org": org})
        for policy in told:
            reason = policy.held_for and (known.get(policy.org, policy).held_for or policy.held_for)
            await _write(connection, policy._replace(held_for=reason))
        _log.warning(
            "the catalog knew less than shard %r of what orgs are told, as after a restore: it took %d org(s) over",
            shard.name,
            len(told),
        )


async def wait_for_holds(connection: Connection) -> None:
    """Until the transaction ends, no org is put under legal hold on this shard, and none released."""
    await connection.execute(statements.SHARE_TURN, {"lock": _HOLDS})


def _retentions(policies: Sequence[Policy]) -> str:
    return arrays.sparse_numbers(
        {at: policy.retention for at, policy in enumerate(policies) if policy.retention is not None}, len(policies)
    )


@contextlib.asynccontextmanager
async def _change(catalog: Database) -> AsyncGenerator[Connection]:
    async with catalog.transaction() as connection:
        await connection.execute(statements.WAIT_TURN, {"lock": _CHANGES})
        yield connection
        await connection.run(statements.RAISE_POLICIES, {})


async def _read(catalog: Database) -> tuple[int, list[Policy]]:
    rows = await catalog.run(statements.READ_POLICIES, {})
    return rows[0][0], _policies(row[1:] for row in rows)


async def _read_one(connection: Connection, org: OrgId) -> Policy:
    return next(iter(_policies(await connection.run(statements.READ_POLICY, {"org": org}))), Policy(org))


async def _write(connection: Connection, policy: Policy) -> Policy:
    if policy.retention is None and policy.held_for is None:
        await connection.run(statements.DELETE_POLICY, {"org": policy.org})
    else:
        await connection.run(
            statements.WRITE_POLICY,
            {"org": policy.org, "retention": policy.retention, "held_for": policy.held_for},
        )
    return await _read_one(connection, policy.org)


def _policies(rows: Iterable[Sequence[object]]) -> list[Policy]:
    return [Policy._make(row) for row in rows if row[0] is not None]

"""Policies of orgs about their history. A policy says for how long finished jobs are kept if their queue has no
retention, and whether the org is under legal hold.

The catalog is the authority. Every shard has a copy, with one version number, because an org's history may be on
several shards. The policies are copied to a shard when a policy changes, in each pass of the archiver, and before the
shard gets slots. An older version never overwrites a newer version.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import NamedTuple

from shard.errors import LegallyHeld, NotHeld
from shard.history import statements
from shard.placement import statements as placement_statements
from shard.placement.slots import slot_of
from shard.postgres import arrays
from shard.postgres import statements as postgres_statements
from shard.postgres.connection import Connection
from shard.postgres.pool import Database
from shard.vocabulary import Micros, OrgId

_log = logging.getLogger(__name__)

# The keys of advisory locks. Any numbers would do, but they must be the same in every release.
_CHANGES_LOCK = 0x77696E64_706F6C63
_HOLDS_LOCK = 0x77696E64_686F6C64


class Policy(NamedTuple):
    """One org's policy, in the order of read_policy.sql's columns."""

    org: OrgId
    # For how many days finished jobs are kept if their queue has no retention. None: 30 days.
    retention: int | None = None
    # The time since which the org is under legal hold, and the reason. None: the org is not under legal hold.
    held_since: Micros | None = None
    held_for: str | None = None


async def read(catalog: Database) -> list[Policy]:
    """Returns the policies of all orgs that have a policy, by org."""
    return (await _read(catalog))[1]


async def read_one(catalog: Database, org: OrgId) -> Policy:
    """Returns one org's policy, or the default policy if the org has none."""
    rows = await catalog.run(statements.READ_POLICY, {"org": org})
    return Policy._make(rows[0]) if rows else Policy(org)


async def has_queues(database: Database, org: OrgId) -> bool:
    """Returns whether this shard has queues of the org."""
    return bool(await database.run(statements.FIND_A_QUEUE, {"org": org}))


async def set_retention(catalog: Database, org: OrgId, *, days: int | None) -> Policy:
    """Sets the org's retention, which applies to jobs that finish from now on and whose queue has no retention of its
    own. `days`: None sets the default. Returns the new policy."""
    async with _change(catalog) as connection:
        return await _write(connection, (await _read_one(connection, org))._replace(retention=days))


async def hold(catalog: Database, org: OrgId, *, reason: str) -> Policy:
    """Puts the org under legal hold: nothing of its history is dropped. Returns the new policy. Raises LegallyHeld if
    the org is under legal hold already."""
    async with _change(catalog) as connection:
        policy = await _read_one(connection, org)
        refuse_held(policy)
        return await _write(connection, policy._replace(held_for=reason))


async def release(catalog: Database, org: OrgId) -> Policy:
    """Ends the legal hold. The org's history is then dropped when its retention has passed, as before the hold. Returns
    the new policy. Raises NotHeld."""
    async with _change(catalog) as connection:
        policy = await _read_one(connection, org)
        if policy.held_since is None:
            raise NotHeld(org)
        return await _write(connection, policy._replace(held_for=None))


async def delete(catalog: Database, org: OrgId) -> None:
    """Deletes the org's policy: an erased org must leave no trace. Raises LegallyHeld."""
    async with _change(catalog) as connection:
        refuse_held(await _read_one(connection, org))
        await connection.run(statements.DELETE_POLICY, {"org": org})


def refuse_held(policy: Policy) -> None:
    """Raises LegallyHeld if the org is under legal hold."""
    if policy.held_since is not None:
        raise LegallyHeld(policy.org, policy.held_for)


async def copy(catalog: Database, shard: Database) -> None:
    """Copies the policies from the catalog to a shard. Afterwards, the shard drops nothing more of the history of orgs
    that were under legal hold when this call began. Raises ShardUnavailable."""
    version, policies = await _read(catalog)
    ((copied,),) = await shard.run(statements.READ_POLICIES_VERSION, {})
    if copied > version:
        # The catalog was restored from a backup: only the shards know what has changed since the backup.
        await _restore_from_shard(catalog, shard, copied)
        version, policies = await _read(catalog)
    if copied == version:
        return
    orgs = {policy.org: slot_of(policy.org) for policy in policies}
    async with shard.transaction() as connection:
        await connection.execute(postgres_statements.LOCK_EXCLUSIVE, {"lock": _HOLDS_LOCK})
        if not await connection.run(statements.REPLACE_POLICIES, {"version": version}):
            return
        # Insert orgs that the shard does not know: a hold must apply to jobs that reach the shard later.
        await connection.run(
            placement_statements.INSERT_NAMES,
            {
                "orgs": arrays.texts(list(orgs)),
                "slots": arrays.numbers(orgs.values()),
                "queues": arrays.names(()),
            },
        )
        rows = await connection.run(
            statements.APPLY_ORG_POLICIES,
            {
                "orgs": arrays.texts(list(orgs)),
                "retentions": _retentions(policies),
                "held": arrays.plain("f" if policy.held_since is None else "t" for policy in policies),
            },
        )
        await connection.run(statements.APPLY_QUEUE_POLICIES, {"orgs": arrays.texts([org for (org,) in rows])})


async def _restore_from_shard(catalog: Database, shard: Database, version: int) -> None:
    """Copies this shard's policies to the catalog, unless the catalog has newer policies by now."""
    found = await shard.run(statements.READ_APPLIED_POLICIES, {})
    applied = [Policy(org, retention, None, held) for org, retention, held in found]
    async with _locked(catalog) as connection:
        rows = await connection.run(statements.READ_POLICIES, {})
        if rows[0][0] >= version:
            return
        known = {policy.org: policy for policy in _policies(row[1:] for row in rows)}
        for org in known.keys() - {policy.org for policy in applied}:
            await connection.run(statements.DELETE_POLICY, {"org": org})
        for policy in applied:
            reason = policy.held_for and (known.get(policy.org, policy).held_for or policy.held_for)
            await _write(connection, policy._replace(held_for=reason))
        # Set the version of this shard, and no higher version. Another shard may have newer policies, which are copied
        # to the catalog only if their version is higher than the catalog's.
        await connection.run(statements.SET_POLICIES_VERSION, {"version": version})
        _log.warning(
            "the catalog's org policies were older than those of shard %r, as after a restore: copied the policies of "
            "%d org(s) from the shard",
            shard.name,
            len(applied),
        )


async def lock_holds(connection: Connection) -> None:
    """Waits for changes of legal holds to end. Until the transaction ends, no legal hold begins or ends on this
    shard."""
    await connection.execute(statements.LOCK_SHARED, {"lock": _HOLDS_LOCK})


def _retentions(policies: Sequence[Policy]) -> str:
    return arrays.sparse_numbers(
        {at: policy.retention for at, policy in enumerate(policies) if policy.retention is not None}, len(policies)
    )


@contextlib.asynccontextmanager
async def _change(catalog: Database) -> AsyncGenerator[Connection]:
    async with _locked(catalog) as connection:
        yield connection
        await connection.run(statements.RAISE_POLICIES, {})


@contextlib.asynccontextmanager
async def _locked(catalog: Database) -> AsyncGenerator[Connection]:
    async with catalog.transaction() as connection:
        await connection.execute(postgres_statements.LOCK_EXCLUSIVE, {"lock": _CHANGES_LOCK})
        yield connection


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

"""Tests the retention, the legal hold and the erasure of one org, on all shards that have jobs of the org."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyarrow import parquet  # type: ignore[import-untyped]

from archiver import orgs, service
from archiver.run import Pass
from shard.admin import weights
from shard.admin.queue_admin import QueueAdmin
from shard.errors import LegallyHeld, NotHeld, OrgMoves, ShardUnavailable, TooManyRetentions
from shard.history import erasure, export_reader, org_policies, retention_change
from shard.history import statements as history_statements
from shard.history.days import days_over, days_past, drop, turn_cold
from shard.placement import pins, statements
from shard.placement.slots import slot_of
from shard.postgres import arrays, partitions
from shard.postgres.connection import Connection
from shard.postgres.pool import Database
from shard.postgres.statements import LOCK_EXCLUSIVE
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.vocabulary import Answer, Failure, JobId, Lease, OrgId, QueueName, ShardName
from shard.workflow import Callback
from tests.balancers import Field, open_field
from tests.command import windrow
from tests.effort import trials
from tests.jobs import HOUR_US, QUEUE, ids_of, lease_jobs, some_jobs
from tests.postgres import Server
from tests.recorder import Recorder
from tests.timemachine import age_finished, until_blocked
from tests.workflows import Flows

A, B = ShardName("s1"), ShardName("s2")


@pytest.fixture
async def field(tmp_path: Path, fresh_dsn: str, postgres: Server) -> AsyncGenerator[Field, None]:
    async with open_field(tmp_path, fresh_dsn, postgres, B) as opened:
        opened.write(s1={}, s2={})
        await opened.admit(B)
        yield opened


async def finish_some(database: Database, org: OrgId, count: int = 2, queue: str = QUEUE) -> list[Lease]:
    store = Store(database)
    await store.enqueue(some_jobs(org, count, queue=queue))
    leases = [lease for _, lease in await lease_jobs(store, org, queue=queue)]
    assert await store.settle(Settlement.ack(org, leases)) == [Answer.OK] * count
    return leases


async def pass_once(field: Field, shard: ShardName = A) -> Pass:
    outcome = (await service.archive_once(field.cluster, stop=asyncio.Event()))[shard]
    assert isinstance(outcome, Pass), outcome
    return outcome


async def keep(field: Field, org: OrgId, days: int | None) -> None:
    policy, behind, _ = await orgs.keep(field.cluster, org, days=days)
    assert (policy, behind) == (org_policies.Policy(org, days), {})


async def hold(field: Field, org: OrgId) -> None:
    _, behind, _ = await orgs.change(field.cluster, lambda catalog: org_policies.hold(catalog, org, reason="case 7"))
    assert behind == {}


async def release(field: Field, org: OrgId) -> None:
    _, behind, _ = await orgs.change(field.cluster, lambda catalog: org_policies.release(catalog, org))
    assert behind == {}


async def version(field: Field) -> int:
    """Returns the version of the orgs' policies in the catalog."""
    ((changed,),) = await field.catalog.run(b"SELECT changed FROM windrow.policies", {})
    return int(changed)


async def restore_catalog(field: Field, *, version: int) -> None:
    """Restores the catalog from a backup of a time when no org had a policy."""
    await field.catalog.run(b"DELETE FROM windrow.policy", {})
    await field.catalog.run(b"UPDATE windrow.policies SET changed = %(version)s", {"version": version})


async def retentions(database: Database, org: OrgId) -> list[tuple[str, int]]:
    """Returns, for each finished job of the org, the kind of the job's table and the job's retention."""
    return await database.run(
        b"""
        SELECT split_part(c.relname, '_', 1), f.retention
        FROM (SELECT tableoid, * FROM windrow.finished UNION ALL SELECT tableoid, * FROM windrow.cold) f
        JOIN windrow.queue q ON q.queue_id = f.queue_id
        JOIN pg_class c ON c.oid = f.tableoid
        WHERE q.org = %(org)s
        ORDER BY 1, 2
        """,
        {"org": org},
    )


async def assert_balanced(*databases: Database) -> None:
    for database in databases:
        for entry in await QueueAdmin(database).check():
            assert entry.balanced, entry


# ── How long the history is kept ─────────────────────────────────────────────────────────────────────────────────────


async def test_an_orgs_word_holds_for_its_queues_that_say_nothing_on_every_shard_and_for_queues_to_come(
    field: Field, org: OrgId, other_org: OrgId
) -> None:
    await finish_some(field.databases[A], org)
    await field.catalog.run(b"UPDATE windrow.queue SET retention = 7 WHERE org = %(org)s", {"org": org})
    await keep(field, org, 365)
    await finish_some(field.databases[A], org)
    await finish_some(field.databases[A], org, queue="another")
    await finish_some(field.databases[A], other_org)
    assert await retentions(field.databases[A], org) == [("finished", days) for days in (7, 7, 30, 30, 365, 365)]
    assert await retentions(field.databases[A], other_org) == [("finished", 30)] * 2
    # A shard on which the org has no jobs yet learns the retention too.
    ((known,),) = await field.databases[B].run(b"SELECT retention FROM windrow.org WHERE org = %(org)s", {"org": org})
    assert known == 365
    await keep(field, org, None)
    await finish_some(field.databases[A], org, queue="another")
    assert (await retentions(field.databases[A], org)).count(("finished", 30)) == 4
    assert await orgs.read(field.cluster) == []


async def test_a_queue_that_is_made_during_a_change_of_its_orgs_policy_gets_the_change(
    field: Field, org: OrgId
) -> None:
    await finish_some(field.databases[A], org)
    async with await psycopg.AsyncConnection.connect(field.dsns[A]) as other:
        await other.execute("UPDATE windrow.org SET retention = 90 WHERE org = %s", [org])
        making = asyncio.create_task(finish_some(field.databases[A], org, queue="another"))
        await until_blocked(field.databases[A])
        await other.commit()
        await making
    assert (await retentions(field.databases[A], org)).count(("finished", 90)) == 2


async def test_a_shard_that_was_away_is_told_before_an_archiver_works_there(field: Field, org: OrgId) -> None:
    field.write(s1={}, s2={"dsn": "host=127.0.0.1 port=1 connect_timeout=1"})
    _, behind, _ = await orgs.change(field.cluster, lambda catalog: org_policies.hold(catalog, org, reason="case 7"))
    assert list(behind) == [B]
    assert isinstance(behind[B], ShardUnavailable)
    field.write(s1={}, s2={})
    await pass_once(field, B)
    assert await field.databases[B].run(b"SELECT FROM windrow.org WHERE org = %(org)s AND held", {"org": org})


async def test_an_older_copy_never_overwrites_a_newer_one(field: Field, org: OrgId, other_org: OrgId) -> None:
    await hold(field, org)
    # Make it look as if the shard's database had been restored from a backup that is older than the change.
    await field.databases[B].run(b"UPDATE windrow.policies SET changed = 1", {})
    await org_policies.copy(field.databases[B], field.databases[A])
    assert await field.databases[A].run(b"SELECT FROM windrow.org WHERE org = %(org)s AND held", {"org": org})
    # After a change, a restored catalog has a higher version than the shards again.
    await restore_catalog(field, version=1)
    await keep(field, other_org, 7)
    assert await field.catalog.run(b"SELECT retention FROM windrow.org WHERE org = %(org)s", {"org": other_org}) == [
        (7,)
    ]


async def test_what_has_finished_is_kept_as_its_queues_say_now_by_command_hot_or_cold(
    field: Field, org: OrgId, other_org: OrgId
) -> None:
    database = field.databases[A]
    for name in (org, other_org):
        await finish_some(database, name, 3)
        await finish_some(database, name, 1, queue="another")
        ids = await age_finished(database, name, days=5)
        assert len(ids) == 4
    await pass_once(field)
    await finish_some(database, org, 2)
    await database.run(
        b"UPDATE windrow.queue SET retention = 7 WHERE org = %(org)s AND queue = 'another'", {"org": org}
    )
    await keep(field, org, 2557)
    assert await orgs.apply_to_past(field.cluster, org, say=print) == 6
    expected = [("cold", 7), *[("cold", 2557)] * 3, *[("finished", 2557)] * 2]
    assert await retentions(database, org) == expected
    assert await retentions(database, other_org) == [("cold", 30)] * 4
    await assert_balanced(database)
    assert await orgs.apply_to_past(field.cluster, org, say=print) == 0
    # The next pass drops the jobs whose retention is over.
    await keep(field, org, 1)
    await orgs.apply_to_past(field.cluster, org, say=print)
    assert [aged.jobs for aged in (await pass_once(field)).dropped] == [3]
    await assert_balanced(database)


async def test_any_number_of_days_is_applied_to_jobs_on_a_shard_that_has_never_seen_it(
    field: Field, org: OrgId
) -> None:
    database = field.databases[A]
    await finish_some(database, org, 2)
    await age_finished(database, org, days=5)
    await pass_once(field)
    await finish_some(database, org, 1)
    await orgs.keep(field.cluster, org, days=14)
    assert await orgs.apply_to_past(field.cluster, org, say=print) == 3
    assert await retentions(database, org) == [("cold", 14), ("cold", 14), ("finished", 14)]
    await finish_some(database, org, 1)
    assert (await retentions(database, org))[2:] == [("finished", 14)] * 2
    await assert_balanced(database)


@pytest.mark.parametrize("state", ["owned", "draining"])
async def test_finished_jobs_of_workflows_that_are_kept_otherwise_do_not_end_again(
    field: Field, org: OrgId, state: str
) -> None:
    database = field.databases[A]
    flows = Flows(database, org)
    flow = await flows.start({"a": [], "b": ["a"], "c": ["a"]}, callbacks={"done": Callback.END})
    await flows.run_all()
    assert await flows.state(flow) == "succeeded"
    # A shard that the slot has left still has finished jobs of the org, but folds no workflow.
    await database.run(b"UPDATE windrow.owned_slot SET state = %(state)s", {"state": state})
    appended = (
        b"SELECT (SELECT last_value FROM windrow.workflow_arrival_number_seq), count(*) FROM windrow.workflow_arrival"
    )
    ((last, _),) = await database.run(appended, {})
    await keep(field, org, 365)
    assert await orgs.apply_to_past(field.cluster, org, say=print) == 4
    assert await retentions(database, org) == [("finished", 365)] * 4
    assert await database.run(appended, {}) == [(last, 0)]


async def test_who_keeps_jobs_otherwise_makes_partitions_in_turn_with_other_sessions(
    fresh_recorder: Recorder, fresh_database: Database, org: OrgId
) -> None:
    await finish_some(fresh_recorder, org, 2)
    async with fresh_database.transaction() as other:

        async def make_partitions() -> None:
            await other.run(LOCK_EXCLUSIVE, {"lock": partitions.LOCK})

        fresh_recorder.before(history_statements.FIND_KEPT_OTHERWISE, make_partitions)
        applying = asyncio.create_task(retention_change.apply(fresh_recorder, org, {QueueName(QUEUE): 14}))
        await until_blocked(fresh_recorder)
        assert await retentions(fresh_recorder, org) == [("finished", 30)] * 2
    assert await applying == 2
    assert await retentions(fresh_recorder, org) == [("finished", 14)] * 2


async def test_steps_that_may_read_a_day_of_all_orgs_have_an_hour_for_it(
    field: Field, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = field.databases[A]
    await database.run(b"CREATE TABLE public.limits (step text, timeout text)", {})
    await database.run(
        b"""
        CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO public.limits VALUES (TG_OP || ' ' || TG_TABLE_NAME, current_setting('statement_timeout'));
            RETURN NULL;
        END
        $$
        """,
        {},
    )
    steps = ["UPDATE finished", "UPDATE cold", "DELETE finished", "DELETE past_id"]
    for step in steps:
        act, name = step.split()
        await database.run(
            f"CREATE TRIGGER note_{act} AFTER {act} ON windrow.{name} EXECUTE FUNCTION public.note()".encode(), {}
        )
    await fill(field, org)
    await database.run(b"TRUNCATE public.limits", {})
    await keep(field, org, 90)
    await orgs.apply_to_past(field.cluster, org, say=print)
    await orgs.erase(field.cluster, org, say=print)
    rows = await database.run(b"SELECT DISTINCT step, timeout FROM public.limits", {})
    assert sorted(rows) == sorted((step, "1h") for step in steps)
    # Now some jobs finish and age, because the export counts the jobs of past days.
    await finish_some(database, org)
    await age_finished(database, org, days=40)
    for day in await days_over(database):
        await turn_cold(database, day)
    past, *_ = await days_past(database)
    counting = "SELECT current_setting('statement_timeout'), 1::bigint, 1::bigint FROM {} LIMIT 1"
    monkeypatch.setattr(export_reader, "_COUNT", counting)
    assert [one.org for one in await export_reader.count(database, past)] == ["1h"]


async def test_an_orgs_retention_for_which_one_shard_has_no_room_changes_nothing_anywhere(
    field: Field, org: OrgId, other_org: OrgId
) -> None:
    for days in range(100, 125):
        await keep(field, OrgId(f"{org}-{days}"), days)
    before = await orgs.read(field.cluster)
    with pytest.raises(TooManyRetentions, match=r"has 32 different retentions.* no room for 14 days"):
        await orgs.keep(field.cluster, org, days=14)
    assert await orgs.read(field.cluster) == before
    # A retention that other orgs already have is accepted, and the default is accepted too.
    policy, behind, _ = await orgs.keep(field.cluster, org, days=100)
    assert (policy.retention, behind) == (100, {})
    assert (await orgs.keep(field.cluster, org, days=None)).policy.retention is None


# ── Legal hold ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_nothing_of_an_org_under_legal_hold_is_dropped_and_what_others_had_beside_it_goes(
    field: Field, org: OrgId, other_org: OrgId
) -> None:
    database = field.databases[A]
    ids: dict[OrgId, list[JobId]] = {}
    for name in (org, other_org):
        await finish_some(database, name)
        ids[name] = await age_finished(database, name, days=40)
    await hold(field, org)
    assert [aged.jobs for aged in (await pass_once(field)).dropped] == [2]
    store = Store(database)
    assert len(await store.get(org, ids[org], include_payload=True)) == 2
    assert await store.get(other_org, ids[other_org], include_payload=True) == []
    await assert_balanced(database)
    assert (await pass_once(field)).released_jobs_dropped == 0
    await release(field, org)
    assert (await pass_once(field)).released_jobs_dropped == 2
    assert await store.get(org, ids[org], include_payload=True) == []
    await assert_balanced(database)
    assert await database.run(b"SELECT FROM windrow.archived", {}) == []


async def test_what_a_hold_has_kept_stays_after_it_if_its_queue_keeps_it_for_longer_by_then(
    field: Field, org: OrgId
) -> None:
    database = field.databases[A]
    await finish_some(database, org)
    await finish_some(database, org, 1, queue="another")
    await age_finished(database, org, days=40)
    await hold(field, org)
    await pass_once(field)
    assert await retentions(database, org) == [("cold", -1)] * 3
    await database.run(
        b"UPDATE windrow.queue SET retention = 7 WHERE org = %(org)s AND queue = 'another'", {"org": org}
    )
    await orgs.keep(field.cluster, org, days=365)
    assert await orgs.apply_to_past(field.cluster, org, say=print) == 2
    assert await orgs.apply_to_past(field.cluster, org, say=print) == 0
    assert await retentions(database, org) == [("cold", -1), *[("cold", 365)] * 2]
    await assert_balanced(database)
    await release(field, org)
    assert (await pass_once(field)).released_jobs_dropped == 1
    assert await retentions(database, org) == [("cold", 365)] * 2
    await assert_balanced(database)


async def test_a_hold_that_is_put_at_the_last_moment_before_a_day_is_dropped_holds(
    field: Field, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    field.write(s1={})
    database = field.databases[A]
    await finish_some(database, org)
    ids = await age_finished(database, org, days=40)
    real = org_policies.lock_holds
    held = asyncio.Event()

    async def wait(connection: object) -> None:
        # By now, the drop has looked for jobs of orgs under legal hold, and has found none.
        if not held.is_set():
            held.set()
            await hold(field, org)
        await real(connection)  # type: ignore[arg-type]

    monkeypatch.setattr(org_policies, "lock_holds", wait)
    done = await pass_once(field)
    assert [aged.jobs for aged in done.dropped] == []
    assert len(await Store(database).get(org, ids, include_payload=False)) == 2
    await assert_balanced(database)


async def test_holds_that_a_restored_catalog_does_not_know_are_taken_over_from_the_shards(
    field: Field, org: OrgId, other_org: OrgId
) -> None:
    before = await version(field)
    await hold(field, org)
    await restore_catalog(field, version=before)
    await field.catalog.run(b"UPDATE windrow.policies SET copied = changed", {})
    await pass_once(field, B)
    (told,) = await orgs.read(field.cluster)
    assert (told.org, told.held_for) == (org, "held before the catalog was restored")
    await keep(field, other_org, 7)
    for database in field.databases.values():
        assert await database.run(b"SELECT FROM windrow.org WHERE org = %(org)s AND held", {"org": org})


async def test_a_change_after_the_catalog_was_restored_ends_no_hold_that_the_shards_know(
    field: Field, org: OrgId, other_org: OrgId
) -> None:
    before = await version(field)
    await hold(field, org)
    await restore_catalog(field, version=before)
    await keep(field, other_org, 7)
    assert {policy.org: policy.held_since is not None for policy in await orgs.read(field.cluster)} == {
        org: True,
        other_org: False,
    }
    for database in field.databases.values():
        assert await database.run(b"SELECT FROM windrow.org WHERE org = %(org)s AND held", {"org": org})


async def test_a_restored_catalog_gets_its_policies_from_the_shard_that_has_the_newest(
    field: Field, org: OrgId, other_org: OrgId
) -> None:
    before = await version(field)
    await keep(field, other_org, 7)
    # Copy the legal hold to one shard only, as if the other shard were away.
    await org_policies.hold(field.catalog, org, reason="case 7")
    await org_policies.copy(field.catalog, field.databases[B])
    await restore_catalog(field, version=before)
    for shard in (A, B, A):
        await org_policies.copy(field.catalog, field.databases[shard])
    for database in field.databases.values():
        assert await database.run(b"SELECT FROM windrow.org WHERE org = %(org)s AND held", {"org": org})


async def test_jobs_of_a_held_org_that_join_a_day_at_the_last_moment_are_not_dropped_with_it(
    field: Field, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    field.write(s1={})
    database = field.databases[A]
    await finish_some(database, org)
    await age_finished(database, org, days=40)
    for day in await days_over(database):
        await turn_cold(database, day)
    (past,) = await days_past(database)
    await hold(field, org)
    # More jobs finish on the same day, as if the clock had been set back.
    await finish_some(database, org, 3)
    await age_finished(database, org, days=40)
    (late,) = [day for day in await days_over(database) if day.cold_already]
    real = org_policies.lock_holds
    joined = False

    async def wait(connection: Connection) -> None:
        nonlocal joined
        await real(connection)
        if not joined:
            joined = True
            # The drop has already moved the jobs of held orgs out of the day. Now another archiver adds the late jobs
            # to the day.
            await turn_cold(other, late)

    other = Database(A, field.dsns[A], connections=1, may_scan=True)
    await other.open()
    monkeypatch.setattr(org_policies, "lock_holds", wait)
    try:
        await drop(database, past)
    finally:
        await other.close()
    rows = await database.run(b"SELECT retention, count(*) FROM windrow.cold GROUP BY 1", {})
    assert rows == [(-1, 5)]
    await assert_balanced(database)


async def test_a_hold_is_set_once_listed_and_ended_once(field: Field, org: OrgId) -> None:
    await hold(field, org)
    with pytest.raises(LegallyHeld, match="case 7"):
        await hold(field, org)
    (told,) = await orgs.read(field.cluster)
    assert (told.org, told.held_for) == (org, "case 7")
    # The hold stays when another setting changes.
    await orgs.change(field.cluster, lambda catalog: org_policies.set_retention(catalog, org, days=7))
    (again,) = await orgs.read(field.cluster)
    assert again == told._replace(retention=7)
    await release(field, org)
    with pytest.raises(NotHeld):
        await release(field, org)


async def test_a_hold_of_an_org_that_no_shard_has_says_so(field: Field, org: OrgId, other_org: OrgId) -> None:
    await finish_some(field.databases[A], other_org)
    for name, says_so in ((org, True), (other_org, False)):
        held = await asyncio.to_thread(
            windrow, "orgs", "hold", name, "--reason", "case 7", "--config", str(field.config)
        )
        assert held.code == 0, held.err
        assert (f"no shard has a queue of org {name!r} (is the name right?)" in held.err) is says_so


# ── Erasure ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def fill(field: Field, org: OrgId, *, many: int = 1) -> list[JobId]:
    """Stores jobs of an org in all tables of jobs on both shards, as if the org had lived on the other shard before.
    Returns the ids of the jobs on the first shard, but not of the `many` jobs that only raise the number of jobs."""
    await field.databases[B].run(
        b"INSERT INTO windrow.owned_slot (slot, state, epoch) VALUES (%(slot)s, 'owned', 1)", {"slot": slot_of(org)}
    )
    ids: list[JobId] = []
    for database in (field.databases[B], field.databases[A]):
        store = Store(database)
        brief, dying, leased, waiting = (
            some_jobs(org, 1, queue="brief"),
            some_jobs(org, 1),
            some_jobs(org, 1),
            some_jobs(org, 2, dedup_keys=["one", "two"]),
        )
        await store.enqueue(brief)
        await database.run(
            b"UPDATE windrow.queue SET retention = 1 WHERE org = %(org)s AND queue = 'brief'", {"org": org}
        )
        await store.settle(Settlement.ack(org, [lease for _, lease in await lease_jobs(store, org, queue="brief")]))
        await finish_some(database, org, 1)
        ids = await age_finished(database, org, days=5)
        for at in range(0, many, 1000):
            await finish_some(database, org, min(1000, many - at))
            await store.enqueue(some_jobs(org, min(1000, many - at), delay_us=HOUR_US))
        await store.enqueue(dying)
        ((_, lease),) = await lease_jobs(store, org)
        await store.settle(Settlement.nack(org, [Nack(lease=lease, failure=Failure(permanent=True))]))
        await store.enqueue(leased)
        await lease_jobs(store, org)
        await store.enqueue(waiting)
        ids += [*ids_of(dying), *ids_of(leased), *ids_of(waiting)]
    # Make past days cold, and drop the jobs with a short retention. The ids of the dropped jobs stay.
    await service.archive_once(field.cluster, stop=asyncio.Event())
    return ids


async def number_of(database: Database, org: OrgId) -> int:
    ((number,),) = await database.run(b"SELECT org_id FROM windrow.org WHERE org = %(org)s", {"org": org})
    return int(number)


async def numbered(database: Database, number: int) -> list[str]:
    """Returns the tables that have a row with the org's number, or with the number of one of the org's queues."""
    columns = await database.run(
        b"""
        SELECT c.oid::regclass::text, a.attname
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname IN ('org_id', 'queue_id')
        WHERE c.relnamespace = 'windrow'::regnamespace AND c.relkind = 'r'
        """,
        {},
    )
    assert len(columns) > 10
    return [
        table
        for table, column in columns
        if await database.run(
            f"SELECT FROM {table} WHERE {column}::bigint & 4294967295 = %(number)s LIMIT 1".encode(), {"number": number}
        )
    ]


async def traces_of(database: Database, words: Sequence[str]) -> list[str]:
    """Returns the tables that have rows with one of these words, each with the number of these rows."""
    names = await database.run(
        b"SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'windrow'::regnamespace AND relkind = 'r'", {}
    )
    found: list[str] = []
    for (name,) in names:
        ((count,),) = await database.run(
            f"SELECT count(*) FROM {name} t WHERE t::text LIKE ANY (%(words)s::text[])".encode(),
            {"words": "{" + ",".join(f'"%{word}%"' for word in words) + "}"},
        )
        if count:
            found.append(f"{name}: {count}")
    return found


def exported(place: Path, org: OrgId) -> int:
    """Counts the rows of the org's jobs in the exported files. Does not read the manifests."""
    return sum(
        parquet.read_table(path, columns=["org"])["org"].to_pylist().count(org) for path in place.rglob("*.parquet")
    )


async def whole(database: Database, org: OrgId) -> str:
    """Returns everything that a shard has of an org's jobs and keys, in a fixed order."""
    ((rows,),) = await database.run(
        b"""
        SELECT coalesce(jsonb_agg(r.row ORDER BY r.row), '[]')::text
        FROM windrow.queue q
        CROSS JOIN LATERAL (
            SELECT to_jsonb(j) AS row FROM windrow.job j WHERE j.queue_id = q.queue_id
            UNION ALL SELECT to_jsonb(d) FROM windrow.dead d WHERE d.queue_id = q.queue_id
            UNION ALL SELECT to_jsonb(f) FROM windrow.finished f WHERE f.queue_id = q.queue_id
            UNION ALL SELECT to_jsonb(c) FROM windrow.cold c WHERE c.queue_id = q.queue_id
            UNION ALL SELECT to_jsonb(k) FROM windrow.dedup k WHERE k.queue_id = q.queue_id
        ) r
        WHERE q.org = %(org)s
        """,
        {"org": org},
    )
    return str(rows)


@pytest.mark.thorough
@pytest.mark.timeout(900)
async def test_of_an_org_that_is_erased_nothing_is_left_anywhere_and_others_have_what_they_had(
    field: Field, org: OrgId, other_org: OrgId, tmp_path: Path
) -> None:
    gone, kept, place = OrgId(f"{org}-erased"), other_org, tmp_path / "exports"
    field.write(f"[archiver]\nexport = '{place}'\n", s1={}, s2={})
    # The org has jobs in four places.
    each = trials(8, thorough=200_000) // 4
    ids = await fill(field, gone, many=each)
    await fill(field, kept)
    databases = [field.databases[A], field.databases[B]]
    before = [await whole(database, kept) for database in databases]
    assert all(json.loads(rows) for rows in before)
    words, numbers = [gone, *ids], [await number_of(database, gone) for database in databases]
    assert exported(place, gone) == 2
    # The seven tables are those of live jobs, dead jobs, cold jobs, past ids, dedup keys, orgs and queues.
    assert len(await traces_of(databases[0], words)) == 7
    assert len(await numbered(databases[0], numbers[0])) > 7
    await keep(field, gone, 7)

    began_s = time.monotonic()
    receipt = await orgs.erase(field.cluster, gone, say=print)
    print(f"erased in {time.monotonic() - began_s:.1f} s")

    for database, number in zip(databases, numbers, strict=True):
        assert await traces_of(database, [*words, "\x7f"]) == []
        assert await numbered(database, number) == []
    assert [await whole(database, kept) for database in databases] == before
    await assert_balanced(*databases)
    for erasures in receipt.shards.values():
        (one,) = erasures
        assert one.ended_at is not None
        assert (one.live, one.finished) == (3 + each, each)
        assert (one.dead, one.cold, one.dedup_keys, one.past_ids) == (1, 1, 2, 1)
    assert [one.rows for one in receipt.files] == [1, 1]
    assert exported(place, gone) == 0
    assert exported(place, kept) == 2
    assert not any(gone in path.read_text() for path in place.rglob("*.json"))
    assert await orgs.read(field.cluster) == []
    # A second erasure finds nothing.
    assert (await orgs.erase(field.cluster, gone, say=print)).shards == {A: [], B: []}


async def test_an_erasure_that_was_cut_short_is_ended_by_the_next_pass_and_the_books_balance_all_the_while(
    field: Field, org: OrgId
) -> None:
    await fill(field, org)
    database = field.databases[A]
    erasure_id = "0198c0de-0000-7000-8000-000000000001"
    assert await erasure.begin(database, org, erasure=erasure_id)
    assert not await erasure.begin(database, org, erasure=erasure_id)
    (one,) = await erasure.unfinished(database)
    for _ in range(3):
        assert await erasure.go_on(database, one)
        await assert_balanced(database)
    assert (await pass_once(field)).erased == 1
    (ended,) = await erasure.read(database, [erasure_id])
    assert ended.ended_at is not None
    assert (ended.live, ended.dead, ended.finished) == (4, 1, 1)
    assert await traces_of(database, [org, "\x7f"]) == []


async def test_the_receipt_of_a_repeated_erasure_has_what_was_erased_before_it_was_interrupted(
    field: Field, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(field, org)
    go_on, erasure_id = erasure.go_on, "0198c0de-0000-7000-8000-000000000006"

    async def stop_at_b(database: Database, unfinished: erasure.Unfinished) -> bool:
        if database.name == B:
            raise ShardUnavailable(B, "away")
        return await go_on(database, unfinished)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(erasure, "go_on", stop_at_b)
        with pytest.raises(ShardUnavailable):
            await orgs.erase(field.cluster, org, say=print, erasure_id=erasure_id)
    receipt = await orgs.erase(field.cluster, org, say=print)
    assert {name: [one.id for one in erasures] for name, erasures in receipt.shards.items()} == {
        A: [erasure_id],
        B: [erasure_id],
    }
    # By now, only the id of the erasure shows that the erasure belongs to the org.
    again = await orgs.erase(field.cluster, org, say=print, erasure_id=erasure_id)
    assert again.shards == receipt.shards


async def test_a_receipt_whose_file_cannot_be_made_is_named_before_anything_is_erased(
    field: Field, org: OrgId, tmp_path: Path
) -> None:
    await Store(field.databases[A]).enqueue(some_jobs(org, 1))
    number = await number_of(field.databases[A], org)
    file = str(tmp_path / "nosuch" / "receipt.json")
    done = await asyncio.to_thread(
        windrow, "orgs", "erase", org, "--yes", "--receipt", file, "--config", str(field.config)
    )
    assert done.code == 2
    assert "No such file or directory" in " ".join(done.err.split())
    assert await number_of(field.databases[A], org) == number


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
async def test_a_receipt_that_does_not_fit_into_its_file_is_printed(field: Field, org: OrgId) -> None:
    await Store(field.databases[A]).enqueue(some_jobs(org, 1))
    done = await asyncio.to_thread(
        windrow, "orgs", "erase", org, "--yes", "--receipt", "/dev/full", "--config", str(field.config)
    )
    assert done.code == 3
    (document,) = done.documents
    assert (document["org"], [one["live"] for one in document["erasures"]]) == (org, [1])


async def test_an_erasure_that_is_interrupted_says_how_to_get_its_whole_receipt(
    field: Field, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Store(field.databases[A]).enqueue(some_jobs(org, 1))
    command = ("orgs", "erase", org, "--yes", "--json", "--config", str(field.config))

    async def stop(_: Database, __: erasure.Unfinished) -> bool:
        raise ShardUnavailable(A, "away")

    with monkeypatch.context() as interrupted:
        interrupted.setattr(erasure, "go_on", stop)
        failed = await asyncio.to_thread(windrow, *command)
    assert failed.code == 3
    found = re.search(r"repeat the command with --id ([0-9a-f-]{36})", failed.err)
    assert found is not None
    done = await asyncio.to_thread(windrow, *command, "--id", found[1])
    assert [one["id"] for one in done.documents[0]["erasures"]] == [found[1]]


async def test_an_erasure_that_ends_is_counted_also_if_the_pass_leaves_other_work(
    field: Field, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = field.databases[A]
    names = {"orgs": arrays.texts([org]), "queues": arrays.names(["empty"])}
    await database.run(statements.INSERT_NAMES, {**names, "slots": arrays.numbers([slot_of(org)])})
    await database.run(statements.INSERT_QUEUES, {**names, "relisted": True})
    assert await erasure.begin(database, org, erasure="0198c0de-0000-7000-8000-000000000005")
    # Give another step of the pass some work too, and give the pass no time to repeat a step.
    await database.run(b"INSERT INTO windrow.dedup VALUES (0, 'old', gen_random_uuid(), now() - interval '1 day')", {})
    monkeypatch.setattr("archiver.run._PASS_S_MAX", -1.0)
    done = await pass_once(field)
    assert (done.more, done.dedup_keys, done.erased) == (True, 1, 1)


async def test_who_holds_a_lease_of_an_erased_org_has_lost_it_and_its_next_job_is_another_orgs(
    field: Field, org: OrgId
) -> None:
    store = Store(field.databases[A])
    await store.enqueue(some_jobs(org, 2))
    ((_, lease), *_) = await lease_jobs(store, org)
    await orgs.erase(field.cluster, org, say=print)
    assert await store.settle(Settlement.ack(org, [lease])) != [Answer.OK]
    # The store still remembers the queue's number.
    fresh = some_jobs(org, 1)
    assert await store.enqueue(fresh) == {}
    assert [claimed.id for claimed, _ in await lease_jobs(store, org)] == ids_of(fresh)
    await assert_balanced(field.databases[A])


async def test_a_pinned_org_keeps_its_slot_when_it_is_erased_and_its_next_job_is_taken(
    field: Field, org: OrgId
) -> None:
    store = Store(field.databases[A])
    await store.enqueue(some_jobs(org, 1))
    pin = await pins.pin(field.catalog, org, pins.OnShard(A))
    assert await pins.adopt(field.databases[A], [pin])
    receipt = await orgs.erase(field.cluster, org, say=print)
    assert [one.live for one in receipt.shards[A]] == [1]
    rows = await field.databases[A].run(b"SELECT slot FROM windrow.org WHERE org = %(org)s", {"org": org})
    assert rows == [(pin.slot,)]
    # Make the shard lose the org's hash slot: by this time, that slot may be on either shard.
    await field.databases[A].run(
        b"UPDATE windrow.owned_slot SET state = 'draining' WHERE slot = %(slot)s", {"slot": slot_of(org)}
    )
    assert await store.enqueue(some_jobs(org, 1), epoch=pin.epoch) == {}
    assert [len(erasures) for erasures in (await orgs.erase(field.cluster, org, say=print)).shards.values()] == [1, 0]
    await assert_balanced(field.databases[A])


async def test_a_queue_that_is_being_made_while_its_org_is_erased_goes_too(field: Field, org: OrgId) -> None:
    database, erasure_id = field.databases[A], "0198c0de-0000-7000-8000-000000000004"
    await Store(database).enqueue(some_jobs(org, 1))
    async with database.transaction() as making:
        names = {"orgs": arrays.texts([org]), "queues": arrays.names(["fresh"])}
        await making.run(statements.INSERT_NAMES, {**names, "slots": arrays.numbers([slot_of(org)])})
        await making.run(statements.INSERT_QUEUES, {**names, "relisted": True})
        # The erasure waits briefly, and then changes nothing.
        with pytest.raises(ShardUnavailable):
            await erasure.begin(database, org, erasure=erasure_id)
    assert await erasure.begin(database, org, erasure=erasure_id)
    assert await traces_of(database, [org]) == []
    assert (await pass_once(field)).erased == 1


async def test_an_org_whose_first_job_comes_while_its_erasure_begins_is_erased(
    field: Field, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = field.databases[A]
    run = Connection.run

    async def insert_behind(
        self: Connection, statement: bytes, parameters: Mapping[str, object]
    ) -> list[tuple[Any, ...]]:
        rows = await run(self, statement, parameters)
        if statement == history_statements.READ_ORG_SLOT:
            names = {"orgs": arrays.texts([org]), "queues": arrays.names([]), "slots": arrays.numbers([slot_of(org)])}
            await database.run(statements.INSERT_NAMES, names)
        return rows

    monkeypatch.setattr(Connection, "run", insert_behind)
    assert await erasure.begin(database, org, erasure="0198c0de-0000-7000-8000-000000000006")
    monkeypatch.undo()
    (one,) = await erasure.unfinished(database)
    while await erasure.go_on(database, one):
        pass
    assert await traces_of(database, [org, "\x7f"]) == []


async def test_an_org_that_comes_again_while_it_is_erased_is_erased_again(field: Field, org: OrgId) -> None:
    database, erasure_id = field.databases[A], "0198c0de-0000-7000-8000-000000000003"
    for _ in range(2):
        await Store(database).enqueue(some_jobs(org, 1))
        assert await erasure.begin(database, org, erasure=erasure_id)
    assert (await pass_once(field)).erased == 2
    assert [one.live for one in await erasure.read(database, [erasure_id])] == [1, 1]


async def test_an_org_under_legal_hold_or_on_its_way_is_not_erased(
    field: Field, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orgs, "_BEGIN_PAUSE_S", 0.001)
    store = Store(field.databases[A])
    await store.enqueue(some_jobs(org, 1))
    await hold(field, org)
    with pytest.raises(LegallyHeld):
        await orgs.erase(field.cluster, org, say=print)
    with pytest.raises(LegallyHeld):
        await erasure.begin(field.databases[A], org, erasure="0198c0de-0000-7000-8000-000000000002")
    await release(field, org)
    await keep(field, org, 7)
    await weights.set_weight(field.catalog, org, 2.0)
    await field.begin(A, B, [slot_of(org)])
    with pytest.raises(OrgMoves, match="from shard 's1' to 's2'"):
        await orgs.erase(field.cluster, org, say=print)
    assert await field.count_jobs(A) == 1
    # The org's policies and weight are as before.
    assert await orgs.read(field.cluster) == [org_policies.Policy(org, 7)]
    assert (await weights.read(field.catalog)).of == {org: 2.0}


async def test_an_erasure_that_does_not_keep_archivers_away_any_more_leaves_the_exports_alone(
    field: Field, org: OrgId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "exports"
    field.write(f"[archiver]\nexport = '{place}'\n", s1={})
    database = field.databases[A]
    await finish_some(database, org)
    await age_finished(database, org, days=40)
    await pass_once(field)
    await Store(database).enqueue(some_jobs(org, 1))
    real = erasure.go_on

    async def lose_session(database: Database, unfinished: erasure.Unfinished) -> bool:
        if not (more := await real(database, unfinished)):
            await database.run(
                b"SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory' AND granted", {}
            )
        return more

    with monkeypatch.context() as losing:
        losing.setattr(erasure, "go_on", lose_session)
        with pytest.raises(ShardUnavailable):
            await orgs.erase(field.cluster, org, say=print)
    assert exported(place, org) == 2
    assert [one.rows for one in (await orgs.erase(field.cluster, org, say=print)).files] == [2]
    assert exported(place, org) == 0


async def test_an_erasure_of_another_org_ends_one_that_was_interrupted_and_leaves_its_exports(
    field: Field, org: OrgId, other_org: OrgId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "exports"
    field.write(f"[archiver]\nexport = '{place}'\n", s1={})
    database = field.databases[A]
    await finish_some(database, org)
    await age_finished(database, org, days=40)
    await pass_once(field)
    for one in (org, other_org):
        await Store(database).enqueue(some_jobs(one, 1))

    async def interrupted(database: Database, _: erasure.Unfinished) -> bool:
        raise ShardUnavailable(database.name, "away")

    with monkeypatch.context() as away:
        away.setattr(erasure, "go_on", interrupted)
        with pytest.raises(ShardUnavailable):
            await orgs.erase(field.cluster, org, say=print)
    receipt = await orgs.erase(field.cluster, other_org, say=print)
    assert [one.live for one in receipt.shards[A]] == [1, 1]
    assert await erasure.unfinished(database) == []
    assert (receipt.files, exported(place, org)) == ([], 2)
    # If the command now erases the first org, it still finds these files.
    assert [one.rows for one in (await orgs.erase(field.cluster, org, say=print)).files] == [2]
    assert exported(place, org) == 0


async def test_it_is_refused_where_the_directory_of_the_exports_does_not_exist_and_nothing_is_erased(
    field: Field, org: OrgId, tmp_path: Path
) -> None:
    """This happens if the command does not run on the archiver's machine, or if the directory is not mounted."""
    place = tmp_path / "exports"
    field.write(f"[archiver]\nexport = '{place}'\n", s1={}, s2={})
    await finish_some(field.databases[A], org)
    await age_finished(field.databases[A], org, days=40)
    await pass_once(field)
    await Store(field.databases[A]).enqueue(some_jobs(org, 1))
    elsewhere = place.rename(tmp_path / "elsewhere")
    failed = await asyncio.to_thread(windrow, "orgs", "erase", org, "--yes", "--config", str(field.config))
    assert failed.code == 3
    assert "there is no such directory" in " ".join(failed.err.split())
    assert (place.exists(), await field.count_jobs(A)) == (False, 1)
    elsewhere.rename(place)
    assert [one.rows for one in (await orgs.erase(field.cluster, org, say=print)).files] == [2]


async def test_it_is_refused_while_a_shard_cannot_be_reached_and_nothing_is_erased(field: Field, org: OrgId) -> None:
    await Store(field.databases[A]).enqueue(some_jobs(org, 1))
    field.write(s1={}, s2={"dsn": "host=127.0.0.1 port=1 connect_timeout=1"})
    with pytest.raises(ShardUnavailable, match="s2"):
        await orgs.erase(field.cluster, org, say=print)
    assert await field.count_jobs(A) == 1

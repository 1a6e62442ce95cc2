"""Acks, nacks, extends and releases of many calls and orgs in one statement: each call is answered as if it were
alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest

from shard.admin.queue_admin import QueueAdmin
from shard.queue import statements
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.retry_policy import Fixed
from shard.vocabulary import Answer, Failure, Lease, OrgId
from tests.jobs import HOUR_US, MINUTE_US, at_once, job_id, lease_jobs, some_jobs
from tests.recorder import Recorder
from tests.timemachine import end_leases, until_blocked
from tests.verbs import VERBS

OK, STALE, NOT_FOUND = Answer.OK, Answer.STALE, Answer.NOT_FOUND

verbs = pytest.mark.parametrize("verb", VERBS)


async def held_by(store: Store, org: OrgId, count: int = 3) -> list[Lease]:
    await store.enqueue(some_jobs(org, count))
    return [lease for _, lease in await lease_jobs(store, org, max_jobs=count, window_us=HOUR_US)]


async def states(store: Store, org: OrgId, leases: Sequence[Lease]) -> list[str]:
    names = [name_of(lease) for lease in leases]
    found = {record.id: record.state for record in await store.get(org, names, include_payload=False)}
    return [found[name] for name in names]


def name_of(lease: Lease) -> Any:
    text = lease.job_hex
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


@verbs
async def test_calls_of_several_orgs_share_a_statement_and_each_hears_its_own(
    recorder: Recorder, org: OrgId, other_org: OrgId, verb: str
) -> None:
    store = Store(recorder)
    mine, others = await held_by(store, org), await held_by(store, other_org)
    ended = await held_by(store, org, 1)
    await end_leases(recorder, org)
    mine = await held_by(store, org)
    unknown = Lease(job_hex=job_id().replace("-", ""), number=7)
    act = VERBS[verb].act
    before = len(recorder.runs)
    answers = await at_once(
        act(store, org, [mine[0], ended[0]]),
        act(store, other_org, others[:2]),
        act(store, org, [unknown, mine[1], mine[2]]),
        act(store, other_org, others[2:]),
    )
    assert answers == [[OK, STALE], [OK, OK], [NOT_FOUND, OK, OK], [OK]]
    assert recorder.count(VERBS[verb].statement, since=before) == 1
    assert await states(store, org, mine) == [VERBS[verb].state] * 3
    assert await states(store, other_org, others) == [VERBS[verb].state] * 3
    assert await states(store, org, ended) == ["ready"]


@verbs
async def test_a_lease_that_two_orgs_name_is_its_owners_alone(
    recorder: Recorder, org: OrgId, other_org: OrgId, verb: str
) -> None:
    """The answers do not depend on which org calls first, on what else a call names, or on how calls are combined."""
    store = Store(recorder)
    act = VERBS[verb].act
    for owner_first, with_own in itertools.product((True, False), repeat=2):
        mine, others = await held_by(store, org), await held_by(store, other_org)
        foreign = [*mine, *others] if with_own else mine
        calls = [(org, mine, [OK] * 3), (other_org, foreign, [NOT_FOUND] * 3 + [OK] * 3 * with_own)]
        if not owner_first:
            calls.reverse()
        bystander = OrgId(f"{org}-bystander")
        theirs = await held_by(store, bystander, 1)
        calls += [(bystander, theirs, [OK]), (org, [mine[1]], [OK])]
        answers = await at_once(*(act(store, one, named) for one, named, _ in calls))
        assert answers == [expected for _, _, expected in calls]
        assert await states(store, org, mine) == [VERBS[verb].state] * 3
        assert await states(store, other_org, others) == [VERBS[verb].state if with_own else "leased"] * 3
        # Repeat the calls one after another: the answers are the same.
        for one, named, expected in calls:
            assert await act(store, one, named) == expected
        for one in (org, other_org, bystander):
            await store.cancel(one, [name_of(lease) for lease in (*mine, *others, *theirs)], reason="")


async def test_an_error_that_postgres_refuses_costs_the_nacks_beside_it_a_few_statements(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    good, (bad,) = await held_by(store, org, 99), await held_by(store, other_org, 1)
    before = len(recorder.runs)
    answers = await asyncio.gather(
        store.settle(Settlement.nack(other_org, [Nack(lease=bad, failure=Failure(message="\0"))])),
        *(
            store.settle(
                Settlement.nack(org, [Nack(lease=lease, failure=Failure(message="no"), retry_after_us=HOUR_US)])
            )
            for lease in good
        ),
        return_exceptions=True,
    )
    assert isinstance(answers[0], psycopg.DataError)
    assert answers[1:] == [[OK]] * 99
    assert await states(store, org, good) == ["scheduled"] * 99
    assert recorder.count(statements.GIVE_BACK, since=before) <= 15


async def test_leases_that_many_calls_of_another_org_name_cost_their_owner_one_act(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    held = await held_by(store, org, 50)
    before = len(recorder.runs)
    answers = await asyncio.gather(
        *(store.settle(Settlement.ack(one, [lease])) for lease in held for one in (org, other_org))
    )
    assert answers == [[OK], [NOT_FOUND]] * 50
    assert recorder.count(statements.ACK, since=before) == 2


@verbs
async def test_a_foreign_org_that_names_a_lease_alone_beside_other_calls_changes_nothing(
    recorder: Recorder, org: OrgId, other_org: OrgId, verb: str
) -> None:
    store = Store(recorder)
    mine, others = await held_by(store, org), await held_by(store, other_org)
    act = VERBS[verb].act
    answers = await at_once(act(store, other_org, mine), act(store, org, others))
    assert answers == [[NOT_FOUND] * 3] * 2
    assert await states(store, org, mine) == await states(store, other_org, others) == ["leased"] * 3


@verbs
async def test_repeated_calls_in_one_batch_all_hear_ok_and_count_once(
    recorder: Recorder, books: QueueAdmin, org: OrgId, verb: str
) -> None:
    store = Store(recorder)
    mine = await held_by(store, org)
    act = VERBS[verb].act
    twice = [mine[0], mine[1], mine[0]]
    assert await at_once(act(store, org, mine), act(store, org, mine[::-1]), act(store, org, twice)) == [[OK] * 3] * 3
    assert await act(store, org, mine) == [OK] * 3
    assert await states(store, org, mine) == [VERBS[verb].state] * 3
    outcome = VERBS[verb].outcome
    for record in await store.get(org, [name_of(lease) for lease in mine], include_payload=False):
        assert [attempt.outcome for attempt in record.attempts()] == ([outcome] if outcome else [])
    (entry,) = [entry for entry in await books.check() if entry.org == org]
    assert (entry.accepted, entry.balanced) == (3, True)


async def test_each_job_has_the_result_of_its_own_call(recorder: Recorder, org: OrgId, other_org: OrgId) -> None:
    store = Store(recorder)
    mine, others = await held_by(store, org), await held_by(store, other_org)
    plain = await held_by(store, org, 1)
    before = len(recorder.runs)
    await at_once(
        store.settle(Settlement.ack(org, plain)),
        store.settle(Settlement.ack(org, mine, [b"a", None, b""])),
        store.settle(Settlement.ack(other_org, others, [None, b"b", b"c"])),
    )
    assert recorder.count(statements.ACK, since=before) == 1
    for one, leases, results in ((org, mine, [b"a", None, b""]), (other_org, others, [None, b"b", b"c"])):
        names = [name_of(lease) for lease in leases]
        found = {record.id: record.result for record in await store.get(one, names, include_payload=True)}
        assert [found[name] for name in names] == results


async def test_nacks_of_several_orgs_meet_each_its_own_fate(recorder: Recorder, org: OrgId, other_org: OrgId) -> None:
    store = Store(recorder)
    await store.enqueue(some_jobs(org, 2, retry=Fixed(delay_us=HOUR_US)))
    await store.enqueue(some_jobs(other_org, 2, max_attempts=1))
    mine = [lease for _, lease in await lease_jobs(store, org)]
    others = [lease for _, lease in await lease_jobs(store, other_org)]
    answers = await at_once(
        store.settle(Settlement.nack(org, [Nack(lease=mine[0], failure=Failure(message="mine"))])),
        store.settle(
            Settlement.nack(other_org, [Nack(lease=others[0], failure=Failure(message="theirs"), retry_after_us=0)])
        ),
        store.settle(
            Settlement.nack(org, [Nack(lease=mine[1], failure=Failure(message="mine too"), retry_after_us=0)])
        ),
        store.settle(
            Settlement.nack(other_org, [Nack(lease=others[1], failure=Failure(message="theirs too", permanent=True))])
        ),
    )
    assert answers == [[OK]] * 4
    assert await states(store, org, mine) == ["scheduled", "ready"]
    assert await states(store, other_org, others) == ["dead", "dead"]
    for one, leases, errors in ((org, mine, ["mine", "mine too"]), (other_org, others, ["theirs", "theirs too"])):
        for lease, error in zip(leases, errors, strict=True):
            (record,) = await store.get(one, [name_of(lease)], include_payload=False)
            assert [attempt.failure and attempt.failure.message for attempt in record.attempts()] == [error]


# Windows


async def deadlines(store: Store, org: OrgId, leases: Sequence[Lease]) -> list[int]:
    names = [name_of(lease) for lease in leases]
    found = {record.id: record.deadline for record in await store.get(org, names, include_payload=False)}
    return [found[name] or 0 for name in names]


async def test_each_lease_is_extended_by_the_window_of_its_own_call(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    for one in (org, other_org):
        await store.enqueue(some_jobs(one, 2))
    mine = [lease for _, lease in await lease_jobs(store, org, window_us=MINUTE_US)]
    others = [lease for _, lease in await lease_jobs(store, other_org, window_us=MINUTE_US)]
    before = len(recorder.runs)
    await at_once(
        store.settle(Settlement.extend(org, mine[:1], window_us=HOUR_US)),
        store.settle(Settlement.extend(other_org, others, window_us=2 * HOUR_US)),
        store.settle(Settlement.extend(org, mine[1:], window_us=3 * HOUR_US)),
    )
    assert recorder.count(statements.EXTEND, since=before) == 1
    first, second = await deadlines(store, org, mine)
    third, fourth = await deadlines(store, other_org, others)
    assert (third - first, fourth - first, second - first) == (HOUR_US, HOUR_US, 2 * HOUR_US)


@pytest.mark.parametrize("windows", list(itertools.permutations((MINUTE_US, HOUR_US, 4 * HOUR_US))))
async def test_of_several_extends_of_one_lease_the_longest_is_in_force(
    recorder: Recorder, org: OrgId, windows: tuple[int, ...]
) -> None:
    """Each caller got the answer OK, so the lease must last for the longest window."""
    store = Store(recorder)
    await store.enqueue(some_jobs(org, 1))
    ((job, lease),) = await lease_jobs(store, org, window_us=MINUTE_US)
    answers = await at_once(*(store.settle(Settlement.extend(org, [lease], window_us=window)) for window in windows))
    assert answers == [[OK]] * len(windows)
    (deadline,) = await deadlines(store, org, [lease])
    assert deadline >= job.leased_at + 4 * HOUR_US


# Errors


async def test_calls_that_name_nothing_are_answered_with_nothing(recorder: Recorder, org: OrgId) -> None:
    store = Store(recorder)
    mine = await held_by(store, org, 2)
    answers = await at_once(
        store.settle(Settlement.ack(org, mine)), *(each.act(store, org, []) for each in VERBS.values())
    )
    assert answers == [[OK, OK], *([] for _ in VERBS)]
    assert await store.settle(Settlement.ack(org, [])) == []


async def test_a_call_whose_caller_leaves_while_others_are_served_is_done_with_theirs(
    recorder: Recorder, module_dsn: str, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    mine, others = await held_by(store, org), await held_by(store, other_org)
    async with await psycopg.AsyncConnection.connect(module_dsn) as rival:
        await rival.execute("SELECT FROM windrow.job WHERE id = %s FOR UPDATE", [name_of(mine[0])])
        leaver = asyncio.create_task(store.settle(Settlement.ack(org, mine)))
        stayer = asyncio.create_task(store.settle(Settlement.ack(other_org, others)))
        await until_blocked(recorder)
        leaver.cancel()
        await asyncio.wait([leaver])
    assert await stayer == [OK] * 3
    assert leaver.cancelled()
    assert await states(store, org, mine) == ["succeeded"] * 3


async def test_a_call_that_is_cancelled_before_it_begins_is_not_done(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    mine, others = await held_by(store, org), await held_by(store, other_org)
    leaver = asyncio.create_task(store.settle(Settlement.ack(org, mine)))
    stayer = asyncio.create_task(store.settle(Settlement.ack(other_org, others)))
    await asyncio.sleep(0)
    leaver.cancel()
    assert await stayer == [OK] * 3
    assert await states(store, org, mine) == ["leased"] * 3


async def test_a_settle_tells_of_the_ends_of_its_own_orgs_jobs_alone(
    store: Store, org: OrgId, other_org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(store, "on_settled", told.extend)
    await store.enqueue(some_jobs(org, 1))
    ((_, lease),) = await lease_jobs(store, org)
    assert await store.settle(Settlement.ack(other_org, [lease])) == [Answer.NOT_FOUND]
    assert told == []
    assert await store.settle(Settlement.ack(org, [lease])) == [Answer.OK]
    assert told == [lease.job_hex]

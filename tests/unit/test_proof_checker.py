"""Tests the checker of the proof on histories that the tests make: the checker accepts a clean history, and finds each
violation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from proof.checker import Evidence, check, examine
from proof.checker.evidence import (
    Alone,
    Backfill,
    Change,
    ChangeKind,
    Files,
    Flow,
    Found,
    Health,
    InForce,
    Key,
    OperatedFlow,
    OrgBooks,
    Owned,
    Past,
    Placed,
    Release,
    Restored,
    Row,
    Run,
    RunName,
    Schedule,
    State,
    StoredSchedule,
    Terms,
    Version,
)
from proof.history import (
    Addition,
    Answer,
    Call,
    Cancel,
    Delivery,
    Enqueue,
    History,
    LeaseKey,
    Lookup,
    Outcome,
    Settle,
    Signal,
    Verb,
)
from shard.placement.slots import SLOTS, slot_of
from shard.vocabulary import OrgId
from shard.workflow import WorkflowId, job_id_of

ORG, OTHER, QUEUE, SHARD = "acme", "evil", "load", "s1"
CALM_S, LATE_S_MAX = 100.0, 10.0
WINDOW_S = 3.0


def call(verb: Verb, began_s: float, ended_s: float | None = None, *, client: str = "c1", org: str = ORG) -> Call:
    """Returns a call that is answered after a tenth of a second, unless the test says otherwise."""
    return Call(
        client=client,
        verb=verb,
        org=org,
        began_s=began_s,
        ended_s=began_s + 0.1 if ended_s is None else ended_s,
        outcome=Outcome.OK,
    )


def enqueue(
    job: str,
    at_s: float,
    *,
    answered: str | None = "",
    duplicate: bool = False,
    key: str = "",
    org: str = ORG,
    delay_s: float = 0.0,
) -> Enqueue:
    """Returns an enqueue that stores the job under its own id, unless the test says otherwise."""
    return Enqueue(
        call=call(Verb.ENQUEUE, at_s, org=org),
        job=job,
        queue=QUEUE,
        key=key,
        delay_s=delay_s,
        answered=job if answered == "" else answered,
        duplicate=duplicate,
    )


def delivery(
    job: str,
    at_s: float,
    *,
    lease: int,
    attempt: int = 1,
    client: str = "w1",
    org: str = ORG,
    of: Verb = Verb.DEQUEUE,
    payload_org: str = ORG,
    payload_job: str = "",
) -> Delivery:
    return Delivery(
        call=call(of, at_s - 0.1, at_s, client=client, org=org),
        lease=LeaseKey(job, lease),
        attempt=attempt,
        received_s=at_s,
        window_s=WINDOW_S,
        payload_org=payload_org,
        payload_job=payload_job or job,
    )


def settle(
    verb: Verb, job: str, at_s: float, *, lease: int, answer: Answer | None = Answer.OK, span_s: float = 0.0
) -> Settle:
    return Settle(call=call(verb, at_s), lease=LeaseKey(job, lease), answer=answer, span_s=span_s)


def past(lease: int, outcome: str, leased_at_us: int, ended_at_us: int) -> Past:
    return Past(lease=lease, outcome=outcome, leased_at_us=leased_at_us, ended_at_us=ended_at_us)


def succeeded(job: str, *, lease: int = 1, history: Sequence[Past] = (), **fields: str) -> Row:
    row = Row(
        job=job,
        org=ORG,
        queue=QUEUE,
        shard=SHARD,
        state=State.SUCCEEDED,
        lease=lease,
        leased_at_us=1_000_000,
        past=history,
    )
    return replace(row, **fields)  # type: ignore[arg-type]


def evidence(
    *,
    enqueues: Sequence[Enqueue] = (),
    deliveries: Sequence[Delivery] = (),
    settles: Sequence[Settle] = (),
    cancels: Sequence[Cancel] = (),
    rows: Sequence[Row] = (),
    flows: Sequence[Flow] = (),
    books: Sequence[OrgBooks] | None = None,
    drift_s: float = 0.0,
) -> Evidence:
    """Returns the evidence of a history. Without `books`, makes books that agree with the rows."""
    places = [(row.shard, row.org) for row in rows]
    agreeing = [
        OrgBooks(shard=shard, org=org, accepted=places.count((shard, org)), balanced=True)
        for shard, org in sorted(set(places))
    ]
    return Evidence(
        history=History(enqueues=enqueues, deliveries=deliveries, settles=settles, cancels=cancels, drift_s=drift_s),
        rows=rows,
        flows=flows,
        books=agreeing if books is None else books,
        calm_s=CALM_S,
        late_s_max=LATE_S_MAX,
    )


def found(given: Evidence) -> list[str]:
    return [violation.invariant for violation in check(given)]


def whole_life(job: str = "j1", at_s: float = 10.0) -> Evidence:
    """Returns the evidence of one job that is enqueued, delivered, acked and finished."""
    return evidence(
        enqueues=[enqueue(job, at_s)],
        deliveries=[delivery(job, at_s + 1, lease=1)],
        settles=[settle(Verb.ACK, job, at_s + 2, lease=1)],
        rows=[succeeded(job)],
    )


def changed(given: Evidence, **history: object) -> Evidence:
    return replace(given, history=replace(given.history, **history))  # type: ignore[arg-type]


# ── Nothing is wrong ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_whole_life_passes() -> None:
    assert found(whole_life()) == []


def test_a_job_that_nobody_acknowledged_may_be_there_or_not() -> None:
    open_ended = [enqueue("j1", 10.0, answered=None)]
    assert found(evidence(enqueues=open_ended)) == []
    assert found(changed(whole_life(), enqueues=open_ended)) == []


def test_a_lease_that_expired_and_went_to_another_passes() -> None:
    given = evidence(
        enqueues=[enqueue("j1", 10.0)],
        deliveries=[
            delivery("j1", 11.0, lease=1),
            delivery("j1", 15.0, lease=2, attempt=2, client="w2"),
        ],
        settles=[
            settle(Verb.ACK, "j1", 16.0, lease=1, answer=Answer.STALE),
            settle(Verb.ACK, "j1", 16.5, lease=2),
        ],
        rows=[succeeded("j1", lease=2, history=[past(1, "expired", 10_000, 900_000)])],
    )
    assert found(given) == []


def test_an_ack_said_again_after_it_was_done_passes() -> None:
    # The first try was executed, and its answer was lost. No router released the job, and the second try got the answer
    # of the first try.
    given = changed(
        whole_life(),
        settles=[
            settle(Verb.ACK, "j1", 12.0, lease=1, answer=None),
            settle(Verb.ACK, "j1", 20.0, lease=1),
        ],
    )
    assert found(given) == []


def test_a_nack_said_again_while_another_has_the_job_passes() -> None:
    given = evidence(
        enqueues=[enqueue("j1", 10.0)],
        deliveries=[delivery("j1", 11.0, lease=1), delivery("j1", 13.0, lease=2, attempt=2, client="w2")],
        settles=[
            settle(Verb.NACK, "j1", 12.0, lease=1, answer=None),
            settle(Verb.NACK, "j1", 13.5, lease=1),
            settle(Verb.ACK, "j1", 14.0, lease=2),
        ],
        rows=[succeeded("j1", lease=2, history=[past(1, "nacked", 10_000, 900_000)])],
    )
    assert found(given) == []


def test_a_job_that_its_router_gave_back_before_anybody_read_it_passes() -> None:
    given = evidence(
        enqueues=[enqueue("j1", 10.0)],
        deliveries=[delivery("j1", 11.5, lease=2, client="w2")],
        settles=[settle(Verb.ACK, "j1", 12.0, lease=2)],
        rows=[succeeded("j1", lease=2, history=[past(1, "released", 10_000, 900_000)])],
    )
    assert found(given) == []


@pytest.mark.parametrize("of", [Verb.DEQUEUE, Verb.CONSUME])
def test_a_consumer_that_stood_still_and_got_its_job_after_another_passes(of: Verb) -> None:
    late = delivery("j1", 11.0, lease=1, of=of)
    given = evidence(
        enqueues=[enqueue("j1", 10.0)],
        deliveries=[
            replace(late, received_s=20.0),
            delivery("j1", 15.0, lease=2, attempt=2, client="w2"),
        ],
        settles=[
            settle(Verb.ACK, "j1", 21.0, lease=1, answer=Answer.STALE),
            settle(Verb.ACK, "j1", 16.0, lease=2),
        ],
        rows=[succeeded("j1", lease=2, history=[past(1, "expired", 10_000, 900_000)])],
    )
    assert found(given) == []


def test_a_cancelled_job_may_have_been_leased_again_before_its_end() -> None:
    given = evidence(
        enqueues=[enqueue("j1", 10.0)],
        deliveries=[delivery("j1", 11.0, lease=1)],
        settles=[settle(Verb.ACK, "j1", 12.5, lease=1, answer=Answer.STALE)],
        cancels=[Cancel(call=call(Verb.CANCEL, 12.0), job="j1", answer=Answer.OK)],
        rows=[replace(succeeded("j1"), state=State.CANCELLED, lease=None, leased_at_us=None)],
    )
    assert found(given) == []


def test_a_wall_clock_that_jumped_excuses_a_lease_that_ended_early() -> None:
    given = overlapping(later_at_s=13.0)
    assert found(given) == ["I2"]
    assert found(changed(given, drift_s=3600.0)) == []


# ── I1: lost ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_acknowledged_job_that_is_nowhere_is_found() -> None:
    assert found(evidence(enqueues=[enqueue("j1", 10.0)])) == ["I1"]


def test_an_acknowledged_duplicate_that_is_nowhere_is_found() -> None:
    assert found(evidence(enqueues=[enqueue("j1", 10.0, duplicate=True)])) == ["I1"]


# ── I2: leases ───────────────────────────────────────────────────────────────────────────────────────────────────────


def overlapping(*, later_at_s: float) -> Evidence:
    """Returns a job with two leases. A Dequeue made the first one, whose window ends at 13.9. Another consumer got the
    second one."""
    return evidence(
        enqueues=[enqueue("j1", 10.0)],
        deliveries=[
            delivery("j1", 11.0, lease=1),
            delivery("j1", later_at_s, lease=2, attempt=2, client="w2"),
        ],
        settles=[settle(Verb.ACK, "j1", 20.0, lease=2)],
        rows=[succeeded("j1", lease=2, history=[past(1, "expired", 10_000, 900_000)])],
    )


def test_a_job_given_to_another_within_its_window_is_found() -> None:
    assert found(overlapping(later_at_s=13.5)) == ["I2"]
    assert found(overlapping(later_at_s=14.0)) == []


def test_an_extended_lease_lasts_longer() -> None:
    extended = changed(
        overlapping(later_at_s=14.0),
        settles=[
            settle(Verb.EXTEND, "j1", 13.0, lease=1, span_s=WINDOW_S),
            settle(Verb.ACK, "j1", 20.0, lease=2),
        ],
    )
    assert found(extended) == ["I2"]


def test_a_lease_that_was_released_ends_there() -> None:
    released = changed(
        overlapping(later_at_s=13.0),
        settles=[
            settle(Verb.RELEASE, "j1", 12.0, lease=1, answer=None),
            settle(Verb.ACK, "j1", 20.0, lease=2),
        ],
    )
    assert found(released) == []


@pytest.mark.parametrize("verb", [Verb.EXTEND, Verb.NACK, Verb.RELEASE])
def test_a_lease_that_is_used_after_another_has_the_job_is_found(verb: Verb) -> None:
    outcome = {Verb.EXTEND: "expired", Verb.NACK: "nacked", Verb.RELEASE: "released"}[verb]
    given = evidence(
        enqueues=[enqueue("j1", 10.0)],
        deliveries=[
            delivery("j1", 11.0, lease=1, of=Verb.CONSUME),
            delivery("j1", 15.0, lease=2, attempt=2, client="w2", of=Verb.CONSUME),
        ],
        settles=[
            settle(verb, "j1", 16.0, lease=1),
            settle(Verb.ACK, "j1", 20.0, lease=2),
        ],
        rows=[succeeded("j1", lease=2, history=[past(1, outcome, 10_000, 900_000)])],
    )
    assert found(given) == ["I2"]


@pytest.mark.parametrize("verb", [Verb.ACK, Verb.NACK, Verb.RELEASE])
def test_a_lease_that_is_extended_after_its_end_is_found(verb: Verb) -> None:
    """No other consumer has had the job, so the only violation is the extend after the end."""
    outcome = {Verb.NACK: "nacked", Verb.RELEASE: "released"}.get(verb)
    history = [] if outcome is None else [past(1, outcome, 10_000, 900_000)]
    last = delivery("j1", 30.0, lease=2, attempt=2)
    given = evidence(
        enqueues=[enqueue("j1", 10.0)],
        deliveries=[delivery("j1", 11.0, lease=1), *([] if verb is Verb.ACK else [last])],
        settles=[
            settle(verb, "j1", 12.0, lease=1),
            settle(Verb.EXTEND, "j1", 13.0, lease=1, span_s=WINDOW_S),
            *([] if verb is Verb.ACK else [settle(Verb.ACK, "j1", 31.0, lease=2)]),
        ],
        rows=[succeeded("j1", lease=1 if verb is Verb.ACK else 2, history=history)],
    )
    assert found(given) == ["I2"]
    settles = [replace(one, answer=Answer.STALE) if one.span_s else one for one in given.history.settles]
    assert found(changed(given, settles=settles)) == []


def test_two_acks_of_one_job_are_found() -> None:
    given = evidence(
        enqueues=[enqueue("j1", 10.0)],
        deliveries=[
            delivery("j1", 11.0, lease=1, of=Verb.CONSUME),
            delivery("j1", 15.0, lease=2, attempt=2, client="w2", of=Verb.CONSUME),
        ],
        settles=[settle(Verb.ACK, "j1", 12.0, lease=1), settle(Verb.ACK, "j1", 16.0, lease=2)],
        rows=[succeeded("j1", lease=2, history=[past(1, "expired", 10_000, 900_000)])],
    )
    # There are two other violations: the job was delivered after its ack, and the books lack the ack of the first
    # lease.
    assert found(given) == ["I2"] * 3


@pytest.mark.parametrize("verb", [Verb.ACK, Verb.KILL])
def test_a_job_that_comes_after_its_end_is_found(verb: Verb) -> None:
    row = succeeded("j1")
    if verb is Verb.KILL:
        row = replace(row, state=State.DEAD, past=[past(1, "nacked", 1_000_000, 2_000_000)])
    given = evidence(
        enqueues=[enqueue("j1", 10.0)],
        deliveries=[delivery("j1", 11.0, lease=1), delivery("j1", 30.0, lease=2, client="w2")],
        settles=[settle(verb, "j1", 12.0, lease=1)],
        rows=[row],
    )
    assert found(given) == ["I2"]


def test_a_job_that_comes_after_it_was_cancelled_is_found() -> None:
    given = evidence(
        enqueues=[enqueue("j1", 10.0)],
        deliveries=[delivery("j1", 30.0, lease=1)],
        cancels=[Cancel(call=call(Verb.CANCEL, 12.0), job="j1", answer=Answer.OK)],
        rows=[replace(succeeded("j1"), state=State.CANCELLED, lease=None, leased_at_us=None)],
    )
    assert found(given) == ["I2"]


def test_a_cancelled_job_that_succeeded_is_found() -> None:
    given = changed(
        whole_life(), cancels=[Cancel(call=call(Verb.CANCEL, 11.5), job="j1", answer=Answer.OK)], deliveries=[]
    )
    assert found(given) == ["I2"]


def test_one_lease_given_to_two_is_found() -> None:
    given = whole_life()
    twice = [*given.history.deliveries, delivery("j1", 11.1, lease=1, client="w2")]
    assert found(changed(given, deliveries=twice)) == ["I2"]


def test_an_ack_that_was_refused_and_finished_the_job_is_found() -> None:
    # The ack came after the end of the lease's window, so the router was right to refuse it. The violation is that the
    # job finished.
    given = changed(whole_life(), settles=[settle(Verb.ACK, "j1", 15.0, lease=1, answer=Answer.STALE)])
    assert found(given) == ["I2"]


def test_a_nack_that_was_refused_and_is_in_the_books_is_found() -> None:
    given = whole_life()
    nacked = evidence(
        enqueues=given.history.enqueues,
        settles=[
            settle(Verb.NACK, "j1", 11.0, lease=7, answer=Answer.STALE),
            settle(Verb.ACK, "j1", 12.0, lease=1),
        ],
        rows=[succeeded("j1", history=[past(7, "nacked", 10_000, 900_000)])],
    )
    assert found(nacked) == ["I2"]


def test_a_success_that_nobody_asked_for_is_found() -> None:
    assert found(changed(whole_life(), settles=[])) == ["I2"]


@pytest.mark.parametrize("verb", [Verb.ACK, Verb.NACK, Verb.KILL, Verb.RELEASE])
def test_what_was_answered_ok_and_is_not_in_the_books_is_found(verb: Verb) -> None:
    given = evidence(
        enqueues=[enqueue("j1", 10.0)],
        settles=[settle(verb, "j1", 11.0, lease=7), settle(Verb.ACK, "j1", 12.0, lease=1, answer=None)],
        rows=[succeeded("j1")],
    )
    assert found(given) == ["I2"]


def given_back(*settles: Settle) -> Evidence:
    """Returns a job that a consumer read. In the books, the lease of this consumer was released."""
    return evidence(
        enqueues=[enqueue("j1", 10.0)],
        deliveries=[delivery("j1", 11.0, lease=1, of=Verb.CONSUME), delivery("j1", 13.0, lease=2, client="w2")],
        settles=[*settles, settle(Verb.ACK, "j1", 13.5, lease=2)],
        rows=[succeeded("j1", lease=2, history=[past(1, "released", 10_000, 900_000)])],
    )


def test_a_job_that_a_consumer_has_read_and_its_router_gave_back_is_found() -> None:
    assert found(given_back()) == ["I2"]
    assert found(given_back(settle(Verb.ACK, "j1", 12.0, lease=1, answer=Answer.STALE))) == ["I2"]


def test_a_job_that_its_consumer_gave_back_passes_whether_it_was_answered_or_not() -> None:
    for answer in (Answer.OK, None):
        assert found(given_back(settle(Verb.RELEASE, "j1", 11.5, lease=1, answer=answer))) == []


def refused_ack(at_s: float, *others: Settle, cancels: Sequence[Cancel] = ()) -> Evidence:
    """Returns a job whose ack is answered STALE. A Dequeue made the lease, and the window of the lease ends at 13.9."""
    return evidence(
        enqueues=[enqueue("j1", 10.0)],
        deliveries=[delivery("j1", 11.0, lease=1), delivery("j1", 15.0, lease=2, attempt=2, client="w2")],
        settles=[
            *others,
            settle(Verb.ACK, "j1", at_s, lease=1, answer=Answer.STALE),
            settle(Verb.ACK, "j1", 15.5, lease=2),
        ],
        cancels=cancels,
        rows=[succeeded("j1", lease=2)],
    )


def test_an_ack_that_is_stale_although_its_window_had_not_ended_is_found() -> None:
    assert found(refused_ack(12.0)) == ["I2"]
    assert found(refused_ack(14.0)) == []


def test_an_ack_that_is_stale_after_its_consumer_or_a_cancel_ended_the_lease_passes() -> None:
    assert found(refused_ack(12.0, settle(Verb.NACK, "j1", 11.5, lease=1, answer=None))) == []
    assert found(refused_ack(12.0, cancels=[Cancel(call=call(Verb.CANCEL, 11.5), job="j1", answer=None)])) == []


@pytest.mark.parametrize("last_leased_at_us", [1_400_000, 1_600_000])
def test_leases_that_overlap_by_the_books_are_found(last_leased_at_us: int) -> None:
    history = [past(7, "expired", 500_000, 1_000_000), past(8, "expired", 1_000_000, 1_500_000)]
    row = replace(succeeded("j1", history=history), leased_at_us=last_leased_at_us)
    given = replace(whole_life(), rows=[row])
    assert found(given) == (["I2"] if last_leased_at_us < 1_500_000 else [])
    row = replace(row, leased_at_us=2_000_000, past=[history[0], replace(history[1], leased_at_us=999_999)])
    assert found(replace(given, rows=[row])) == ["I2"]


# ── I3: twice ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_that_is_stored_twice_is_found() -> None:
    given = whole_life()
    twice = replace(given, rows=[*given.rows, replace(given.rows[0], shard="s2")])
    assert found(replace(twice, books=[*given.books, replace(given.books[0], shard="s2")])) == ["I3"]


def test_two_enqueues_that_were_each_told_new_are_found() -> None:
    given = whole_life()
    assert found(changed(given, enqueues=[enqueue("j1", 10.0), enqueue("j1", 10.5)])) == ["I3"]
    assert found(changed(given, enqueues=[enqueue("j1", 10.0), enqueue("j1", 10.5, duplicate=True)])) == []


def test_a_job_that_nobody_enqueued_is_found() -> None:
    assert found(changed(whole_life(), enqueues=[])) == ["I3"]


def test_an_enqueue_answered_with_another_job_is_found() -> None:
    given = changed(whole_life(), enqueues=[enqueue("j1", 10.0), enqueue("j2", 10.0, answered="j1", duplicate=True)])
    assert found(given) == ["I3"]
    with_key = [enqueue("j1", 10.0, key="k"), enqueue("j2", 10.0, answered="j1", duplicate=True, key="k")]
    assert found(changed(given, enqueues=with_key)) == []


def test_an_enqueue_with_a_key_answered_with_a_job_of_another_key_is_found() -> None:
    enqueues = [enqueue("j1", 10.0, key="one"), enqueue("j2", 11.0, answered="j1", duplicate=True, key="other")]
    given = changed(replace(whole_life(), rows=[succeeded("j1", key="one")]), enqueues=enqueues)
    assert "I3" in found(given)


def test_an_enqueue_said_again_is_answered_with_its_own_job_or_the_first_of_its_key() -> None:
    enqueues = [
        enqueue("j1", 10.0, key="k"),
        enqueue("j2", 11.0, answered=None, key="k"),
        enqueue("j2", 12.0, answered="j1", duplicate=True, key="k"),
        enqueue("j1", 13.0, duplicate=True, key="k"),
    ]
    assert found(changed(replace(whole_life(), rows=[succeeded("j1", key="k")]), enqueues=enqueues)) == []


def test_two_jobs_of_one_dedup_key_are_found() -> None:
    first, second = whole_life("j1"), whole_life("j2")
    given = evidence(
        enqueues=[enqueue("j1", 10.0, key="k"), enqueue("j2", 11.0, key="k")],
        deliveries=[*first.history.deliveries, *second.history.deliveries],
        settles=[*first.history.settles, *second.history.settles],
        rows=[succeeded("j1", key="k"), succeeded("j2", key="k")],
    )
    assert found(given) == ["I3"]
    # No producer got an answer about the second job, but the job was stored.
    unheard = [enqueue("j1", 10.0, key="k"), enqueue("j2", 11.0, key="k", answered=None)]
    assert found(changed(given, enqueues=unheard)) == ["I3"]


# ── I4: others' jobs ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "seen",
    [
        delivery("j1", 11.0, lease=1, org=OTHER),
        delivery("j1", 11.0, lease=1, payload_org=OTHER),
        delivery("j1", 11.0, lease=1, payload_job="j2"),
    ],
)
def test_a_job_or_a_payload_that_came_to_the_wrong_consumer_is_found(seen: Delivery) -> None:
    assert found(changed(whole_life(), deliveries=[seen])) == ["I4"]


def test_a_job_stored_as_another_orgs_is_found() -> None:
    given = evidence(
        enqueues=[enqueue("j1", 10.0)],
        settles=[settle(Verb.ACK, "j1", 12.0, lease=1)],
        rows=[succeeded("j1", org=OTHER)],
    )
    assert found(given) == ["I4"]


# ── I5: books ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "books",
    [
        [],
        [OrgBooks(shard=SHARD, org=ORG, accepted=1, balanced=False)],
        [OrgBooks(shard=SHARD, org=ORG, accepted=2, balanced=True)],
    ],
)
def test_books_that_do_not_agree_are_found(books: list[OrgBooks]) -> None:
    assert found(replace(whole_life(), books=books)) == ["I5"]


# ── I7: late ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_that_was_never_done_is_found() -> None:
    given = evidence(
        enqueues=[enqueue("j1", 10.0)],
        rows=[replace(succeeded("j1"), state=State.LIVE, lease=None, leased_at_us=None)],
    )
    assert found(given) == ["I7"]
    # No producer got an answer, so the job may have been stored just before the end.
    assert found(changed(given, enqueues=[enqueue("j1", 10.0, answered=None)])) == []


def came(at_s: float, *, delay_s: float = 0.0, others_at_s: Sequence[float] = ()) -> Evidence:
    """Returns the life of a job that was enqueued when no fault was active, and the lives of other jobs of its org."""
    lives = [whole_life(f"other-{number}", at_s=other_s - 1) for number, other_s in enumerate(others_at_s)]
    return evidence(
        enqueues=[
            enqueue("j1", CALM_S + 10, delay_s=delay_s),
            *(one for life in lives for one in life.history.enqueues),
        ],
        deliveries=[delivery("j1", at_s, lease=1), *(one for life in lives for one in life.history.deliveries)],
        settles=[
            settle(Verb.ACK, "j1", at_s + 1, lease=1),
            *(one for life in lives for one in life.history.settles),
        ],
        rows=[succeeded("j1"), *(row for life in lives for row in life.rows)],
    )


def test_a_job_that_came_late_is_found() -> None:
    assert found(came(CALM_S + 20)) == []
    assert found(came(CALM_S + 21)) == ["I7"]


def test_a_job_that_was_behind_others_or_was_to_come_later_is_not_late() -> None:
    assert found(came(CALM_S + 21, others_at_s=[CALM_S + 15])) == []
    assert found(came(CALM_S + 21, delay_s=5.0)) == []


def test_a_job_from_before_has_time_from_when_all_was_calm() -> None:
    def given(at_s: float) -> Evidence:
        life = whole_life()
        return changed(
            life,
            deliveries=[delivery("j1", at_s, lease=1)],
            settles=[settle(Verb.ACK, "j1", at_s + 1, lease=1)],
        )

    assert found(given(CALM_S + 9)) == []
    assert found(given(CALM_S + 11)) == ["I7"]


def again(at_s: float, said: Sequence[Settle]) -> Evidence:
    """Returns a job that was first delivered at CALM_S + 1, the calls about that delivery, and the next delivery."""
    nacked = [past(1, "nacked", 10_000, 900_000)] if any(one.call.verb is Verb.NACK for one in said) else []
    return evidence(
        enqueues=[enqueue("j1", CALM_S)],
        deliveries=[
            delivery("j1", CALM_S + 1, lease=1),
            delivery("j1", at_s, lease=2, attempt=2, client="w2"),
        ],
        settles=[*said, settle(Verb.ACK, "j1", at_s + 1, lease=2)],
        rows=[succeeded("j1", lease=2, history=nacked or [past(1, "expired", 10_000, 900_000)])],
    )


def test_a_job_that_comes_again_late_is_found() -> None:
    # The window of the first lease ends at CALM_S + 4 at the latest.
    assert found(again(CALM_S + 13, [])) == []
    assert found(again(CALM_S + 15, [])) == ["I7"]
    # A nack sets the time of the next delivery.
    nack = settle(Verb.NACK, "j1", CALM_S + 2, lease=1, span_s=5.0)
    assert found(again(CALM_S + 17, [nack])) == []
    assert found(again(CALM_S + 18, [nack])) == ["I7"]


# ── I1: what calls are told, and what a router finds in the end ──────────────────────────────────────────────────────


@pytest.mark.parametrize("at_s", [9.0, 20.0])
def test_a_call_that_is_told_there_is_no_such_job_is_found_if_it_was_known(at_s: float) -> None:
    given, expected = whole_life(), [] if at_s < 10 else ["I1"]
    looked = Lookup(call=call(Verb.LOOK_UP, at_s), job="j1", found=False)
    cancelled = Cancel(call=call(Verb.CANCEL, at_s), job="j1", answer=Answer.NOT_FOUND)
    extended = settle(Verb.EXTEND, "j1", at_s, lease=1, answer=Answer.NOT_FOUND)
    assert found(changed(given, lookups=[looked])) == expected
    assert found(changed(given, cancels=[cancelled])) == expected
    assert found(changed(given, settles=[*given.history.settles, extended])) == expected
    # A call without an answer proves nothing.
    unanswered = replace(looked, call=replace(looked.call, outcome=Outcome.UNKNOWN))
    assert found(changed(given, lookups=[unanswered, replace(looked, found=True)])) == []


def by_router(*jobs: tuple[str, State], counted: int = 1) -> list[Found]:
    return [Found(org=ORG, jobs=jobs, counted={State.SUCCEEDED: counted})]


def test_what_a_router_finds_once_as_the_tables_have_it_passes() -> None:
    assert found(replace(whole_life(), found=by_router(("j1", State.SUCCEEDED)))) == []


@pytest.mark.parametrize(
    "jobs", [[], [("j1", State.SUCCEEDED), ("j1", State.SUCCEEDED)], [("j1", State.LIVE)], [("j1", State.DEAD)]]
)
def test_a_job_that_a_router_does_not_find_once_as_it_is_is_found(jobs: Sequence[tuple[str, State]]) -> None:
    assert found(replace(whole_life(), found=by_router(*jobs))) == ["I1"]


@pytest.mark.parametrize("counted", [0, 2])
def test_a_count_that_is_not_that_of_the_tables_is_found(counted: int) -> None:
    assert found(replace(whole_life(), found=by_router(("j1", State.SUCCEEDED), counted=counted))) == ["I5"]


def test_an_org_that_no_router_was_asked_about_is_found() -> None:
    assert found(replace(whole_life(), found=[])) == ["I1"]


# ── I6: slots that move ──────────────────────────────────────────────────────────────────────────────────────────────

SLOT = slot_of(OrgId(ORG))


def placed(writes: str, reads: str, epoch: int, *, slot: int = SLOT, at_s: float = 0.0) -> Placed:
    return Placed(at_s=at_s, slots=[slot], writes=writes.split(), reads=reads.split(), epoch=epoch)


def owned(shard: str, at_s: float, state: str, epoch: int, *, chunk: int = 0, slots: Sequence[int] = (SLOT,)) -> Owned:
    return Owned(shard=shard, at_s=at_s, slots=slots, state=state, epoch=epoch, chunk=chunk)


# The slot moves from s1 to s2, with the job.
PLACED = (
    placed("s1", "s1", 1),
    placed("s1", "s1 s2", 5),
    placed("s2", "s1 s2", 5),
    placed("s2", "s2", 5),
)
ON_S1 = (owned("s1", 0.0, "owned", 1), owned("s1", 20.0, "draining", 5), owned("s1", 22.0, "draining", 5, chunk=1))
ON_S2 = (owned("s2", 21.0, "owned", 5), owned("s2", 23.0, "owned", 5, chunk=1))


def moved(
    *,
    catalog: Sequence[Placed] = PLACED,
    s1: Sequence[Owned] = ON_S1,
    s2: Sequence[Owned] = ON_S2,
    row: Row | None = None,
    pins: Mapping[str, int] | None = None,
) -> Evidence:
    given = replace(whole_life(), rows=[row or succeeded("j1", shard="s2")])
    books = [OrgBooks(shard=given.rows[0].shard, org=ORG, accepted=1, balanced=True)]
    return replace(given, books=books, placed=catalog, owned=[*s1, *s2], pins=pins or {})


def test_a_move_and_its_way_back_pass() -> None:
    back = [
        placed("s2", "s2 s1", 8),
        placed("s1", "s2 s1", 8),
        placed("s1", "s1", 8),
    ]
    given = moved(
        catalog=[*PLACED, *back],
        s1=[*ON_S1, owned("s1", 31.0, "owned", 8)],
        s2=[*ON_S2, owned("s2", 30.0, "draining", 8)],
    )
    assert found(moved()) == []
    assert found(given) == []


@pytest.mark.parametrize(
    "catalog",
    [
        # The wrong placements are, in this order: two writers; no writer; a writer that is not read; three shards that
        # are read.
        [placed("s1 s2", "s1 s2", 1)],
        [placed("", "s1", 1)],
        [placed("s1", "s2", 1)],
        [placed("s1", "s1 s2 s3", 1)],
        # The wrong moves are, in this order: the writer switched before the move began; the move began without a new
        # epoch; the move ended at its own source; the writer switched under another epoch; the writer went back to the
        # source; the writer switched to a third shard.
        [PLACED[0], placed("s2", "s2", 5)],
        [PLACED[0], placed("s1", "s1 s2", 1)],
        [*PLACED[:2], placed("s1", "s1", 5)],
        [*PLACED[:2], placed("s2", "s1 s2", 6)],
        [*PLACED[:3], placed("s1", "s1", 5)],
        [*PLACED[:3], placed("s1", "s1 s2", 5)],
        [*PLACED[:2], placed("s3", "s1 s3", 5)],
    ],
)
def test_what_is_no_step_of_a_move_is_found(catalog: Sequence[Placed]) -> None:
    assert "I6" in found(moved(catalog=catalog, s1=(), s2=()))


@pytest.mark.parametrize(
    "known",
    [
        # The wrong records are, in this order: the slot is opened again under the epoch that closed it; the slot is
        # opened again under an older epoch; a chunk comes twice; a chunk is missing.
        [*ON_S1, owned("s1", 24.0, "owned", 5, chunk=2)],
        [*ON_S1, owned("s1", 24.0, "owned", 1)],
        [*ON_S1, ON_S1[-1]],
        [*ON_S1, owned("s1", 24.0, "draining", 5, chunk=3)],
    ],
)
def test_a_shard_that_forgets_what_it_knew_of_a_slot_is_found(known: Sequence[Owned]) -> None:
    assert "I6" in found(moved(s1=known))


def test_two_owners_at_one_time_are_found_unless_the_clock_jumped() -> None:
    early = moved(s2=[owned("s2", 19.5, "owned", 5), *ON_S2[1:]])
    assert found(early) == ["I6"]
    assert found(changed(early, drift_s=1.0)) == []
    # A step with several slots has one record for all of these slots, so the step is one violation.
    slots = [SLOT, SLOT + 1, SLOT + 2]
    several = [owned(shard, at_s, "owned", 1, slots=slots) for shard, at_s in (("s1", 0.0), ("s2", 1.0))]
    assert found(moved(catalog=(), s1=several[:1], s2=several[1:])) == ["I6"]


def test_an_owner_that_never_closed_is_found() -> None:
    # There are two violations: s1 owns the slot while s2 owns it, and s1 still owns it at the end.
    assert found(moved(s1=ON_S1[:1])) == ["I6", "I6"]


def test_an_owner_that_does_not_know_that_it_is_one_is_found() -> None:
    assert found(moved(s2=[])) == []  # The records of s2 are missing.
    assert found(moved(s2=[owned("s2", 21.0, "owned", 4)])) == ["I6"]
    assert found(moved(s2=[*ON_S2, owned("s2", 30.0, "draining", 7)])) == ["I6"]


def test_slots_that_are_still_on_their_way_in_the_end_are_found() -> None:
    assert found(moved(catalog=PLACED[:3])) == ["I6"]


@pytest.mark.parametrize("state", [State.DEAD, State.LIVE])
def test_a_job_that_was_left_behind_is_found(state: State) -> None:
    row = replace(succeeded("j1", shard="s1"), state=state)
    assert "I6" in found(moved(row=row))
    assert "I6" not in found(moved(row=replace(row, shard="s2")))


def test_a_job_that_has_finished_before_its_slot_left_passes() -> None:
    assert found(moved(row=succeeded("j1", shard="s1"))) == []
    assert found(moved(row=succeeded("j1", shard="s3"))) == ["I6"]


def departing(given: Evidence, *, shard: str) -> Evidence:
    """Adds to the evidence that the job also departs from this shard."""
    row = replace(succeeded("j1", shard=shard), state=State.LIVE, departing=True, lease=None, leased_at_us=None)
    books = [*given.books, OrgBooks(shard=shard, org=ORG, accepted=1, balanced=True)]
    return replace(given, rows=[*given.rows, row], books=books)


def test_a_job_that_still_departs_is_no_second_copy_and_must_not_be_left_when_its_slot_rests() -> None:
    under_way = departing(moved(catalog=PLACED[:3]), shard="s1")
    assert found(changed(under_way, enqueues=[enqueue("j1", 10.0, answered=None)])) == ["I6"]
    left = departing(moved(), shard="s1")
    assert found(changed(left, enqueues=[enqueue("j1", 10.0, answered=None)])) == ["I6"]
    assert "departs" in check(left)[0].what or "departs" in check(left)[-1].what


def test_a_pinned_org_is_looked_for_where_its_own_slot_is() -> None:
    own = SLOTS + 3
    pinned = [
        PLACED[0],
        placed("s1", "s1", 3, slot=own),
        placed("s1", "s1 s2", 5, slot=own),
        placed("s2", "s1 s2", 5, slot=own),
        placed("s2", "s2", 5, slot=own),
    ]
    s1 = [ON_S1[0], owned("s1", 19.0, "owned", 3, slots=[own]), owned("s1", 20.0, "draining", 5, slots=[own])]
    s2 = [owned("s2", 21.0, "owned", 5, slots=[own])]
    dead = replace(succeeded("j1"), state=State.DEAD)

    def given(shard: str, *, pins: Mapping[str, int]) -> list[str]:
        return found(moved(catalog=pinned, s1=s1, s2=s2, row=replace(dead, shard=shard), pins=pins))

    assert "I6" not in given("s2", pins={ORG: own})
    assert "I6" in given("s1", pins={ORG: own})
    assert "I6" in given("s2", pins={})
    # A finished job may be on s1: the job may have finished while its org was in the hash slot or in its own slot.
    assert found(moved(catalog=pinned, s1=s1, s2=s2, row=succeeded("j1", shard="s1"), pins={ORG: own})) == []


def test_a_shard_need_not_know_an_orgs_slot_that_has_never_moved() -> None:
    own = SLOTS + 3
    catalog = [PLACED[0], placed("s1", "s1", 3, slot=own)]
    assert found(moved(catalog=catalog, s1=ON_S1[:1], s2=(), row=succeeded("j1"), pins={ORG: own})) == []
    # A shard may lack records of the slot, but it must not have wrong ones.
    wrong = owned("s1", 20.0, "draining", 3, slots=[own])
    assert found(moved(catalog=catalog, s1=[ON_S1[0], wrong], s2=(), row=succeeded("j1"), pins={ORG: own})) == ["I6"]


# ── Cluster files ────────────────────────────────────────────────────────────────────────────────────────────────────


def gone_by(*digests: str, at_s: float) -> Evidence:
    in_force = [InForce(at_s=at_s, digest=digest) for digest in digests]
    return replace(whole_life(), files=Files(in_force=in_force, unusable=frozenset({"bad"}), last="last"))


def test_a_cluster_file_that_was_to_be_refused_and_is_in_force_is_found() -> None:
    assert found(gone_by("first", "last", at_s=20.0)) == []
    assert found(gone_by("first", "bad", at_s=20.0)) == ["file"]


def test_an_old_cluster_file_that_stays_in_force_is_found() -> None:
    assert found(gone_by("last", at_s=CALM_S + 1)) == []
    assert found(gone_by("first", at_s=CALM_S + 1)) == ["file"]


# ── Faults that were alone ───────────────────────────────────────────────────────────────────────────────────────────


def restarted(*calls: Call) -> Evidence:
    """Returns the history of a router that was restarted from 20 to 25. There are no other faults."""
    alone = [Alone(fault="restart-router", began_s=20.0, ended_s=25.0)]
    return changed(replace(whole_life(), alone=alone), calls=calls)


def failed(verb: Verb, began_s: float, code: str) -> Call:
    return replace(call(verb, began_s), outcome=Outcome.UNKNOWN, code=code)


def test_an_orderly_restart_that_shows_more_than_unavailable_is_found() -> None:
    assert found(restarted(failed(Verb.ACK, 21.0, "CANCELLED"))) == ["restart"]
    assert found(restarted(failed(Verb.DEQUEUE, 21.0, "DEADLINE_EXCEEDED"))) == ["restart"]
    assert found(restarted(failed(Verb.CONSUME, 21.0, "INTERNAL"))) == ["restart"]


def test_an_orderly_restart_that_shows_unavailable_passes() -> None:
    calls = [
        failed(Verb.ACK, 21.0, "UNAVAILABLE"),
        failed(Verb.ACK, 21.0, "SETTLED_UNAVAILABLE"),
        failed(Verb.ACK, 21.0, "STREAM_ENDED"),
        # The deadline of a stream had passed, or the client wrote to a stream that had ended.
        failed(Verb.CONSUME, 21.0, "DEADLINE_EXCEEDED"),
        failed(Verb.CONSUME, 21.0, "WRITE_FAILED"),
        # The lease of the job that adds nodes had ended, or the deadline of the call had passed.
        failed(Verb.ADD, 21.0, "FAILED_PRECONDITION"),
        failed(Verb.ADD, 21.0, "DEADLINE_EXCEEDED"),
        # The node had failed without a signal.
        failed(Verb.SIGNAL, 21.0, "FAILED_PRECONDITION"),
        # These calls began before or after the restart.
        failed(Verb.ACK, 12.0, "CANCELLED"),
        failed(Verb.ACK, 26.0, "CANCELLED"),
        # The client of this call was killed.
        Call(client="c1", verb=Verb.ACK, org=ORG, began_s=21.0),
    ]
    assert found(restarted(*calls)) == []


def test_a_call_that_was_given_up_while_the_machine_stalled_is_not_blamed_on_the_restart() -> None:
    evidence = restarted(failed(Verb.DEQUEUE, 21.0, "DEADLINE_EXCEEDED"))
    assert found(replace(evidence, answer_s_max=4.9)) == ["restart"]
    assert found(replace(evidence, answer_s_max=5.0)) == []


def locked(*acks: Call) -> Evidence:
    """Returns the history of one org whose rows were locked from 20 to 26. There are no other faults."""
    alone = [Alone(fault="lock-rows", began_s=20.0, ended_s=26.0, orgs=[OTHER])]
    return changed(replace(whole_life(), alone=alone, answer_s_max=2.0), calls=acks)


def test_an_ack_that_waits_for_another_orgs_locked_row_is_found() -> None:
    assert found(locked(call(Verb.ACK, 21.0, 26.1))) == ["I4"]
    assert found(locked(failed(Verb.ACK, 21.0, "DEADLINE_EXCEEDED"))) == []
    assert found(locked(replace(failed(Verb.ACK, 20.5, "DEADLINE_EXCEEDED"), ended_s=25.5))) == ["I4"]


def test_an_ack_that_is_answered_soon_or_is_of_the_org_whose_row_is_locked_passes() -> None:
    acks = [
        call(Verb.ACK, 21.0, 22.0),
        call(Verb.ACK, 21.0, 26.1, org=OTHER),
        # When the lock ends, this ack has waited for only one second.
        call(Verb.ACK, 25.0, 28.0),
        call(Verb.ACK, 10.0, 19.0),
    ]
    assert found(locked(*acks)) == []


# ── I9: memory ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_router_that_grows_beyond_its_bound_is_found() -> None:
    given = replace(whole_life(), resident_bytes={41: 100, 42: 201})
    assert found(replace(given, resident_bytes_max=200)) == ["I9"]
    assert found(replace(given, resident_bytes_max=201)) == []
    assert found(given) == []


# ── A restored backup ────────────────────────────────────────────────────────────────────────────────────────────────

COPIED_S, SWAPPED_S, BACK_S, ACCEPTING_S, ACCEPTED_S = 12.0, 20.0, 20.5, 26.0, 28.0
REFUSED = Health(at_s=22.0, reachable=False, error="its database has lost history: …")


def live(job: str, *, lease: int | None = None, history: Sequence[Past] = (), key: str = "") -> Row:
    row = replace(succeeded(job, key=key), state=State.LIVE, past=history, lease=lease)
    return row if lease is not None else replace(row, leased_at_us=None)


def restored(
    given: Evidence,
    *,
    backup: Sequence[Row] = (),
    replaced: Sequence[Row] = (),
    backup_keys: Sequence[Key] = (),
    replaced_keys: Sequence[Key] = (),
    owned: Sequence[Owned] = (),
    told: Sequence[Health] = (REFUSED,),
) -> Evidence:
    """Adds a restore to the history: s1 is copied at 12 and replaced by the copy at 20. The loss is accepted from 26 to
    28."""
    return replace(
        given,
        restored=Restored(
            shard=SHARD,
            backup=Version(rows=backup, keys=frozenset(backup_keys), owned=()),
            replaced=Version(rows=replaced, keys=frozenset(replaced_keys), owned=owned),
            copied_s=COPIED_S,
            swapped_s=SWAPPED_S,
            back_s=BACK_S,
            accepting_s=ACCEPTING_S,
            accepted_s=ACCEPTED_S,
            told=told,
        ),
    )


def excused(given: Evidence) -> list[str]:
    return [one.invariant for one in examine(given) if one.excused]


def test_a_job_that_the_backup_lacks_may_be_lost_and_no_other() -> None:
    given = evidence(enqueues=[enqueue("j1", 13.0)])
    lost = restored(given, replaced=[live("j1")])
    assert (found(lost), excused(lost)) == ([], ["I1"])
    # The backup had the job.
    assert found(restored(given, backup=[live("j1")], replaced=[live("j1")])) == ["I1"]
    # The job was lost before the restore, or was on another shard.
    assert found(restored(given, replaced=[live("j2")])) == ["I1"]
    assert found(restored(given)) == ["I1"]


def test_a_job_may_wait_for_ever_if_the_backup_lacks_a_node_of_its_workflow_and_no_other() -> None:
    first, second = (replace(enqueue(job, 13.0), workflow="w") for job in ("j1", "j2"))
    flow = Flow(workflow="w", org=ORG, shard="s2", state="running", nodes={"j1": "released", "j2": "blocked"})
    given = evidence(enqueues=[first, second], rows=[live("j2")], flows=[flow])
    assert "I7" in excused(restored(given, replaced=[live("j1")]))
    assert "I7" in found(restored(given, replaced=[live("j1")], backup=[live("j1")]))
    assert "I7" in found(restored(given, replaced=[live("j3")]))
    still_there = replace(given, rows=[live("j1"), live("j2")])
    assert found(restored(still_there, replaced=[live("j1")])).count("I7") == 2


def test_a_job_that_was_acknowledged_once_the_backup_was_in_place_must_be_there() -> None:
    for duplicate in (False, True):
        given = evidence(enqueues=[enqueue("j1", 13.0), enqueue("j1", 30.0, duplicate=duplicate)])
        assert "I1" in found(restored(given, replaced=[live("j1")]))


def test_a_key_of_another_shard_may_still_stand_for_a_job_that_moved_here_and_is_lost() -> None:
    key = Key(ORG, QUEUE, "k", "j1")
    again = enqueue("j2", 30.0, answered="j1", duplicate=True, key="k")
    given = evidence(enqueues=[enqueue("j1", 5.0, key="k"), again])
    assert found(restored(given, replaced=[live("j1", key="k")])) == []
    # The key was on this shard, so it should be lost with the job.
    assert found(restored(given, replaced=[live("j1", key="k")], replaced_keys=[key])) == ["I1"]


def run_again(at_s: float = 30.0) -> Evidence:
    """Returns the evidence of a job that was acked at 14 and was delivered again."""
    return evidence(
        enqueues=[enqueue("j1", 5.0)],
        deliveries=[delivery("j1", 13.0, lease=1), delivery("j1", at_s, lease=2, client="w2")],
        settles=[settle(Verb.ACK, "j1", 14.0, lease=1), settle(Verb.ACK, "j1", at_s + 1, lease=2)],
        rows=[succeeded("j1", lease=2)],
    )


def test_a_job_whose_ack_the_backup_lacks_may_run_again_and_no_other() -> None:
    given = restored(run_again(), backup=[live("j1")], replaced=[succeeded("j1")])
    # The excused violations are: the job was delivered after its ack, the job was acked twice, and the books lack the
    # first ack.
    assert (found(given), excused(given)) == ([], ["I2"] * 3)
    # The backup has the ack, or the replaced database lacked the ack, or the job was never on the shard.
    assert found(restored(run_again(), backup=[succeeded("j1")], replaced=[succeeded("j1")])) == ["I2"] * 3
    assert found(restored(run_again(), backup=[live("j1")], replaced=[live("j1")])) == ["I2"] * 3
    assert found(restored(run_again())) == ["I2"] * 3
    # The backup lacks the job's last lease but has its ack.
    assert "I2" in found(restored(run_again(), backup=[succeeded("j1")], replaced=[succeeded("j1", lease=2)]))


def test_a_job_that_ran_again_before_the_backup_was_in_place_is_found() -> None:
    early = restored(run_again(17.0), backup=[live("j1")], replaced=[succeeded("j1")])
    assert found(early) == ["I2"]


def test_attempts_are_counted_anew_by_the_backup() -> None:
    settles = [
        settle(Verb.NACK, "j1", 14.0, lease=1),
        settle(Verb.ACK, "j1", 16.0, lease=2),
        settle(Verb.ACK, "j1", 31.0, lease=3),
    ]
    given = evidence(
        enqueues=[enqueue("j1", 5.0)],
        deliveries=[
            delivery("j1", 13.0, lease=1),
            delivery("j1", 15.0, lease=2, attempt=2),
            # The stream of this delivery was opened before the restore.
            replace(delivery("j1", 30.0, lease=3, of=Verb.CONSUME), call=call(Verb.CONSUME, 2.0, 50.0)),
        ],
        settles=settles,
        rows=[succeeded("j1", lease=3)],
    )
    acked = succeeded("j1", lease=2, history=[past(1, "nacked", 10_000, 900_000)])
    again = restored(given, backup=[live("j1")], replaced=[acked])
    # The excused violations are: the job was delivered after its ack, the job was acked twice, and the books lack the
    # nack and the first ack.
    assert (found(again), excused(again)) == ([], ["I2"] * 4)
    assert "I2" in found(restored(given, backup=[acked], replaced=[acked]))


def test_a_cancel_that_the_backup_lacks_may_be_undone_and_no_other() -> None:
    given = changed(
        whole_life(at_s=29.0),
        enqueues=[enqueue("j1", 5.0)],
        cancels=[Cancel(call=call(Verb.CANCEL, 14.0), job="j1", answer=Answer.OK)],
    )
    cancelled = replace(live("j1"), state=State.CANCELLED)
    lacking = restored(given, backup=[live("j1")], replaced=[cancelled])
    # There are two excused violations: the cancelled job was delivered, and the cancelled job succeeded.
    assert (found(lacking), excused(lacking)) == ([], ["I2"] * 2)
    assert found(restored(given, backup=[cancelled], replaced=[cancelled])) == ["I2"] * 2
    assert found(restored(given, backup=[live("j1")], replaced=[live("j1")])) == ["I2"] * 2
    late = changed(given, cancels=[Cancel(call=call(Verb.CANCEL, 28.5), job="j1", answer=Answer.OK)])
    assert found(restored(late, backup=[live("j1")], replaced=[cancelled])) == ["I2"] * 2


def cut_off(later_at_s: float, *, stale_at_s: float = 40.0) -> Evidence:
    """Returns the history of a job that has a lease until 22.8, and a lease of another consumer."""
    return evidence(
        enqueues=[enqueue("j1", 5.0)],
        deliveries=[delivery("j1", 19.9, lease=1), delivery("j1", later_at_s, lease=2, attempt=2, client="w2")],
        settles=[
            settle(Verb.ACK, "j1", stale_at_s, lease=1, answer=Answer.STALE),
            settle(Verb.ACK, "j1", 41.0, lease=2),
        ],
        rows=[succeeded("j1", lease=2)],
    )


def test_a_lease_may_end_with_the_database_that_gave_it_and_no_sooner() -> None:
    leased = live("j1", lease=1)
    given = restored(cut_off(22.0), backup=[live("j1")], replaced=[leased])
    assert (found(given), excused(given)) == ([], ["I2"])
    # The backup had the lease, but may lack an extend of the lease.
    assert found(restored(cut_off(22.0), backup=[leased], replaced=[leased])) == []
    assert found(restored(cut_off(19.95), backup=[live("j1")], replaced=[leased])) == ["I2"]
    assert found(restored(cut_off(22.0))) == ["I2"]
    # Here the ack is answered STALE before the lease's window has ended.
    stale = restored(cut_off(30.0, stale_at_s=21.0), backup=[live("j1")], replaced=[leased])
    assert (found(stale), excused(stale)) == ([], ["I2"])
    assert found(restored(cut_off(30.0, stale_at_s=19.8), backup=[live("j1")], replaced=[leased])) == ["I2"]
    assert found(restored(cut_off(30.0, stale_at_s=21.0))) == ["I2"]


def test_a_lease_that_went_with_its_database_and_is_used_once_more_is_found() -> None:
    given = changed(
        cut_off(22.0),
        settles=[
            settle(Verb.EXTEND, "j1", 30.0, lease=1, span_s=WINDOW_S),
            settle(Verb.ACK, "j1", 41.0, lease=2),
        ],
    )
    assert found(restored(given, backup=[live("j1")], replaced=[live("j1", lease=1)])) == ["I2"]


def test_what_the_replaced_database_had_in_its_books_is_checked_as_well() -> None:
    given = evidence(enqueues=[enqueue("j1", 13.0)])
    # No client acked the job.
    assert found(restored(given, replaced=[succeeded("j1")])) == ["I2"]
    refused = changed(given, settles=[settle(Verb.ACK, "j1", 15.0, lease=1, answer=Answer.STALE)])
    assert found(restored(refused, replaced=[succeeded("j1")])) == ["I2"]
    # The restored shard refused the repeated call.
    again = [
        settle(Verb.ACK, "j1", 15.0, lease=1, answer=None),
        settle(Verb.ACK, "j1", 30.0, lease=1, answer=Answer.STALE),
    ]
    assert found(restored(changed(given, settles=again), replaced=[succeeded("j1")])) == []
    history = [past(1, "expired", 500_000, 1_000_000), past(2, "expired", 900_000, 1_500_000)]
    assert found(restored(given, replaced=[live("j1", history=history)])) == ["I2"]


def test_what_was_answered_ok_and_neither_database_has_in_its_books_is_found() -> None:
    given = evidence(
        enqueues=[enqueue("j1", 5.0)],
        settles=[settle(Verb.NACK, "j1", 14.0, lease=7), settle(Verb.ACK, "j1", 31.0, lease=2)],
        rows=[succeeded("j1", lease=2)],
    )
    nacked = live("j1", history=[past(7, "nacked", 10_000, 900_000)])
    lacking = restored(given, backup=[live("j1")], replaced=[nacked])
    assert (found(lacking), excused(lacking)) == ([], ["I2"])
    assert found(restored(given, backup=[live("j1")], replaced=[live("j1", lease=9)])) == ["I2"]
    assert found(restored(given, backup=[nacked], replaced=[nacked])) == ["I2"]
    # The same rule holds for a job that is on no shard.
    gone = evidence(enqueues=[enqueue("j1", 13.0)], settles=[settle(Verb.NACK, "j1", 14.0, lease=7)])
    assert found(restored(gone, replaced=[nacked])) == []
    assert found(restored(gone, replaced=[live("j1")])) == ["I2"]


@pytest.mark.parametrize(("at_s", "expected"), [(15.0, ["I1"]), (22.0, ["I1"]), (30.0, [])])
def test_a_job_that_the_backup_lacks_may_be_unknown_once_that_is_accepted(at_s: float, expected: list[str]) -> None:
    looked = Lookup(call=call(Verb.LOOK_UP, at_s), job="j1", found=False)
    given = changed(evidence(enqueues=[enqueue("j1", 13.0)]), lookups=[looked])
    assert found(restored(given, replaced=[live("j1")])) == expected


def test_a_job_that_the_backup_has_or_that_was_stored_again_is_never_unknown() -> None:
    looked = Lookup(call=call(Verb.LOOK_UP, 30.0), job="j1", found=False)
    kept = changed(whole_life(at_s=5.0), lookups=[looked])
    assert found(restored(kept, backup=kept.rows, replaced=kept.rows)) == ["I1"]
    again = changed(whole_life(at_s=28.5), enqueues=[enqueue("j1", 13.0), enqueue("j1", 28.5)], lookups=[looked])
    assert found(restored(again, replaced=[live("j1")])) == ["I1"]


def astray(
    second: Row, *, backup: Sequence[Row] = (live("j1"),), replaced: Sequence[Row] = (), asked: bool = True
) -> list[str]:
    """Returns what the checker finds. After the backup was made, the job moved from s1 to s2 and succeeded on s2. A
    client asked to cancel the job."""
    given = whole_life()
    rows = [succeeded("j1", shard="s2"), second]
    books = [OrgBooks(shard=shard, org=ORG, accepted=1, balanced=True) for shard in (SHARD, "s2")]
    by_router = [Found(org=ORG, jobs=[("j1", State.SUCCEEDED)], counted={row.state: 1 for row in rows})]
    given = replace(given, rows=rows, books=books, found=by_router)
    if asked:
        given = changed(given, cancels=[Cancel(call=call(Verb.CANCEL, 29.0), job="j1", answer=Answer.STALE)])
    return found(restored(given, backup=backup, replaced=replaced))


def test_a_job_that_had_left_and_was_there_once_more_may_be_cancelled_there() -> None:
    second = replace(live("j1"), state=State.CANCELLED)
    assert astray(second) == []
    # No client asked to cancel the job.
    assert "I3" in astray(second, asked=False)
    # The backup did not have the job, or the job had not left.
    assert "I3" in astray(second, backup=())
    assert "I3" in astray(second, replaced=[live("j1")])
    # The copy is not cancelled, or it is on another shard.
    assert "I3" in astray(live("j1"))
    assert "I3" in astray(replace(second, shard="s3"))


@pytest.mark.parametrize(("answer", "expected"), [(Answer.OK, []), (None, []), (Answer.STALE, ["I1"])])
def test_a_job_of_which_only_a_cancelled_copy_is_left_is_lost_unless_it_was_the_job(
    answer: Answer | None, expected: list[str]
) -> None:
    second = replace(live("j1"), state=State.CANCELLED)
    given = evidence(
        enqueues=[enqueue("j1", 5.0)],
        cancels=[Cancel(call=call(Verb.CANCEL, 30.0), job="j1", answer=answer)],
        rows=[second],
    )
    assert found(restored(given, backup=[live("j1")])) == expected


def test_a_job_that_is_cancelled_and_nobody_said_so_is_found() -> None:
    given = evidence(enqueues=[enqueue("j1", 5.0)], rows=[replace(live("j1"), state=State.CANCELLED)])
    assert found(given) == ["I2"]


def test_a_job_that_the_backup_lacks_may_be_told_new_once_more() -> None:
    def told(*at_s: float, replaced: Sequence[Row] = (live("j1"),), backup: Sequence[Row] = ()) -> list[str]:
        given = changed(whole_life(at_s=29.0), enqueues=[enqueue("j1", one) for one in at_s])
        return found(restored(given, replaced=replaced, backup=backup))

    assert told(13.0, 29.0) == []
    # The answer was on its way when the database was replaced.
    assert told(19.95, 29.0) == []
    assert told(13.0, 14.0) == ["I3"]
    assert told(28.0, 29.0) == ["I3"]
    assert told(13.0, 28.0, 29.0) == ["I3"]
    assert told(13.0, 29.0, backup=[live("j1")]) == ["I3"]
    assert told(13.0, 29.0, replaced=()) == ["I3"]


def test_a_key_that_the_backup_lacks_may_stand_for_another_job_and_no_other_key() -> None:
    key = Key(ORG, QUEUE, "k", "j1")
    second = whole_life("j2", at_s=29.0)

    def given(*enqueues: Enqueue) -> Evidence:
        return changed(replace(second, rows=[succeeded("j2", key="k")]), enqueues=enqueues)

    first, other = enqueue("j1", 13.0, key="k"), enqueue("j2", 29.0, key="k")
    gone = live("j1", key="k")
    assert found(restored(given(first, other), replaced=[gone], replaced_keys=[key])) == []
    assert "I3" in found(restored(given(first, other), replaced=[gone], replaced_keys=[key], backup_keys=[key]))
    assert "I3" in found(restored(given(first, other), replaced=[gone]))
    # One more answer for this key is a violation: the first job's id after the restore, or the id of a third job.
    again = enqueue("j1", 28.5, key="k", duplicate=True)
    assert "I3" in found(restored(given(first, again, other), replaced=[gone], replaced_keys=[key]))
    third = enqueue("j3", 30.0, key="k")
    assert "I3" in found(restored(given(first, other, third), replaced=[gone], replaced_keys=[key]))


LEFT_S1 = (owned("s1", 0.0, "owned", 1), owned("s1", 14.0, "draining", 5), owned("s1", 16.0, "draining", 5, chunk=1))
CAME_TO_S2 = (owned("s2", 15.0, "owned", 5), owned("s2", 17.0, "owned", 5, chunk=1))


def slots_of_backup(*since: Owned, replaced: Sequence[Owned] = LEFT_S1, s2: Sequence[Owned] = CAME_TO_S2) -> list[str]:
    """Returns what the checker finds. The slot moved to s2 after the backup was made."""
    given = moved(s1=[LEFT_S1[0], *since], s2=s2)
    return found(restored(given, replaced=[], owned=replaced))


def test_a_slot_that_had_left_is_owned_once_more_by_the_backup_until_that_is_accepted() -> None:
    closed = owned("s1", 27.0, "draining", 5)
    assert slots_of_backup(closed) == []
    # s1 closed the slot too late, or did not close it.
    assert slots_of_backup(owned("s1", 40.0, "draining", 5)) == ["I6"]
    assert "I6" in slots_of_backup()
    # Before the database was replaced, the normal rule applies.
    assert slots_of_backup(closed, replaced=LEFT_S1[:1]) == ["I6"]
    assert "I6" in slots_of_backup(closed, replaced=[*LEFT_S1[:2], owned("s1", 19.0, "owned", 1)])


@pytest.mark.parametrize(("at_s", "expected"), [(27.0, []), (40.0, ["I6"])])
def test_a_restored_shard_may_skip_chunks_that_it_lost_when_that_is_accepted(at_s: float, expected: list[str]) -> None:
    came = owned("s1", 26.5, "owned", 9)
    skipped = replace(came, at_s=at_s, chunk=3)
    catalog = [placed("s2", "s2", 1), placed("s2", "s2 s1", 9), placed("s1", "s2 s1", 9), placed("s1", "s1", 9)]
    s2 = [owned("s2", 0.0, "owned", 1), owned("s2", 15.0, "draining", 9)]
    given = moved(catalog=catalog, s1=[came, skipped], s2=s2, row=succeeded("j1"))
    assert found(restored(given, replaced=[])) == expected


LIVES_ON_S1 = [placed("s1", "s1", 1)]
# A hash slot that has never been on s1.
LIVES_ON_S2 = [placed("s2", "s2", 1, slot=slot_of(OrgId(OTHER)))]


def refused(*calls: Call, told: Sequence[Health] = (REFUSED,), **history: object) -> list[str]:
    given = replace(whole_life(), placed=[*LIVES_ON_S1, *LIVES_ON_S2], owned=[owned("s1", 0.0, "owned", 1)])
    given = changed(given, calls=[call(Verb.DEQUEUE, 22.0), *calls], **history)
    return found(restored(given, told=told, backup=given.rows, replaced=given.rows))


def test_a_shard_that_lost_history_and_is_served_is_found() -> None:
    assert refused() == []
    assert refused(told=[]) == ["restore"]
    assert refused(told=[replace(REFUSED, error="timeout")]) == ["restore"]
    assert refused(told=[REFUSED, replace(REFUSED, reachable=True, error="")]) == ["restore"]
    again = enqueue("j1", 22.0, duplicate=True)
    assert refused(enqueues=[enqueue("j1", 10.0), again]) == []
    assert "restore" in refused(enqueues=[enqueue("j1", 10.0), replace(again, duplicate=False)])
    assert "restore" in refused(deliveries=[delivery("j1", 22.0, lease=1)])


def test_orgs_of_other_shards_that_are_refused_as_well_are_found() -> None:
    refusal = replace(failed(Verb.ENQUEUE, 22.0, "UNAVAILABLE"), org=OTHER)
    assert refused(refusal) == ["restore"]
    assert refused(replace(refusal, code="DEADLINE_EXCEEDED")) == []
    # Refusals for the orgs of the restored shard are expected. Refusals for other orgs are expected before the database
    # is back, and after the operator has begun to accept the loss.
    assert refused(failed(Verb.ENQUEUE, 22.0, "UNAVAILABLE")) == []
    assert refused(replace(refusal, began_s=20.1, ended_s=20.2), replace(refusal, began_s=26.0, ended_s=26.1)) == []


# ── Without faults ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_faults_a_job_comes_once_and_has_succeeded_exactly_if_it_came() -> None:
    stored = [enqueue("j1", 1.0), enqueue("j2", 1.0), enqueue("j3", 1.0)]
    came = [delivery("j1", 2.0, lease=1)]
    acked = [settle(Verb.ACK, "j1", 2.1, lease=1, answer=None), settle(Verb.ACK, "j2", 2.1, lease=1, answer=None)]
    scheduled = replace(succeeded("j3"), state=State.LIVE, lease=None, leased_at_us=None)

    def found(deliveries: Sequence[Delivery], *rows: Row) -> list[str]:
        seen = evidence(enqueues=stored[: len(rows)], deliveries=deliveries, settles=acked, rows=rows)
        return [one.what for one in check(replace(seen, calm_s=None, faultless=True)) if one.invariant == "once"]

    assert found(came, succeeded("j1")) == []
    assert found(came, succeeded("j1"), succeeded("j2")) == ["job j2 has succeeded, and came to no worker"]
    twice = [*came, delivery("j1", 9.0, lease=2, attempt=2)]
    assert found(twice, succeeded("j1")) == ["job j1 came to workers 2 times"]
    (what,) = found([*came, delivery("j3", 2.0, lease=1)], succeeded("j1"), scheduled)
    assert what == "job j3 came to a worker, and has not succeeded"


def test_whether_a_job_comes_is_not_examined_where_nothing_says_by_when() -> None:
    waiting = replace(succeeded("j1"), state=State.LIVE, lease=None, leased_at_us=None)
    seen = evidence(enqueues=[enqueue("j1", 1.0)], rows=[waiting])
    assert [one.invariant for one in check(seen)] == ["I7"]
    assert check(replace(seen, calm_s=None)) == []


# ── Workflows ────────────────────────────────────────────────────────────────────────────────────────────────────────


def workflow_of_two() -> Evidence:
    """Returns a workflow in which job j2 waits for job j1. The two jobs have succeeded."""
    first, second = (replace(enqueue(job, 10.0), workflow="w") for job in ("j1", "j2"))
    return evidence(
        enqueues=[first, replace(second, after=["j1"], delay_s=math.inf)],
        deliveries=[delivery("j1", 11.0, lease=1), delivery("j2", 13.0, lease=2)],
        settles=[settle(Verb.ACK, "j1", 12.0, lease=1), settle(Verb.ACK, "j2", 14.0, lease=2)],
        rows=[succeeded("j1"), succeeded("j2", lease=2)],
        flows=[flow_of_two()],
    )


def flow_of_two(state: str = "succeeded", **nodes: str) -> Flow:
    states = {"j1": "succeeded", "j2": "succeeded"} | nodes
    return Flow(workflow="w", org=ORG, shard=SHARD, state=state, nodes=states)


def test_a_workflow_whose_nodes_run_one_after_another_passes() -> None:
    assert found(workflow_of_two()) == []


def test_a_node_may_run_after_another_was_cancelled() -> None:
    given = workflow_of_two()
    (_, ack), (_, row) = given.history.settles, given.rows
    given = changed(
        replace(
            given,
            rows=[succeeded("j1", state=State.CANCELLED), row],
            flows=[flow_of_two(state="failed", j1="cancelled")],
        ),
        deliveries=given.history.deliveries[1:],
        settles=[ack],
        cancels=[Cancel(call=call(Verb.CANCEL, 12.0), job="j1", answer=Answer.OK)],
    )
    assert found(given) == []


def test_a_node_that_runs_before_the_one_that_it_waits_for_has_ended_is_found() -> None:
    given = workflow_of_two()
    late = [settle(Verb.ACK, "j1", 13.1, lease=1), given.history.settles[1]]
    assert found(changed(given, settles=late)) == ["I11"]


@pytest.mark.parametrize("answered", [True, False])
def test_an_acknowledged_workflow_that_is_nowhere_is_found(answered: bool) -> None:
    given = workflow_of_two()
    if not answered:
        given = changed(given, enqueues=[replace(one, answered=None) for one in given.history.enqueues])
    assert found(replace(given, flows=[])) == ["I1"] * answered


@pytest.mark.parametrize("was_lost", [True, False])
def test_only_a_workflow_that_arrived_after_the_backup_may_be_nowhere(was_lost: bool) -> None:
    """The finished jobs of the workflow stayed on another shard."""
    given = replace(workflow_of_two(), flows=[])
    restore = restored(given).restored
    assert restore is not None
    whole = replace(restore.replaced, flows=frozenset({"w"}))
    restore = replace(restore, replaced=whole, backup=restore.backup if was_lost else whole)
    given = replace(given, restored=restore)
    assert (found(given), excused(given)) == (([], ["I1"]) if was_lost else (["I1"], []))


def test_a_workflow_on_two_shards_is_found() -> None:
    given = workflow_of_two()
    assert found(replace(given, flows=[flow_of_two(), replace(flow_of_two(), shard="s2")])) == ["I3"]


@pytest.mark.parametrize("had_left", [True, False])
def test_only_a_workflow_that_had_left_after_the_backup_may_be_there_twice(had_left: bool) -> None:
    given = replace(workflow_of_two(), flows=[flow_of_two(), replace(flow_of_two(), shard="s2")])
    restore = restored(given).restored
    assert restore is not None
    whole = replace(restore.backup, flows=frozenset({"w"}))
    restore = replace(restore, backup=whole, replaced=restore.replaced if had_left else whole)
    given = replace(given, restored=restore)
    assert (found(given), excused(given)) == (([], ["I3"]) if had_left else (["I3"], []))


def test_a_node_whose_last_lease_expired_has_ended() -> None:
    given = workflow_of_two()
    given = changed(given, settles=given.history.settles[1:])
    given = replace(given, flows=[flow_of_two(state="failed", j1="failed")])

    def dead(outcome: str) -> Evidence:
        row = replace(succeeded("j1", state=State.DEAD, history=[past(1, outcome, 1, 2)]), lease=None)
        return replace(given, rows=[row, *given.rows[1:]])

    assert found(dead("expired")) == []
    assert "I11" in found(dead("nacked"))


def test_a_stranded_node_is_found() -> None:
    given = workflow_of_two()
    stranded = replace(given, flows=[flow_of_two(state="running", j2="blocked")])
    # There are two violations: one for the node and one for the workflow.
    assert found(stranded) == ["I11", "I11"]
    assert found(replace(stranded, calm_s=None)) == []


def test_a_node_that_says_otherwise_than_its_job_is_found() -> None:
    assert found(replace(workflow_of_two(), flows=[flow_of_two(state="failed", j1="failed")])) == ["I11"]


def test_a_node_that_is_missing_is_found() -> None:
    lacks = Flow(workflow="w", org=ORG, shard=SHARD, state="succeeded", nodes={"j1": "succeeded"})
    assert found(replace(workflow_of_two(), flows=[lacks])) == ["I11"]


# ── Nodes that jobs add ──────────────────────────────────────────────────────────────────────────────────────────────


def addition(
    at_s: float,
    *,
    jobs: Mapping[str, str] | None = None,
    stored: int = 0,
    lease: LeaseKey = LeaseKey("j1", 1),  # noqa: B008 - it is a tuple
    code: str = "",
) -> Addition:
    """Returns a call by which job j1 adds node j1+0, which waits for j1. If `jobs` is empty, the call has no answer."""
    outcome = Outcome.OK if jobs else Outcome.UNKNOWN
    return Addition(
        call=replace(call(Verb.ADD, at_s), code=code, outcome=outcome),
        workflow="w",
        lease=lease,
        nodes={"j1+0": ["j1"]},
        jobs=jobs or {},
        stored=stored,
    )


def told(added: Addition) -> Enqueue:
    """Returns the job of an acknowledged addition as the reader of histories returns it."""
    (job,) = added.jobs.values()
    return replace(enqueue(job, 0.0, duplicate=not added.stored, delay_s=math.inf), call=added.call)


def workflow_that_grew() -> Evidence:
    """Returns a workflow. While job j1 ran, it added node j1+0, whose job is j3. The callback j2 ran after j1 and j3.
    The first call that added the node was not answered, and the second call found the stored node."""
    given = workflow_of_two()
    again = addition(11.7, jobs={"j1+0": "j3"})
    return changed(
        replace(
            given,
            rows=[*given.rows, succeeded("j3", lease=3)],
            books=[replace(given.books[0], accepted=3)],
            flows=[grown_flow()],
        ),
        enqueues=[*given.history.enqueues, told(again)],
        additions=[addition(11.5), again],
        deliveries=[
            *given.history.deliveries,
            delivery("j3", 12.2, lease=3, payload_job="j1+0"),
        ],
        settles=[*given.history.settles, settle(Verb.ACK, "j3", 12.4, lease=3)],
    )


def grown_flow(state: str = "succeeded", *, job: str = "j3", name: str = "j1+0", **nodes: str) -> Flow:
    states = {job: "succeeded"} | nodes
    return replace(flow_of_two(state, **states), added={job: name}, callbacks=frozenset({"j2"}))


def test_a_workflow_that_grew_passes_whether_an_answer_came_or_not() -> None:
    given = workflow_that_grew()
    assert found(given) == []
    unanswered = changed(given, enqueues=given.history.enqueues[:2], additions=given.history.additions[:1])
    assert found(unanswered) == []


def test_a_node_that_was_acknowledged_as_added_and_is_nowhere_is_found() -> None:
    given = workflow_that_grew()
    assert found(replace(given, flows=[replace(flow_of_two(), callbacks=frozenset({"j2"}))])) == ["I1"]
    # The node exists, but with another job.
    other = replace(
        given,
        flows=[grown_flow(job="j9")],
        rows=[*given.rows, succeeded("j9", lease=9)],
        books=[replace(given.books[0], accepted=4)],
    )
    other = changed(
        other,
        deliveries=[*given.history.deliveries, delivery("j9", 12.2, lease=9, payload_job="j1+0")],
        settles=[*given.history.settles, settle(Verb.ACK, "j9", 12.4, lease=9)],
    )
    assert found(other) == ["I1"]
    # The job of the node is nowhere.
    lost = replace(given, rows=given.rows[:2], books=[replace(given.books[0], accepted=2)])
    assert found(lost) == ["I1"]


def test_a_node_that_was_added_twice_is_found() -> None:
    given = workflow_that_grew()
    twice = replace(grown_flow(j4="succeeded"), added={"j3": "j1+0", "j4": "j1+0"})
    given = replace(
        given,
        flows=[twice],
        rows=[*given.rows, succeeded("j4", lease=4)],
        books=[replace(given.books[0], accepted=4)],
    )
    given = changed(
        given,
        deliveries=[*given.history.deliveries, delivery("j4", 12.2, lease=4, payload_job="j1+0")],
        settles=[*given.history.settles, settle(Verb.ACK, "j4", 12.4, lease=4)],
    )
    assert found(given) == ["I3"]


def test_a_node_that_was_told_new_twice_is_found() -> None:
    given = workflow_that_grew()
    calls = [addition(at_s, jobs={"j1+0": "j3"}, stored=1) for at_s in (11.5, 11.7)]
    given = changed(given, enqueues=[*given.history.enqueues[:2], *map(told, calls)], additions=calls)
    assert found(given) == ["I3"]


def test_a_node_that_nobody_added_is_found() -> None:
    given = workflow_that_grew()
    given = changed(given, enqueues=given.history.enqueues[:2], additions=[])
    # There are three violations: one for the node, one for its job, and one for the payload of the job.
    assert sorted(found(given)) == ["I3", "I3", "I4"]


def test_an_added_node_that_runs_before_the_one_that_it_waits_for_has_ended_is_found() -> None:
    given = workflow_that_grew()
    early = [*given.history.deliveries[:2], replace(given.history.deliveries[2], received_s=11.9)]
    assert found(changed(given, deliveries=early)) == ["I11"]


def test_a_callback_that_runs_before_an_added_node_has_ended_is_found() -> None:
    given = workflow_that_grew()
    late = [*given.history.settles[:2], settle(Verb.ACK, "j3", 13.5, lease=3)]
    assert found(changed(given, settles=late)) == ["I11"]
    # Job j2 need not wait if it is no callback.
    assert found(changed(replace(given, flows=[replace(grown_flow(), callbacks=frozenset())]), settles=late)) == []


def test_an_added_node_that_is_stranded_is_found() -> None:
    given = workflow_that_grew()
    stranded = replace(given, flows=[grown_flow(j3="released")])
    assert found(stranded) == ["I11"]
    assert found(replace(given, flows=[grown_flow("failed", j3="failed")])) == ["I11"]


def test_an_addition_whose_lease_had_ended_is_found() -> None:
    """Job j1 was given to another consumer before the call began."""
    given = workflow_that_grew()
    first = delivery("j1", 11.0, lease=8, of=Verb.CONSUME)
    second = delivery("j1", 11.4, lease=1, attempt=2, client="w2", of=Verb.CONSUME)
    late = addition(11.5, jobs={"j1+0": "j3"}, stored=1, lease=first.lease)
    given = changed(
        replace(given, rows=[succeeded("j1", history=[past(8, "expired", 1, 2)]), *given.rows[1:]]),
        enqueues=[*given.history.enqueues[:2], told(late)],
        additions=[late],
        deliveries=[first, second, *given.history.deliveries[1:]],
    )
    assert found(given) == ["I2"]
    # The job of this lease was acked before the call began.
    late = addition(12.5, jobs={"j1+0": "j3"}, stored=1)
    acked = workflow_that_grew()
    acked = changed(acked, enqueues=[*acked.history.enqueues[:2], told(late)], additions=[late])
    assert found(acked) == ["I2"]
    refused = addition(11.5, lease=first.lease, code="FAILED_PRECONDITION")
    assert found(changed(given, enqueues=given.history.enqueues[:2], additions=[refused])) == []


@pytest.mark.parametrize("code", ["ALREADY_EXISTS", "NOT_FOUND", "INVALID_ARGUMENT"])
def test_an_addition_that_is_refused_as_if_it_were_of_others_is_found(code: str) -> None:
    given = workflow_that_grew()
    assert found(changed(given, additions=[*given.history.additions, addition(11.9, code=code)])) == ["I11"]


# ── Jobs that wait for nodes that they have added ────────────────────────────────────────────────────────────────────


def job_that_waits(
    again_s: float = 12.6, *, outcome: Outcome = Outcome.OK, waits: bool = True, ended_as: str = "released"
) -> Evidence:
    """Returns the evidence of a job that waits. Job j1 was delivered with lease 8, and added node j1+0, whose job is
    j3. Then j1 waited for this node. A stream delivered j1 again at `again_s`, with lease 1. Job j3 was acked at
    12.4."""
    given = workflow_that_grew()
    jobs = {"j1+0": "j3"} if outcome is Outcome.OK else {}
    wait = addition(11.2, jobs=jobs, stored=len(jobs), lease=LeaseKey("j1", 8))
    wait = replace(
        wait, call=replace(wait.call, outcome=outcome), nodes={"j1+0": []}, wait=True, waits=waits and bool(jobs)
    )
    _, over, added = given.history.deliveries
    _, over_ack, added_ack = given.history.settles
    return changed(
        replace(given, rows=[succeeded("j1", history=[past(8, ended_as, 1, 2)]), *given.rows[1:]]),
        enqueues=[*given.history.enqueues[:2], *([told(wait)] if jobs else [])],
        additions=[wait],
        deliveries=[
            delivery("j1", 11.0, lease=8),
            added,
            delivery("j1", again_s, lease=1, client="w2", of=Verb.CONSUME),
            replace(over, received_s=13.2),
        ],
        settles=[added_ack, settle(Verb.ACK, "j1", 12.9, lease=1), replace(over_ack, call=call(Verb.ACK, 13.5))],
    )


def moving(given: Evidence, *, began_s: float, ended_s: float, slot: int = SLOT) -> Evidence:
    """Adds to the evidence that the slot moved between these times."""
    at_rest = [placed("s1", "s1", 1, slot=one) for one in {SLOT, slot}]
    steps = [("s1", "s1 s2", began_s), ("s2", "s1 s2", began_s), ("s2", "s2", ended_s)]
    moved = [placed(writes, reads, 2, slot=slot, at_s=at_s) for writes, reads, at_s in steps]
    return replace(given, placed=[*at_rest, *moved])


def about_waits(given: Evidence) -> list[str]:
    """Returns the violations that are not about slots."""
    return [one for one in found(given) if one != "I6"]


def test_a_job_that_waits_for_an_added_node_passes_whether_an_answer_came_or_not() -> None:
    assert found(job_that_waits()) == []
    assert found(job_that_waits(outcome=Outcome.UNKNOWN)) == []


def test_a_job_that_comes_again_before_a_node_that_it_waits_for_has_ended_is_found() -> None:
    assert found(job_that_waits(12.3)) == ["I11"]
    # The answer was lost, so the call may not have been executed.
    assert found(job_that_waits(12.3, outcome=Outcome.UNKNOWN)) == []


def test_a_job_that_is_told_to_go_on_before_a_node_that_it_waits_for_has_ended_is_found() -> None:
    given = job_that_waits(waits=False, ended_as="expired")
    (wait,) = given.history.additions
    assert found(given) == ["I11"]
    ended = changed(given, additions=[replace(wait, lease=LeaseKey("j1", 1), call=call(Verb.ADD, 12.8))])
    assert found(ended) == []


def test_a_job_that_waits_while_its_org_moves_may_come_again_and_wait_on_the_other_shard() -> None:
    given = job_that_waits(12.3)
    assert about_waits(moving(given, began_s=10.0, ended_s=11.25)) == []
    assert about_waits(moving(given, began_s=11.25, ended_s=14.0)) == []
    assert about_waits(moving(given, began_s=12.0, ended_s=14.0)) == ["I11"]
    # First, the slot is the slot of another org. Then, it is the org's own slot.
    other = moving(given, began_s=10.0, ended_s=14.0, slot=SLOTS)
    assert about_waits(other) == ["I11"]
    assert about_waits(replace(other, pins={ORG: SLOTS})) == []
    # The lease may have ended by itself before the router ended it.
    expired = job_that_waits(ended_as="expired")
    assert found(expired) == ["I2"]
    assert about_waits(moving(expired, began_s=11.0, ended_s=14.0)) == []


def test_a_wait_that_was_answered_ends_the_lease() -> None:
    given = job_that_waits()
    acked = settle(Verb.ACK, "j1", 11.5, lease=8, answer=Answer.STALE)
    assert found(changed(given, settles=[*given.history.settles, acked])) == []
    extended = settle(Verb.EXTEND, "j1", 11.5, lease=8)
    assert found(changed(given, settles=[*given.history.settles, extended])) == ["I2"]
    # If the job does not wait for the node, the router must not have released the job.
    added = replace(given.history.additions[0], wait=False, waits=False)
    assert found(changed(given, additions=[added])) == ["I2"]


def test_a_wait_that_was_refused_ends_no_lease() -> None:
    given = job_that_waits(outcome=Outcome.ERROR, waits=False)
    assert found(given) == ["I2"]
    assert found(job_that_waits(outcome=Outcome.ERROR, waits=False, ended_as="expired")) == []


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.UNKNOWN])
def test_a_job_that_waits_is_due_when_the_nodes_have_ended(outcome: Outcome) -> None:
    late = job_that_waits(CALM_S + 50, outcome=outcome)
    late = changed(
        late,
        deliveries=[*late.history.deliveries[:3], replace(late.history.deliveries[3], received_s=CALM_S + 51)],
        settles=[
            late.history.settles[0],
            settle(Verb.ACK, "j1", CALM_S + 50.5, lease=1),
            replace(late.history.settles[2], call=call(Verb.ACK, CALM_S + 52)),
        ],
    )
    assert found(late) == []
    # If the job does not wait, it is due at the end of its lease.
    refused = changed(late, additions=[])
    assert "I7" in found(refused)


def test_only_a_backup_excuses_a_job_that_does_not_wait() -> None:
    given = job_that_waits(12.3)
    lost = [live("j1"), *given.rows[1:]]
    assert (found(given), excused(given)) == (["I11"], [])
    given = restored(given, backup=lost, replaced=given.rows)
    assert (found(given), excused(given)) == ([], ["I11"])


def test_a_job_of_an_added_node_may_be_there_although_its_workflow_was_lost() -> None:
    """The workflow arrived after the backup, and its finished jobs stayed on the other shard. No call that added a node
    was answered."""
    given = workflow_that_grew()
    given = changed(given, enqueues=given.history.enqueues[:2], additions=given.history.additions[:1])
    given = restored(replace(given, flows=[]), backup=given.rows, replaced=given.rows)
    assert found(given) == ["I1"]
    restore = given.restored
    assert restore is not None
    restore = replace(restore, replaced=replace(restore.replaced, flows=frozenset({"w"})))
    assert found(replace(given, restored=restore)) == []


def test_only_a_job_of_a_workflow_that_was_lost_may_be_there_although_no_answer_named_it() -> None:
    """The workflow and its retry arrived after the backup, and their finished jobs stayed on another shard. No client
    was told the ids of the retry's jobs, or the id of the node that job 0 of the workflow had added."""
    flow, retry, other = "0198d2c4-7a11-7abc-8def-0123456789ab", "0198d2c4-7a22-7abc-8def-000000000000", "w"
    first = job_id_of(WorkflowId(flow), 0)
    given = whole_life(first)
    start = replace(given.history.enqueues[0], call=call(Verb.START, 10.0), workflow=flow)
    wait = replace(addition(11.5, lease=LeaseKey(first, 1)), workflow=flow, nodes={f"{first}+0": []})
    jobs = [job_id_of(WorkflowId(one), number) for one, number in ((flow, 1), (retry, 0), (retry, 1))]
    rows = [*given.rows, *(succeeded(job, lease=2) for job in jobs)]
    given = changed(
        replace(given, rows=rows, books=[replace(given.books[0], accepted=4)]),
        enqueues=[start],
        additions=[wait],
        deliveries=[
            *given.history.deliveries,
            *(
                delivery(job, 13.0, lease=2, payload_job=name)
                for job, name in ((jobs[0], f"{first}+0"), (jobs[1], first), (jobs[2], f"{first}+0"))
            ),
        ],
        settles=[*given.history.settles, *(settle(Verb.ACK, job, 13.5, lease=2) for job in jobs)],
    )
    asked = OperatedFlow(workflow=flow, org=ORG, retry=retry)
    assert set(found(replace(given, operated=[asked]))) == {"I1"}
    # A cancel of the workflow also cancels the node that was added.
    cancelled = [replace(row, state=State.CANCELLED, lease=None) if row.job == jobs[0] else row for row in rows]
    by_operator = replace(asked, cancelling_s=12.0)
    kept = changed(
        given,
        deliveries=[one for one in given.history.deliveries if one.lease.job != jobs[0]],
        settles=[one for one in given.history.settles if one.lease.job != jobs[0]],
    )
    assert "I2" not in found(replace(kept, rows=cancelled, operated=[by_operator]))
    assert "I2" in found(replace(kept, rows=cancelled, operated=[asked]))
    # No client asked for this retry.
    assert set(found(replace(given, operated=[replace(asked, retry=other)]))) == {"I1", "I3", "I4"}


@pytest.mark.parametrize("was_lost", [True, False])
def test_only_a_job_of_a_workflow_that_was_lost_may_wait_for_ever(was_lost: bool) -> None:
    """The workflow arrived after the backup, and the jobs followed later."""
    given = workflow_that_grew()
    given = replace(given, flows=[] if was_lost else given.flows, rows=[*given.rows[:2], live("j3")])
    given = changed(given, deliveries=given.history.deliveries[:2], settles=given.history.settles[:2])
    given = restored(given, backup=given.rows, replaced=given.rows)
    restore = given.restored
    assert restore is not None
    restore = replace(restore, replaced=replace(restore.replaced, flows=frozenset({"w"})))
    given = replace(given, restored=restore)
    # If the workflow was not lost, its callback must not be delivered before job j3 has ended.
    assert found(given) == ([] if was_lost else ["I7", "I11"])


@pytest.mark.parametrize("stored", [0, 1])
def test_only_the_finished_job_of_a_node_that_was_known_may_be_missing_after_the_restore(stored: int) -> None:
    """Job j3 was on the restored shard, and the workflow was on another shard. A later call names the job again."""
    given = workflow_that_grew()
    first = addition(11.7, jobs={"j1+0": "j3"}, stored=1 - stored)
    again = addition(SWAPPED_S + 1, jobs={"j1+0": "j3"}, stored=stored)
    lacking = [row for row in given.rows if row.job != "j3"]
    given = changed(
        replace(given, rows=lacking, books=[replace(given.books[0], accepted=2)]),
        enqueues=[*given.history.enqueues[:2], told(first), told(again)],
        additions=[first, again],
    )
    given = restored(given, backup=lacking, replaced=workflow_that_grew().rows)
    assert ("I1" in excused(given), "I1" in found(given)) == ((True, False) if not stored else (False, True))


@pytest.mark.parametrize("was_lost", [True, False])
def test_only_an_added_node_that_the_backup_lacks_may_be_missing(was_lost: bool) -> None:
    given = workflow_that_grew()
    lacking = replace(
        given,
        flows=[replace(flow_of_two(), callbacks=frozenset({"j2"}))],
        rows=given.rows[:2],
        books=[replace(given.books[0], accepted=2)],
    )
    lacking = restored(lacking, backup=given.rows[: 2 if was_lost else 3], replaced=given.rows)
    # The job and the node are violations of I1. If the backup lacks the job, the ack is a violation of I2.
    assert (found(lacking), excused(lacking)) == (([], ["I1", "I2", "I1"]) if was_lost else (["I1", "I1"], []))


# ── Schedules ────────────────────────────────────────────────────────────────────────────────────────────────────────


SECOND_US = 1_000_000


def a_run(at_s: int, *, job: str | None = None, skipped_for: str | None = None, through_s: int | None = None) -> Run:
    """Returns a run. If `job` is given, the run was stored; if `skipped_for` is given, the run was skipped; otherwise,
    the run waits."""
    outcome = "stored" if job else "skipped" if skipped_for else "buffered"
    through_us = None if through_s is None else through_s * SECOND_US
    # A run is decided at its last instant.
    decided_us = (through_s or at_s) * SECOND_US
    return Run("id", at_s * SECOND_US, through_us, outcome, skipped_for, job, decided_us)


def of_run(job: str, at_s: int, *, terms: int = 0, **fields: object) -> Row:
    return replace(succeeded(job), run=RunName("tick", at_s * SECOND_US, terms), **fields)  # type: ignore[arg-type]


def every(seconds: int, *, number: int = 0, skips_for: str = "overlap", cancels: bool = False) -> Terms:
    return Terms(number=number, every_us=seconds * SECOND_US, skips_for=frozenset({skips_for}), cancels=cancels)


def a_schedule() -> Evidence:
    """Returns a schedule that was created at 1000.5 s and fires every two seconds before 1010 s. One run was stored,
    one run has waited, and two runs were skipped together."""
    given = evidence(
        deliveries=[delivery(job, 2.0, lease=1, payload_job="tick") for job in ("j1", "j2")],
        settles=[settle(Verb.ACK, job, 2.2, lease=1) for job in ("j1", "j2")],
        rows=[of_run("j1", 1002), of_run("j2", 1004)],
    )
    return replace(
        given,
        schedules=[
            Schedule(org=ORG, name="tick", terms=every(2), ends_us=1010 * SECOND_US),
        ],
        stored_schedules=[StoredSchedule(id="id", org=ORG, name="tick", shard=SHARD, created_us=1000_500_000)],
        runs=frozenset(
            {
                a_run(1002, job="j1"),
                *(a_run(1004), a_run(1004, job="j2")),
                a_run(1006, skipped_for="overlap", through_s=1008),
            }
        ),
    )


def with_runs(*runs: Run, instead_of: int | None = None) -> Evidence:
    """Returns the schedule with these further runs, and without the runs of the second `instead_of`."""
    given = a_schedule()
    left = {run for run in given.runs if instead_of is None or run.at_us != instead_of * SECOND_US}
    return replace(given, runs=frozenset(left | set(runs)))


def test_a_schedule_whose_instants_were_stored_or_skipped_passes() -> None:
    assert found(a_schedule()) == []


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(with_runs(instead_of=1006), id="nobody decided two instants"),
        pytest.param(with_runs(a_run(1006, skipped_for="overlap"), instead_of=1006), id="nobody decided the last one"),
        pytest.param(with_runs(a_run(1002, skipped_for="overlap")), id="it was also skipped"),
        pytest.param(
            with_runs(a_run(1006, skipped_for="catch_up", through_s=1008), instead_of=1006), id="no reason of it"
        ),
        pytest.param(with_runs(a_run(1000, skipped_for="overlap")), id="an instant before its creation"),
        pytest.param(with_runs(a_run(1010, skipped_for="overlap")), id="an instant after its end"),
        pytest.param(with_runs(a_run(1003, skipped_for="overlap")), id="an instant between two others"),
        pytest.param(with_runs(a_run(1002, job="j9"), instead_of=1002), id="another job than the stored one"),
    ],
)
def test_a_wrong_decision_about_an_instant_is_found(given: Evidence) -> None:
    assert set(found(given)) == {"I10"}


def test_instants_lie_later_by_the_offset_of_their_schedule() -> None:
    given = a_schedule()
    (schedule,) = given.schedules
    later = replace(schedule, terms=replace(schedule.terms, offset_us=SECOND_US))
    assert set(found(replace(given, schedules=[later]))) == {"I10"}
    all_skipped = a_run(1001, skipped_for="overlap", through_s=1009)
    without_jobs = replace(given, rows=[], runs=frozenset({all_skipped}), books=[replace(given.books[0], accepted=0)])
    without_jobs = changed(replace(without_jobs, schedules=[later]), settles=[], deliveries=[])
    assert found(without_jobs) == []


def test_an_instant_that_was_stored_twice_is_found() -> None:
    again = with_runs(a_run(1002, job="j3"))
    rows = [*again.rows, of_run("j3", 1002)]
    books = [replace(again.books[0], accepted=3)]
    ack, came = settle(Verb.ACK, "j3", 2.2, lease=1), delivery("j3", 2.0, lease=1, payload_job="tick")
    again = changed(
        replace(again, rows=rows, books=books),
        settles=[*again.history.settles, ack],
        deliveries=[*again.history.deliveries, came],
    )
    assert found(again) == ["I10"]
    # Two jobs are enough for a violation, even if there is only one run.
    assert found(replace(again, runs=a_schedule().runs)) == ["I10"]


def test_a_run_that_waits_for_ever_is_found() -> None:
    waits = with_runs(a_run(1004), instead_of=1004)
    rows = [of_run("j1", 1002)]
    waits = changed(
        replace(waits, rows=rows, books=[replace(waits.books[0], accepted=1)]),
        settles=waits.history.settles[:1],
        deliveries=waits.history.deliveries[:1],
    )
    assert found(waits) == ["I10"]
    assert found(replace(waits, calm_s=None)) == []


def test_a_job_of_a_run_that_is_nowhere_is_found() -> None:
    given = a_schedule()
    lost = changed(
        replace(given, rows=given.rows[:1], books=[replace(given.books[0], accepted=1)]),
        settles=given.history.settles[:1],
        deliveries=given.history.deliveries[:1],
    )
    assert found(lost) == ["I10"]


@pytest.mark.parametrize("was_lost", [True, False])
def test_only_a_job_of_a_run_that_arrived_after_the_backup_may_be_nowhere(was_lost: bool) -> None:
    """The job is dead, and a dead job moves with its org."""
    given = a_schedule()
    nacked = [*given.history.settles[:1], settle(Verb.KILL, "j2", 2.2, lease=1, answer=None)]
    dead = of_run("j2", 1004, state=State.DEAD)
    lost = changed(replace(given, rows=given.rows[:1], books=[replace(given.books[0], accepted=1)]), settles=nacked)
    lost = restored(lost, backup=given.rows[:1] if was_lost else [given.rows[0], dead], replaced=[given.rows[0], dead])
    # There are two violations: one for the payload of the lost job, and one for its run.
    assert (found(lost), excused(lost)) == (([], ["I4", "I10"]) if was_lost else (["I4", "I10"], []))


def test_a_job_of_a_run_that_is_never_done_is_found() -> None:
    given = a_schedule()
    stuck = changed(
        replace(given, rows=[given.rows[0], of_run("j2", 1004, state=State.LIVE)]), settles=given.history.settles[:1]
    )
    assert found(stuck) == ["I7"]


@pytest.mark.parametrize("cancels", [True, False])
def test_only_a_schedule_that_cancels_may_have_cancelled_jobs(cancels: bool) -> None:
    given = a_schedule()
    given = replace(
        given,
        rows=[of_run("j1", 1002, state=State.CANCELLED), given.rows[1]],
        schedules=[replace(given.schedules[0], terms=every(2, cancels=cancels))],
    )
    # The consumer gets this answer before the lease's window has ended.
    refused = replace(given.history.settles[0], answer=Answer.STALE)
    given = changed(given, settles=[refused, given.history.settles[1]])
    assert found(given) == ([] if cancels else ["I2", "I2"])


def test_a_job_that_names_a_run_of_no_schedule_is_found() -> None:
    given = a_schedule()
    assert found(replace(given, schedules=[], stored_schedules=[], runs=frozenset())) == ["I10"]


def test_a_job_that_comes_with_the_payload_of_another_schedule_is_found() -> None:
    given = a_schedule()
    wrong = replace(given.history.deliveries[0], payload_job="tock")
    assert found(changed(given, deliveries=[wrong, given.history.deliveries[1]])) == ["I4"]


def test_an_acknowledged_schedule_that_is_nowhere_is_found() -> None:
    given = replace(a_schedule(), rows=[], books=[], stored_schedules=[], runs=frozenset())
    given = changed(given, deliveries=[], settles=[])
    assert found(given) == ["I10"]
    assert found(replace(given, schedules=[replace(given.schedules[0], acknowledged=False)])) == []


def test_a_schedule_on_two_shards_is_found() -> None:
    given = a_schedule()
    copies = [*given.stored_schedules, replace(given.stored_schedules[0], shard="s2")]
    assert found(replace(given, stored_schedules=copies)) == ["I10"]


@pytest.mark.parametrize("had_left", [True, False])
def test_only_a_schedule_that_had_left_after_the_backup_may_be_there_twice(had_left: bool) -> None:
    given = a_schedule()
    restore = restored(given, backup=given.rows, replaced=given.rows).restored
    assert restore is not None
    whole = replace(restore.backup, schedules=given.stored_schedules)
    restore = replace(restore, backup=whole, replaced=restore.replaced if had_left else whole)
    copies = [*given.stored_schedules, replace(given.stored_schedules[0], shard="s2")]
    given = replace(given, stored_schedules=copies, restored=restore)
    assert (found(given), excused(given)) == (([], ["I10"]) if had_left else (["I10"], []))


@pytest.mark.parametrize("was_lost", [True, False])
def test_only_a_schedule_that_arrived_after_the_backup_may_be_nowhere(was_lost: bool) -> None:
    given = with_runs(a_run(1002, skipped_for="overlap"))
    restore = restored(replace(given, stored_schedules=[]), backup=given.rows, replaced=given.rows).restored
    assert restore is not None
    whole = replace(restore.replaced, schedules=given.stored_schedules)
    restore = replace(restore, replaced=whole, backup=restore.backup if was_lost else whole)
    given = replace(given, stored_schedules=[], restored=restore)
    assert excused(given) == ["I10"] * was_lost
    # The checker examines the runs of the schedule in any case. Otherwise it could not know to which schedule these
    # jobs belong.
    assert found(given) == ["I10"] * (1 if was_lost else 2)


# ── What operators do to schedules ───────────────────────────────────────────────────────────────────────────────────


def change(kind: ChangeKind, at_s: float, *, answered: bool = True, terms: Terms | None = None) -> Change:
    """Returns a call that takes a tenth of a second."""
    began_us = round(at_s * SECOND_US)
    ended_us = began_us + SECOND_US // 10 if answered else None
    return Change(kind=kind, began_us=began_us, ended_us=ended_us, terms=terms)


PAUSE, RESUME = change(ChangeKind.PAUSE, 1005.0), change(ChangeKind.RESUME, 1009.0)


def with_changes(given: Evidence, *changes: Change) -> Evidence:
    return replace(given, schedules=[replace(given.schedules[0], changes=changes)])


def with_jobs(given: Evidence, *rows: Row) -> Evidence:
    """Returns the schedule with further jobs that have run."""
    deliveries = [delivery(row.job, 2.0, lease=1, payload_job="tick") for row in rows]
    settles = [settle(Verb.ACK, row.job, 2.2, lease=1) for row in rows]
    all_rows = [*given.rows, *rows]
    return changed(
        replace(given, rows=all_rows, books=[replace(given.books[0], accepted=len(all_rows))]),
        deliveries=[*given.history.deliveries, *deliveries],
        settles=[*given.history.settles, *settles],
    )


def with_pause(*runs: Run, changes: Sequence[Change] = (PAUSE, RESUME)) -> Evidence:
    """Returns a schedule that was paused from 1005 to 1009. So its instants 1006 and 1008 must be skipped."""
    return with_changes(with_runs(*runs, instead_of=1006), *changes)


SKIPPED_TOGETHER = a_run(1006, skipped_for="pause", through_s=1008)


def test_a_pause_whose_instants_are_skipped_passes() -> None:
    assert found(with_pause(SKIPPED_TOGETHER)) == []
    again = [PAUSE, change(ChangeKind.PAUSE, 1005.2, answered=False), RESUME]
    assert found(with_pause(SKIPPED_TOGETHER, changes=again)) == []


@pytest.mark.parametrize("decided_s", [1006, 1012])
def test_a_run_of_an_instant_of_a_pause_is_found(decided_s: int) -> None:
    stored = a_run(1006, job="j3")._replace(decided_us=decided_s * SECOND_US)
    given = with_jobs(with_pause(stored, a_run(1008, skipped_for="pause")), of_run("j3", 1006))
    # It is a violation that an instant in the pause was stored. If the run was also decided during the pause, there is
    # a second violation.
    assert found(given) == ["I10"] * (2 if decided_s == 1006 else 1)


def test_an_instant_of_a_pause_that_is_skipped_for_another_reason_is_found() -> None:
    assert found(with_pause(a_run(1006, skipped_for="overlap", through_s=1008))) == ["I10", "I10"]


def test_an_instant_of_a_pause_that_is_not_told_as_skipped_is_found() -> None:
    assert found(with_pause(a_run(1008, skipped_for="pause"))) == ["I10"]


def test_an_earlier_run_that_waited_and_is_stored_during_the_pause_is_found() -> None:
    promoted = a_run(1004, job="j2")._replace(decided_us=1007 * SECOND_US)
    given = with_pause(SKIPPED_TOGETHER)
    runs = {run for run in given.runs if run.job != "j2"}
    assert found(replace(given, runs=frozenset(runs | {promoted}))) == ["I10"]


def test_an_instant_that_is_skipped_for_a_pause_which_had_ended_is_found() -> None:
    early = (change(ChangeKind.PAUSE, 1002.5), change(ChangeKind.RESUME, 1003.0))
    assert found(with_pause(SKIPPED_TOGETHER, changes=early)) == ["I10"]
    assert found(with_pause(SKIPPED_TOGETHER, changes=())) == ["I10"]
    # A pause without an answer may have begun later than its call.
    late = replace(early[0], ended_us=None)
    assert found(with_pause(SKIPPED_TOGETHER, changes=[late, *early])) == []


def test_what_was_not_answered_makes_a_pause_uncertain() -> None:
    stored = with_jobs(with_pause(a_run(1006, job="j3"), a_run(1008, skipped_for="pause")), of_run("j3", 1006))
    for changes in (
        (replace(PAUSE, ended_us=None), RESUME),
        # The call may be executed after the pause began.
        (change(ChangeKind.RESUME, 1003.0, answered=False), PAUSE, RESUME),
        (PAUSE, change(ChangeKind.RESUME, 1005.5, answered=False), RESUME),
    ):
        assert found(with_changes(stored, *changes)) == []


def altered(*runs: Run, answered: bool = True) -> Evidence:
    """Returns a schedule that was changed. From 1005 on, it fires every three seconds, for the last time at 1008, and
    skips runs only because of its catch-up policy."""
    terms = every(3, number=1, skips_for="catch_up")
    alter = change(ChangeKind.ALTER, 1005.0, answered=answered, terms=terms)
    return with_changes(with_runs(*runs, instead_of=1006), alter)


EIGHTH = a_run(1008, job="j3")


def test_an_altered_schedule_passes() -> None:
    assert found(with_jobs(altered(EIGHTH), of_run("j3", 1008, terms=1))) == []
    assert found(altered(a_run(1008, skipped_for="catch_up"))) == []
    # The checker cannot know when the call took effect, and 1006 is an instant of the old timing.
    for number in (0, 1):
        late = altered(a_run(1006, skipped_for="overlap"), EIGHTH, answered=False)
        assert found(with_jobs(late, of_run("j3", 1008, terms=number))) == []
    assert found(altered(a_run(1006, skipped_for="overlap", through_s=1008), answered=False)) == []


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param((), id="the instant of the new timing is missing"),
        pytest.param((a_run(1006, skipped_for="catch_up"), a_run(1008, skipped_for="catch_up")), id="one of the old"),
        pytest.param((a_run(1008, skipped_for="overlap"),), id="skipped by the old policy"),
    ],
)
def test_a_wrong_decision_after_an_alteration_is_found(runs: Sequence[Run]) -> None:
    assert set(found(altered(*runs))) == {"I10"}


@pytest.mark.parametrize("answered", [True, False])
def test_an_alteration_that_keeps_the_timing_drops_no_instant(answered: bool) -> None:
    same = every(2, number=1, skips_for="catch_up")
    alter = change(ChangeKind.ALTER, 1005.95, answered=answered, terms=same)
    assert (
        found(with_changes(with_runs(a_run(1006, skipped_for="catch_up", through_s=1008), instead_of=1006), alter))
        == []
    )
    # The call had not been answered at the instant 1006, but the new timing also has this instant.
    assert found(with_changes(with_runs(a_run(1008, skipped_for="catch_up"), instead_of=1006), alter)) == ["I10"]


def test_an_instant_before_an_alteration_that_was_not_decided_is_found() -> None:
    given = altered(a_run(1008, skipped_for="catch_up"))
    dropped = replace(given, runs=frozenset(run for run in given.runs if run.at_us != 1004 * SECOND_US))
    # There are two violations: the run of the instant is missing, and its job names a run that does not exist.
    assert found(dropped) == ["I10", "I10"]


def test_a_job_that_is_stored_by_terms_that_were_altered_before_is_found() -> None:
    assert found(with_jobs(altered(EIGHTH), of_run("j3", 1008))) == ["I10"]


REQUEST = "request-1"


def triggered(*jobs: str, answers: Sequence[str] = ("j3",), newer: int = 0) -> Evidence:
    """Returns a schedule with a run that was triggered at 1005.5 s. For each further job, it was triggered again a
    thousand seconds later."""
    given = a_schedule()
    later = 1010 * SECOND_US
    runs = {
        a_run(0, job=job)._replace(at_us=1005_500_000 + 1000 * SECOND_US * at, request=REQUEST)
        for at, job in enumerate(jobs)
    }
    runs |= {a_run(0)._replace(at_us=later + at, request=f"newer-{at}") for at in range(newer)}
    rows = [replace(of_run(run.job, 0), run=RunName("tick", run.at_us)) for run in runs if run.job]
    schedule = replace(given.schedules[0], triggers={REQUEST: answers, **{f"newer-{at}": [] for at in range(newer)}})
    return with_jobs(replace(given, runs=given.runs | runs, schedules=[schedule]), *rows)


def test_a_run_that_was_triggered_once_passes_whether_the_call_was_answered_or_not() -> None:
    assert found(triggered("j3")) == []
    assert found(triggered("j3", answers=["j3", "j3"])) == []
    assert found(triggered("j3", answers=[])) == []
    assert found(triggered(answers=[])) == []


def test_a_triggered_run_that_is_nowhere_is_found() -> None:
    assert found(triggered()) == ["I10"]
    # The job of the run is not the job that the answer names.
    assert found(triggered("j4")) == ["I10"]


def test_a_run_that_was_triggered_twice_by_one_call_is_found_unless_it_was_forgotten() -> None:
    assert found(triggered("j3", "j4")) == ["I10"]
    # The shard keeps only the newest runs. It must still know the first run if 18 runs are newer, but not if 19 are.
    assert found(triggered("j3", "j4", newer=18)) == ["I10"]
    assert found(triggered("j3", "j4", newer=19)) == []


def test_a_run_that_nobody_triggered_is_found() -> None:
    given = triggered("j3")
    assert found(replace(given, schedules=[replace(given.schedules[0], triggers={})])) == ["I10"]


def test_a_schedule_that_a_router_does_not_know_any_more_is_found() -> None:
    given = a_schedule()
    assert found(replace(given, schedules=[replace(given.schedules[0], denied=1)])) == ["I10"]


# ── Backfills of schedules ───────────────────────────────────────────────────────────────────────────────────────────


def backfill(
    begin_s: int, end_s: int, at_s: float, *, told: int | None, may_skip: bool = False, answered: bool = True
) -> Backfill:
    """Returns a call that takes a tenth of a second."""
    began_us = round(at_s * SECOND_US)
    return Backfill(
        begin_us=begin_s * SECOND_US,
        end_us=end_s * SECOND_US,
        may_skip=may_skip,
        began_us=began_us,
        ended_us=began_us + SECOND_US // 10 if answered else None,
        instants=told,
    )


def by_backfill(at_s: int, decided_s: float, *, job: str | None = None, skipped_for: str | None = None) -> Run:
    run = a_run(at_s, job=job, skipped_for=skipped_for)
    return run._replace(cause="backfill", decided_us=round(decided_s * SECOND_US))


def with_backfills(
    *runs: Run, calls: Sequence[Backfill], given: Evidence | None = None, changes: Sequence[Change] = ()
) -> Evidence:
    given = a_schedule() if given is None else given
    known = {row.job for row in given.rows}
    jobs = {run.job: run.at_us // SECOND_US for run in runs if run.job}
    schedule = replace(given.schedules[0], backfills=calls, changes=changes)
    given = replace(given, schedules=[schedule], runs=given.runs | set(runs))
    return with_jobs(given, *(of_run(job, at_s) for job, at_s in jobs.items() if job not in known))


# The instants 998 and 1000 are before the creation of the schedule. The instant 1002 has a run.
BEFORE = backfill(998, 1003, 1004.5, told=3)
EARLY = by_backfill(998, 1004.55, job="b1"), by_backfill(1000, 1004.55, job="b2")


def test_a_backfill_whose_instants_have_one_run_each_passes_whether_it_was_answered_or_not() -> None:
    assert found(with_backfills(*EARLY, calls=[BEFORE, replace(BEFORE, began_us=BEFORE.began_us + SECOND_US)])) == []
    unanswered = backfill(998, 1003, 1004.5, told=None, answered=False)
    assert found(with_backfills(*EARLY, calls=[unanswered])) == []
    assert found(with_backfills(calls=[unanswered])) == []
    # A run may wait first, if the policy of the backfill says so.
    waited = [by_backfill(1000, 1004.55), by_backfill(1000, 1006.0, job="b2")]
    assert found(with_backfills(EARLY[0], *waited, calls=[replace(BEFORE, may_skip=True)])) == []
    skipped = by_backfill(1000, 1004.55, skipped_for="overlap")
    assert found(with_backfills(EARLY[0], skipped, calls=[replace(BEFORE, may_skip=True)])) == []


@pytest.mark.parametrize(
    ("runs", "calls"),
    [
        pytest.param(EARLY[:1], [BEFORE], id="an instant is left out"),
        pytest.param([*EARLY, by_backfill(1000, 1005.55, job="b3")], [BEFORE, BEFORE], id="one is stored twice"),
        pytest.param([*EARLY, by_backfill(1002, 1004.55, job="b3")], [BEFORE], id="one that had a run is stored"),
        pytest.param(EARLY, [], id="nobody asked"),
        pytest.param([*EARLY, by_backfill(996, 1004.55, job="b3")], [BEFORE], id="one outside the range"),
        pytest.param(EARLY, [backfill(998, 1003, 1005.5, told=3)], id="stored before anybody asked"),
        pytest.param([*EARLY, by_backfill(999, 1004.55, job="b3")], [BEFORE], id="one that the calendar has not"),
        pytest.param(
            [EARLY[0], by_backfill(1000, 1004.55, skipped_for="overlap")], [BEFORE], id="skipped although all may run"
        ),
        pytest.param(
            [EARLY[0], by_backfill(1000, 1004.55, skipped_for="catch_up")],
            [replace(BEFORE, may_skip=True)],
            id="skipped for what is no reason of backfills",
        ),
        pytest.param([EARLY[0], by_backfill(1000, 1004.55)], [BEFORE], id="it waits for ever"),
        pytest.param(EARLY, [replace(BEFORE, instants=2)], id="the answer tells of fewer"),
    ],
)
def test_a_wrong_decision_of_a_backfill_is_found(runs: Sequence[Run], calls: Sequence[Backfill]) -> None:
    assert set(found(with_backfills(*runs, calls=calls))) == {"I10"}


def test_a_backfill_makes_no_instants_after_the_end_of_its_schedule() -> None:
    late = backfill(1007, 1013, 1014, told=1)
    assert found(with_backfills(calls=[late])) == []
    assert found(with_backfills(by_backfill(1010, 1014.05, job="b1"), calls=[replace(late, instants=2)])) == [
        "I10",
        "I10",
    ]


def test_a_run_that_may_have_been_forgotten_may_be_backfilled_again() -> None:
    again = by_backfill(1002, 1009.05, job="b1")
    call = backfill(1002, 1003, 1009.0, told=1)
    newer = [by_backfill(at_s, 1008.05, job=f"n{at_s}") for at_s in range(1004, 1044, 2)]
    # The backfill is for instants of the schedule, some of which the schedule itself has decided.
    of_newer = backfill(1010, 1044, 1008.0, told=17)
    assert "I10" in found(with_backfills(again, calls=[call]))
    given = with_runs()
    kept = frozenset(run for run in given.runs if run.at_us <= 1002 * SECOND_US)
    longer = replace(given.schedules[0], ends_us=1044 * SECOND_US)
    given = replace(given, schedules=[longer], runs=kept, rows=[row for row in given.rows if row.job == "j1"])
    given = changed(
        given,
        deliveries=[one for one in given.history.deliveries if one.lease.job == "j1"],
        settles=[one for one in given.history.settles if one.lease.job == "j1"],
    )
    of_all = replace(of_newer, begin_us=1004 * SECOND_US, instants=20)
    assert found(with_backfills(again, *newer, calls=[of_all, call], given=given)) == []
    less = replace(of_all, begin_us=1006 * SECOND_US, instants=19)
    fourth = a_run(1004, skipped_for="overlap")._replace(decided_us=1009_500_000)
    assert found(with_backfills(again, *newer[1:], fourth, calls=[less, call], given=given)) == ["I10"]


def test_an_instant_of_a_pause_may_be_backfilled_during_it_and_after_it() -> None:
    for at_s in (1007.0, 1009.5):
        runs = by_backfill(1006, at_s + 0.05, job="b1"), a_run(1008, skipped_for="pause")
        call = backfill(1006, 1007, at_s, told=1)
        given = with_runs(instead_of=1006)
        assert found(with_backfills(*runs, calls=[call], changes=[PAUSE, RESUME], given=given)) == []
        # When the first instant of the pause is stored, the rest of the pause gets a record again.
        together = by_backfill(1006, at_s + 0.05, job="b1"), SKIPPED_TOGETHER, runs[1]
        assert found(with_backfills(*together, calls=[call], changes=[PAUSE, RESUME], given=given)) == []
        # No record says that the other instant was skipped.
        assert found(with_backfills(runs[0], calls=[call], changes=[PAUSE, RESUME], given=given)) == ["I10"]


def test_a_run_of_a_backfill_that_has_waited_and_is_stored_during_a_pause_is_found() -> None:
    runs = by_backfill(1000, 1004.55), by_backfill(1000, 1007.0, job="b2")
    given = with_backfills(
        *runs,
        SKIPPED_TOGETHER,
        calls=[backfill(1000, 1001, 1004.5, told=1, may_skip=True)],
        changes=[PAUSE, RESUME],
        given=with_runs(instead_of=1006),
    )
    assert found(given) == ["I10"]


def test_a_backfill_after_an_alteration_has_the_instants_of_the_new_timing() -> None:
    given = with_jobs(altered(EIGHTH), of_run("j3", 1008, terms=1))
    call = backfill(998, 1002, 1008.5, told=1)
    stored = by_backfill(999, 1008.55, job="b1")
    for calls, expected in (([call], []), ([replace(call, instants=2)], ["I10"])):
        schedule = replace(given.schedules[0], backfills=calls)
        now = replace(given, schedules=[schedule], runs=given.runs | {stored})
        assert found(with_jobs(now, of_run("b1", 999, terms=1))) == expected


# ── What operators do to workflows ───────────────────────────────────────────────────────────────────────────────────


def with_operator(given: Evidence, *changes: Change, **fields: Any) -> Evidence:
    one = OperatedFlow(workflow="w", org=ORG, changes=changes, **fields)
    return replace(given, operated=[one])


def released(at_s: float) -> list[Release]:
    return [Release("w", "j2", round(at_s * SECOND_US))]


def test_a_node_that_is_released_before_or_after_a_pause_passes() -> None:
    paused = with_operator(workflow_of_two(), PAUSE, RESUME)
    for at_s in (1004.5, 1005.05, 1009.05):
        assert found(replace(paused, releases=released(at_s))) == []
    # These calls may have ended the pause.
    for ends in (change(ChangeKind.RESUME, 1005.5, answered=False), change(ChangeKind.CANCEL, 1005.5, answered=False)):
        ended = with_operator(
            workflow_of_two(), PAUSE, ends, RESUME, cancelling_s=11.5 if ends.kind is ChangeKind.CANCEL else None
        )
        assert found(replace(ended, releases=released(1007.0))) == []


def test_a_node_that_is_released_during_a_pause_is_found() -> None:
    paused = with_operator(workflow_of_two(), PAUSE, RESUME)
    assert found(replace(paused, releases=released(1007.0))) == ["I11"]


def a_cancelled_workflow(*, leased_s: float = 1000.0, state: str = "cancelled", **nodes: str) -> Evidence:
    """Returns a workflow that was cancelled at 1005 s, which is 11.5 s by the clients' clock. At that time, job j1 was
    leased. The callback j3 ran later."""
    states = {"j1": "cancelled", "j2": "cancelled", "j3": "succeeded"} | nodes
    flow = Flow(workflow="w", org=ORG, shard=SHARD, state=state, nodes=states, callbacks=frozenset({"j3"}))
    first, second, third = (replace(enqueue(job, 10.0), workflow="w") for job in ("j1", "j2", "j3"))
    leased_us = round(leased_s * SECOND_US)
    given = evidence(
        enqueues=[
            first,
            replace(second, after=["j1"], delay_s=math.inf),
            replace(third, after=["j1", "j2"], delay_s=math.inf),
        ],
        deliveries=[delivery("j1", 11.0, lease=1), delivery("j3", 13.0, lease=1)],
        settles=[settle(Verb.ACK, "j3", 14.0, lease=1)],
        rows=[
            replace(succeeded("j1", state=State.CANCELLED), leased_at_us=leased_us),
            replace(succeeded("j2", state=State.CANCELLED), lease=None, leased_at_us=None),
            replace(succeeded("j3"), leased_at_us=1007 * SECOND_US),
        ],
        flows=[flow],
    )
    return with_operator(given, change(ChangeKind.CANCEL, 1005.0), cancelling_s=11.5, ended_as="cancelled")


def test_a_cancelled_workflow_whose_callback_runs_passes() -> None:
    assert found(a_cancelled_workflow()) == []


def test_a_node_that_is_leased_after_its_workflow_was_cancelled_is_found() -> None:
    assert found(a_cancelled_workflow(leased_s=1005.3)) == ["I11"]
    # The attempt of the node may also have ended after the cancel.
    given = a_cancelled_workflow()
    late = past(1, "expired", 1006 * SECOND_US, 1007 * SECOND_US)
    rows = [replace(given.rows[0], past=[late], lease=None, leased_at_us=None), *given.rows[1:]]
    assert found(replace(given, rows=rows)) == ["I11"]


def test_a_cancelled_workflow_that_has_not_ended_or_has_ended_otherwise_is_found() -> None:
    assert found(a_cancelled_workflow(state="running")) == ["I11"]
    assert found(a_cancelled_workflow(state="failed")) == ["I11"]
    # A node of the workflow is stranded.
    assert found(a_cancelled_workflow(j2="blocked")) == ["I11"]


def test_a_workflow_or_its_callback_that_is_cancelled_and_nobody_said_so_is_found() -> None:
    given = a_cancelled_workflow()
    assert set(found(replace(given, operated=[]))) == {"I2", "I11"}
    cancelled = [*given.rows[:2], succeeded("j3", state=State.CANCELLED)]
    (flow,) = given.flows
    without = changed(
        replace(given, rows=cancelled, flows=[replace(flow, nodes={**flow.nodes, "j3": "cancelled"})]),
        deliveries=given.history.deliveries[:1],
        settles=[],
    )
    assert found(without) == ["I2"]


def a_retry(*, answered: bool = True, state: str = "succeeded", flows: int = 1, **names: str) -> Evidence:
    """Returns a retry of a workflow. Job r2 repeats j2, and job r3 repeats the callback j3. Job j1 had succeeded, and
    the retry takes it over."""
    given = a_cancelled_workflow(j1="succeeded")
    (old,) = given.flows
    old = replace(old, names={job: job for job in old.nodes})
    jobs = {"j1": "j1", "r2": "j2", "r3": "j3"} | names
    flow = Flow(
        workflow="v",
        org=ORG,
        shard=SHARD,
        state=state,
        nodes=dict.fromkeys(jobs, "succeeded"),
        callbacks=frozenset({"r3"}),
        retry_of="w",
        names=jobs,
    )
    new = [job for job in jobs if job != "j1"]
    at_us = {job: (1010 + 2 * at) * SECOND_US for at, job in enumerate(new)}
    rows = [
        replace(succeeded(job, history=[past(1, "acked", at_us[job], at_us[job] + SECOND_US)]), leased_at_us=at_us[job])
        for job in new
    ]
    rows = [replace(succeeded("j1"), leased_at_us=1000 * SECOND_US), *given.rows[1:], *rows]
    given = changed(
        given,
        deliveries=[
            *given.history.deliveries,
            *(delivery(job, 20.0 + at, lease=1, payload_job=jobs[job]) for at, job in enumerate(new)),
        ],
        settles=[
            settle(Verb.ACK, "j1", 11.2, lease=1),
            *given.history.settles,
            *(settle(Verb.ACK, job, 20.5 + at, lease=1) for at, job in enumerate(new)),
        ],
    )
    one = replace(given.operated[0], retry="v", retried=answered)
    books = [replace(given.books[0], accepted=len(rows))]
    return replace(given, rows=rows, flows=[old, *[flow] * flows], operated=[one], books=books)


def test_a_retry_that_runs_what_had_not_succeeded_passes_whether_it_was_answered_or_not() -> None:
    assert found(a_retry()) == []
    assert found(a_retry(answered=False)) == []


def test_a_retry_that_is_nowhere_or_there_twice_is_found() -> None:
    given = a_retry()
    known = replace(given, flows=given.flows[:1])
    assert "I11" in found(known)
    assert "I11" in found(a_retry(flows=2))


def test_a_node_of_a_retry_that_runs_twice_or_not_at_all_is_found() -> None:
    assert set(found(a_retry(r4="j2"))) == {"I11"}
    # The retry runs a node that had succeeded.
    assert set(found(a_retry(r4="j1"))) == {"I11"}
    # The retry runs a node that the old workflow did not have.
    assert set(found(a_retry(r4="j9"))) == {"I11"}
    given = a_retry()
    old, flow = given.flows
    lacking = replace(flow, nodes={"j1": "succeeded", "r3": "succeeded"}, names={"j1": "j1", "r3": "j3"})
    assert "I11" in found(replace(given, flows=[old, lacking]))


def test_a_retry_that_has_not_ended_or_runs_in_another_order_is_found() -> None:
    assert found(a_retry(state="running")) == ["I11"]
    given = a_retry()
    rows = [replace(row, leased_at_us=1010 * SECOND_US, past=()) if row.job == "r3" else row for row in given.rows]
    assert found(replace(given, rows=rows)) == ["I11"]


def test_a_retry_that_nobody_asked_for_is_found() -> None:
    given = a_retry()
    assert "I11" in found(replace(given, operated=[replace(given.operated[0], retry="", retried=False)]))


def test_a_job_of_a_retry_that_does_not_wait_as_before_is_found() -> None:
    """In the old workflow, job j2 added node j3 and waited for it. In the retry, j2 runs again before j3."""
    given = a_retry()
    wait = addition(9.0, jobs={"j3": "j3"}, lease=LeaseKey("j2", 7))
    wait = replace(wait, nodes={"j3": []}, wait=True)
    whats = [one.what for one in check(changed(given, additions=[wait]))]
    assert [what for what in whats if "was leased before" in what] == [
        "workflow v on s1: node j2 was leased before node j3, which it waits for, had ended"
    ]
    lost = replace(wait, call=replace(wait.call, outcome=Outcome.UNKNOWN), jobs={})
    assert found(changed(given, additions=[lost])) == []


def test_the_jobs_of_a_cancelled_workflow_that_the_backup_lacks_may_be_cancelled() -> None:
    """The workflow arrived after the backup, and its finished jobs stayed on another shard."""
    given = replace(a_cancelled_workflow(), flows=[])
    given = restored(given, backup=given.rows, replaced=given.rows)
    restore = given.restored
    assert restore is not None
    restore = replace(restore, replaced=replace(restore.replaced, flows=frozenset({"w"})))
    given = replace(given, restored=restore)
    assert (found(given), excused(given)) == ([], ["I1"])
    assert set(found(replace(given, operated=[]))) == {"I2", "I11"}


def test_a_node_of_a_retry_that_was_taken_over_may_wait_for_one_that_runs_again() -> None:
    given = a_retry()
    assert any(one.job == "j1" for one in given.history.enqueues)
    # In the old workflow, node j1 waits for j2, so j1 ran after j2 had failed.
    enqueues = [replace(one, after=["j2"] if one.job == "j1" else []) for one in given.history.enqueues]
    whats = [violation.what for violation in check(changed(given, enqueues=enqueues))]
    assert not any("was leased before" in what for what in whats)


def test_only_the_dead_jobs_of_a_workflow_that_is_cancelled_or_retried_are_cancelled_later() -> None:
    given = a_retry()
    old, flow = given.flows
    dead = replace(old, nodes={**old.nodes, "j2": "failed"})
    assert found(replace(given, flows=[dead, flow])) == []
    one = replace(given.operated[0], retry="", retried=False)
    cancelled = replace(given, flows=[dead], operated=[one])
    untouched = replace(given, flows=[dead], operated=[replace(one, cancelling_s=None)])
    what = "workflow w on s1: the node of job j2 has failed, and the job is cancelled"
    assert what not in [violation.what for violation in check(cancelled)]
    assert what in [violation.what for violation in check(untouched)]


# ── Nodes that wait for signals ──────────────────────────────────────────────────────────────────────────────────────


def signal(
    at_s: float, *, payload: str = "yes", is_first: bool = True, node: str = "j1", workflow: str = "w", code: str = ""
) -> Signal:
    """Returns a signal for job j1. The signal is answered with `code`, or with OK if there is no code."""
    outcome = {"": Outcome.OK, "UNAVAILABLE": Outcome.UNKNOWN}.get(code, Outcome.ERROR)
    made = replace(call(Verb.SIGNAL, at_s), outcome=outcome, code=code)
    is_first = is_first and outcome is Outcome.OK
    return Signal(call=made, workflow=workflow, node=node, payload=payload, is_first=is_first)


def a_signalled_workflow(*signals: Signal, **fields: Any) -> Evidence:
    """Returns a workflow in which job j1 waits for a signal for 5 s. The wait begins at 1000 s by the shard's clock,
    which is 10 s by the clients' clock. Job j2 waits for job j1. `fields`: fields of the row of job j1."""
    given = workflow_of_two()
    waiting, second = given.history.enqueues
    of_row: dict[str, Any] = {"signal": "yes", **fields}
    row = replace(succeeded("j1"), lease=None, leased_at_us=None, stored_us=1000 * SECOND_US, **of_row)
    state = "succeeded" if row.state is State.SUCCEEDED else "failed"
    return changed(
        replace(given, rows=[row, given.rows[1]], flows=[flow_of_two(state, j1=str(row.state))]),
        enqueues=[replace(waiting, timeout_s=5.0, delay_s=math.inf), second],
        signals=signals,
        deliveries=given.history.deliveries[1:],
        settles=given.history.settles[1:],
    )


def an_unsignalled_workflow(*signals: Signal, at_s: float = 1005.0, came_s: float = 15.2) -> Evidence:
    """Returns a workflow in which no signal came for job j1 until `at_s`. Job j2 was delivered at `came_s`."""
    given = a_signalled_workflow(*signals, state=State.CANCELLED, signal=None, unsignalled_us=round(at_s * SECOND_US))
    return changed(
        given, deliveries=[delivery("j2", came_s, lease=2)], settles=[settle(Verb.ACK, "j2", came_s + 1, lease=2)]
    )


def test_a_node_that_ends_with_its_first_signal_passes() -> None:
    assert found(a_signalled_workflow(signal(12.0), signal(12.5, payload="no", is_first=False))) == []
    # The answer to the signal that counts was lost, or the signals came at the same time.
    lost, second = signal(12.0, code="UNAVAILABLE"), signal(12.3, is_first=False)
    assert found(a_signalled_workflow(lost, second)) == []
    assert found(a_signalled_workflow(signal(12.05), signal(12.0, payload="no", is_first=False))) == []


def test_a_node_that_a_signal_ended_otherwise_than_it_was_answered_is_found() -> None:
    no, later = signal(12.0, payload="no", is_first=False), signal(12.5)
    # No client gave this signal, or another signal was the first.
    for signals in ([], [replace(no, is_first=True), replace(later, is_first=False)], [no, later]):
        assert "I11" in found(a_signalled_workflow(*signals)), signals
    assert found(a_signalled_workflow(signal(12.0), signal(12.05))) == ["I11"]
    assert found(a_signalled_workflow(signal(12.0, code="FAILED_PRECONDITION"), signal(12.0))) == ["I11"]


def test_a_node_that_succeeded_without_a_signal_is_found() -> None:
    assert "I11" in found(a_signalled_workflow(signal(12.0), signal=None))


def test_a_job_that_ends_with_a_signal_although_it_waits_for_none_is_found() -> None:
    given = a_signalled_workflow(signal(12.0))
    waiting, second = given.history.enqueues
    assert "I11" in found(changed(given, enqueues=[replace(waiting, timeout_s=None), second]))


def test_a_node_that_fails_without_a_signal_once_its_time_is_over_passes() -> None:
    assert found(an_unsignalled_workflow()) == []
    assert found(an_unsignalled_workflow(signal(16.0, code="FAILED_PRECONDITION"))) == []
    assert found(an_unsignalled_workflow(signal(12.0, code="UNAVAILABLE"))) == []


def test_a_node_that_fails_too_early_or_although_it_had_its_signal_is_found() -> None:
    assert found(an_unsignalled_workflow(at_s=1004.9)) == ["I11"]
    for is_first in (True, False):
        assert found(an_unsignalled_workflow(signal(12.0, is_first=is_first))) == ["I11"]
    # The time of the node begins when the transaction that released the node began.
    given = an_unsignalled_workflow()
    for began_s, expected in ((1000.0, []), (1003.0, ["I11"])):
        release = Release("w", "j1", 1004 * SECOND_US, round(began_s * SECOND_US))
        assert found(replace(given, releases=[release])) == expected


def test_a_node_that_is_cancelled_with_its_signal_although_nobody_cancelled_it_is_found() -> None:
    given = a_signalled_workflow(signal(12.0), state=State.CANCELLED, signal=None)
    assert "I11" in found(given)
    # An early signal is kept, but the job can still be cancelled.
    cancelled = Cancel(call=call(Verb.CANCEL, 12.5), job="j1", answer=Answer.OK)
    assert found(changed(given, cancels=[cancelled])) == []


def test_a_job_that_waits_for_a_signal_and_comes_to_a_consumer_is_found() -> None:
    given = a_signalled_workflow(signal(12.0))
    came = delivery("j1", 11.5, lease=1, of=Verb.CONSUME)
    assert found(changed(given, deliveries=[*given.history.deliveries, came])) == ["I11"]
    assert "I11" in found(a_signalled_workflow(signal(12.0), state=State.DEAD, signal=None))


def test_a_node_that_comes_before_the_signal_that_it_waits_for_is_found() -> None:
    assert found(a_signalled_workflow(signal(13.1))) == ["I11"]
    assert found(a_signalled_workflow(signal(12.0, code="FAILED_PRECONDITION"), signal(13.1))) == ["I11", "I11"]
    # The time of the node was over at 15 s.
    assert found(an_unsignalled_workflow(came_s=14.9)) == ["I11"]


@pytest.mark.parametrize(("acked_s", "is_found"), [(12.8, False), (13.1, True)])
def test_a_node_that_an_early_signal_ended_before_the_nodes_that_it_waits_for_is_found(
    acked_s: float, is_found: bool
) -> None:
    """Job j2 waits for the signal of job j1, and job j1 waits for job j0."""
    given = a_signalled_workflow(signal(10.5))
    waiting, second = given.history.enqueues
    given = changed(
        replace(
            given,
            rows=[*given.rows, succeeded("j0")],
            books=[replace(given.books[0], accepted=3)],
            flows=[flow_of_two(j0="succeeded")],
        ),
        enqueues=[replace(enqueue("j0", 9.0), workflow="w"), replace(waiting, after=["j0"]), second],
        deliveries=[delivery("j0", 11.0, lease=1), *given.history.deliveries],
        settles=[settle(Verb.ACK, "j0", acked_s, lease=1), *given.history.settles],
    )
    assert found(given) == ["I11"] * is_found


@pytest.mark.parametrize("code", ["NOT_FOUND", "INVALID_ARGUMENT"])
def test_a_signal_that_is_refused_as_if_its_node_waited_for_none_is_found(code: str) -> None:
    assert found(a_signalled_workflow(signal(12.0), signal(12.5, code=code))) == ["I11"]


def test_a_signal_ends_the_node_of_the_workflow_that_it_names_also_in_a_retry() -> None:
    """In workflow w, which was cancelled, node j2 waited for a signal. In v, the retry of w, job r2 has this node."""
    given = a_retry()
    first, waiting, callback = given.history.enqueues
    rows = [replace(row, signal="yes", lease=None) if row.job == "r2" else row for row in given.rows]
    given = changed(
        replace(given, rows=rows),
        enqueues=[first, replace(waiting, timeout_s=5.0), callback],
        deliveries=[one for one in given.history.deliveries if one.lease.job != "r2"],
    )

    def about_signals(workflow: str) -> list[str]:
        signals = [signal(10.5, node="j2", workflow=workflow)]
        return [one.what for one in check(changed(given, signals=signals)) if "signal" in one.what]

    assert about_signals("v") == []
    assert about_signals("w") == ["job r2 succeeded with the signal 'yes', which nobody gave"]


def test_a_node_whose_time_was_over_before_a_backup_was_restored_that_lacks_it_has_ended() -> None:
    given = an_unsignalled_workflow()
    lost = restored(replace(given, rows=given.rows[1:]), replaced=given.rows)
    assert "I11" not in found(lost)
    assert "I11" in found(restored(replace(given, rows=given.rows[1:]), replaced=given.rows[1:]))


def test_only_a_backup_excuses_a_signal_that_has_no_effect() -> None:
    given = an_unsignalled_workflow(signal(12.0))
    kept = [live("j1"), *given.rows[1:]]
    given = restored(given, backup=kept, replaced=[succeeded("j1"), *given.rows[1:]])
    assert "I11" not in found(given)
    assert "I11" in excused(given)

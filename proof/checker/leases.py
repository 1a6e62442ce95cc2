"""Checks I2: a job has one lease at a time, and a lease that has ended changes nothing.

A client does not see the whole life of a lease: the lease began before the job arrived, and ended at a moment that only
the shard knows. But three things are certain.

- A settle, an extend or an addition of nodes is answered OK only if it finds the lease live. So the lease was live at
  least until that call began. If the call was repeated, the lease was live at least until the first try began: a
  repeated ack is answered OK because the first try acked the job.
- A lease that a Dequeue gave lasts at least until its window has passed since the beginning of the call, because the
  lease begins later than the call. Only the holder of the lease, or a cancel of the job, ends the lease earlier. The
  lease of a job that came on a stream is excluded, because nobody knows when such a lease began.
- Only the consumer that has read a job gives it back. A router gives back only jobs that no consumer has read.

A job's attempts are numbered, so it is known which of two leases with different numbers is later. If the job arrived
with the later lease while the earlier lease was certainly live, both leases were live at the same time.

If a backup was restored, the job histories of the replaced database are checked as well. Whatever the backup lacks may
be done again (proof/checker/backup.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from proof.checker.backup import Backup, answered_ok, books_have, latest_by_job
from proof.checker.evidence import CLOCK_S, Evidence, Row, State, Violation
from proof.checker.moves import Moves
from proof.checker.workflows import by_operators
from proof.history import ENDED, Answer, Call, Cancel, Delivery, LeaseKey, Outcome, Settle, Verb

# For each outcome in a job's history, the calls that lead to it.
_OUTCOMES = {"acked": (Verb.ACK,), "nacked": (Verb.NACK, Verb.KILL), "released": (Verb.RELEASE,)}


def check(evidence: Evidence) -> Iterator[Violation]:
    history = evidence.history
    moves = Moves(evidence)
    settles: defaultdict[LeaseKey, list[Settle]] = defaultdict(list)
    for settle in history.settles:
        settles[settle.lease].append(settle)
    for added in history.additions:
        # Like an extend, an addition succeeds only if it finds the lease live.
        if added.call.outcome is Outcome.OK:
            call = replace(added.call, verb=Verb.EXTEND)
            settles[added.lease].append(Settle(call=call, lease=added.lease, answer=Answer.OK))
        # Like a release, a wait ends the lease, and the attempt does not count. While the org moves, the router first
        # stores the nodes on one shard and then ends the lease on the other shard, where the lease may have expired
        # before.
        if added.may_end_lease:
            call = replace(added.call, verb=Verb.RELEASE)
            answer = Answer.OK if added.waits and not moves.may_move(call) else None
            settles[added.lease].append(Settle(call=call, lease=added.lease, answer=answer))
    cancels: defaultdict[str, list[Cancel]] = defaultdict(list)
    for cancel in history.cancels:
        cancels[cancel.job].append(cancel)
    for cancel in (*_by_schedules(evidence), *(cancel for _, cancel in by_operators(evidence))):
        cancels[cancel.job].append(cancel)
    deliveries: defaultdict[str, list[Delivery]] = defaultdict(list)
    for delivery in history.deliveries:
        deliveries[delivery.lease.job].append(delivery)
    backup = Backup(evidence)
    rows = latest_by_job(evidence.rows, lambda row: row.departing or backup.is_second(row))

    for lease, times in Counter(delivery.lease for delivery in history.deliveries).items():
        if times > 1:
            yield _violation(f"lease {lease.number} of job {lease.job} was given out {times} times")
    slack_s = CLOCK_S + history.drift_s
    for job, of_job in deliveries.items():
        yield from _overlaps(of_job, settles, cancels[job], backup, slack_s=slack_s)
        yield from _after_the_end(of_job, settles, cancels[job], backup)
        yield from _refused(of_job, settles, cancels[job], backup, slack_s=slack_s)
    yield from _two_ends(settles, backup)
    yield from _used_after_the_end(settles, backup)
    read = {delivery.lease for delivery in history.deliveries}
    for row in evidence.rows:
        yield from _in_order(row)
        yield from _unasked(row, settles, read)
        if row.state is State.CANCELLED and row.unsignalled_us is None and not cancels[row.job]:
            yield _violation(f"job {row.job} was cancelled on {row.shard}, and nobody said so")
    # The replaced database did not give the answers that came after its replacement.
    before = {
        lease: [one if backup.was_answered_before(one.call) else replace(one, answer=None) for one in of_lease]
        for lease, of_lease in settles.items()
    }
    for row in backup.lost_rows:
        yield from _in_order(row)
        yield from _unasked(row, before, read)
    for lease, of_lease in settles.items():
        yield from _undone(rows.get(lease.job), lease, of_lease, backup)
    for cancel in history.cancels:
        if cancel.answer is Answer.OK and cancel.job in rows and rows[cancel.job].state is not State.CANCELLED:
            what = f"job {cancel.job} was cancelled, and is {rows[cancel.job].state}"
            yield _violation(what, excused=backup.forgot_cancel(cancel))


def _by_schedules(evidence: Evidence) -> Iterator[Cancel]:
    """Yields the cancels that schedules caused because their overlap policy cancels the job of the previous run.
    Routers made these cancels, at unknown times."""
    cancelling = {
        (schedule.org, schedule.name)
        for schedule in evidence.schedules
        if schedule.terms.cancels or any(terms.cancels for _, _, terms in schedule.alterations)
    }
    for row in evidence.rows:
        if row.state is State.CANCELLED and row.run is not None and (row.org, row.run.schedule) in cancelling:
            call = Call(client="schedule", verb=Verb.CANCEL, org=row.org, began_s=float("-inf"))
            yield Cancel(call=call, job=row.job, answer=None)


# ── By what clients saw ──────────────────────────────────────────────────────────────────────────────────────────────


def _overlaps(
    of_job: Sequence[Delivery],
    settles: defaultdict[LeaseKey, list[Settle]],
    cancels: Sequence[Cancel],
    backup: Backup,
    *,
    slack_s: float,
) -> Iterator[Violation]:
    cancelled_s = min((cancel.call.began_s for cancel in cancels), default=float("inf"))
    for earlier in of_job:
        live_until_s = _live_until_s(earlier, settles[earlier.lease], cancelled_s, slack_s=slack_s)
        # The time at which the replacement of the database ended the lease. Answers after this time come from the
        # backup.
        went_s = backup.ends_by(earlier.lease.job, earlier.call.began_s)
        for later in of_job:
            if _is_later(later, earlier, backup) and later.received_s < live_until_s:
                yield _violation(
                    f"job {earlier.lease.job}: {later.call.client} had attempt {later.attempt} while attempt "
                    f"{earlier.attempt} of {earlier.call.client} was live, {live_until_s - later.received_s:.3f} s "
                    "before its end",
                    excused=later.received_s > went_s and not _was_answered_later(settles[earlier.lease], went_s),
                )


def _is_later(one: Delivery, other: Delivery, backup: Backup) -> bool:
    """Returns whether `one` came later than `other`, according to their attempt numbers. After a restore, the numbers
    continue from an older value."""
    before = backup.was_given_before(other)
    return one.attempt > other.attempt if backup.was_given_before(one) == before else before


def _was_answered_later(settles: Sequence[Settle], at_s: float) -> bool:
    return any(one.answer is Answer.OK and one.call.began_s >= at_s for one in settles)


def _live_until_s(delivery: Delivery, settles: Sequence[Settle], cancelled_s: float, *, slack_s: float) -> float:
    """Returns the time until which the lease was certainly live, or minus infinity if nothing is certain."""
    extends = [one for one in settles if one.call.verb is Verb.EXTEND and one.answer is Answer.OK]
    ends = [one for one in settles if one.call.verb is not Verb.EXTEND]
    # The time at which the job arrived proves nothing, because the consumer may have been frozen before it read the
    # job.
    until_s = max((one.call.began_s for one in extends), default=float("-inf"))
    for verb in {one.call.verb for one in ends if one.answer is Answer.OK}:
        until_s = max(until_s, min(one.call.began_s for one in ends if one.call.verb is verb))
    if delivery.call.verb is Verb.DEQUEUE:
        windows = [(delivery.call.began_s, delivery.window_s), *((one.call.began_s, one.span_s) for one in extends)]
        deadline_s = max(began_s + window_s for began_s, window_s in windows)
        ended_s = min([cancelled_s, *(one.call.began_s for one in ends)])
        until_s = max(until_s, min(deadline_s, ended_s) - slack_s)
    return until_s


def _after_the_end(
    of_job: Sequence[Delivery],
    settles: defaultdict[LeaseKey, list[Settle]],
    cancels: Sequence[Cancel],
    backup: Backup,
) -> Iterator[Violation]:
    """Yields a violation for each delivery of a job that was already finished, dead or cancelled."""
    # Each tuple is one end of the job. It has the verb of the call that ended the job, the time at which this call was
    # answered, and the attempt. The last two fields say whether a restored backup lacks this end, and whether the end
    # belongs to the time before the restore.
    ends: list[tuple[Verb, float | None, int, bool, bool]] = [
        (
            settle.call.verb,
            settle.call.ended_s,
            delivery.attempt,
            backup.forgot(settle),
            backup.was_given_before(delivery),
        )
        for delivery in of_job
        for settle in settles[delivery.lease]
        if settle.call.verb in {Verb.ACK, Verb.KILL} and settle.answer is Answer.OK
    ]
    ends += [
        (
            Verb.CANCEL,
            cancel.call.ended_s,
            1 << 31,
            backup.forgot_cancel(cancel),
            backup.was_answered_before(cancel.call),
        )
        for cancel in cancels
        if cancel.answer is Answer.OK
    ]
    for verb, ended_s, attempt, forgotten, before in ends:
        assert ended_s is not None, "what was answered has ended"
        for delivery in of_job:
            came_after = delivery.call.began_s > ended_s
            if backup.was_given_before(delivery) == before:
                came_after |= delivery.attempt > attempt
            elif before:
                # The lease was given after the restore, and the end was answered before the restore.
                came_after |= ended_s < backup.swapped_s
            if came_after:
                yield _violation(
                    f"job {delivery.lease.job} came to {delivery.call.client} as attempt {delivery.attempt}, after "
                    f"its {verb} was answered OK",
                    excused=forgotten and delivery.received_s > backup.swapped_s,
                )


def _refused(
    of_job: Sequence[Delivery],
    settles: defaultdict[LeaseKey, list[Settle]],
    cancels: Sequence[Cancel],
    backup: Backup,
    *,
    slack_s: float,
) -> Iterator[Violation]:
    """Yields a violation for each ack that was answered STALE within the window of a Dequeue, although no other call
    had settled or cancelled the job."""
    for delivery in of_job:
        if delivery.call.verb is not Verb.DEQUEUE:
            continue
        deadline_s = delivery.call.began_s + delivery.window_s - slack_s
        of_lease = [one for one in settles[delivery.lease] if one.call.verb is not Verb.EXTEND]
        for ack in of_lease:
            ended_s = ack.call.ended_s
            if ack.call.verb is not Verb.ACK or ack.answer is not Answer.STALE or ended_s is None:
                continue
            others = [*(one.call for one in of_lease if one is not ack), *(one.call for one in cancels)]
            if ended_s < deadline_s and all(other.began_s > ended_s for other in others):
                yield _violation(
                    f"job {delivery.lease.job}: an ack of attempt {delivery.attempt} of {delivery.call.client} was "
                    f"answered STALE {deadline_s - ended_s:.3f} s before the end of its window",
                    excused=ended_s > backup.ends_by(delivery.lease.job, delivery.call.began_s),
                )


def _two_ends(settles: defaultdict[LeaseKey, list[Settle]], backup: Backup) -> Iterator[Violation]:
    acked: defaultdict[str, set[int]] = defaultdict(set)
    forgotten: defaultdict[str, set[int]] = defaultdict(set)
    for lease, of_lease in settles.items():
        oks = [one for one in of_lease if one.call.verb is Verb.ACK and one.answer is Answer.OK]
        if oks:
            acked[lease.job].add(lease.number)
        if any(map(backup.forgot, oks)):
            forgotten[lease.job].add(lease.number)
    for job, leases in acked.items():
        if len(leases) > 1:
            what = f"acks of {len(leases)} leases of job {job} were answered OK"
            yield _violation(what, excused=len(leases - forgotten[job]) <= 1)


def _used_after_the_end(settles: defaultdict[LeaseKey, list[Settle]], backup: Backup) -> Iterator[Violation]:
    """Yields a violation for each extend or addition that was answered OK after the lease had ended."""
    for lease, of_lease in settles.items():
        for end in filter(answered_ok, of_lease):
            for use in of_lease:
                is_use = use.call.verb is Verb.EXTEND and use.answer is Answer.OK
                if is_use and end.call.ended_s is not None and use.call.began_s > end.call.ended_s:
                    what = f"job {lease.job}: lease {lease.number} was used after its {end.call.verb} was answered OK"
                    yield _violation(what, excused=backup.forgot(end))


# ── By the books ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _in_order(row: Row) -> Iterator[Violation]:
    """Yields a violation for each lease that, by the shard's clock, began before the previous lease had ended."""
    for earlier, later in pairwise(row.past):
        if later.leased_at_us < earlier.ended_at_us:
            yield _violation(f"job {row.job}: by the books lease {later.lease} began before {earlier.lease} had ended")
    last = row.past[-1] if row.past else None
    if last and row.leased_at_us is not None and row.lease != last.lease and row.leased_at_us < last.ended_at_us:
        yield _violation(f"job {row.job}: by the books its last lease began before {last.lease} had ended")


def _unasked(row: Row, settles: Mapping[LeaseKey, Sequence[Settle]], read: Collection[LeaseKey]) -> Iterator[Violation]:
    """Yields a violation for each attempt in a job's history that has ended although no client asked for this end, or
    although all clients that asked were refused."""
    done = [(past.lease, past.outcome) for past in row.past]
    if row.state is State.SUCCEEDED and row.lease is not None:
        done.append((row.lease, "acked"))
    for number, outcome in done:
        verbs = _OUTCOMES.get(outcome)
        if verbs is None or (outcome == "released" and LeaseKey(row.job, number) not in read):
            continue
        said = [one for one in settles.get(LeaseKey(row.job, number), ()) if one.call.verb in verbs]
        if not said:
            yield _violation(f"job {row.job}: lease {number} was {outcome}, and nobody said so")
        elif all(one.answer in ENDED for one in said):
            yield _violation(
                f"job {row.job}: lease {number} was {outcome} by a call that was answered {said[0].answer}"
            )


def _undone(row: Row | None, lease: LeaseKey, of_lease: Sequence[Settle], backup: Backup) -> Iterator[Violation]:
    """Yields a violation for each answer of OK or CANCELLED that the job's row contradicts. A job without a row is
    lost, which stored.py reports."""
    if row is None and not backup.rewinds(lease.job):
        return
    for settle in of_lease:
        if answered_ok(settle) and (row is None or not books_have(row, settle)):
            what = (
                f"job {lease.job}: a {settle.call.verb} of lease {lease.number} was answered OK, and the books lack it"
            )
            yield _violation(what, excused=backup.forgot(settle))
        if settle.answer is Answer.CANCELLED and row is not None and row.state is not State.CANCELLED:
            what = f"job {lease.job}: a {settle.call.verb} was answered CANCELLED, and the job is {row.state}"
            yield _violation(what, excused=backup.rewinds(lease.job))


def _violation(what: str, *, excused: bool = False) -> Violation:
    return Violation(invariant="I2", what=what, excused=excused)

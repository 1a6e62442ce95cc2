"""I2: one lease at a time, and a lease that has ended changes nothing.

What a client sees of a lease is less than its life: it was made before the job arrived, and ended at a moment that only
the shard knows. Two things are certain all the same.

- A settle or an extend that was answered OK found the lease live: it was live until the beginning of that call, at
  least (of its first try, where it was said again: a repeated ack is OK because the first did it).
- A lease that a Dequeue gave lasts for its window, counted from the beginning of the call, which is earlier than the
  lease; for longer if it was extended; for less only if its holder ends it, or somebody cancels the job. A stream's
  lease is not counted on so: nobody knows when it began.
- A job that a consumer has read is given back by that consumer, and by nobody else. A router gives back jobs that no
  consumer has read.

A job's attempts are numbered, so that of two leases with different numbers the later one is known. Where the later one
had arrived before the earlier one had certainly ended, both were live at one time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from chaos.checker.evidence import Evidence, Row, State, Violation
from chaos.history import Answer, Cancel, Delivery, LeaseKey, Settle, Verb

# By the books; what the client said for it.
_OUTCOMES = {"acked": (Verb.ACK,), "nacked": (Verb.NACK, Verb.KILL), "released": (Verb.RELEASE,)}
_BOOKED = {Verb.NACK: "nacked", Verb.KILL: "nacked", Verb.RELEASE: "released"}
# The wall clock that the shard counts by is slewed now and then.
_CLOCK_S = 0.05
_PAST_MAX = 50


def check(evidence: Evidence) -> Iterator[Violation]:
    history = evidence.history
    settles: defaultdict[LeaseKey, list[Settle]] = defaultdict(list)
    for settle in history.settles:
        settles[settle.lease].append(settle)
    cancels: defaultdict[str, list[Cancel]] = defaultdict(list)
    for cancel in history.cancels:
        cancels[cancel.job].append(cancel)
    deliveries: defaultdict[str, list[Delivery]] = defaultdict(list)
    for delivery in history.deliveries:
        deliveries[delivery.lease.job].append(delivery)
    # Of a job that departs and has arrived, what it was when it departed is not the last of it.
    rows = {row.job: row for row in sorted(evidence.rows, key=lambda row: not row.departing)}

    for lease, times in Counter(delivery.lease for delivery in history.deliveries).items():
        if times > 1:
            yield _violation(f"lease {lease.number} of job {lease.job} was given out {times} times")
    for job, of_job in deliveries.items():
        yield from _overlaps(of_job, settles, cancels[job], slack_s=_CLOCK_S + history.drift_s)
        yield from _after_the_end(of_job, settles, cancels[job])
        yield from _refused(of_job, settles, cancels[job], slack_s=_CLOCK_S + history.drift_s)
    yield from _two_ends(settles)
    read = {delivery.lease for delivery in history.deliveries}
    for row in evidence.rows:
        yield from _in_order(row)
        yield from _unasked(row, settles, read)
    for lease, of_lease in settles.items():
        if lease.job in rows:
            yield from _undone(rows[lease.job], lease, of_lease)
    for cancel in history.cancels:
        if cancel.answer is Answer.OK and cancel.job in rows and rows[cancel.job].state is not State.CANCELLED:
            yield _violation(f"job {cancel.job} was cancelled, and is {rows[cancel.job].state}")


# ── By what clients saw ──────────────────────────────────────────────────────────────────────────────────────────────


def _overlaps(
    of_job: Sequence[Delivery],
    settles: defaultdict[LeaseKey, list[Settle]],
    cancels: Sequence[Cancel],
    *,
    slack_s: float,
) -> Iterator[Violation]:
    cancelled_s = min((cancel.call.began_s for cancel in cancels), default=float("inf"))
    for earlier in of_job:
        live_until_s = _live_until_s(earlier, settles[earlier.lease], cancelled_s, slack_s=slack_s)
        for later in of_job:
            if later.attempt > earlier.attempt and later.received_s < live_until_s:
                yield _violation(
                    f"job {earlier.lease.job}: {later.call.client} had attempt {later.attempt} while attempt "
                    f"{earlier.attempt} of {earlier.call.client} was live, {live_until_s - later.received_s:.3f} s "
                    "before its end"
                )


def _live_until_s(delivery: Delivery, settles: Sequence[Settle], cancelled_s: float, *, slack_s: float) -> float:
    """Until when the lease was live for certain; long ago, if nothing is."""
    extends = [one for one in settles if one.call.verb is Verb.EXTEND and one.answer is Answer.OK]
    ends = [one for one in settles if one.call.verb is not Verb.EXTEND]
    # Nothing is certain of the moment when it arrived: the consumer may have stood still meanwhile.
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
    of_job: Sequence[Delivery], settles: defaultdict[LeaseKey, list[Settle]], cancels: Sequence[Cancel]
) -> Iterator[Violation]:
    """Deliveries of a job that was finished, dead or cancelled by then."""
    # How, when it was known, and by which attempt.
    ends: list[tuple[Verb, float | None, int]] = [
        (settle.call.verb, settle.call.ended_s, delivery.attempt)
        for delivery in of_job
        for settle in settles[delivery.lease]
        if settle.call.verb in {Verb.ACK, Verb.KILL} and settle.answer is Answer.OK
    ]
    ends += [(Verb.CANCEL, cancel.call.ended_s, 1 << 31) for cancel in cancels if cancel.answer is Answer.OK]
    for verb, ended_s, attempt in ends:
        assert ended_s is not None, "what was answered has ended"
        for delivery in of_job:
            if delivery.call.began_s > ended_s or delivery.attempt > attempt:
                yield _violation(
                    f"job {delivery.lease.job} came to {delivery.call.client} as attempt {delivery.attempt}, after "
                    f"its {verb} was answered OK"
                )


def _refused(
    of_job: Sequence[Delivery],
    settles: defaultdict[LeaseKey, list[Settle]],
    cancels: Sequence[Cancel],
    *,
    slack_s: float,
) -> Iterator[Violation]:
    """Acks that were answered STALE within the window of a Dequeue, while nobody else had said anything of the job."""
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
                    f"answered STALE {deadline_s - ended_s:.3f} s before the end of its window"
                )


def _two_ends(settles: defaultdict[LeaseKey, list[Settle]]) -> Iterator[Violation]:
    acked: defaultdict[str, set[int]] = defaultdict(set)
    for lease, of_lease in settles.items():
        if any(one.call.verb is Verb.ACK and one.answer is Answer.OK for one in of_lease):
            acked[lease.job].add(lease.number)
    for job, leases in acked.items():
        if len(leases) > 1:
            yield _violation(f"acks of {len(leases)} leases of job {job} were answered OK")


# ── By the books ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _in_order(row: Row) -> Iterator[Violation]:
    """Each lease began after the one before had ended, by the shard's own clock."""
    for earlier, later in pairwise(row.past):
        if later.leased_at_us < earlier.ended_at_us:
            yield _violation(f"job {row.job}: by the books lease {later.lease} began before {earlier.lease} had ended")
    last = row.past[-1] if row.past else None
    if last and row.leased_at_us is not None and row.lease != last.lease and row.leased_at_us < last.ended_at_us:
        yield _violation(f"job {row.job}: by the books its last lease began before {last.lease} had ended")


def _unasked(row: Row, settles: defaultdict[LeaseKey, list[Settle]], read: Collection[LeaseKey]) -> Iterator[Violation]:
    """What the books say was done, and nobody asked for; or all who did were refused."""
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
        elif all(one.answer in {Answer.STALE, Answer.NOT_FOUND} for one in said):
            yield _violation(
                f"job {row.job}: lease {number} was {outcome} by a call that was answered {said[0].answer}"
            )


def _undone(row: Row, lease: LeaseKey, of_lease: Sequence[Settle]) -> Iterator[Violation]:
    """What was answered OK, and the books do not know of."""
    for settle in of_lease:
        verb = settle.call.verb
        if settle.answer is not Answer.OK or verb is Verb.EXTEND:
            continue
        if verb is Verb.ACK:
            kept = row.state is State.SUCCEEDED and row.lease == lease.number
        elif len(row.past) >= _PAST_MAX:
            continue
        else:
            kept = any(past.lease == lease.number and past.outcome == _BOOKED[verb] for past in row.past)
        if not kept:
            yield _violation(f"job {row.job}: a {verb} of lease {lease.number} was answered OK, and the books lack it")


def _violation(what: str) -> Violation:
    return Violation(invariant="I2", what=what)

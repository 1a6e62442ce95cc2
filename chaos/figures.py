"""Computes the figures of a run from what clients saw. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from chaos.run import Told
from proof.checker.backup import Backup
from proof.checker.evidence import Evidence, Placed, State
from proof.history import Addition, Answer, Call, History, Outcome, Signal, Verb
from shard.placement.slots import slot_of
from shard.vocabulary import OrgId


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """One second of a run."""

    acknowledged: int = 0
    delivered: int = 0
    acked: int = 0
    # How many calls were refused, or had no answer.
    failed: int = 0
    # The pickup times of the jobs that arrived at a worker in this second for the first time. Only jobs that were due
    # at once count.
    pickups_s: Sequence[float] = ()


def jobs(evidence: Evidence) -> Mapping[str, int]:
    """Returns counts of jobs, runs of schedules and operators' calls, by their outcomes."""
    seen = evidence.history
    answers = Counter(f"{one.call.verb} {one.answer}" for one in seen.settles if one.answer is not None)
    return {
        "acknowledged": len({one.answered for one in seen.enqueues if one.answered is not None}),
        "said again and known": sum(one.duplicate for one in seen.enqueues),
        "deliveries": len(seen.deliveries),
        **{f"answered {what}": count for what, count in sorted(answers.items())},
        **{
            f"in the tables: {state}": count
            for state, count in sorted(Counter(row.state for row in evidence.rows).items())
        },
        **{
            f"runs of schedules: {outcome}": count
            for outcome, count in sorted(Counter(run.outcome for run in evidence.runs).items())
        },
        "runs of schedules: triggered": len({run.job for run in evidence.runs if run.request is not None}),
        "runs of schedules: backfilled": len({run.job for run in evidence.runs if run.job and run.cause == "backfill"}),
        **_answered(
            "schedules",
            (
                call
                for schedule in evidence.schedules
                for call in (
                    *((str(one.kind), one.ended_us is not None) for one in schedule.changes),
                    *(("backfill", one.ended_us is not None) for one in schedule.backfills),
                )
            ),
        ),
        **_answered(
            "workflows",
            (
                call
                for flow in evidence.operated
                for call in (
                    *((str(one.kind), one.ended_us is not None) for one in flow.changes),
                    *([("retry", flow.retried)] if flow.retry else []),
                )
            ),
        ),
        "nodes that jobs have added": sum(len(flow.added) for flow in evidence.flows),
        **{
            f"waits for added nodes: {what}": count
            for what, count in sorted(Counter(map(_wait, seen.additions)).items())
            if what
        },
        **{f"signals: {what}": count for what, count in sorted(Counter(map(_signal, seen.signals)).items())},
        "nodes that a signal ended": sum(row.signal is not None for row in evidence.rows),
        "nodes that no signal reached in time": sum(row.unsignalled_us is not None for row in evidence.rows),
    }


def _wait(added: Addition) -> str:
    """Returns the outcome of a call that adds nodes and lets the job wait for them. Empty: the call does not let the
    job wait."""
    if not added.wait:
        return ""
    return _outcome(added.call, "the job waits" if added.waits else "the nodes have ended")


def _signal(signal: Signal) -> str:
    """Returns the outcome of one try to give a signal."""
    return _outcome(signal.call, "the first" if signal.is_first else "not the first")


def _outcome(call: Call, succeeded: str) -> str:
    """Returns the outcome of a call. `succeeded`: the text for a call that was answered OK."""
    match call.outcome:
        case Outcome.OK:
            return succeeded
        case Outcome.ERROR:
            return "refused"
        case Outcome.UNKNOWN:
            return "not answered"


def _answered(of: str, calls: Iterable[tuple[str, bool]]) -> Mapping[str, int]:
    """Returns the numbers of operators' calls, by their kind and by whether they were answered."""
    return {
        f"{of}: {kind}, {'answered' if answered else 'not answered'}": count
        for (kind, answered), count in sorted(Counter(calls).items())
    }


def restored(evidence: Evidence) -> Mapping[str, int]:
    """Compares the restored backup with the replaced database. Counts the jobs, the ends of jobs and the dedup keys
    that the backup lacked. Also counts what happened to these jobs afterwards. Empty if no backup was restored."""
    if evidence.restored is None:
        return {}
    backup = Backup(evidence)
    acknowledged = {one.answered for one in evidence.history.enqueues}
    kept = {row.job for row in evidence.restored.backup.rows}
    there = {row.job for row in evidence.rows}
    lost = {row.job for row in backup.lost_rows if row.job not in kept}
    ended = {row.job for row in backup.lost_rows if row.job in kept and row.state is not State.LIVE}
    again = {one.lease.job for one in evidence.history.deliveries if backup.came_after(one.call)}
    return {
        "jobs in the backup": len(kept),
        "jobs that it lacked": len(lost),
        "of them acknowledged, and in no table in the end": len((lost & acknowledged) - there),
        "jobs whose end it lacked": len(ended),
        "of them delivered again": len(ended & again),
        "dedup keys that it lacked": len(evidence.restored.replaced.keys - evidence.restored.backup.keys),
        "jobs that had left since, and were there once more": sum(map(backup.revives, kept)),
        "of them left there, because somebody cancelled them": sum(map(backup.is_second, evidence.rows)),
    }


def errors(seen: History) -> Counter[tuple[str, str]]:
    """Counts the calls that were refused or that have no known outcome, by verb and code."""
    return Counter((call.verb.value, call.code or "no end") for call in seen.calls if _failed(call))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One move of slots, as the catalog recorded it."""

    epoch: int
    source: str
    target: str
    slots: int
    began_s: float
    # The time at which the target began to take the new jobs. None: the target never did.
    switched_s: float | None = None
    # The time at which the last slot of this move was at rest. None: the move did not end.
    ended_s: float | None = None


def moves(evidence: Evidence) -> list[Moved]:
    """Returns the moves in the order in which they began."""
    found: dict[int, Moved] = {}
    left: dict[int, int] = {}
    for now in evidence.placed:
        move = found.get(now.epoch)
        if len(now.reads) > 1 and move is None:
            found[now.epoch] = Moved(
                epoch=now.epoch, source=now.reads[0], target=now.reads[1], slots=len(now.slots), began_s=now.at_s
            )
            left[now.epoch] = len(now.slots)
        elif len(now.reads) > 1 and move is not None:
            found[now.epoch] = replace(move, switched_s=now.at_s)
        elif move is not None:
            left[now.epoch] -= len(now.slots)
            if not left[now.epoch]:
                found[now.epoch] = replace(move, ended_s=now.at_s)
    return sorted(found.values(), key=lambda one: one.began_s)


def chunks(evidence: Evidence) -> int:
    """Returns how many chunks of jobs have arrived on other shards."""
    return sum(len(now.slots) for now in evidence.owned if now.state == "owned" and now.chunk)


def holdings(evidence: Evidence) -> list[tuple[float, Mapping[str, int], int]]:
    """Returns for each change of placements: the time of the change; the number of slots whose new jobs each shard
    takes after the change; and the number of slots that are then moving."""
    known: dict[int, Placed] = {}
    writes: Counter[str] = Counter()
    moving = 0
    course: list[tuple[float, Mapping[str, int], int]] = []
    for now in evidence.placed:
        for slot in now.slots:
            before, known[slot] = known.get(slot), now
            if before is not None:
                writes[before.writes[0]] -= 1
                moving -= len(before.reads) > 1
            writes[now.writes[0]] += 1
            moving += len(now.reads) > 1
        course.append((now.at_s, dict(writes), moving))
    return course


def unavailable_s(told: Told) -> Mapping[str, float]:
    """Returns for each shard the longest time in which the shard acknowledged no enqueue although it had slots. Only
    the time from the first fault until the last fault is healed counts."""
    events = sorted([*_had(told.evidence), *_acknowledged(told.evidence)], key=lambda event: event[0])
    # For each shard that has slots, the time since which the shard has acknowledged no enqueue.
    since_s: dict[str, float] = {}
    longest_s: dict[str, float] = {}

    def until(shard: str, at_s: float) -> None:
        began_s, ended_s = max(since_s.get(shard, at_s), told.began_s), min(at_s, told.healed_s)
        longest_s[shard] = max(longest_s.get(shard, 0.0), ended_s - began_s)

    for at_s, shard, has_slots in events:
        until(shard, at_s)
        since_s.pop(shard, None)
        if has_slots:
            since_s[shard] = at_s
    for shard in list(since_s):
        until(shard, told.healed_s)
    return dict(sorted(longest_s.items()))


def _had(evidence: Evidence) -> Iterator[tuple[float, str, bool]]:
    """Yields the times at which a shard without slots got slots, or a shard lost its last slot."""
    had: set[str] = set()
    for at_s, slots, _ in holdings(evidence):
        has = {shard for shard, count in slots.items() if count}
        yield from ((at_s, shard, shard in has) for shard in sorted(has ^ had))
        had = has


def _acknowledged(evidence: Evidence) -> Iterator[tuple[float, str, bool]]:
    """Yields the times at which each shard acknowledged enqueues."""
    by_slot: defaultdict[int, list[Placed]] = defaultdict(list)
    for now in evidence.placed:
        for slot in now.slots:
            by_slot[slot].append(now)
    for call in evidence.history.calls:
        if call.verb is Verb.ENQUEUE and call.outcome is Outcome.OK and call.ended_s is not None:
            by_hash = slot_of(OrgId(call.org))
            for slot in (evidence.pins.get(call.org, by_hash), by_hash):
                # If the org was pinned after this call, the org had no slot of its own during this call. In this case
                # its hash slot counts.
                at = bisect_right(by_slot[slot], call.ended_s, key=lambda now: now.at_s)
                if at:
                    yield call.ended_s, by_slot[slot][at - 1].writes[0], True
                    break


def seconds(told: Told) -> list[Second]:
    """Returns the figures of each second of the run, from the first fault on."""
    seen = told.evidence.history
    count = int(told.ended_s - told.began_s) + 1
    acknowledged, delivered, acked, failed = ([0] * count for _ in range(4))
    pickups: list[list[float]] = [[] for _ in range(count)]

    def at(moment_s: float | None) -> int | None:
        second = -1 if moment_s is None else int(moment_s - told.began_s)
        return second if 0 <= second < count else None

    stored_s: dict[str, float] = {}
    for enqueue in seen.enqueues:
        ended_s = enqueue.call.ended_s
        if enqueue.answered is None or enqueue.duplicate or ended_s is None:
            continue
        if (second := at(ended_s)) is not None:
            acknowledged[second] += 1
        if not enqueue.delay_s:
            stored_s[enqueue.job] = ended_s
    for delivery in seen.deliveries:
        second = at(delivery.received_s)
        if second is None:
            continue
        delivered[second] += 1
        if delivery.attempt == 1 and delivery.lease.job in stored_s:
            # A job that is handed over may arrive before its producer gets the answer.
            pickups[second].append(max(0.0, delivery.received_s - stored_s.pop(delivery.lease.job)))
    for settle in seen.settles:
        second = at(settle.call.ended_s)
        if second is not None and settle.call.verb is Verb.ACK and settle.answer is Answer.OK:
            acked[second] += 1
    for call in seen.calls:
        second = at(call.ended_s)
        if second is not None and _failed(call):
            failed[second] += 1
    return [
        Second(
            acknowledged=acknowledged[one],
            delivered=delivered[one],
            acked=acked[one],
            failed=failed[one],
            pickups_s=pickups[one],
        )
        for one in range(count)
    ]


def _failed(call: Call) -> bool:
    # A handler of windrow.Worker does not learn whether its acks succeeded. Therefore its calls without an end do not
    # count as failures.
    is_handler = call.client.partition(".")[0].endswith("-handler")
    return call.outcome is not Outcome.OK and not (is_handler and call.ended_s is None)

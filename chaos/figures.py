"""The figures of a run, from what clients saw. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from chaos.checker.evidence import Evidence
from chaos.history import Answer, Call, History, Outcome, Verb
from chaos.run import Told


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """One second of a run."""

    acknowledged: int = 0
    delivered: int = 0
    acked: int = 0
    # Calls that were refused, or not answered.
    failed: int = 0
    # Of jobs that were due at once and came for the first time, in this second.
    pickups_s: Sequence[float] = ()


def jobs(evidence: Evidence) -> Mapping[str, int]:
    """How many jobs there were, and what became of them."""
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
    }


def errors(seen: History) -> Counter[tuple[str, str]]:
    """By verb and code: calls that were refused, or left open."""
    return Counter((call.verb.value, call.code or "no end") for call in seen.calls if _failed(call))


def unavailable_s(told: Told) -> Mapping[str, float]:
    """By shard: the longest time in which no enqueue was acknowledged, from the first fault until all was healed."""
    shard_of = {row.org: row.shard for row in told.evidence.rows}
    ends: defaultdict[str, list[float]] = defaultdict(list)
    for call in told.evidence.history.calls:
        if call.verb is not Verb.ENQUEUE or call.outcome is not Outcome.OK or call.ended_s is None:
            continue
        if call.org in shard_of and told.began_s < call.ended_s < told.healed_s:
            ends[shard_of[call.org]].append(call.ended_s)
    return {
        shard: max(later - earlier for earlier, later in pairwise([told.began_s, *sorted(times), told.healed_s]))
        for shard, times in sorted(ends.items())
    }


def seconds(told: Told) -> list[Second]:
    """Second by second, from the first fault on."""
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
            # A job that is handed over may come before its producer is answered.
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
    # A handler of windrow.Worker is not told what became of its acks: that is no failure.
    handling = call.client.partition(".")[0].endswith("-handling")
    return call.outcome is not Outcome.OK and not (handling and call.ended_s is None)

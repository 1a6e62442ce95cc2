"""Computes how the growth of the cluster affected clients, from what the clients recorded and from looks at the
catalog. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from bench import pickups
from bench.pickups import Pickup, Waits
from bench.times import Times, due_between, times
from proof.history import Call, History, Outcome, Verb

# How many jobs one call has.
BATCH = 10
# How many orgs are watched, and their share of all jobs. A watched org gets calls all the time, with one job per call.
_WATCHED = 16
WATCHED_SHARE = 0.05


def watched(orgs: Sequence[str]) -> list[str]:
    """Returns the orgs that are watched, spread evenly over all orgs."""
    return [orgs[at] for at in sorted({at * len(orgs) // _WATCHED for at in range(_WATCHED)})]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    name: str
    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The records of all clients: their calls, and how long jobs waited since they were due and since they were
    stored."""

    calls: Sequence[Call]
    pickups: Sequence[Pickup]
    dequeues: Sequence[Pickup]

    @classmethod
    def of(cls, history: History, *, since_s: float) -> Self:
        """Returns only the records of calls and jobs that were due after `since_s`."""
        calls = [call for call in history.calls if call.due_s >= since_s]
        return cls(
            calls=calls,
            pickups=[one for one in pickups.since_due(history) if one.due_s >= since_s],
            dequeues=[one for one in pickups.since_stored(history) if one.due_s >= since_s],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the catalog says about slots. `written`: how many slots store new jobs on the shard that is added or
    drained. `moving`: how many slots are moving."""

    at_s: float
    written: int
    moving: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    phase: Phase
    # How many jobs a second were stored. Only jobs that were due in this phase count.
    stored_per_s: float
    # How long jobs waited for a worker. `pickup` counts from the time at which a job was due to be stored, and
    # `dequeue` from the answer to its enqueue.
    pickup: Waits | None
    dequeue: Waits | None
    enqueue: Times | None
    # The number of failed calls, plus the failures that the workers logged.
    failed: int
    # How many failed tries the client repeated, by their gRPC code.
    retries: Mapping[str, int]
    # The longest time for which a watched org had no successful enqueue: for the orgs whose slots move, and for the
    # other orgs.
    gap_moved_s: float
    gap_stayed_s: float
    # The longest enqueue: for the orgs whose slots move, and for the other orgs.
    longest_moved_s: float
    longest_stayed_s: float

    def told(self, start_s: float) -> dict[str, object]:
        """Returns the figures in a form for JSON, with times since the start."""
        return {
            "name": self.phase.name,
            "from_s": self.phase.began_s - start_s,
            "to_s": self.phase.ended_s - start_s,
            "stored_per_s": self.stored_per_s,
            "pickup": self.pickup.told() if self.pickup else None,
            "dequeue": self.dequeue.told() if self.dequeue else None,
            "enqueue_ms": asdict(self.enqueue) if self.enqueue else None,
            "failed": self.failed,
            "retries_by_code": dict(self.retries),
            **{
                name: value if math.isfinite(value := getattr(self, name)) else None
                for name in ("gap_moved_s", "gap_stayed_s", "longest_moved_s", "longest_stayed_s")
            },
        }


def figures(seen: Seen, phase: Phase, *, moved: Collection[str], watched: Collection[str]) -> PhaseFigures:
    """Computes the figures of one phase. `moved`: the orgs whose slots move. `watched`: the orgs that get calls all the
    time."""
    due = due_between(seen.calls, phase.began_s, phase.ended_s)
    enqueues = [call for call in due if call.verb is Verb.ENQUEUE]
    return PhaseFigures(
        phase=phase,
        stored_per_s=sum(1 if call.org in watched else BATCH for call in enqueues if call.outcome is Outcome.OK)
        / phase.seconds,
        pickup=pickups.waits(pickups.due_between(seen.pickups, phase.began_s, phase.ended_s)),
        dequeue=pickups.waits(pickups.due_between(seen.dequeues, phase.began_s, phase.ended_s)),
        enqueue=times(enqueues),
        failed=sum(call.outcome is not Outcome.OK for call in due if call.verb in {Verb.ENQUEUE, Verb.WORK}),
        retries=Counter(call.code for call in due if call.verb is Verb.RETRY),
        gap_moved_s=longest_gap_s(seen.calls, phase, [org for org in watched if org in moved]),
        gap_stayed_s=longest_gap_s(seen.calls, phase, [org for org in watched if org not in moved]),
        longest_moved_s=max((call.took_s for call in enqueues if call.org in moved), default=math.nan),
        longest_stayed_s=max((call.took_s for call in enqueues if call.org not in moved), default=math.nan),
    )


def longest_gap_s(calls: Iterable[Call], phase: Phase, orgs: Collection[str]) -> float:
    """Returns the longest time that one of these orgs spent between two successful enqueues. Only times that overlap
    the phase count. Infinity: an org had no successful enqueue before the phase began, or none after the phase ended.
    NaN: `orgs` is empty."""
    ends: defaultdict[str, list[float]] = defaultdict(list)
    for call in calls:
        if call.verb is Verb.ENQUEUE and call.outcome is Outcome.OK and call.ended_s is not None:
            ends[call.org].append(call.ended_s)
    longest_s = 0.0 if orgs else math.nan
    for org in orgs:
        edges = [-math.inf, *sorted(ends[org]), math.inf]
        for before_s, after_s in itertools.pairwise(edges):
            if before_s < phase.ended_s and after_s > phase.began_s:
                longest_s = max(longest_s, after_s - before_s)
    return longest_s


def moved_slots(before: Sequence[str], after: Sequence[str]) -> set[int]:
    """Returns the slots whose shard differs between `before` and `after`."""
    return {slot for slot, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}

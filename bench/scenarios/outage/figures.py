"""Computes from clients' calls how an outage of one shard affected the orgs of this shard and those of the other
shards. Pure."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from bench.times import Times, due_between, times
from proof.history import Call, Verb
from proof.history import Outcome as Answered

_UNAVAILABLE = "UNAVAILABLE"


class Sort(enum.StrEnum):
    RESTART = "restart"
    FAIL_OVER = "fail-over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One outage: a shard's Postgres is killed and brought back. The times are of the monotonic clock, in ascending
    order."""

    sort: Sort
    shard: str
    # The phase before the kill begins at this time.
    began_s: float
    killed_s: float
    # `back_s`: the time at which the restart of Postgres, or the promotion of its standby, was ordered. `up_s`: the
    # time at which Postgres was up again.
    back_s: float
    up_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    strike: Strike
    # The times of calls of orgs on other shards: before the kill, while the shard was down, and after the restart or
    # the promotion was ordered.
    before: Times | None
    away: Times | None
    back: Times | None
    # The times of calls of orgs on other shards, by verb: before the kill, and while the shard was down.
    by_verb: Mapping[str, tuple[Times | None, Times | None]]
    # How many calls of the other orgs failed after the kill.
    others_failed: int
    # For calls of the shard's own orgs. `first_refused_s`: the time from the kill to the first UNAVAILABLE. `silent_s`:
    # the longest wait for an answer among the calls that were due before the restart. A wait begins at the kill, or
    # when the call was due, whichever is later.
    first_refused_s: float
    silent_s: float
    # How many answers after the kill were neither OK nor UNAVAILABLE, by code.
    odd: Mapping[str, int]
    # The time from the order to restart or promote until every org of the shard was served, with no failed call
    # afterwards.
    served_s: float

    @property
    def ratio_p99(self) -> float:
        return self.away.p99 / self.before.p99 if self.before and self.away else math.nan

    @property
    def ratio_p50(self) -> float:
        return self.away.p50 / self.before.p50 if self.before and self.away else math.nan

    def told(self, start_s: float) -> dict[str, object]:
        """Returns the figures in a form for JSON, with times since the start."""
        strike = self.strike
        named = ("began_s", "killed_s", "back_s", "up_s", "ended_s")
        return {
            "sort": str(strike.sort),
            "shard": strike.shard,
            **{name: getattr(strike, name) - start_s for name in named},
            "others_ms": {
                name: asdict(times) if times else None
                for name, times in (("before", self.before), ("away", self.away), ("back", self.back))
            },
            "others_by_verb_ms": {
                verb: {"before": before and asdict(before), "away": away and asdict(away)}
                for verb, (before, away) in self.by_verb.items()
            },
            "others_failed": self.others_failed,
            "first_refused_s": _finite(self.first_refused_s),
            "silent_s": _finite(self.silent_s),
            "odd_answers_by_code": dict(self.odd),
            "served_s": _finite(self.served_s),
        }


def outcome(strike: Strike, calls: Iterable[Call], homes: Mapping[str, str]) -> Outcome:
    """Computes the outcome of one outage. `homes`: the shard of each org. A call belongs to the phase in which it was
    due."""
    mine: list[Call] = []
    others: list[Call] = []
    for call in calls:
        if strike.began_s <= call.due_s < strike.ended_s:
            (mine if homes[call.org] == strike.shard else others).append(call)
    before = due_between(others, strike.began_s, strike.killed_s)
    away = due_between(others, strike.killed_s, strike.back_s)
    # The calls that ended after the kill, including those that were under way at the kill.
    struck = [call for call in mine if _ended_s(call) >= strike.killed_s]
    refused = [_ended_s(call) for call in struck if call.code == _UNAVAILABLE]
    odd = Counter(call.code for call in struck if call.outcome is not Answered.OK and call.code != _UNAVAILABLE)
    return Outcome(
        strike=strike,
        before=times(before),
        away=times(away),
        back=times(due_between(others, strike.back_s, strike.ended_s)),
        by_verb={
            verb.value: (
                times(call for call in before if call.verb is verb),
                times(call for call in away if call.verb is verb),
            )
            for verb in (Verb.ENQUEUE, Verb.DEQUEUE, Verb.ACK)
        },
        others_failed=sum(call.outcome is not Answered.OK and _ended_s(call) >= strike.killed_s for call in others),
        first_refused_s=min(refused, default=math.inf) - strike.killed_s,
        silent_s=max(
            (_ended_s(call) - max(call.due_s, strike.killed_s) for call in struck if call.due_s < strike.back_s),
            default=math.nan,
        ),
        odd=odd,
        served_s=_served_s(strike, mine, [org for org, home in homes.items() if home == strike.shard]),
    )


def _served_s(strike: Strike, mine: Iterable[Call], orgs: Iterable[str]) -> float:
    """Computes `Outcome.served_s`. Returns infinity if an org had no successful call after its last failed call."""
    served = dict.fromkeys(orgs, math.inf)
    for call in sorted(mine, key=_ended_s):
        if call.outcome is not Answered.OK:
            served[call.org] = math.inf
        elif _ended_s(call) >= strike.back_s:
            served[call.org] = min(served[call.org], _ended_s(call))
    return max(served.values(), default=math.nan) - strike.back_s


def _ended_s(call: Call) -> float:
    """Returns the time at which the call ended, or infinity if the call was never answered."""
    return math.inf if call.ended_s is None else call.ended_s


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

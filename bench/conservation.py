"""Whether every job is where it must be: what clients saw, held against what the tables say. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from bench.evidence import JobKey, Seen, id_of

_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What the tables of all shards have, and how many times."""

    # Live, dead or on its way to another shard.
    left: Counter[JobKey] = field(default_factory=Counter[JobKey])
    succeeded: Counter[JobKey] = field(default_factory=Counter[JobKey])
    # Books that do not balance, in words.
    unbalanced: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conservation:
    """How many jobs were looked for, and which are not as they must be, by what is wrong with them."""

    jobs: int
    violations: Mapping[str, Collection[JobKey]]
    unbalanced: Sequence[str]

    @property
    def holds(self) -> bool:
        return not self.unbalanced and not any(self.violations.values())

    def count(self, what: str) -> int:
        return len(self.violations[what])

    def told(self) -> dict[str, object]:
        """As JSON takes it, with a few examples."""
        return {
            "jobs": self.jobs,
            "violations": {what: len(jobs) for what, jobs in self.violations.items()},
            "examples": {what: _some(jobs) for what, jobs in self.violations.items() if jobs},
            "unbalanced": list(self.unbalanced),
        }

    def text(self) -> str:
        wrong = [
            f"{what}: {len(jobs):,} job(s), such as {', '.join(_some(jobs))}"
            for what, jobs in self.violations.items()
            if jobs
        ]
        wrong += [f"books that do not balance: {', '.join(self.unbalanced[:_SHOWN])}"] if self.unbalanced else []
        return "; ".join(wrong) or f"{self.jobs:,} jobs, each where it must be"


LOST = "acknowledged and gone"
DOUBLED = "stored twice"
STRANGE = "offered by nobody"
UNDONE = "an ack was answered OK, and it has not succeeded"
ACKED_TWICE = "two acks were answered OK"
TAKEN_TWICE = "came to a worker twice"
UNFINISHED = "came to a worker that acked it, and has not succeeded"
UNTAKEN = "has succeeded, and came to no worker"


def judge(seen: Seen, kept: Kept, *, faultless: bool) -> Conservation:
    """`faultless`: nothing was killed, and workers ended in order. So each job came to one worker once, and whatever
    came to one has succeeded. After faults a job may come again, unless an ack of it was answered OK."""
    there = kept.left + kept.succeeded
    violations: dict[str, Collection[JobKey]] = {
        LOST: [job for job in seen.stored if job not in there],
        DOUBLED: [job for job, times in there.items() if times > 1],
        STRANGE: [job for job in there if job not in seen.offered],
        UNDONE: [job for job in seen.acked if job not in kept.succeeded],
        ACKED_TWICE: [job for job, times in seen.acked.items() if times > 1],
    }
    if faultless:
        violations |= {
            TAKEN_TWICE: [job for job, times in seen.taken.items() if times > 1],
            UNFINISHED: [job for job in seen.taken if job not in kept.succeeded],
            UNTAKEN: [job for job in kept.succeeded if job not in seen.taken],
        }
    return Conservation(jobs=len(seen.stored), violations=violations, unbalanced=kept.unbalanced)


def _some(jobs: Collection[JobKey]) -> list[str]:
    return [id_of(job) for job, _ in zip(jobs, range(_SHOWN), strict=False)]

"""Checks that every job is where it must be, by comparing what clients saw with the tables (proof/checker)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.demands import Demand, none_of
from proof import history, tables
from proof.checker import EXAMINED, Evidence, Violation, check
from proof.history import History

_SHOWN = 3
_FAULTLESS = {"once": "Each job comes to a worker once, and then has succeeded"}
# The invariants that benchmarks check. The checker knows further invariants.
_INVARIANTS = {name: EXAMINED[name] for name in ("I1", "I2", "I3", "I4", "I5")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How many jobs were acknowledged, and the violations that were found. `faultless`: no process was killed."""

    jobs: int
    violations: Sequence[Violation]
    faultless: bool

    def told(self) -> dict[str, object]:
        """Returns the verdict in a form for JSON, with a few examples."""
        return {
            "jobs": self.jobs,
            "violations": dict(Counter(one.invariant for one in self.violations)),
            "examples": [one.what for one in self.violations[:_SHOWN]],
        }

    def text(self) -> str:
        examples = "; ".join(f"{one.invariant}: {one.what}" for one in self.violations[:_SHOWN])
        return f"{len(self.violations):,} violations, such as {examples}"

    def demands(self) -> list[Demand]:
        counts = Counter(one.invariant for one in self.violations)
        examined = _INVARIANTS | (_FAULTLESS if self.faultless else {})
        return [
            none_of(f"{what}: violations ({name}), of {self.jobs:,} jobs", counts[name])
            for name, what in examined.items()
        ]


def judge(folder: Path, dsns: Mapping[str, str], *, address: str, faultless: bool = False) -> tuple[History, Verdict]:
    """Reads the histories of a folder and the tables of all shards. Raises psycopg.Error and grpc.RpcError."""
    seen = history.read(folder)
    evidence = Evidence(
        history=seen,
        rows=[row for shard, dsn in dsns.items() for row in tables.rows_in(dsn, shard)],
        books=tables.read_books(address, dsns),
        faultless=faultless,
    )
    jobs = len({one.answered for one in seen.enqueues if one.answered is not None})
    return seen, Verdict(jobs=jobs, violations=check(evidence), faultless=faultless)

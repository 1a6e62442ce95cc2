"""From samples to medians, a table and a file. Pure, but for writing the file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench.measure import Figure, Plan, Sample

_HEAD = (
    "shards",
    "batch",
    "figure",
    "system",
    "jobs/s",
    "min – max",
    "of the limit",
    "client µs",
    "router µs",
    "Postgres µs",
)
# (shards, batch, figure, system)
_Case = tuple[int, int, Figure, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One case: medians over its runs. The ratio is the median of the runs' own ratios, each to the limit's run of the
    same round."""

    shards: int
    batch: int
    figure: Figure
    system: str
    runs: int
    jobs_per_s: float
    jobs_per_s_min: float
    jobs_per_s_max: float
    of_limit: float
    # CPU time for one job.
    client_us: float
    router_us: float
    postgres_us: float


def summary(samples: Sequence[Sample], *, limit: str) -> list[Line]:
    by_case: dict[_Case, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_case[sample.shards, sample.batch, sample.figure, sample.system].append(sample)
    lines: list[Line] = []
    for (shards, batch, figure, system), found in by_case.items():
        limits = {sample.run: sample.jobs_per_s for sample in by_case[shards, batch, figure, limit]}
        rates = [sample.jobs_per_s for sample in found]
        line = Line(
            shards=shards,
            batch=batch,
            figure=figure,
            system=system,
            runs=len(found),
            jobs_per_s=median(rates),
            jobs_per_s_min=min(rates),
            jobs_per_s_max=max(rates),
            of_limit=median(sample.jobs_per_s / limits[sample.run] for sample in found),
            client_us=_us_a_job(found, lambda sample: sample.client_cpu_s),
            router_us=_us_a_job(found, lambda sample: sample.router_cpu_s),
            postgres_us=_us_a_job(found, lambda sample: sample.postgres_cpu_s),
        )
        lines.append(line)
    order = list(Figure)
    return sorted(lines, key=lambda line: (line.shards, line.batch, order.index(line.figure), line.system == limit))


def markdown(samples: Sequence[Sample], *, limit: str, cores: int) -> str:
    """The table, and how much of the machine was others'."""
    rows = [_HEAD, tuple("---" for _ in _HEAD), *map(_cells, summary(samples, limit=limit))]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    others = sorted(sample.others_cpu_s / sample.seconds / cores for sample in samples)
    return (
        f"{table}\n\nµs: CPU time for one job. Everything else on the machine took {median(others):.0%} of its {cores} "
        f"cores while this was measured ({others[0]:.0%} – {others[-1]:.0%})."
    )


def _cells(line: Line) -> tuple[str, ...]:
    return (
        f"{line.shards}",
        f"{line.batch}",
        f"{line.figure}",
        line.system,
        f"{line.jobs_per_s:,.0f}",
        f"{line.jobs_per_s_min:,.0f} – {line.jobs_per_s_max:,.0f}",
        f"{line.of_limit:.0%}",
        f"{line.client_us:.1f}",
        f"{line.router_us:.1f}",
        f"{line.postgres_us:.1f}",
    )


def write(file: Path, *, plan: Plan, samples: Sequence[Sample], environment: Mapping[str, object], limit: str) -> None:
    """All that is known, as JSON."""
    told = {
        "environment": dict(environment),
        "plan": asdict(plan),
        "summary": [asdict(line) for line in summary(samples, limit=limit)],
        "samples": [asdict(sample) | {"jobs_per_s": sample.jobs_per_s} for sample in samples],
    }
    file.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n")


def _us_a_job(samples: Sequence[Sample], cpu_s: Callable[[Sample], float]) -> float:
    return median(cpu_s(sample) / sample.jobs * 1e6 for sample in samples)

"""The measured jobs a second, as tables and pictures. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from bench.counts import KINDS, PIECES, pieces
from bench.meter import Written
from bench.rate import Figure, Load, Timed
from bench.report import Plot
from bench.spread import ratio, spread
from bench.systems import load
from proof.table import Table

_POINTS_MIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shards: int
    load: Load
    routers: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    system: str
    case: Case
    run: int
    timed: Timed
    # What the database wrote for the whole life of the jobs. None: not counted.
    written: Written | None = None

    def told(self) -> dict[str, object]:
        return {
            "system": self.system,
            **asdict(self.case),
            "run": self.run,
            **self.timed.told(),
            **({"written": asdict(self.written)} if self.written else {}),
        }


def table(samples: Sequence[Sample], *, over: str, title: str) -> Table:
    """Returns a table with the medians of each case's runs. The ratio compares the rate of `over` with the rate of each
    other system, round by round."""
    grouped: dict[tuple[Case, Figure], dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        grouped[sample.case, sample.timed.figure][sample.system].append(sample)
    rows: list[tuple[str, ...]] = []
    for (case, figure), by_system in grouped.items():
        ours = {sample.run: sample.timed.jobs_per_s for sample in by_system.get(over, [])}
        for system, found in by_system.items():
            rates = {sample.run: sample.timed.jobs_per_s for sample in found}
            times = None if system == over else ratio(ours, rates)
            cells = (
                f"{case.shards}",
                f"{case.routers}",
                f"{case.load.batch}",
                f"{case.load.callers}",
                f"{figure}",
                load(system).title,
                spread(rates.values()).text(),
                "" if times is None else f"{times.median:.2f}",
                *(f"{each:.1f}" for each in _costs(found)),
            )
            rows.append(cells)
    head = (
        "shards",
        "routers",
        "batch",
        "callers",
        "figure",
        "system",
        "jobs/s (min – max)",
        f"{load(over).title} ÷ it",
    )
    others = sorted(sample.timed.spent.others_s / sample.timed.wall_s for sample in samples)
    note = (
        "Medians. µs: CPU time for one job, all processes of a kind together; those that both enqueue and work count "
        "as workers. Everything else on the machine took "
        f"{median(others):.2f} of a core meanwhile ({others[0]:.2f} – {others[-1]:.2f})."
    )
    return Table(title=title, head=(*head, *(f"{kind} µs" for kind in KINDS)), rows=rows, note=note)


def counts_table(samples: Sequence[Sample]) -> Table:
    """Returns a table with the medians of each case's runs."""
    grouped: dict[tuple[Case, Figure, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        grouped[sample.case, sample.timed.figure, sample.system].append(sample)
    rows: list[tuple[str, ...]] = []
    for (case, figure, system), found in grouped.items():
        of_runs = [pieces(sample.timed.counts, sample.timed.jobs) for sample in found]
        cells = (
            f"{case.shards}",
            f"{case.routers}",
            f"{case.load.batch}",
            f"{case.load.callers}",
            f"{figure}",
            load(system).title,
            *(_middle([each[name] for each in of_runs if name in each]) for name in PIECES),
        )
        rows.append(cells)
    return Table(
        title="The pieces in which jobs travel",
        head=("shards", "routers", "batch", "callers", "figure", "system", *PIECES),
        rows=rows,
        note="Medians. An act is one statement with one commit; claims that found nothing count too. Handed over: "
        "leased by the enqueue, not claimed. Messages: of all workers' streams, in both directions. A second: of the "
        "run; a whole life begins a second before its first job. Wake-ups: waits of all threads of a kind of process, "
        "of which up to 50/s in each worker process are the benchmark's own.",
    )


def _middle(values: Sequence[float]) -> str:
    if not values:
        return ""
    middle = median(values)
    return f"{middle:,.0f}" if middle >= 10 else f"{middle:.2g}"


def written_table(samples: Sequence[Sample]) -> Table:
    grouped: dict[tuple[Case, str], list[tuple[Written, int]]] = defaultdict(list)
    for sample in samples:
        if sample.written is not None:
            grouped[sample.case, sample.system].append((sample.written, sample.timed.jobs))
    rows: list[tuple[str, ...]] = []
    for (case, system), found in grouped.items():
        wal, commits, dead, hot = (
            spread(getattr(written, name) / jobs for written, jobs in found)
            for name in ("wal_bytes", "commits", "dead_rows", "dead_rows_hot")
        )
        cells = (
            f"{case.load.batch}",
            f"{case.load.callers}",
            load(system).title,
            wal.text(),
            f"{commits.median:.3f}",
            f"{dead.median:.2f}",
            f"{hot.median:.2f}",
        )
        rows.append(cells)
    return Table(
        title="What the database writes for one job's whole life",
        head=("batch", "callers", "system", "WAL bytes (min – max)", "commits", "dead rows", "of HOT updates"),
        rows=rows,
        note="WAL: of the whole server, by its insert position. Commits: transactions in the system's database, by "
        "pg_stat_database. Dead rows: deletes, and updates that were not HOT, of all its tables, by "
        "pg_stat_all_tables; HOT updates leave one too, which needs no vacuum.",
    )


def _costs(samples: Sequence[Sample]) -> tuple[float, ...]:
    """Returns the CPU time per job, in µs, of each kind of process."""
    return tuple(
        median(getattr(sample.timed.spent, f"{kind.lower()}_s") / sample.timed.jobs * 1e6 for sample in samples)
        for kind in KINDS
    )


def plots(samples: Sequence[Sample]) -> list[Plot]:
    """Returns plots of the whole life of jobs: by batch size if several batch sizes were measured, and by callers if
    several numbers of callers were measured."""
    found: list[Plot] = []
    lives = [sample for sample in samples if sample.timed.figure is Figure.LIFE]
    if not lives:
        return []
    first = lives[0].case
    lives = [one for one in lives if (one.case.shards, one.case.routers) == (first.shards, first.routers)]
    for axis, other in (("batch", "callers"), ("callers", "batch")):
        # If the number of callers depends on the batch, plot all cases as one line.
        fixed = {getattr(sample.case.load, other) for sample in lives}
        crossed = len({sample.case.load for sample in lives}) == len(
            {getattr(sample.case.load, axis) for sample in lives}
        )
        for chosen in (
            [lives]
            if crossed
            else [[one for one in lives if getattr(one.case.load, other) == at] for at in sorted(fixed)]
        ):
            lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
            places = sorted({getattr(sample.case.load, axis) for sample in chosen})
            if len(places) < _POINTS_MIN:
                continue
            for system in dict.fromkeys(sample.system for sample in chosen):
                for at in places:
                    rates = [
                        sample.timed.jobs_per_s
                        for sample in chosen
                        if sample.system == system and getattr(sample.case.load, axis) == at
                    ]
                    if rates:
                        lines[load(system).title].append((at, median(rates)))
            suffix = "" if crossed else f", {other} {getattr(chosen[0].case.load, other)}"
            found.append(
                Plot(
                    name=f"throughput-by-{axis}" + suffix.replace(", ", "-").replace(" ", "-"),
                    title=f"Whole life by {axis}{suffix}",
                    x=axis,
                    y="jobs/s",
                    lines=lines,
                    x_log=True,
                    y_log=True,
                )
            )
        if crossed and found:
            break
    return found

"""Writes tables of README.md and docs/performance.md from the results of a run: `python -m bench.pages FOLDER TABLE …`.

A table stands between `<!-- table NAME -->` and `<!-- end -->`. FOLDER contains the bench.json of a `./run bench
throughput` with the options that the page names next to the table.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.systems import BATCHES, LIMIT, PEERS, RAW, WINDROW, load
from proof.environment import described

_ROOT = Path(__file__).resolve().parent.parent
PAGES = (_ROOT / "README.md", _ROOT / "docs" / "performance.md")
MARK = re.compile(r"(<!-- table (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_FIGURES = ("enqueue", "drain", "whole life")
_KINDS = ("producer_s", "worker_s", "router_s", "postgres_s")
Rows = list[Sequence[str]]


class Results:
    """The samples of one bench.json, by system, batch and figure."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self._samples: list[Mapping[str, Any]] = told["scenarios"]["throughput"]["samples"]
        self._environment: Mapping[str, Any] = told["environment"]
        self.batches = sorted({sample["load"]["batch"] for sample in self._samples}, reverse=True)

    def systems(self, known: Sequence[str]) -> list[str]:
        """Returns those of the known systems that were measured."""
        found = {sample["system"] for sample in self._samples}
        return [system for system in known if system in found]

    def middle(self, system: str, batch: int, figure: str, value: Callable[[Mapping[str, Any]], float]) -> float:
        return median(
            value(sample)
            for sample in self._samples
            if (sample["system"], sample["load"]["batch"], sample["figure"]) == (system, batch, figure)
        )

    def rate(self, system: str, batch: int, figure: str) -> str:
        return f"{self.middle(system, batch, figure, lambda sample: sample['jobs_per_s']):,.0f}"

    def cpu_us(self, system: str, batch: int, figure: str, kinds: Sequence[str] = _KINDS) -> float:
        return self.middle(
            system,
            batch,
            figure,
            lambda sample: sum(sample["spent"][kind] for kind in kinds) / sample["jobs"] * 1e6,
        )

    @property
    def caption(self) -> str:
        others = median(
            max(0.0, sample["spent"]["machine_s"] - sum(sample["spent"][kind] for kind in (*_KINDS, "own_s")))
            / sample["wall_s"]
            for sample in self._samples
        )
        runs = max(sample["run"] for sample in self._samples)
        return textwrap.fill(
            f"Medians of {runs} runs; the systems took turns. {described(self._environment)} "
            f"During the runs, all other programs on it used {others:.1f} cores.",
            width=120,
            break_on_hyphens=False,
        )


def _users(results: Results) -> Rows:
    """The figures of each system that matter to its users, with the largest batch."""
    batch = results.batches[0]
    return [
        ("jobs/s", *_FIGURES, "CPU µs for each job (whole life, all processes)"),
        *(
            (
                load(system).title,
                *(results.rate(system, batch, figure) for figure in _FIGURES),
                f"{results.cpu_us(system, batch, 'whole life'):.0f}",
            )
            for system in results.systems((WINDROW, "river", *(peer for peer in PEERS if peer != "river")))
        ),
    ]


def _layers(results: Results) -> Rows:
    """The rates of all systems and of Windrow's inner layers, for every batch."""
    columns = [(batch, figure) for batch in results.batches for figure in _FIGURES]
    return [
        ("jobs/s", *(f"{figure} by {batch}" for batch, figure in columns)),
        *(
            (load(system).title, *(results.rate(system, batch, figure) for batch, figure in columns))
            for system in results.systems((WINDROW, BATCHES, RAW, LIMIT, *PEERS))
        ),
    ]


def _cpu(results: Results) -> Rows:
    """The CPU time that each kind of process spends on a job, for every batch."""
    rows: Rows = [("CPU µs a job", "producers", "workers", "routers", "Postgres", "all", "jobs/s for each core")]
    for batch in results.batches:
        for system in results.systems((WINDROW, BATCHES, RAW, LIMIT)):
            for figure in _FIGURES:
                every = results.cpu_us(system, batch, figure)
                of_kinds = (f"{results.cpu_us(system, batch, figure, [kind]):.1f}" for kind in _KINDS)
                row = (f"{load(system).title}: {figure} by {batch}", *of_kinds, f"{every:.1f}", f"{1e6 / every:,.0f}")
                rows.append(row)
    return rows


TABLES: Mapping[str, Callable[[Results], Rows]] = {
    "users": _users,
    "layers": _layers,
    "one-router": _layers,
    "cpu": _cpu,
}


def written(page: str, results: Results, tables: Collection[str]) -> str:
    """Returns the page, with the named tables made anew from the results."""

    def table(mark: re.Match[str]) -> str:
        if mark["name"] not in tables:
            return mark[0]
        head, *rows = TABLES[mark["name"]](results)
        lines = (head, ["---"] * len(head), *rows)
        text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return f"{mark[1]}{text}\n\n{results.caption}\n{mark[3]}"

    return MARK.sub(table, page)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pages", description="Writes tables of the pages.")
    parser.add_argument("folder", type=Path, help="with the bench.json of a run")
    parser.add_argument("table", nargs="+", choices=list(TABLES), help="what the run measured for the pages")
    given = parser.parse_args()
    results = Results(json.loads((given.folder / "bench.json").read_text()))
    for page in PAGES:
        page.write_text(written(page.read_text(), results, given.table))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench`: measures on a cluster of its own, which is gone afterwards. See bench/README.md."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import report
from bench.environment import environment
from bench.measure import Measured, Plan, Sample, measure
from bench.system import Wrong
from bench.systems import LIMIT, load
from embedded import EmbeddedError
from router.server import CannotListen
from router.supervisor import RouterFailed


def main() -> int:
    plan, file = _arguments()
    console = Console(stderr=True)
    surroundings = environment()
    try:
        measured = asyncio.run(_measure(plan, console))
    except (Wrong, EmbeddedError, CannotListen, RouterFailed) as error:
        console.print(f"bench: {error}", style="red", markup=False)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("bench: stopped")
        return 130
    surroundings["postgres"] = measured.postgres
    limit, cores = load(LIMIT).title, surroundings["cores"]
    assert isinstance(cores, int)
    print(report.markdown(measured.samples, limit=limit, cores=cores))
    if file is not None:
        report.write(file, plan=plan, samples=measured.samples, environment=surroundings, limit=limit)
    return 0


async def _measure(plan: Plan, console: Console) -> Measured:
    task = asyncio.current_task()
    assert task is not None
    # As Ctrl-C does: every scope ends what it has started.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=plan.turns)

        def say(what: str) -> None:
            progress.update(bar, description=what)
            if not console.is_terminal:
                console.print(what, markup=False, highlight=False)

        def sampled(sample: Sample | None) -> None:
            if sample is None:
                progress.advance(bar)
            else:
                case = f"{sample.shards} × {sample.batch}  {sample.figure:<10}"
                line = f"{case} {sample.jobs_per_s:>9,.0f}/s  {sample.system}"
                console.print(line, markup=False, highlight=False)

        return await measure(plan, say=say, sampled=sampled)


def _arguments() -> tuple[Plan, Path | None]:
    plan = Plan()
    parser = argparse.ArgumentParser(
        prog="./run bench",
        description="Measures enqueue, drain and whole life of no-op jobs, beside the limit that bare statements set.",
    )
    parser.add_argument("--batch", type=_numbers(1000), default=plan.batches, metavar="N,N", help="jobs a call; 100")
    parser.add_argument("--shards", type=_numbers(64), default=plan.shards, metavar="N,N", help="Postgres shards; 1,2")
    parser.add_argument("--jobs", type=_number(10**8), help="jobs of a run; by default enough for some seconds")
    parser.add_argument("--runs", type=_number(1000), default=plan.runs, help="after a warm-up; 5")
    parser.add_argument("--clients", type=_number(64), default=plan.clients, help="client processes; 2")
    parser.add_argument("--callers", type=_number(1000), default=plan.callers, help="calls at a time of each; 4")
    parser.add_argument("--routers", type=_number(64), default=plan.routers, help="router processes; 2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    given = parser.parse_args()
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"there is no folder {given.json.parent} for --json")
    plan = Plan(
        shards=given.shards,
        batches=given.batch,
        jobs=given.jobs,
        runs=given.runs,
        clients=given.clients,
        callers=given.callers,
        routers=given.routers,
    )
    return plan, given.json


def _number(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        number = int(text)
        if not 1 <= number <= most:
            raise argparse.ArgumentTypeError(f"must be from 1 to {most:,}, not {text}")
        return number

    return read


def _numbers(most: int) -> Callable[[str], tuple[int, ...]]:
    one = _number(most)
    return lambda text: tuple(map(one, text.split(",")))


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench`: measures on clusters of its own, which it removes afterwards. See bench/README.md."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
from platformdirs import user_cache_path
from rich.console import Console

from bench import plots, report
from bench.arguments import peers
from bench.catalog import SCENARIOS
from bench.report import Found
from bench.scenario import Bench
from bench.system import Wrong
from bench.systems import PEERS
from embedded import EmbeddedError
from proof.environment import environment
from proof.processes import ProcessFailed
from router.errors import CannotListen, RouterFailed

_RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The scenarios that the command line asks for, each with its plan."""

    parts: list[tuple[str, Any]]
    out: Path
    cache: Path


def main() -> int:
    order = read_order(sys.argv[1:])
    console = Console(stderr=True, highlight=False)
    began_s = time.monotonic()

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - began_s:6.0f} s  {what}", markup=False, soft_wrap=True)

    bench = Bench(cache=order.cache, say=say)
    found: list[Found] = []
    surroundings = environment()
    try:
        asyncio.run(_measure(order, bench, found))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("bench: stopped")
        return 130
    for what, why in bench.failed.items():
        console.print(f"bench: {what}: {why}", style="red", markup=False)
    surroundings["postgres"] = bench.postgres
    if found:
        print(report.markdown(found, environment=surroundings, failed=bench.failed))
        try:
            report.write(order.out, found, environment=surroundings, failed=bench.failed)
            plots.draw(order.out, [plot for one in found for plot in one.plots], say)
        except OSError as error:
            console.print(f"bench: cannot write to {order.out}: {error}", style="red", markup=False)
            return 1
        say(f"written to {order.out}")
    return 1 if bench.failed else 0


async def _measure(order: Order, bench: Bench, found: list[Found]) -> None:
    task = asyncio.current_task()
    assert task is not None
    # SIGTERM acts like Ctrl-C: every scope ends what it has started.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    for name, plan in order.parts:
        try:
            found.append(await SCENARIOS[name].measure(plan, bench))
        except (Wrong, ProcessFailed, EmbeddedError, CannotListen, RouterFailed, psycopg.Error, OSError) as error:
            # Continue: the other scenarios can still be measured.
            bench.failed[f"scenario {name}"] = f"{error}"


def read_order(arguments: list[str]) -> Order:
    parser = argparse.ArgumentParser(
        prog="./run bench",
        description="Measures Windrow, the limits above it, and other queue systems on the same Postgres. Without the "
        "name of a scenario: all of them but dashboards, in about 55 minutes.",
    )
    parser.add_argument("--quick", action="store_true", help="Windrow and its limits alone, in about 4 minutes")
    parser.add_argument(
        "--peers", type=peers, default=tuple(PEERS), metavar="all|none|NAME,…", help="beside Windrow; all"
    )
    _add_places(parser, default=None)
    commands = parser.add_subparsers(dest="scenario", metavar="SCENARIO")
    for name, scenario in SCENARIOS.items():
        # In a help text, `argparse` treats a % as the start of a format. In a description it does not.
        command = commands.add_parser(
            name, help=scenario.help.replace("%", "%%"), description=f"Measures {scenario.help}."
        )
        scenario.options(command)
        # Keep the options that were given before the scenario's name.
        _add_places(command, default=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    kind = given.scenario or ("quick" if given.quick else "all")
    out: Path = given.out or _RESULTS / f"{stamp}-{kind}"
    if not out.absolute().parent.is_dir() and given.out is not None:
        parser.error(f"there is no folder {out.parent} for --out")
    cache: Path = (given.cache or user_cache_path("windrow") / "bench").absolute()
    if given.scenario is not None:
        if given.quick:
            parser.error("--quick is for all scenarios together: leave the name out")
        return Order(parts=[(given.scenario, SCENARIOS[given.scenario].plan(given))], out=out, cache=cache)
    if given.quick:
        parts = [
            (name, plan)
            for name, scenario in SCENARIOS.items()
            if scenario.quick is not None
            for plan in _several(scenario.quick())
        ]
    else:
        parts = [
            (name, plan)
            for name, scenario in SCENARIOS.items()
            if scenario.full is not None
            for plan in _several(scenario.full(given.peers))
        ]
    return Order(parts=parts, out=out, cache=cache)


def _several(plans: Any) -> tuple[Any, ...]:
    return plans if isinstance(plans, tuple) else (plans,)


def _add_places(parser: argparse.ArgumentParser, *, default: object) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=default,
        metavar="FOLDER",
        help="for bench.json, bench.md and plots; bench/results/…",
    )
    parser.add_argument(
        "--cache", type=Path, default=default, metavar="FOLDER", help="where peers are installed; in the user's cache"
    )


if __name__ == "__main__":
    sys.exit(main())

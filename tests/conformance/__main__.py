"""Runs the scenarios against a client library of any language. README.md says what the program with the library must
do.

python -m tests.conformance --list
python -m tests.conformance --run [--only NAME]... [--json] -- COMMAND...
python -m tests.conformance --serve SCENARIO [--address HOST:PORT]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from tests.conformance.scenarios import SCENARIOS, Scenario
from tests.conformance.stage import PATIENCE_S, Outcome, by_hand, play, program

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
# How many scenarios run at the same time. Most scenarios only wait.
JOBS = 4
_WIDTH = 118


def main(given: Sequence[str]) -> int:
    own, command = _split(given)
    options = _parser().parse_args(own)
    chosen = [BY_NAME[name] for name in options.only or BY_NAME]
    if options.list:
        _print_list(chosen, as_json=options.json)
        return 0
    if options.serve is not None:
        outcomes = [asyncio.run(_serve(BY_NAME[options.serve], options.address, options.patience))]
    elif command:
        outcomes = asyncio.run(_run(chosen, command, jobs=options.jobs, patience_s=options.patience))
    else:
        _parser().error("--run needs the command of a client: --run -- COMMAND...")
    _print_outcomes(outcomes, as_json=options.json)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _split(given: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the arguments before `--`, and the arguments after it."""
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description="Scenarios for client libraries, against a fake server.",
        epilog="Exit codes: 0, the client passed; 1, it did not; 2, the command line makes no sense.",
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="what each scenario asks for")
    what.add_argument("--run", action="store_true", help="start COMMAND for each scenario: --run -- COMMAND...")
    what.add_argument("--serve", metavar="SCENARIO", choices=BY_NAME, help="one scenario, for a client started by hand")
    parser.add_argument("--only", metavar="SCENARIO", choices=BY_NAME, action="append", help="repeat it for several")
    parser.add_argument("--address", default="127.0.0.1:0", help="where --serve listens; default: a free port")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"scenarios at the same time; default: {JOBS}")
    parser.add_argument(
        "--patience", metavar="S", type=float, default=PATIENCE_S, help=f"for each step; default: {PATIENCE_S:g} s"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


async def _run(chosen: Sequence[Scenario], command: Sequence[str], *, jobs: int, patience_s: float) -> list[Outcome]:
    places = asyncio.Semaphore(max(1, jobs))

    async def run(scenario: Scenario) -> Outcome:
        async with places:
            return await play(scenario, program(command), patience_s=patience_s)

    return await asyncio.gather(*map(run, chosen))


async def _serve(scenario: Scenario, address: str, patience_s: float) -> Outcome:
    return await play(scenario, by_hand, address=address, patience_s=patience_s)


def _print_list(chosen: Sequence[Scenario], *, as_json: bool) -> None:
    wide = max(len(scenario.name) for scenario in chosen)
    for scenario in chosen:
        if as_json:
            print(json.dumps({"scenario": scenario.name, "what": scenario.what}))
        else:
            print(f"{scenario.name:<{wide}}  {scenario.what}")


def _print_outcomes(outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    wide = max(len(outcome.scenario) for outcome in outcomes)
    for outcome in outcomes:
        if as_json:
            print(json.dumps(asdict(outcome)))
            continue
        verdict, what = ("pass", f"  {outcome.expected}") if outcome.passed else ("FAIL", "")
        print(f"{verdict}  {outcome.scenario:<{wide}}  {outcome.seconds:5.1f} s{what}")
        if not outcome.passed:
            print(_indented("expected", outcome.expected), _indented("seen", outcome.seen), sep="\n")
    if not as_json:
        print(f"{sum(outcome.passed for outcome in outcomes)} of {len(outcomes)} passed")


def _indented(what: str, text: str) -> str:
    return textwrap.fill(f"{what}: {text}", _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 8)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

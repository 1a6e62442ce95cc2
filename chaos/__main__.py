"""`python -m chaos`: makes a run under faults. Exit code 0: every invariant held. 1: an invariant did not hold. 2: the
run was not possible."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import grpc
import psycopg
from rich.console import Console

from chaos import report, timeline
from chaos.crew import ClientFailed
from chaos.disk import small_disk
from chaos.faults import FAULTS
from chaos.run import Order, Told, run
from cli.standard_error import standard_error_to
from embedded import EmbeddedError
from proof.arguments import names, number, positive
from proof.checker import examine
from proof.environment import environment
from router.errors import CannotListen, RouterFailed
from shard.errors import ShardError

_RESULTS = Path(__file__).resolve().parent / "results"
_FAILURES = (EmbeddedError, CannotListen, RouterFailed, ClientFailed, ShardError, psycopg.Error, grpc.RpcError, OSError)


def main() -> int:
    order = read_order(sys.argv[1:])
    began_s = time.monotonic()
    with _screen() as screen, small_disk(f"s{order.cast.shards}") as disk:
        console = Console(file=screen, highlight=False)

        def say(what: str) -> None:
            console.print(f"{time.monotonic() - began_s:6.0f} s  {what}", markup=False, soft_wrap=True)

        say(f"seed {order.seed}, {order.seconds:g} s of faults, written to {order.out}")
        try:
            order.out.mkdir(parents=True)
            with (order.out / "routers.log").open("ab") as log, standard_error_to(log.fileno()):
                told = asyncio.run(_stoppable(run(order, disk=disk, say=say)))
        except (KeyboardInterrupt, asyncio.CancelledError):
            say("stopped")
            return 130
        except _FAILURES as error:
            console.print(f"chaos: {error}", style="red", markup=False)
            return 2
        return _judge(order, told, say)


def read_order(arguments: list[str]) -> Order:
    parser = argparse.ArgumentParser(
        prog="./run chaos",
        description="Runs a cluster of its own under load while its parts are killed, frozen, cut off and filled up, "
        "slots move and operators change their minds, and checks the invariants by what clients saw and tables say.",
    )
    parser.add_argument("--minutes", type=positive, default=2.0, help="of faults; starting and draining come on top; 2")
    parser.add_argument(
        "--seed", type=int, default=None, help="draws the faults and the clients' choices; a new one each time"
    )
    parser.add_argument("--out", type=Path, default=None, metavar="FOLDER", help="a new folder; chaos/results/…")
    parser.add_argument(
        "--only", type=_faults, default=tuple(FAULTS), metavar="FAULT,…", help=f"of {', '.join(FAULTS)}; all"
    )
    parser.add_argument(
        "--router-memory", type=positive, default=None, metavar="MIB", help="more resident in a router is a violation"
    )
    parser.add_argument(
        "--schedules",
        type=number(10**6),
        default=0,
        metavar="COUNT",
        help="so many more that nobody changes; each fires every 15 minutes",
    )
    given = parser.parse_args(arguments)
    seed = secrets.randbelow(1_000_000) if given.seed is None else given.seed
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    out: Path = given.out or _RESULTS / f"{stamp}-{seed}"
    if out.exists():
        parser.error(f"{out} is there already: name a new folder for --out")
    return Order(
        seed=seed,
        seconds=60 * given.minutes,
        out=out.absolute(),
        faults=given.only,
        router_bytes_max=None if given.router_memory is None else round(given.router_memory * 2**20),
        steady_schedules=given.schedules,
    )


def _faults(text: str) -> tuple[str, ...]:
    return names(text, FAULTS, "fault")


async def _stoppable(running: Coroutine[Any, Any, Told]) -> Told:
    """Runs the coroutine so that SIGTERM acts like Ctrl-C: every scope ends what it has started."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await running


def _judge(order: Order, told: Told, say: Callable[[str], None]) -> int:
    found = [*examine(told.evidence), *told.unhealed]
    violations = [one for one in found if not one.excused]
    surroundings = environment()
    report.write(order.out, order, told, found, surroundings)
    timeline.draw(order.out, told, say)
    print(report.markdown(order, told, found, surroundings))
    say(f"written to {order.out}; again: ./run chaos --minutes {order.seconds / 60:g} --seed {order.seed}")
    return 1 if violations else 0


@contextlib.contextmanager
def _screen() -> Generator[IO[str], None, None]:
    """Yields a copy of standard error. When standard error is redirected later, the copy still leads to the old
    place."""
    with os.fdopen(os.dup(2), "w") as screen:
        yield screen


if __name__ == "__main__":
    sys.exit(main())

"""Producers and a worker that tests run while routers are upgraded. The producers and the worker use only the client of
one release.

    python tests/fault/upgrade_load.py ORG LOG PER_SECOND ADDRESS...

The log has one JSON object per line: {"stored": id, "at": s, "took": s}, {"failed": error, "at": s} or {"ran": id,
"attempt": n, "at": s}. `at` is CLOCK_MONOTONIC, which all processes of a machine share. `took` is the time since the
call was due, including all tries. After SIGUSR1 no more jobs are enqueued. The process ends when all jobs have run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from pathlib import Path

import windrow

WINDOW_S = 5.0
_QUEUE, _KIND = "load", "upgrade"
_PRODUCERS, _WORKERS = 4, 2
_LINGER_S_MAX = 45.0


async def main(org: str, log: Path, per_second: float, addresses: list[str]) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, stopped.set)
    stored, ran = set[str](), set[str]()
    all_stored, all_ran = asyncio.Event(), asyncio.Event()

    with log.open("w") as lines:

        def tell(**said: object) -> None:
            lines.write(json.dumps(said) + "\n")

        def look() -> None:
            if all_stored.is_set() and stored <= ran:
                all_ran.set()

        async def enqueue(client: windrow.Client, due_s: float) -> None:
            try:
                job = await client.enqueue(_QUEUE, _KIND, b"x" * 200)
            except windrow.WindrowError as error:
                tell(failed=repr(error), at=due_s)
                return
            stored.add(job.id)
            tell(stored=job.id, at=due_s, took=time.monotonic() - due_s)

        async def produce(client: windrow.Client, first: int) -> None:
            """Enqueues by a timetable, however long the answers take."""
            begun_s = time.monotonic()
            number = first
            async with asyncio.TaskGroup() as calls:
                while not stopped.is_set():
                    due_s = begun_s + number / per_second
                    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                    calls.create_task(enqueue(client, due_s))
                    number += _PRODUCERS

        async def work(client: windrow.Client) -> None:
            worker = windrow.Worker(client, _QUEUE, concurrency=50, visibility_window=WINDOW_S)

            @worker.handler(_KIND)
            async def run(job: windrow.Job) -> None:
                tell(ran=job.id, attempt=job.attempt, at=time.monotonic())
                ran.add(job.id)
                look()

            running = asyncio.create_task(worker.run())
            await all_ran.wait()
            worker.stop()
            await running

        async with contextlib.AsyncExitStack() as stack:
            clients: list[windrow.Client] = []
            for _ in range(_PRODUCERS + _WORKERS):
                # gRPC takes the first address that answers. The order differs, so that every router has some of the
                # clients.
                clients.append(await stack.enter_async_context(windrow.Client(f"ipv4:{','.join(addresses)}", org=org)))
                addresses = [*addresses[1:], addresses[0]]
            workers = [asyncio.create_task(work(client)) for client in clients[_PRODUCERS:]]
            async with asyncio.TaskGroup() as producing:
                for number, client in enumerate(clients[:_PRODUCERS]):
                    producing.create_task(produce(client, number))
            all_stored.set()
            look()
            # The wait is bounded. If some jobs never run, the log shows this.
            await asyncio.wait([asyncio.create_task(all_ran.wait())], timeout=_LINGER_S_MAX)
            all_ran.set()
            await asyncio.gather(*workers)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))

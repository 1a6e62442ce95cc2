"""A worker process that dies when it gets a job of one kind, as from a fault in native code.

    python -m tests.fault.poison_worker ADDRESS ORG [mended]

`mended`: the process survives jobs of this kind. Jobs of all other kinds always succeed. The process ends after
SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import windrow

QUEUE, POISON = "load", "poison"
INNOCENT = ("mail", "resize", "report")
WINDOW_S = 2


async def main(address: str, org: str, *, mended: bool) -> None:
    async with windrow.Client(address, org=org) as client:
        worker = windrow.Worker(client, QUEUE, concurrency=4, visibility_window=WINDOW_S)

        @worker.handler(POISON)
        async def poison(_: windrow.Job) -> None:
            if not mended:
                os.kill(os.getpid(), signal.SIGKILL)

        @worker.handler(*INNOCENT)
        async def innocent(_: windrow.Job) -> None:
            await asyncio.sleep(0.01)

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        await worker.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], mended="mended" in sys.argv[3:]))

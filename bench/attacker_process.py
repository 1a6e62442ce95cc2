"""`python -m bench.attacker_process`: one attack of the scenario *hostile*. A real attacker has a machine of its own.
Therefore, on Linux, this process takes only the CPU time that routers, Postgres and the quiet org leave.

Reads its order from standard input, one line of JSON, and prints `ready`. Begins the attack at the next line, and then
prints what it saw, as one line of JSON. Ends when its input ends, also if the input ends because the parent process
died.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass

from bench.attacks import Attack, Attacker

_LOWEST_PRIORITY = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`streams`: the number of streams that the attack UNREAD_STREAMS opens."""

    attack: Attack
    address: str
    streams: int
    seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))


async def _main() -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    order = Order(**json.loads(await lines.readline()))
    attacker = Attacker(Attack(order.attack), order.address, streams=order.streams)
    await attacker.prepare()
    os.write(1, b"ready\n")
    if not await lines.readline():
        return
    _step_back()
    attacking, ending = asyncio.ensure_future(attacker.attack(order.seconds)), asyncio.ensure_future(lines.read())
    try:
        await asyncio.wait({attacking, ending}, return_when=asyncio.FIRST_COMPLETED)
        if attacking.done():
            attacking.result()
            os.write(1, f"{attacker.outcome.to_json()}\n".encode())
    finally:
        attacking.cancel()
        ending.cancel()


def _step_back() -> None:
    """Lets every other process run first."""
    if sys.platform == "linux":
        # The lowest priority is not enough: the kernel would let this process finish its slice of some ms before a
        # process that wakes up may run. A call causes many wake-ups, and each of them would wait for such a slice to
        # end.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(_LOWEST_PRIORITY)


if __name__ == "__main__":
    # Ctrl-C in a terminal reaches every process of the group. Ignore the signal, because the parent process ends this
    # process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_main())

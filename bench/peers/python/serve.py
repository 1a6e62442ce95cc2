"""The loop of a peer written in Python. Reads and writes frames until standard input ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from bench.peers import wire

# One frame reports many jobs. A job is reported at most this long after it was taken.
_TELL_S = 0.002
_END_S_MAX = 5.0


class Report:
    """Collects what a consumer has done, and reports it in batches."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._payloads: list[bytes] = []
        self._times_ns: list[int] = []
        self._finished = 0
        self._planned: asyncio.TimerHandle | None = None

    def taken(self, payload: str) -> None:
        """Reports that a handler has this job now."""
        self._times_ns.append(time.monotonic_ns())
        self._payloads.append(payload.encode())
        self._plan()

    def finished(self, jobs: int) -> None:
        """Reports that this number of further jobs has finished in the database."""
        self._finished += jobs
        self._plan()

    def tell(self) -> None:
        self._planned = None
        if self._payloads:
            self._send(wire.taken(self._payloads, self._times_ns))
            self._payloads, self._times_ns = [], []
        if self._finished:
            self._send(wire.frame(wire.Kind.FINISHED, wire.U32.pack(self._finished)))
            self._finished = 0

    def _plan(self) -> None:
        if self._planned is None:
            self._planned = asyncio.get_running_loop().call_later(_TELL_S, self.tell)


class Peer(Protocol):
    """The operations of one queue system, which each peer implements with its own library."""

    async def open(self, dsn: str, connections: int) -> None:
        """Connects, and makes the schema if it is missing. At most `connections` calls of enqueue() run at the same
        time."""
        ...

    async def prepare(self, run: str) -> None:
        """Makes an empty queue. Another process may have made it already."""
        ...

    async def enqueue(self, payloads: list[str]) -> None:
        """Stores jobs by one call of the system. Returns after their transaction has committed."""
        ...

    async def work(self, batch: int, concurrency: int, report: Report) -> None:
        """Runs the system's own consumer until rest() is called. Then the consumer finishes the jobs that it has
        begun."""
        ...

    def rest(self) -> None: ...

    async def counts(self) -> dict[str, int | None]:
        """Returns three counts for the last prepared run: the jobs that are left, the accepted jobs and the finished
        jobs. A count is None if the system does not keep it."""
        ...

    async def close(self) -> None: ...


def serve(peer: Peer, *, loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    # Ctrl-C reaches every process of the terminal. Ignore it: the client gets it too, and ends this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_serve(peer))


async def _serve(peer: Peer) -> None:
    # The client expects only frames: redirect what a library prints to standard error.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    loop = asyncio.get_running_loop()
    frames = asyncio.StreamReader(limit=2**22)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(frames), sys.stdin)
    transport, _ = await loop.connect_write_pipe(asyncio.Protocol, out)
    report = Report(transport.write)
    working: asyncio.Task[None] | None = None
    tasks: set[asyncio.Task[None]] = set()

    def answer(call: int, told: dict[str, object]) -> None:
        transport.write(wire.frame(wire.Kind.ANSWER, json.dumps({"id": call, **told}).encode()))

    async def act(call: int, action: Awaitable[Any]) -> None:
        try:
            answer(call, {"value": await action})
        except Exception as error:  # noqa: BLE001 - told to the client
            answer(call, {"error": f"{type(error).__name__}: {error}"})

    async def rest() -> None:
        if working is not None:
            peer.rest()
            await asyncio.wait({working})
            report.tell()

    def begin(call: int, action: Awaitable[Any]) -> asyncio.Task[None]:
        task = asyncio.create_task(act(call, action))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            length, kind = wire.HEAD.unpack(await frames.readexactly(wire.HEAD.size))
            body = await frames.readexactly(length)
            if kind == wire.Kind.ENQUEUE:
                payloads, _end = wire.unpack(body, 4)
                begin(wire.U32.unpack_from(body)[0], peer.enqueue([payload.decode() for payload in payloads]))
                continue
            told = json.loads(body)
            call, verb = told.pop("id"), told.pop("verb")
            if verb == "work":
                working = begin(call, peer.work(**told, report=report))
            elif verb == "rest":
                begin(call, rest())
            else:
                begin(call, getattr(peer, verb)(**told))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S_MAX):
            await rest()
            await peer.close()
    # Do not wait for threads and connections that a library has left behind.
    os._exit(0)

"""What the client processes of `./run bench grow` have in common: their orgs, what they write down, and what the Python
client makes up for without telling."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc

from bench.evidence import Recorder, Verb
from bench.tally import Tally
from windrow import calls, leases
from windrow.errors import WindrowError

# As in router/process.py: thousands of streams are all alive, and looking through them for garbage would stop what
# measures for a second at a time.
_COLLECT_AFTER = 10_000, 10, 10
# Connections of one process. The kernel deals them out to the router processes.
CHANNELS = 4
_UNKNOWN: int = grpc.StatusCode.UNKNOWN.value[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Goes to a process as JSON."""

    name: str
    address: str
    # Orgs are `<run>-<number>`; a process has those whose numbers are `mine` modulo `places`.
    run: str
    orgs: int
    mine: int
    places: int
    folder: str
    # Where jobs are counted as they are stored (`finished`) and taken, and which place is this process's.
    tally: str
    tally_places: int
    tally_mine: int
    # Of a producer.
    jobs_per_s: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def org(self, number: int) -> str:
        return f"{self.run}-{number}"

    @property
    def numbers(self) -> range:
        return range(self.mine, self.orgs, self.places)


def main(work: Callable[[Site, Recorder, Tally, asyncio.Event], Awaitable[None]]) -> None:
    """Runs a process's work, which says `ready` by itself, and ends when the event is set: with its input."""
    gc.set_threshold(*_COLLECT_AFTER)
    asyncio.run(_main(work))


async def _main(work: Callable[[Site, Recorder, Tally, asyncio.Event], Awaitable[None]]) -> None:
    site = Site(**json.loads(sys.argv[1]))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    over = asyncio.Event()

    async def listen() -> None:
        await lines.read()
        over.set()

    tally = Tally(Path(site.tally), places=site.tally_places, mine=site.tally_mine)
    with Recorder(Path(site.folder), site.name) as recorder, told(recorder):
        async with asyncio.TaskGroup() as group:
            group.create_task(listen())
            group.create_task(_run(work(site, recorder, tally, over)))


async def _run(work: Awaitable[None]) -> None:
    await work


def code_of(error: WindrowError) -> int:
    """gRPC's, of the last try."""
    cause = error.__cause__
    if isinstance(cause, grpc.aio.AioRpcError):
        status: Any = cause.code()
        return int(status.value[0])
    return _UNKNOWN


@contextmanager
def told(recorder: Recorder) -> Generator[None, None, None]:
    """Writes down each try that failed and that the client repeats by itself: it tells nobody, so it is overheard where
    it decides on that. And what a worker says in its log that it could not do: a lease lost, an ack that came late."""

    def note(verb: Verb, code: int) -> None:
        now_ns = time.monotonic_ns()
        recorder.called(verb, 0, due_ns=now_ns, ended_ns=now_ns, code=code)

    pause_s, failed = calls.pause_s, leases.Reach.failed

    def heard_pause_s(failure: calls.Failure, **rest: Any) -> float | None:
        pause = pause_s(failure, **rest)
        if pause is not None:
            note(Verb.TRY, failure.code.value[0])
        return pause

    def heard_failed(self: leases.Reach, error: WindrowError) -> None:
        note(Verb.TRY, code_of(error))
        failed(self, error)

    listener = _Listener(lambda: note(Verb.WORK, _UNKNOWN))
    leases.log.addHandler(listener)
    try:
        with patch.object(calls, "pause_s", heard_pause_s), patch.object(leases.Reach, "failed", heard_failed):
            yield
    finally:
        leases.log.removeHandler(listener)


class _Listener(logging.Handler):
    """Hears of what went wrong, but for what `Reach` says: that is tried again."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        if "cannot be reached" not in str(record.msg):
            self._note()
            print(self.format(record), file=sys.stderr, flush=True)


def codes(counts: Mapping[int, int]) -> str:
    """In words: how many of each."""
    names = {status.value[0]: status.name for status in grpc.StatusCode}
    return ", ".join(f"{count:,} {names.get(code, str(code))}" for code, count in sorted(counts.items())) or "none"

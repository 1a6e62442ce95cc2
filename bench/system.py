"""What a queue system must do to be measured. Knows no system, and takes no time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

# Tells that a worker has a job: when, by time.monotonic_ns(), and its payload.
Taken = Callable[[int, bytes], None]
# Tells that so many more jobs are finished.
Finished = Callable[[int], None]


class Wrong(Exception):
    """The system did something else than it was asked: its figures are worth nothing."""


# The connections of a client process. The kernel deals them out to the server's processes, and could give a single one
# to always the same process.
CONNECTIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where things are. Goes to the client processes as JSON."""

    # HOST:PORT of what speaks gRPC: the routers, or the echo.
    address: str
    # The DSN of each shard's database, for Windrow's own role.
    dsns: Mapping[str, str]
    # The DSN of a database for this system alone, on the first shard's server. Its role owns it.
    dsn: str
    # The folder that peers are installed in.
    cache: str
    # The most calls that this client process has under way at a time, of each sort (enqueue; work).
    callers: int
    # The most connections of this client process, if it uses gRPC.
    connections: int = CONNECTIONS


class System(Protocol):
    """One queue system, as one client process uses it.

    Every method checks what it is answered, and raises Wrong if it is not what was asked for.
    """

    # As the tables call it.
    title: ClassVar[str]

    def __init__(self, site: Site) -> None: ...

    async def prepare(self, run: str) -> None:
        """Connects, and makes empty queues for a run of a name never used before; the same in every client process, and
        one of them first. Not timed."""
        ...

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        """Stores these jobs in one call of the system, its bulk call where they are several; they have committed when
        it returns. Called by several tasks at a time."""
        ...

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        """Runs the system's own consumer, in its documented fast configuration, until it is cancelled.

        `batch`: how many jobs it may fetch at once, where it has such a choice; `concurrency`: how many jobs, or
        batches of them, it has under way. `taken` is told of each job at the moment its handler had it; `finished`
        when jobs have been finished as far as the consumer knows."""
        ...

    async def left(self) -> int:
        """How many jobs of this run are not finished in the database. Asked rarely, at the end of a run."""
        ...

    async def check(self, jobs: int) -> None:
        """After the run: so many jobs were accepted, all of them have finished, each once, and no other is there, as
        far as the system can tell. Not timed."""
        ...

    async def close(self) -> None: ...

"""The interface of a queue system that can be measured. Knows no particular system, and measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

# Reports that a worker has a job: the time by time.monotonic_ns(), and the payload.
Taken = Callable[[int, bytes], None]
# Reports that so many more jobs are finished.
Finished = Callable[[int], None]


class Wrong(Exception):
    """The system did not do what it was asked, so its figures are worthless."""


# The connections of a client process that uses the stubs. The kernel distributes them over the server's processes; a
# single connection would always use the same process.
CONNECTIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The addresses of a system's servers. They go to the client processes as JSON."""

    # HOST:PORT of the gRPC server: the routers, or the echo.
    address: str
    # The DSN of each shard's database, for Windrow's own role.
    dsns: Mapping[str, str]
    # The DSN of a database for this system alone, on the first shard's server. Its role owns it.
    dsn: str
    # The folder that peers are installed in.
    cache: str
    # The most calls that this client process has under way at a time, of each sort (enqueue; work).
    callers: int
    # The most connections of this client process, if it uses gRPC. None: CONNECTIONS by the stubs, and the default of
    # windrow.Client.
    connections: int | None = None
    # The PEM file of the CA of the server's certificate. None: the server speaks plain text.
    ca: str | None = None
    # The API key of the calls. None: the server does not ask for one.
    token: str | None = None


class System(Protocol):
    """One queue system, as one client process uses it.

    Every method checks the answer that it gets, and raises Wrong if that is not what was asked for.
    """

    # Its name in the tables of the report.
    title: ClassVar[str]

    def __init__(self, site: Site) -> None: ...

    async def prepare(self, run: str) -> None:
        """Connects, and makes empty queues for a run with a new name. Every client process calls it with the same name,
        one of them before the others. Not timed."""
        ...

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        """Stores these jobs by one call of the system, which is its bulk call if there are several jobs. They have
        committed when it returns. Called by several tasks at a time."""
        ...

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        """Runs the system's own consumer, in its documented fast configuration, until it is cancelled.

        `batch`: how many jobs it may fetch at once, if it has this choice. `concurrency`: how many jobs, or batches of
        them, it has under way. `taken` is called for each job when its handler gets it; `finished` when the consumer
        knows that jobs have finished."""
        ...

    async def left(self) -> int:
        """How many jobs of this run are not finished in the database. Called rarely, at the end of a run."""
        ...

    async def check(self, jobs: int) -> None:
        """Checks after the run, as far as the system's records allow, that so many jobs were accepted, that each has
        finished exactly once, and that there are no others. Not timed."""
        ...

    async def close(self) -> None: ...

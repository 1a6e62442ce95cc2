"""The interface of a queue system that can be measured. Contains no particular system, and measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

# Reports that a worker has got a job: the time by time.monotonic_ns(), and the payload.
Taken = Callable[[int, bytes], None]
# Reports a number of further jobs that have finished.
Finished = Callable[[int], None]


class Wrong(Exception):
    """The system did not do what it was told to do, so its figures are worthless."""


# The connections of a client process that uses the stubs. The kernel distributes them over the server's processes; a
# single connection would always use the same process.
CONNECTIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a client process must know about a system's servers. It is sent to the client process as JSON."""

    # HOST:PORT of the gRPC server: the routers, or the echo.
    address: str
    # The DSN of each shard's database, for Windrow's own role.
    dsns: Mapping[str, str]
    # The DSN of a database for this system alone, on the first shard's server. The DSN's role owns this database.
    dsn: str
    # The folder in which peers are installed.
    cache: str
    # The most calls of each kind (enqueue, work) that this client process has under way at the same time.
    callers: int
    # The most connections of this client process, if it uses gRPC. None: the stubs use CONNECTIONS, and windrow.Client
    # uses its default.
    connections: int | None = None
    # The PEM file of the CA of the server's certificate. None: the server speaks plain text.
    ca: str | None = None
    # The API key of the calls. None: the server requires no key.
    token: str | None = None


class System(Protocol):
    """One queue system, as one client process uses it.

    Every method checks the system's answer, and raises Wrong if the system did not do what it was asked to do.
    """

    # The system's name in the tables of the report.
    title: ClassVar[str]

    def __init__(self, site: Site) -> None: ...

    async def prepare(self, run: str) -> None:
        """Connects, and makes empty queues for a run with a new name. Every client process calls this with the same
        name; one process calls it first, before all others. Not timed."""
        ...

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        """Stores these jobs with one call: the system's bulk call if there are several jobs. Returns after their
        transaction has committed. Several tasks call this method at the same time."""
        ...

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        """Runs the system's own consumer until this call is cancelled. The consumer has the fast configuration that the
        system's documentation describes.

        `batch`: how many jobs the consumer may fetch at once, if it has this option. `concurrency`: how many jobs, or
        batches of jobs, the consumer has under way. The consumer calls `taken` for each job when the job's handler gets
        it, and `finished` when it knows that jobs have finished."""
        ...

    async def left(self) -> int:
        """Returns how many jobs of this run are not finished in the database. Called rarely, at the end of a run."""
        ...

    async def check(self, jobs: int) -> None:
        """Checks after the run, as far as the system's records allow, that exactly `jobs` jobs were accepted, and that
        each has finished exactly once. Not timed."""
        ...

    async def close(self) -> None: ...

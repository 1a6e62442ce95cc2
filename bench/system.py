"""What a queue system must do to be measured. Knows no system, and takes no time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol


class Wrong(Exception):
    """The system did something else than it was asked: its figures are worth nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where things are. Goes to the client processes as JSON."""

    # HOST:PORT of the routers.
    address: str
    # Of each shard's Postgres, as Windrow's own role.
    dsns: Mapping[str, str]
    # Calls that one client process has under way at a time, of each sort (enqueue; drain).
    callers: int
    payload: str

    @property
    def payload_bytes(self) -> bytes:
        return bytes.fromhex(self.payload)


class System(Protocol):
    """One queue system, as one client process uses it. The methods are called by several tasks at a time.

    Every method checks what it is answered, and raises Wrong if it is not what was asked for.
    """

    # As the tables call it.
    title: ClassVar[str]

    def __init__(self, site: Site) -> None: ...

    async def prepare(self, run: str) -> None:
        """Connects, and makes empty queues for a run of a name never used before; the same in every client process.
        Not timed."""
        ...

    async def enqueue(self, jobs: int) -> None:
        """Stores so many jobs in one call; they have committed when it returns."""
        ...

    async def drain(self, jobs_max: int) -> int:
        """Takes up to `jobs_max` jobs in one call, and finishes them in another; answers how many, 0 when none is
        there now."""
        ...

    async def check(self, jobs: int) -> None:
        """After the run: so many jobs were accepted, all of them have finished, each once, and no other is there.
        Not timed."""
        ...

    async def close(self) -> None: ...

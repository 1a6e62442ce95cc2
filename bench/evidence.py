"""What client processes saw of calls and of jobs: written down as it happens, and read when all is over.

Two files for each process, of records of one length each. Times are of CLOCK_MONOTONIC, which is one for all processes
of a machine.
"""

from __future__ import annotations

import enum
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from uuid import UUID

from bench.pickups import Pickup

_CALLS, _JOBS = ".calls", ".jobs"
_CALL = struct.Struct("<BIqqH")
_SIGHT = struct.Struct("<B16sqq")
_BUFFER_BYTES = 1024 * 1024

# 16 bytes: there are millions.
JobKey = bytes


class Verb(enum.IntEnum):
    ENQUEUE = 1
    DEQUEUE = 2
    ACK = 3
    # What a worker of the Python client could not do, and tells of in its log.
    WORK = 4
    # A try that failed and that the Python client made up for.
    TRY = 5


class Sight(enum.IntEnum):
    """What was seen of a job."""

    # Somebody is about to enqueue it.
    OFFERED = 1
    # Its enqueue was answered OK.
    STORED = 2
    # It came to a worker.
    TAKEN = 3
    # Its ack was answered OK.
    ACKED = 4


class Call(NamedTuple):
    verb: Verb
    # By its number.
    org: int
    # When it was to begin, and when it was answered.
    due_s: float
    ended_s: float
    # gRPC's; 0: OK.
    code: int

    @property
    def took_s(self) -> float:
        return self.ended_s - self.due_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What all clients saw together."""

    calls: list[Call] = field(default_factory=list[Call])
    offered: set[JobKey] = field(default_factory=set[JobKey])
    # When that was heard.
    stored: dict[JobKey, float] = field(default_factory=dict[JobKey, float])
    # How often.
    taken: Counter[JobKey] = field(default_factory=Counter[JobKey])
    acked: Counter[JobKey] = field(default_factory=Counter[JobKey])
    # In the order in which each process got them: since they were due to be stored, and since their enqueues were
    # answered, where they were.
    pickups: list[Pickup] = field(default_factory=list[Pickup])
    dequeues: list[Pickup] = field(default_factory=list[Pickup])


class Recorder:
    """Writes one process's files. Whoever dies before its end has seen nothing: such a run is worth nothing."""

    def __init__(self, folder: Path, client: str) -> None:
        self._calls = (folder / f"{client}{_CALLS}").open("wb", buffering=_BUFFER_BYTES)
        self._jobs = (folder / f"{client}{_JOBS}").open("wb", buffering=_BUFFER_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.close()
        self._jobs.close()

    def called(self, verb: Verb, org: int, *, due_ns: int, ended_ns: int, code: int) -> None:
        self._calls.write(_CALL.pack(verb, org, due_ns, ended_ns, code))

    def saw(self, sight: Sight, job: str, *, at_ns: int = 0, due_ns: int = 0) -> None:
        """`at_ns`: of one that was stored or taken, when; `due_ns`: when it was due to be stored."""
        self._jobs.write(_SIGHT.pack(sight, key_of(job), at_ns, due_ns))


def key_of(job: str) -> JobKey:
    return bytes.fromhex(job.replace("-", ""))


def id_of(key: JobKey) -> str:
    return str(UUID(bytes=key))


def read(folder: Path) -> Seen:
    """All files of a folder."""
    seen = Seen()
    for path in sorted(folder.glob(f"*{_CALLS}")):
        for verb, org, due_ns, ended_ns, code in _records(_CALL, path):
            seen.calls.append(Call(Verb(verb), org, due_ns / 1e9, ended_ns / 1e9, code))
    taken: list[tuple[JobKey, int]] = []
    for path in sorted(folder.glob(f"*{_JOBS}")):
        for sight, job, at_ns, due_ns in _records(_SIGHT, path):
            match sight:
                case Sight.OFFERED:
                    seen.offered.add(job)
                case Sight.STORED:
                    seen.stored[job] = at_ns / 1e9
                case Sight.TAKEN:
                    seen.taken[job] += 1
                    seen.pickups.append(Pickup(due_s=due_ns / 1e9, waited_ms=(at_ns - due_ns) / 1e6))
                    taken.append((job, at_ns))
                case Sight.ACKED:
                    seen.acked[job] += 1
                case _:
                    raise ValueError(f"{path}: there is no sight {sight}")
    for job, at_ns in taken:
        if (stored_s := seen.stored.get(job)) is not None:
            # A worker may have it before its producer hears of it.
            seen.dequeues.append(Pickup(due_s=stored_s, waited_ms=max(0.0, at_ns / 1e6 - stored_s * 1e3)))
    return seen


def _records(record: struct.Struct, path: Path) -> Iterator[tuple[Any, ...]]:
    """Raises struct.error where a record is torn."""
    return record.iter_unpack(path.read_bytes())

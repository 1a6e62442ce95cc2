"""The messages of sibling processes to each other, as bytes. This module does no I/O.

A frame begins with the sizes of its two parts, each in four bytes. Then come the two parts: the head, in JSON, and the
encoded jobs of the outcomes in the head. A frame has everything that one process has to tell another at one moment, or
as much of it as fits (see `take`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from shard.vocabulary import Micros, OrgId, QueueName, ShardName

_T = TypeVar("_T")

SIZES = struct.Struct(">II")
# The largest frame that is read. The frames that are written are much smaller: see `take`.
FRAME_BYTES_MAX = 16 * 1024 * 1024
# A frame gets at most _HINTS_MAX hints. Outcomes are added to a frame until the jobs in its outcomes have
# _JOBS_BYTES_MAX bytes in total. What does not fit goes into the next frame.
_JOBS_BYTES_MAX = 1024 * 1024
_HINTS_MAX = 1000
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class QueueKey(NamedTuple):
    """A queue of an org on a shard."""

    shard: ShardName
    org: OrgId
    queue: QueueName


class Ask(NamedTuple):
    """Asks for places at consumers of `key` for new jobs with these ids and payload sizes. After `until_s`, nobody
    waits for the answer. This is a time of the clock `time.monotonic`, which all processes of a machine share."""

    number: int
    key: QueueKey
    ids: Sequence[str]
    sizes: Sequence[int]
    until_s: float


class Place(NamedTuple):
    """Room for a number of jobs at one consumer, and the lease that these jobs would get."""

    lease: int
    worker: str
    window_us: int
    jobs: int


class Answer(NamedTuple):
    """The places that are kept for the jobs of the Ask with this number, in the order of these jobs. If `places` is
    empty, no places are kept, and no outcome will come."""

    number: int
    places: Sequence[Place]


class Leased(NamedTuple):
    """The jobs of one Place that were leased. `positions`: their positions among the jobs of the Place (None: all jobs
    of the Place). `jobs`: each job encoded as field 1 of an answer."""

    deadline: Micros
    positions: Sequence[int] | None
    jobs: Sequence[bytes]


class Outcome(NamedTuple):
    """What happened with an Answer's places, with one entry for each place. If there are no entries, no job was
    leased."""

    number: int
    leased: Sequence[Leased]


@dataclass(slots=True)
class Frame:
    # Whether consumers of a queue are ready to be handed jobs. Only changes are sent.
    hints: dict[QueueKey, bool] = field(default_factory=dict[QueueKey, bool])
    asks: list[Ask] = field(default_factory=list[Ask])
    answers: list[Answer] = field(default_factory=list[Answer])
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    # The numbers of the received outcomes that had jobs.
    received: list[int] = field(default_factory=list[int])

    def __bool__(self) -> bool:
        return bool(self.hints or self.asks or self.answers or self.outcomes or self.received)

    def take(self) -> Frame:
        """Returns a frame with as many of this object's messages as one frame may have, and removes these messages from
        this object."""
        hints = dict(list(self.hints.items())[:_HINTS_MAX])
        for key in hints:
            del self.hints[key]
        count, room = 0, _JOBS_BYTES_MAX
        while count < len(self.outcomes) and room > 0:
            room -= sum(sum(map(len, leased.jobs)) for leased in self.outcomes[count].leased)
            count += 1
        taken = Frame(hints, self.asks, self.answers, self.outcomes[:count], self.received)
        self.outcomes = self.outcomes[count:]
        self.asks, self.answers, self.received = [], [], []
        return taken

    def encoded(self) -> bytes:
        jobs = [job for outcome in self.outcomes for leased in outcome.leased for job in leased.jobs]
        head = [
            list(self.hints.items()),
            [(number, key, ",".join(ids), sizes, until_s) for number, key, ids, sizes, until_s in self.asks],
            self.answers,
            [
                (number, [(deadline, positions, list(map(len, jobs))) for deadline, positions, jobs in leased])
                for number, leased in self.outcomes
            ],
            self.received,
        ]
        return _framed(head, b"".join(jobs))


def greeting(version: str) -> bytes:
    """Returns the first frame, which names the release of the process that sends it."""
    return _framed(["windrow", version], b"")


def greeted_by(head: bytes) -> str:
    """Returns the release that the first frame names. Raises ValueError."""
    match json.loads(head):
        case ["windrow", str(version)]:
            return version
        case other:
            raise ValueError(f"is no greeting: {other!r:.100}")


def decoded(head: bytes, jobs: bytes) -> Frame:
    """Raises ValueError if the bytes are no frame."""
    match json.loads(head):
        case [[*hints], [*asks], [*answers], [*outcomes], [*received]]:
            at = _Cursor(jobs)
            frame = Frame(
                hints=dict(_each(_hint, hints)),
                asks=list(_each(_ask, asks)),
                answers=list(_each(_answer, answers)),
                outcomes=list(_each(at.outcome, outcomes)),
                received=_numbers(received),
            )
            at.check_end()
            return frame
        case other:
            raise ValueError(f"is no frame: {other!r:.100}")


def _framed(head: Sequence[object], jobs: bytes) -> bytes:
    encoded = _encode(head).encode()
    return SIZES.pack(len(encoded), len(jobs)) + encoded + jobs


def _each(read: Callable[[Any], _T | None], parts: Iterable[Any]) -> Iterator[_T]:
    for part in parts:
        found = read(part)
        if found is None:
            raise ValueError(f"is no part of a frame: {part!r:.100}")
        yield found


def _numbers(found: Any) -> list[int]:
    """Returns `found`. Raises ValueError unless it is a list of numbers that are not negative."""
    match found:
        case [*numbers] if set(map(type, numbers)) <= {int} and min(numbers, default=0) >= 0:
            return numbers
        case _:
            raise ValueError(f"is no list of numbers: {found!r:.100}")


def _key(part: Any) -> QueueKey:
    match part:
        case [str(shard), str(org), str(queue)]:
            return QueueKey(ShardName(shard), OrgId(org), QueueName(queue))
        case _:
            raise ValueError(f"names no queue: {part!r:.100}")


def _hint(part: Any) -> tuple[QueueKey, bool] | None:
    match part:
        case [key, bool(ready)]:
            return _key(key), ready
        case _:
            return None


def _ask(part: Any) -> Ask | None:
    match part:
        case [int(number), key, str(joined), sizes, float(until_s)]:
            ids = joined.split(",")
            if len(ids) == len(_numbers(sizes)):
                return Ask(number, _key(key), ids, sizes, until_s)
            return None
        case _:
            return None


def _answer(part: Any) -> Answer | None:
    match part:
        case [int(number), [*places]]:
            return Answer(number, list(_each(_place, places)))
        case _:
            return None


def _place(part: Any) -> Place | None:
    match part:
        case [int(lease), str(worker), int(window_us), int(jobs)] if 0 <= lease < 2**63 and jobs > 0:
            return Place(lease, worker, window_us, jobs)
        case _:
            return None


class _Cursor:
    """Reads the encoded jobs of a frame one after another."""

    def __init__(self, jobs: bytes) -> None:
        self._jobs = jobs
        self._at = 0

    def outcome(self, part: Any) -> Outcome | None:
        match part:
            case [int(number), [*leased]]:
                return Outcome(number, list(_each(self._leased, leased)))
            case _:
                return None

    def _leased(self, part: Any) -> Leased | None:
        match part:
            case [int(deadline), positions, sizes]:
                jobs: list[bytes] = []
                for size in _numbers(sizes):
                    jobs.append(self._jobs[self._at : self._at + size])
                    self._at += size
                return Leased(Micros(deadline), None if positions is None else _numbers(positions), jobs)
            case _:
                return None

    def check_end(self) -> None:
        if self._at != len(self._jobs):
            raise ValueError(f"the jobs of a frame have {len(self._jobs)} bytes, and its head says {self._at}")

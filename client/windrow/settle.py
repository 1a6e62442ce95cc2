"""What a worker has to say of its leases: acks, nacks, releases and extends, in messages that cost no delay.

Owns what waits to be said and what is said but not answered; refuses to know how a message travels. A message carries
all that waits when it leaves. A few may be unanswered at a time; what is decided meanwhile goes with the next one. An
idle worker's ack leaves at once, a busy worker's acks leave by the hundred.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from windrow.errors import InvalidRequest, RouterError, Violation, WindrowError, from_code
from windrow.jobs import Answer, answers
from windrow.leases import Held, Leases, Reach, log
from windrow.payloads import duration, error_text
from windrow.v1 import queue_pb2

# The contract's bound on each sort of entry in one message.
ENTRIES_MAX = 1000
# Results may have 64 KiB each: a message stays well below the largest one.
_BYTES_MAX = 4 * 1024 * 1024
_ENTRY_BYTES = 64
UNANSWERED_MAX = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Finished, with a result of at most 64 KiB."""

    result: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Given back with an error. `delay_s` None: as the retry policy says."""

    error: str
    delay_s: float | None = None
    kill: bool = False


@dataclass(frozen=True, slots=True)
class _GivenBack:
    """At once, the attempt uncounted."""


@dataclass(frozen=True, slots=True)
class _Extended:
    """Needed longer."""


Fate = Done | Failed
_Said = Done | Failed | _GivenBack | _Extended
_GIVEN_BACK, _EXTENDED = _GivenBack(), _Extended()


class _Entry:
    __slots__ = ("alone", "held", "said", "size")

    def __init__(self, held: Held, said: _Said, size: int) -> None:
        self.held = held
        self.said = said
        self.size = size
        # Suspected of having a whole message refused: goes by itself.
        self.alone = False

    @property
    def verb(self) -> str:
        match self.said:
            case Done():
                return "ack"
            case Failed():
                return "nack"
            case _GivenBack():
                return "release"
            case _Extended():
                return "extend"
            case _:
                assert_never(self.said)


class _Message:
    """What was said together and is not answered."""

    __slots__ = ("entries", "sent_at")

    def __init__(self, entries: list[_Entry], sent_at: float) -> None:
        # In the order of their answers.
        self.entries = entries
        # From before it was sent; monotonic seconds.
        self.sent_at = sent_at


class Settlements:
    """The fates of a worker's jobs, on their way to the router."""

    def __init__(self, leases: Leases, reach: Reach, *, backoff: Backoff) -> None:
        self._leases = leases
        self._reach = reach
        self._backoff = backoff
        self._waiting: deque[_Entry] = deque()
        self._unanswered: dict[int, _Message] = {}
        self._number = 0
        # After "send it again": when to.
        self._again: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._room.set()
        # Set whenever there may be something to say.
        self.news = asyncio.Event()
        # Nothing waits, and nothing is unanswered.
        self.idle = asyncio.Event()
        self.idle.set()

    async def settle(self, held: Held, fate: Fate) -> None:
        """Returns at once, unless more than a message's worth is waiting: handlers go no faster than the router."""
        match fate:
            case Done(result=result):
                self._put(held, fate, _ENTRY_BYTES + len(result))
            case Failed(error=error):
                kept = error_text(error)
                self._put(held, replace(fate, error=kept), _ENTRY_BYTES + len(kept))
            case _:
                assert_never(fate)
        while len(self._waiting) > ENTRIES_MAX:
            self._room.clear()
            await self._room.wait()

    def give_back(self, held: Held) -> None:
        """Releases a job that nobody has begun, or that must end. Never waits: this is for the way out."""
        self._put(held, _GIVEN_BACK, _ENTRY_BYTES)

    def extend(self, leases: Sequence[Held]) -> None:
        for held in leases:
            held.extending = True
            self._waiting.append(_Entry(held, _EXTENDED, _ENTRY_BYTES))
        self._look()

    def fill(self, request: queue_pb2.ConsumeRequest) -> bool:
        """Adds what may be said now; whether there was anything. The message counts as sent."""
        if self._again is not None or len(self._unanswered) >= UNANSWERED_MAX:
            return False
        if self._suspected():
            # Until it is known which entry is refused, nothing else is under way.
            return False
        batch = self._take()
        if not batch:
            self._reckon()
            return False
        self._number += 1
        request.number = self._number
        acks: list[_Entry] = []
        nacks: list[_Entry] = []
        extends: list[_Entry] = []
        releases: list[_Entry] = []
        for entry in batch:
            lease = entry.held.job.lease
            match entry.said:
                case Done(result=result):
                    request.acks.add(lease=lease, result=result)
                    acks.append(entry)
                case Failed(error=error, delay_s=delay_s, kill=kill):
                    nack = request.nacks.add(lease=lease, error=error)
                    if kill:
                        nack.kill = True
                    elif delay_s is not None:
                        nack.delay.CopyFrom(duration(delay_s))
                    nacks.append(entry)
                case _Extended():
                    request.extends.append(lease)
                    extends.append(entry)
                case _GivenBack():
                    request.releases.append(lease)
                    releases.append(entry)
                case _:
                    assert_never(entry.said)
        self._unanswered[self._number] = _Message([*acks, *nacks, *extends, *releases], time.monotonic())
        return True

    def unanswered_since(self) -> float | None:
        """When the oldest message that is not answered was sent; monotonic seconds."""
        return min((message.sent_at for message in self._unanswered.values()), default=None)

    def answered(self, settled: queue_pb2.Settled) -> None:
        """Raises RouterError for an answer to something that was not said."""
        message = self._unanswered.pop(settled.number, None)
        if message is None or (settled.answers and len(settled.answers) != len(message.entries)):
            if message is not None:
                self._unanswered[settled.number] = message
            raise RouterError(f"message {settled.number} was answered, and not as it was sent")
        if settled.HasField("error"):
            self._refused(message.entries, _read(settled.error))
        else:
            self._backoff.reset()
            self._reach.answered()
            if settled.answers:
                for entry, answer in zip(message.entries, answers(settled.answers), strict=True):
                    self._end(entry, answer, message.sent_at)
            else:
                for entry in message.entries:
                    self._end(entry, Answer.OK, message.sent_at)
        self._look()

    def cut(self) -> None:
        """The stream broke: what was not answered is said again."""
        unsure = [entry for message in self._unanswered.values() for entry in message.entries]
        self._unanswered.clear()
        self._put_again(unsure)

    def suspect(self, error: InvalidRequest) -> bool:
        """The stream was refused. Whether something said may be why: then each of it goes alone, until it is found."""
        unsure = [entry for message in self._unanswered.values() for entry in message.entries]
        self._unanswered.clear()
        if unsure:
            self._refused(unsure, error)
        return bool(unsure)

    def close(self) -> None:
        """Nothing is said again by itself."""
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def _put(self, held: Held, said: _Said, size: int) -> None:
        held.settling = True
        self._waiting.append(_Entry(held, said, size))
        self.idle.clear()
        self.news.set()

    def _suspected(self) -> bool:
        if not self._unanswered:
            return False
        if self._waiting and self._waiting[0].alone:
            return True
        return any(message.entries[0].alone for message in self._unanswered.values())

    def _take(self) -> list[_Entry]:
        batch: list[_Entry] = []
        size = 0
        waiting = self._waiting
        while waiting and len(batch) < ENTRIES_MAX:
            entry = waiting[0]
            if entry.said is _EXTENDED and (entry.held.settling or entry.held not in self._leases):
                # Its fate is decided by now, or its lease has ended.
                waiting.popleft()
                continue
            size += entry.size
            if batch and (size > _BYTES_MAX or entry.alone):
                break
            batch.append(waiting.popleft())
            if entry.alone:
                break
        self._room.set()
        return batch

    def _end(self, entry: _Entry, answer: Answer, sent_at: float) -> None:
        held = entry.held
        if entry.said is _EXTENDED:
            held.extending = False
            if answer is Answer.OK:
                held.renewed_at = max(held.renewed_at, sent_at)
            elif held in self._leases:
                self._leases.lose(held, f"the router answered {answer.name}")
            return
        self._leases.drop(held)
        if answer is not Answer.OK:
            log.warning("job %s: its %s was answered %s: the lease had ended", held.job.id, entry.verb, answer.name)

    def _refused(self, entries: list[_Entry], error: WindrowError) -> None:
        if not isinstance(error, InvalidRequest):
            # "Send it again."
            self._reach.failed(error)
            self._put_again(entries)
            if self._again is None:
                self._again = asyncio.get_running_loop().call_later(self._backoff.next_s(), self._go_on)
        elif len(entries) > 1:
            # One bad entry must not hold up the others.
            for entry in entries:
                entry.alone = True
            self._put_again(entries)
        else:
            for entry in entries:
                self._give_up(entry, error)

    def _give_up(self, entry: _Entry, error: WindrowError) -> None:
        if entry.said is _EXTENDED:
            self._leases.lose(entry.held, str(error))
            return
        log.error("job %s: its %s was refused; its lease is left to end: %s", entry.held.job.id, entry.verb, error)
        self._leases.drop(entry.held)

    def _put_again(self, entries: Iterable[_Entry]) -> None:
        again: list[_Entry] = []
        for entry in entries:
            if entry.said is not _EXTENDED and self._leases.ended(entry.held):
                self._leases.drop(entry.held)
                log.warning("job %s: its lease ended before its %s reached the router", entry.held.job.id, entry.verb)
            else:
                again.append(entry)
        self._waiting.extendleft(reversed(again))
        self._look()

    def _go_on(self) -> None:
        self._again = None
        self._look()

    def _look(self) -> None:
        self._reckon()
        self.news.set()

    def _reckon(self) -> None:
        if self._waiting or self._unanswered:
            self.idle.clear()
        else:
            self.idle.set()


class Backoff:
    """Growing pauses with jitter: 2, 4, 8 ... times the first, up to a maximum, each between its half and its whole."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._count = 0

    def next_s(self) -> float:
        whole = min(self._max_s, self._first_s * 2.0 ** min(self._count, 16))
        self._count += 1
        return whole * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._count = 0


def _read(error: queue_pb2.JobError) -> WindrowError:
    return from_code(
        error.code, error.message, (Violation(found.field, found.description) for found in error.violations)
    )

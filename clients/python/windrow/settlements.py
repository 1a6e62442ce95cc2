"""What a worker reports about its leases: acks, nacks, releases and extends, batched into messages without delay.

This module owns the entries that wait to be sent, and the entries that are sent but not answered. consume_stream.py
sends the messages. A message carries every entry that waits when it is sent. At most UNANSWERED_MAX messages may be
unanswered. Entries that are added meanwhile go into the next message. An idle worker sends an ack at once; a busy one
sends hundreds together.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from windrow.calls import error_of, patient_pause_s
from windrow.errors import InvalidRequest, RouterError, WindrowError
from windrow.job_log import LOG_BYTES_MAX
from windrow.jobs import Answer, answer_of
from windrow.leases import Connectivity, HeldLease, Leases, log, named
from windrow.outcomes import DONE, Action, Extended, Released, acks_of
from windrow.reports import Report
from windrow.v1 import queue_pb2

# The contract's limit for each kind of entry in one message.
ENTRIES_MAX = 1000
# A result may have 64 KiB. This bound keeps a message well below the largest message that is allowed.
_BYTES_MAX = 4 * 1024 * 1024
# How many bytes an entry has at most in addition to its lease and its texts. These bytes are tags, lengths and a
# retry_after.
_ENTRY_BYTES = 32
_RELEASE, _EXTEND = Released(), Extended()
UNANSWERED_MAX = 2


class _Entry:
    # Most entries have the values of these class attributes. An entry stores a value only if it differs.

    # This entry may be the reason why a whole message was refused: send it in a message of its own.
    alone = False
    sent = False
    # What the handler has reported since this entry was sent. Always None for an entry without a report.
    later: Report | None = None

    def __init__(self, held: HeldLease, action: Action, *, bare: bool = False) -> None:
        self.held = held
        self.action = action
        # Whether the entry is an ack that carries nothing except its lease.
        self.bare = bare

    @property
    def is_extend(self) -> bool:
        return self.action.is_extend

    @property
    def size(self) -> int:
        log = LOG_BYTES_MAX if self.tells_log else 0
        return _ENTRY_BYTES + len(self.held.lease) + self.action.size + log

    @property
    def tells_log(self) -> bool:
        """Whether to send the entry with the lines that the handler has logged. An extend is sent with the lines only
        if some of them are new."""
        if self.is_extend:
            return self.held.job.logged.count > self.held.lines_told
        return self.held.logs

    def write(self, request: queue_pb2.ConsumeRequest) -> None:
        log = ""
        if self.tells_log:
            log, self.held.lines_told = self.held.job.logged.read()
        self.action.write(request, self.held.lease, log)


class _Message:
    """Entries that were sent together and are not answered yet."""

    __slots__ = ("entries", "sent_at")

    def __init__(self, entries: list[_Entry], sent_at: float) -> None:
        self.entries = entries
        # The time just before the entries were sent (monotonic seconds).
        self.sent_at = sent_at


class Settlements:
    """The outcomes of a worker's jobs, on their way to the router."""

    def __init__(self, leases: Leases, connectivity: Connectivity, *, backoff: Backoff) -> None:
        self._leases = leases
        self._connectivity = connectivity
        self._backoff = backoff
        self._waiting: deque[_Entry] = deque()
        # The entry with the report of each job that has such an entry. A second report must wait until the first is
        # answered: the router settles messages in parallel, and the older report could be stored last.
        self._reports: dict[HeldLease, _Entry] = {}
        self._unanswered: dict[int, _Message] = {}
        self._number = 0
        # Set when the router has asked for a retry: nothing is sent until the timer fires.
        self._retry_timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._room.set()
        # Outcomes of jobs whose report is on its way. They wait until the report is answered: the router settles
        # messages in parallel, and refuses a report about a lease that has ended.
        self._after_report: dict[HeldLease, Action] = {}
        # For each job, the futures to complete when no report of the job is on its way.
        self._told: dict[HeldLease, list[Future[None]]] = {}
        # Set whenever there may be something to send.
        self.wake = asyncio.Event()
        # Set while no entry waits to be sent and every sent message has been answered.
        self.idle = asyncio.Event()
        self.idle.set()

    def settle(self, held: HeldLease, fate: Action) -> None:
        """Queues the outcome of a job."""
        held.settling = True
        logged = held.job.logged
        reported = held in self._reports
        # Close the log if it will still be read, which is the case if it has lines, or if a report is on its way.
        if logged.count or reported:
            logged.close()
            held.logs = logged.count > 0
        if reported:
            self._after_report[held] = fate
        else:
            self._waiting.append(_Entry(held, fate, bare=fate is DONE and not held.logs))
        self.idle.clear()
        self.wake.set()

    @property
    def is_full(self) -> bool:
        """Whether more than one full message is queued."""
        return len(self._waiting) > ENTRIES_MAX

    async def room(self) -> None:
        """Waits while `is_full`."""
        while self.is_full:
            self._room.clear()
            await self._room.wait()

    def give_back(self, held: HeldLease) -> None:
        """Queues the release of a job that has not begun or was cancelled."""
        self.settle(held, _RELEASE)

    def extend(self, leases: Sequence[HeldLease]) -> None:
        for held in leases:
            held.extending = True
            self._waiting.append(_Entry(held, _EXTEND))
        self._notify()

    def report(self, held: HeldLease, report: Report) -> None:
        """Queues what a handler reports about its job. The report is sent with an extend."""
        if held.settling or held.lost:
            return
        entry = self._reports.get(held)
        if entry is None:
            self._queue_report(held, report)
        elif entry.sent:
            entry.later = report if entry.later is None else entry.later.then(report)
        else:
            _add_report(entry, report)
        self._notify()

    def when_stored(self, held: HeldLease, stored: Future[None]) -> None:
        """Completes the future when one of two conditions holds: the job's lease is lost, or all lines that the handler
        has logged are sent and no report of this job is on its way."""
        if held.job.logged.count > held.lines_told:
            self.report(held, Report())
        self._told.setdefault(held, []).append(stored)
        if held not in self._reports or held.lost:
            self.tell_stored(held)

    def tell_stored(self, held: HeldLease) -> None:
        """Wakes everyone who waits for the reports of this job to be answered."""
        for stored in self._told.pop(held, ()):
            if stored.set_running_or_notify_cancel():
                stored.set_result(None)

    def _queue_report(self, held: HeldLease, report: Report) -> None:
        entry = self._reports[held] = _Entry(held, Extended(report=report))
        held.extending = True
        self._waiting.append(entry)

    def fill(self, request: queue_pb2.ConsumeRequest) -> bool:
        """Adds the entries that may be sent now, and marks them as sent. Returns whether it added any entries."""
        if self._retry_timer is not None or len(self._unanswered) >= UNANSWERED_MAX:
            return False
        if self._is_isolating():
            # Nothing else is sent until it is known which entry was refused.
            return False
        batch = self._take_batch()
        if not batch:
            self._update_idle()
            return False
        self._number += 1
        request.request_id = self._number
        bare: list[bytes] = []
        for entry in batch:
            if entry.bare:
                bare.append(entry.held.lease)
            else:
                entry.write(request)
        request.MergeFromString(acks_of(bare))
        self._unanswered[self._number] = _Message(batch, time.monotonic())
        return True

    def unanswered_since(self) -> float | None:
        """Returns the time at which the oldest unanswered message was sent (monotonic seconds), or None if all are
        answered."""
        return min((message.sent_at for message in self._unanswered.values()), default=None)

    def answered(self, settled: queue_pb2.Settled) -> None:
        """Applies the router's answer to a message. Raises RouterError if the answer does not match a message that was
        sent."""
        message = self._unanswered.pop(settled.request_id, None)
        not_ok = {answer.lease: answer.answer for answer in settled.not_ok} if settled.not_ok else {}
        if message is None or (not_ok and not not_ok.keys() <= {entry.held.lease for entry in message.entries}):
            if message is not None:
                self._unanswered[settled.request_id] = message
            raise RouterError(f"the router's answer to message {settled.request_id} does not match what was sent")
        if settled.HasField("error"):
            self._refused(message.entries, error_of(settled.error))
        else:
            self._backoff.reset()
            self._connectivity.answered()
            drop = self._leases.drop
            for entry in message.entries:
                value = not_ok.get(entry.held.lease) if not_ok else None
                if value is None and not entry.action.is_extend:
                    drop(entry.held)
                else:
                    self._end(entry, Answer.OK if value is None else answer_of(value), message.sent_at)
        self._notify()

    def on_disconnect(self) -> None:
        """Queues all unanswered entries again, after the stream broke."""
        entries = [entry for message in self._unanswered.values() for entry in message.entries]
        self._unanswered.clear()
        self._requeue(entries)

    def on_stream_refused(self, error: InvalidRequest) -> bool:
        """Handles an InvalidRequest that ended the stream. If there are unanswered entries, one of them may be the
        cause. To find it, queues each of these entries for a message of its own. Returns whether there were unanswered
        entries."""
        entries = [entry for message in self._unanswered.values() for entry in message.entries]
        self._unanswered.clear()
        if entries:
            self._refused(entries, error)
        return bool(entries)

    def close(self) -> None:
        """Cancels the retry timer, and ends all waits for reports."""
        for held in list(self._told):
            self.tell_stored(held)
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None

    def _take_batch(self) -> list[_Entry]:
        batch: list[_Entry] = []
        size = 0
        waiting = self._waiting
        while waiting and len(batch) < ENTRIES_MAX:
            entry = waiting[0]
            if entry.bare:
                size += _ENTRY_BYTES + len(entry.held.lease)
            elif entry.is_extend and self._is_needless(entry):
                waiting.popleft()
                self._end_report(entry)
                continue
            else:
                size += entry.size
            if batch and (size > _BYTES_MAX or entry.alone):
                break
            batch.append(waiting.popleft())
            if not entry.bare:
                entry.sent = True
            if entry.alone:
                break
        self._room.set()
        return batch

    def _end(self, entry: _Entry, answer: Answer, sent_at: float) -> None:
        held = entry.held
        if entry.is_extend:
            held.extending = False
            self._end_report(entry)
            if answer is Answer.OK:
                held.renewed_at = max(held.renewed_at, sent_at)
            elif held in self._leases:
                self._leases.answered(held, answer)
            return
        self._leases.drop(held)
        if answer is not Answer.OK:
            log.warning(
                "%s: its %s was answered %s: the lease had ended", named(held.job), entry.action.verb, answer.name
            )

    def _is_needless(self, extend: _Entry) -> bool:
        """Returns whether the extend need not be sent, because the lease has ended, or because the job's outcome is
        queued by now and does not wait for the report of this extend."""
        held = extend.held
        return held not in self._leases or (held.settling and self._reports.get(held) is not extend)

    def _end_report(self, entry: _Entry) -> None:
        """Handles an extend that is no longer on its way. Queues the report that the handler has made meanwhile. If
        there is no such report, queues the outcome that waited for this extend."""
        held = entry.held
        if self._reports.get(held) is not entry:
            return
        del self._reports[held]
        if entry.later is not None and held in self._leases:
            self._queue_report(held, entry.later)
            return
        self.tell_stored(held)
        if held in self._after_report:
            self._waiting.append(_Entry(held, self._after_report.pop(held)))

    def _is_isolating(self) -> bool:
        """After a message was refused, each of its entries is sent in a message of its own (`alone`). Returns whether a
        message with such an entry is unanswered, or such an entry is the next to send while other messages are
        unanswered."""
        if not self._unanswered:
            return False
        if self._waiting and self._waiting[0].alone:
            return True
        return any(message.entries[0].alone for message in self._unanswered.values())

    def _refused(self, entries: list[_Entry], error: WindrowError) -> None:
        if not isinstance(error, InvalidRequest):
            # The router asks for these entries again.
            self._connectivity.failed(error)
            self._requeue(entries)
            if self._retry_timer is None:
                pause_s = patient_pause_s(error, own_s=self._backoff.next_s())
                self._retry_timer = asyncio.get_running_loop().call_later(pause_s, self._resume)
        elif len(entries) > 1:
            # One bad entry must not block the other entries: send each in a message of its own.
            for entry in entries:
                entry.alone = True
            self._requeue(entries)
        else:
            for entry in entries:
                self._give_up(entry, error)

    def _give_up(self, entry: _Entry, error: WindrowError) -> None:
        if entry.is_extend:
            self._end_report(entry)
            self._leases.lose(entry.held, str(error))
            return
        log.error("%s: its %s was refused; its lease will expire: %s", named(entry.held.job), entry.action.verb, error)
        self._leases.drop(entry.held)

    def _requeue(self, entries: Iterable[_Entry]) -> None:
        again: list[_Entry] = []
        for entry in entries:
            if not entry.is_extend and self._leases.ended(entry.held):
                self._leases.drop(entry.held)
                log.warning(
                    "%s: its lease ended before its %s reached the router", named(entry.held.job), entry.action.verb
                )
            else:
                entry.sent = False
                entry.held.lines_told = 0
                if entry.later is not None:
                    _add_report(entry, entry.later)
                    entry.later = None
                again.append(entry)
        self._waiting.extendleft(reversed(again))
        self._notify()

    def _resume(self) -> None:
        self._retry_timer = None
        self._notify()

    def _notify(self) -> None:
        self._update_idle()
        self.wake.set()

    def _update_idle(self) -> None:
        if self._waiting or self._unanswered or self._after_report:
            self.idle.clear()
        else:
            self.idle.set()


def _add_report(entry: _Entry, later: Report) -> None:
    assert isinstance(entry.action, Extended)
    earlier = entry.action.report
    entry.action = Extended(report=later if earlier is None else earlier.then(later))


class Backoff:
    """Exponential backoff: 1, 2, 4, 8 ... times the first pause, up to a maximum, multiplied by a random 0.5 to 1.0."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._count = 0

    def next_s(self) -> float:
        pause_s = min(self._max_s, self._first_s * 2.0 ** min(self._count, 16))
        self._count += 1
        return pause_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._count = 0

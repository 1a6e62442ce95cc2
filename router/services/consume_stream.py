"""One Consume stream: reads credit and settlements, writes jobs and answers, and releases unsent jobs at its end."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from itertools import chain
from typing import Any

import grpc

from router.codec import convert
from router.codec.fast_write import Delivery
from router.codec.lease_verbs import VERBS, LeaseVerb, entries_of, not_ok, tokens
from router.codec.status import (
    INTERNAL,
    InvalidRequest,
    MessageTooLarge,
    RequestLate,
    ShuttingDown,
    StreamExpired,
    Violation,
    status_of,
)
from router.codec.validate import check, check_consume
from router.fleet.fleet import Fleet
from router.gate.admission import DRAIN_S, Context, Gate
from router.gate.call import Call
from router.gate.calls import Received
from router.gate.refusal import status_for
from router.route.by_lease import Answers, Leases
from router.services.all_orgs_consumer import AllOrgsConsumer
from router.services.consumer import Consumer, ConsumerFields
from shard.errors import ShardError
from shard.lease_token import org_of_token
from shard.vocabulary import OrgId, QueueName, ShardName
from windrow.v1 import job_pb2, queue_pb2

_log = logging.getLogger(__name__)

CREDIT_MAX = 10_000
# Upper bound for the bytes of jobs that wait to be written; above it the stream stops claiming.
_WAITING_BYTES_MAX = 8 * 1024 * 1024
# Jobs are added to a message until it has this many bytes. Even if the last job has the largest payload, the message
# stays below 4 MiB.
_MESSAGE_BYTES_MAX = 2 * 1024 * 1024
# Answers are added to a message until they have this many bytes. A single answer has at most 150 KiB.
_SETTLED_BYTES_MAX = 256 * 1024
# The most bytes about revoked leases that wait to be written, enough for some 3,000 leases. The client is not told of
# further leases.
_REVOKED_BYTES_MAX = 128 * 1024
# The most messages of one stream that are being settled, or whose answers wait to be written. At this limit the stream
# stops reading.
_SETTLING_MAX = 64
# How long the first message, which says whose jobs the stream wants, may take to come.
_START_S_MAX = 10.0
# The time limit for settling one message. Clients wait longer than this before they regard a silent connection as dead.
_SETTLE_S_MAX = 8.0


async def first_message(messages: AsyncIterator[Received], draining: asyncio.Event) -> Received | None:
    """Returns the first message, or None if the client closed its side without one. Raises RequestLate if no message
    comes within 10 s, ShuttingDown if this router drains before that, and MessageTooLarge."""

    async def read() -> Received | None:
        return await anext(messages, None)

    reading = asyncio.create_task(read())
    drained = asyncio.create_task(draining.wait())
    try:
        await asyncio.wait({reading, drained}, timeout=_START_S_MAX, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (reading, drained):
            task.cancel()
        await asyncio.wait({reading, drained})
    if reading.cancelled():
        if draining.is_set():
            raise ShuttingDown
        # Do not answer INVALID_ARGUMENT, which would end the consumer: its machine may just have been paused.
        raise RequestLate(_START_S_MAX, what="the first message of the stream")
    received = reading.result()
    if received is not None and received.too_large is not None:
        raise received.too_large
    return received


def _gravest(errors: Sequence[BaseException]) -> BaseException:
    """Returns the most serious of several errors that occurred at the same time, and logs the others. The stream ends
    with the most serious one. A fault of the router is more serious than an expected error. The least serious error is
    that the client is gone."""

    def gravity(error: BaseException) -> int:
        if isinstance(error, grpc.aio.InternalError):
            # gRPC could not write.
            return 0
        return 2 if status_of(error).code == INTERNAL else 1

    gravest = max(errors, key=gravity)
    for error in errors:
        if error is not gravest:
            level = logging.ERROR if gravity(error) == 2 else logging.DEBUG
            _log.log(level, "a stream that ended with %r also failed otherwise", gravest, exc_info=error)
    return gravest


class Stream:
    """`run` serves the stream until the client closes its side, the router drains, the stream's time is over, or `run`
    is cancelled. When the router drains or the time is over, `run` announces the end, and leaves the client 2 s to
    close its side. The constructor raises InvalidRequest if the first message has no valid `start`."""

    def __init__(
        self,
        fleet: Fleet,
        gate: Gate,
        call: Call,
        received: Received,
        messages: AsyncIterator[Received],
        context: Context,
    ) -> None:
        first: queue_pb2.ConsumeRequest = received.message
        check(first)
        if not first.HasField("start"):
            raise InvalidRequest([Violation("start", "is missing: the first message says what the stream consumes")])
        self._leases = Leases(fleet)
        self._revocations = fleet.revocations
        self._gate = gate
        self._call = call
        # None: all orgs.
        self._org = OrgId(first.start.org) if first.start.HasField("org") else None
        # From now on the stream's memory counts for its org. A stream of all orgs counts for operators, like calls
        # without an org.
        call.move(first.start.org)
        # None once `_read` has taken it.
        self._first: Received | None = received
        self._messages = messages
        self._context = context
        self._window_us = convert.window_us(first.start)
        fields = ConsumerFields(
            queues=[QueueName(queue) for queue in first.start.queues],
            worker=first.start.worker,
            window_us=self._window_us,
            kinds=tuple(first.start.kinds),
        )
        self._consumer = (
            AllOrgsConsumer(fleet, self, call, **fields)
            if self._org is None
            else Consumer(fleet, self, call, org=self._org, **fields)
        )
        # Jobs to be written. Each entry has the time, by the event loop's clock, from which its jobs have waited.
        self._jobs: deque[tuple[float, Delivery]] = deque()
        self._jobs_bytes = 0
        self._take_back_timer: asyncio.TimerHandle | None = None
        # True if jobs were taken back because the client did not read. False again when everything that waits has been
        # written.
        self._behind = False
        # Answers to be written, each with the number of bytes that the answered message holds in the buffer until the
        # answer is written.
        self._settled: deque[tuple[queue_pb2.Settled, int]] = deque()
        # Encoded messages about leases that somebody other than the client ended. They are written after all jobs.
        self._revoked: list[bytes] = []
        # Whether `draining` is to be written.
        self._announcing = False
        self._to_write = asyncio.Event()
        self._room = asyncio.Event()
        # The number of messages that are being settled.
        self._settling = 0
        # Set when a message has been settled, or its answer written.
        self._settled_one = asyncio.Event()
        # Whether no more jobs are sent, because the router drains or the stream's time is over.
        self._winding_down = False
        self._ending = False
        self._client_closed = False

    async def run(self, draining: asyncio.Event, *, ends_after_s: float = math.inf) -> None:
        """Serves the stream to its end, for at most `ends_after_s`. Raises InvalidRequest, MessageTooLarge, ShardError,
        ShuttingDown, StreamExpired."""
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        self._revocations.join(self._org, self._consumer.worker, self._on_revoked)
        try:
            # Send the metadata at once, so that a client whose queues are empty also knows that it is served.
            await self._context.send_initial_metadata(())
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(self._consumer.serve())
                reading = group.create_task(self._read(group))
                drained = group.create_task(draining.wait())

                def finish(_: object) -> None:
                    """Stops claiming and reading; `_write` ends after the answers that are still to come."""
                    if not self._ending:
                        self._ending = True
                        for task in (serving, reading, drained):
                            task.cancel()
                        self._consumer.close()
                        self._release_unsent()
                        self._to_write.set()

                def wind_down(left_s: float) -> None:
                    """Sends no more jobs, announces the end, and leaves the client time to close its side."""
                    if not (self._ending or self._winding_down):
                        self._winding_down = self._announcing = True
                        serving.cancel()
                        self._consumer.close()
                        self._release_unsent()
                        self._to_write.set()
                        timers.append(loop.call_later(left_s, finish, None))

                reading.add_done_callback(finish)
                drained.add_done_callback(lambda _: wind_down(DRAIN_S))
                if ends_after_s < math.inf:
                    left_s = min(DRAIN_S, ends_after_s / 2)
                    timers.append(loop.call_later(ends_after_s - left_s, wind_down, left_s))
                group.create_task(self._write())
        except BaseExceptionGroup as group_error:
            raise _gravest(group_error.exceptions) from None
        except asyncio.CancelledError as cancelled:
            # The traceback refers to the group's frame, and that frame to the exception: break the reference cycle.
            raise cancelled.with_traceback(None) from None
        finally:
            for timer in timers:
                timer.cancel()
            self._revocations.leave(self._org, self._consumer.worker, self._on_revoked)
            self._consumer.close()
            self._release_unsent()
            # The consumer refers back to this stream. Break the reference cycle, so that the garbage collector need
            # not.
            del self._consumer
        if self._winding_down and not self._client_closed:
            raise ShuttingDown if draining.is_set() else StreamExpired

    # ── What comes in ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _read(self, group: asyncio.TaskGroup) -> None:
        received, self._first = self._first, None
        assert received is not None
        check_consume(received.message)
        self._take(received, group)
        # Keep no reference while waiting for the next message: the buffer already counts the memory of this message as
        # free.
        del received
        async for received in self._messages:
            too_large = received.too_large
            if too_large is None:
                if received.message.HasField("start"):
                    raise InvalidRequest([Violation("start", "is set again; a stream is started by its first message")])
                check_consume(received.message)
            while self._settling + len(self._settled) >= _SETTLING_MAX:
                self._settled_one.clear()
                await self._settled_one.wait()
            if too_large is None:
                self._take(received, group)
            else:
                self._refuse(too_large)
            del received
        self._client_closed = True

    def _refuse(self, error: MessageTooLarge) -> None:
        """Answers a message that was not decoded. If the message has no request_id, raises the error, which ends the
        stream."""
        if not error.request_id:
            raise error
        self._settled.append((queue_pb2.Settled(request_id=error.request_id, error=status_for(error)), 0))
        self._to_write.set()

    def _take(self, received: Received, group: asyncio.TaskGroup) -> None:
        request: queue_pb2.ConsumeRequest = received.message
        if request.credit and self._consumer.credit + request.credit > CREDIT_MAX:
            raise InvalidRequest([Violation("credit", f"more than {CREDIT_MAX:,} jobs would be outstanding")])
        if request.credit and not self._winding_down:
            self._consumer.add_credit(request.credit)
        if any(entries_of(request)):
            self._settling += 1
            group.create_task(self._settle(request, received.bytes))
        else:
            self._call.give_back(received.bytes)

    async def _settle(self, request: queue_pb2.ConsumeRequest, held: int) -> None:
        settled = queue_pb2.Settled(request_id=request.request_id)
        try:
            async with asyncio.timeout(_SETTLE_S_MAX):
                answers = await self._answers(request)
            settled.not_ok.extend(not_ok(entries_of(request), answers))
        except (ShardError, TimeoutError) as error:
            settled.error.CopyFrom(status_for(error))
        finally:
            self._settling -= 1
            self._settled_one.set()
        self._settled.append((settled, held))
        self._to_write.set()

    async def _answers(self, request: queue_pb2.ConsumeRequest) -> Answers:
        window_us = convert.window_us(request, self._window_us)
        acts = [
            self._answers_to(verb, entries, window_us)
            for verb, entries in zip(VERBS, entries_of(request), strict=True)
            if entries
        ]
        if len(acts) == 1:
            return await acts[0]
        return [answer for answers in await asyncio.gather(*acts) for answer in answers]

    async def _answers_to(self, verb: LeaseVerb, entries: Sequence[Any], window_us: int) -> Answers:
        if self._org is not None:
            return await self._leases.settle(self._org, verb, entries, field=verb.stream_field, window_us=window_us)
        by_org: dict[OrgId | None, list[int]] = {}
        for at, lease in enumerate(tokens(entries)):
            by_org.setdefault(org_of_token(lease), []).append(at)
        # A lease that names no org does not belong to a stream of all orgs.
        answers = [job_pb2.JOB_ANSWER_NOT_FOUND] * len(entries)
        by_org.pop(None, None)
        settled = await asyncio.gather(
            *(
                self._leases.settle(
                    org, verb, [entries[at] for at in there], field=verb.stream_field, window_us=window_us
                )
                for org, there in by_org.items()
                if org is not None
            ),
            return_exceptions=True,
        )
        # Raise an error only now, when the parts of all orgs have ended. What was settled for other orgs stays settled.
        for there, outcome in zip(by_org.values(), settled, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            for at, answer in zip(there, outcome, strict=True):
                answers[at] = answer
        return answers

    # ── What goes out ────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, jobs: Delivery) -> None:
        loop = asyncio.get_running_loop()
        self._jobs.append((loop.time(), jobs))
        self._jobs_bytes += jobs.bytes
        self._to_write.set()
        if self._take_back_timer is None:
            self._take_back_timer = loop.call_later(self._patience_s, self._take_back)

    @property
    def _patience_s(self) -> float:
        """How long a job may wait to be written: half of the visibility window. The other half is for the work."""
        return self._window_us / 2_000_000

    def _take_back(self) -> None:
        """Releases jobs that have waited for too long, so that other consumers get them."""
        loop = asyncio.get_running_loop()
        while self._jobs and self._jobs[0][0] + self._patience_s <= loop.time():
            _, jobs = self._jobs.popleft()
            self._jobs_bytes -= jobs.bytes
            self._behind = True
            self._consumer.take_back(jobs)
        self._take_back_timer = None
        if self._jobs:
            self._take_back_timer = loop.call_at(self._jobs[0][0] + self._patience_s, self._take_back)

    @property
    def takes_once(self) -> bool:
        return False

    def is_full(self) -> bool:
        return self._behind or self._jobs_bytes > _WAITING_BYTES_MAX

    async def reserve(self, count: int, shard: ShardName) -> None:
        while self.is_full():
            self._room.clear()
            await self._room.wait()
        await self._call.reserve(count, patiently=True, shard=shard)

    async def _write(self) -> None:
        while True:
            while self._jobs or self._settled or self._revoked or self._announcing:
                rest, held = self._next_rest()
                waiting_bytes = self._jobs_bytes
                jobs = self._next_jobs()
                sent_bytes = waiting_bytes - self._jobs_bytes
                # If a client were told of a revoked lease before it gets the job, it would ignore the message.
                revoked = [] if self._jobs else self._take_revoked()
                # All parts are encoded messages of the same type: joined, they are one message.
                message = b"".join(
                    [*chain.from_iterable(delivery.jobs for delivery in jobs), rest.SerializeToString(), *revoked]
                )
                self._gate.writing(self._call)
                # The client may read these jobs even if the stream fails from here on, so they stay leased.
                await self._context.write(message)
                self._gate.written(self._call)
                self._call.give_back(held + sum(map(len, revoked)))  # pyrefly: ignore[bad-argument-type]
                self._consumer.sent(jobs, sent_bytes)
                self._room.set()
                self._settled_one.set()
            self._behind = False
            self._room.set()
            if self._ending and not self._settling:
                return
            self._to_write.clear()
            await self._to_write.wait()

    def _next_rest(self) -> tuple[queue_pb2.ConsumeResponse, int]:
        """Returns the part of the next message that is not jobs: the announcement, if there is one, and as many waiting
        answers as leave room for jobs. Removes these answers from `_settled`. Also returns how many bytes the answered
        messages hold in the buffer."""
        rest = queue_pb2.ConsumeResponse(draining=self._announcing)
        self._announcing = False
        held, room = 0, _SETTLED_BYTES_MAX
        while self._settled and room > 0:
            answer, of_message = self._settled.popleft()
            rest.settled.append(answer)
            held += of_message
            room -= answer.ByteSize()
        return rest, held

    def _on_revoked(self, encoded: bytes) -> None:
        has_room = sum(map(len, self._revoked)) + len(encoded) <= _REVOKED_BYTES_MAX
        if has_room and self._call.take(len(encoded)):
            self._revoked.append(encoded)
            self._to_write.set()

    def _take_revoked(self) -> list[bytes]:
        revoked, self._revoked = self._revoked, []
        return revoked

    def _next_jobs(self) -> list[Delivery]:
        """Removes as many jobs from `_jobs` as fit into one message, and returns them."""
        jobs: list[Delivery] = []
        room = _MESSAGE_BYTES_MAX
        while self._jobs and room > 0:
            since_s, delivery = self._jobs.popleft()
            count = 0
            while count < len(delivery.jobs) and room > 0:
                room -= len(delivery.jobs[count])
                count += 1
            if count < len(delivery.jobs):
                delivery, remaining = delivery.split(count)
                self._jobs.appendleft((since_s, remaining))
            jobs.append(delivery)
        self._jobs_bytes -= _MESSAGE_BYTES_MAX - room
        return jobs

    def _release_unsent(self) -> None:
        """Releases the jobs that were not sent."""
        if self._take_back_timer is not None:
            self._take_back_timer.cancel()
        while self._jobs:
            self._consumer.release(self._jobs.popleft()[1])

"""The attackers of the scenario *hostile*. Each attack lasts for the given time. If a router has ended all connections
of an attack, the attack opens new ones."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields

import grpc
from h2.errors import ErrorCodes

from bench.systems.on_routers import CALL_S_MAX, QUEUE
from proof import hostile_peer
from proof.hostile_peer import Seen
from proof.malformed import conversation, say
from windrow.ids import uuid7
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

_ENQUEUE, _GET_JOBS, _CONSUME = (f"/windrow.v1.Queue/{name}" for name in ("Enqueue", "GetJobs", "Consume"))
_AGAIN_S = 0.1
_MIB = 1024 * 1024
_UNREAD_CALLS = 400
_UNFINISHED_CALLS, _UNFINISHED_BYTES, _UNFINISHED_CONNECTIONS = 120, 15 * _MIB, 4
# How many streams an attacker opens on one connection. A router allows 1,000 calls on a connection.
_STREAMS_OF_CONNECTION = 500
_STREAM_CONNECTIONS_MIN = 4
_JOBS_FOR_STREAMS, _JOBS_OF_CALL = 600, 15
_CREDIT = 100
# The window is so long that no lease ends during the attack.
_WINDOW_S = 600
_RESET_CONNECTIONS, _RESETS = 2, 60_000
_FLOOD_CONNECTIONS = 64
_OLD_IDS_OF_CALL = 100
_MALFORMED_CONNECTIONS = 16
# A job id contains the time when it was made. These ids contain a time in 1970, and Windrow refuses them as too old.
_OLD_ID = "00000000-0000-7000-8000-{:012x}"


class Attack(enum.StrEnum):
    """The attacks, by the names that --attacks takes."""

    UNREAD_ANSWERS = "unread-answers"
    UNFINISHED_REQUESTS = "unfinished-requests"
    UNREAD_STREAMS = "unread-streams"
    RAPID_RESETS = "rapid-resets"
    OLD_IDS = "old-ids"
    LARGE_PAYLOADS = "large-payloads"
    MALFORMED = "malformed"


_DESCRIPTIONS = {
    Attack.UNREAD_ANSWERS: f"{_UNREAD_CALLS} GetJobs of two 1 MiB jobs, one connection with a window of 0",
    Attack.UNFINISHED_REQUESTS: f"{_UNFINISHED_CALLS} × 15 MiB without the last byte, "
    f"{_UNFINISHED_CONNECTIONS} connections",
    Attack.UNREAD_STREAMS: "{streams:,} streams of one org that never read, "
    f"{_JOBS_FOR_STREAMS} jobs of 1 MiB waiting",
    Attack.RAPID_RESETS: f"{_RESETS:,} × HEADERS and RST_STREAM on {_RESET_CONNECTIONS} connections, again and again",
    Attack.OLD_IDS: f"Enqueues of {_OLD_IDS_OF_CALL} ids that are too old, {_FLOOD_CONNECTIONS} connections",
    Attack.LARGE_PAYLOADS: f"Enqueues of 1 MiB payloads, {_FLOOD_CONNECTIONS} connections",
    Attack.MALFORMED: f"malformed HTTP/2, gRPC and protobuf, {_MALFORMED_CONNECTIONS} connections at a time",
}


def description(attack: Attack, *, streams: int) -> str:
    return _DESCRIPTIONS[attack].format(streams=streams)


@dataclass(slots=True, kw_only=True)
class AttackOutcome:
    """What the attacker saw on all its connections."""

    # How many calls ended with each grpc-status.
    statuses: Counter[int] = field(default_factory=Counter[int])
    # How many calls ended with each error of an RST_STREAM.
    resets: Counter[str] = field(default_factory=Counter[str])
    closed: int = 0
    calls: int = 0
    # For the attack with malformed bytes: how many connections sent each kind of bytes, and the seed of the attack's
    # random choices.
    sent: Counter[str] = field(default_factory=Counter[str])
    seed: int | None = None

    def add(self, seen: Iterable[Seen]) -> None:
        for one in seen:
            self.statuses.update(one.statuses)
            self.resets.update({_name(error): count for error, count in one.resets.items()})
            self.closed += one.closed_after_s is not None
            self.calls += one.calls_sent

    def to_json(self) -> str:
        # dataclasses.asdict() does not work with a Counter.
        return json.dumps({one.name: getattr(self, one.name) for one in fields(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> AttackOutcome:
        told = json.loads(text)
        statuses = Counter({int(status): count for status, count in told.pop("statuses").items()})
        resets, sent = Counter(told.pop("resets")), Counter(told.pop("sent"))
        return cls(statuses=statuses, resets=resets, sent=sent, **told)

    def text(self) -> str:
        parts = [f"{self.calls:,} calls"] if self.seed is None else []
        parts += [f"{count:,} × {kind}" for kind, count in sorted(self.sent.items())]
        parts += [f"{count:,} × status {status}" for status, count in sorted(self.statuses.items())]
        parts += [f"{count:,} reset with {error}" for error, count in sorted(self.resets.items())]
        if self.closed:
            parts.append(f"{self.closed:,} connections closed")
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        return ", ".join(parts)


class Attacker:
    """One attack on one cluster. The attacker uses an org of its own. `streams`: the number of streams that the attack
    UNREAD_STREAMS opens."""

    def __init__(self, attack: Attack, address: str, *, streams: int) -> None:
        self.outcome = AttackOutcome()
        self._streams = streams
        self._attack = attack
        self._address = address
        self._org = f"bench-attacker-{secrets.token_hex(4)}"
        self._ids: list[str] = []

    async def prepare(self) -> None:
        """Stores the jobs that the attack needs. Raises grpc.RpcError."""
        match self._attack:
            case Attack.UNREAD_ANSWERS:
                count = 2
            case Attack.UNREAD_STREAMS:
                count = _JOBS_FOR_STREAMS
            case _:
                return
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = queue_pb2_grpc.QueueStub(channel)
            for at in range(0, count, _JOBS_OF_CALL):
                jobs = [_large_job() for _ in range(min(_JOBS_OF_CALL, count - at))]
                await stub.Enqueue(queue_pb2.EnqueueRequest(org=self._org, jobs=jobs), timeout=CALL_S_MAX)
                self._ids += [job.id for job in jobs]

    async def attack(self, seconds: float) -> None:
        match self._attack:
            case Attack.UNREAD_ANSWERS:
                request = queue_pb2.GetJobsRequest(org=self._org, ids=self._ids, include_payload=True)
                message = request.SerializeToString()
                await self._insist(
                    seconds,
                    lambda left_s: hostile_peer.leave_answers_unread(
                        self._address, _GET_JOBS, message, calls=_UNREAD_CALLS, seconds=left_s
                    ),
                )
            case Attack.UNFINISHED_REQUESTS:
                await self._insist(
                    seconds,
                    lambda left_s: hostile_peer.leave_requests_unfinished(
                        self._address,
                        _ENQUEUE,
                        size_bytes=_UNFINISHED_BYTES,
                        calls=_UNFINISHED_CALLS,
                        connections=_UNFINISHED_CONNECTIONS,
                        seconds=left_s,
                    ),
                )
            case Attack.UNREAD_STREAMS:
                start = queue_pb2.ConsumeStart(org=self._org, queues=[QUEUE], worker="hostile")
                start.visibility_window.FromSeconds(_WINDOW_S)
                first = queue_pb2.ConsumeRequest(start=start, credit=_CREDIT).SerializeToString()
                await self._insist(
                    seconds,
                    lambda left_s: hostile_peer.leave_answers_unread(
                        self._address,
                        _CONSUME,
                        first,
                        calls=self._streams,
                        connections=max(_STREAM_CONNECTIONS_MIN, -(-self._streams // _STREAMS_OF_CONNECTION)),
                        seconds=left_s,
                        ends=False,
                    ),
                )
            case Attack.RAPID_RESETS:
                await self._insist(
                    seconds,
                    lambda left_s: hostile_peer.reset_rapidly(
                        self._address, _ENQUEUE, count=_RESETS, connections=_RESET_CONNECTIONS, seconds=left_s
                    ),
                )
            case Attack.OLD_IDS:
                old = [
                    job_pb2.NewJob(id=_OLD_ID.format(at), template=job_pb2.JobTemplate(queue=QUEUE, kind="no-op"))
                    for at in range(_OLD_IDS_OF_CALL)
                ]
                await self._flood(seconds, lambda: old)
            case Attack.LARGE_PAYLOADS:
                await self._flood(seconds, lambda: [_large_job()])
            case Attack.MALFORMED:
                await self._garble(seconds)

    async def _insist(self, seconds: float, attack: Callable[[float], Awaitable[Sequence[Seen]]]) -> None:
        """Repeats the attack until the time is over. When the router has ended all connections, opens new ones."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > _AGAIN_S:
            with contextlib.suppress(OSError):
                self.outcome.add(await attack(left_s))
            await asyncio.sleep(_AGAIN_S)

    async def _flood(self, seconds: float, make: Callable[[], Sequence[job_pb2.NewJob]]) -> None:
        """Enqueues on many connections, one call at a time on each."""
        until_s = time.monotonic() + seconds
        options = [("grpc.use_local_subchannel_pool", 1)]

        async def call_on(stub: queue_pb2_grpc.QueueAsyncStub) -> None:
            while time.monotonic() < until_s:
                request = queue_pb2.EnqueueRequest(org=self._org, jobs=make())
                code = 0
                try:
                    await stub.Enqueue(request, timeout=CALL_S_MAX)
                except grpc.aio.AioRpcError as error:
                    code = int(error.code().value[0])
                self.outcome.calls += 1
                self.outcome.statuses[code] += 1

        async with AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(grpc.aio.insecure_channel(self._address, options=options))
                for _ in range(_FLOOD_CONNECTIONS)
            ]
            await asyncio.gather(*(call_on(queue_pb2_grpc.QueueStub(channel)) for channel in channels))

    async def _garble(self, seconds: float) -> None:
        """Sends malformed bytes, each time on a new connection."""
        until_s = time.monotonic() + seconds
        self.outcome.seed = secrets.randbits(32)
        luck = random.Random(self.outcome.seed)
        job = job_pb2.NewJob(id=uuid7(), template=job_pb2.JobTemplate(queue=QUEUE, kind="no-op", payload=b"payload"))
        valid = queue_pb2.EnqueueRequest(org=self._org, jobs=[job]).SerializeToString()

        async def talk() -> None:
            while time.monotonic() < until_s:
                made = conversation(luck, valid=valid)
                self.outcome.sent[made.kind] += 1
                try:
                    self.outcome.closed += await say(self._address, made.sent)
                except OSError:
                    # No router process listens at the moment. The report's table says whether a router process ended.
                    await asyncio.sleep(_AGAIN_S)

        await asyncio.gather(*(talk() for _ in range(_MALFORMED_CONNECTIONS)))


def _name(error: ErrorCodes | int) -> str:
    return error.name if isinstance(error, ErrorCodes) else str(error)


def _large_job() -> job_pb2.NewJob:
    return job_pb2.NewJob(id=uuid7(), template=job_pb2.JobTemplate(queue=QUEUE, kind="no-op", payload=bytes(_MIB)))

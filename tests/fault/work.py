"""The load while slots move: producers and streams of an org that moves, and calls of orgs that do not move. Everything
is recorded in the format of proof/history.py, so that proof/checker can judge it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

import windrow
from proof import history, tables
from proof.checker import Evidence, Violation, check
from proof.clients import calls
from proof.clients.consumer import Consumer
from proof.clients.site import Orders, Site
from proof.history import Answer, Call, History, Outcome, Recorder, Verb, leased, payload_of
from proof.postgres import ask
from proof.tables import Place
from tests.routers import PATIENCE_S
from tests.streams import until
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

# The queue of the streams, and a queue that only `hold_leases` reads.
QUEUE, HELD = "load", "held"
# The least number of calls, and of deliveries, in one test.
_LOAD_MIN = 50
_KEYS_MAX = 10
_LOOKED_FOR_MAX = 50
_PAUSE_S = 0.2
# The pause between two looks into the histories or the tables. Each look costs some milliseconds of CPU.
_LOOK_S = 0.1
_WINDOW_S = 1.0
_HELD_S = 60.0


@dataclass(kw_only=True)
class Work:
    """The load of `org`, which moves, and of `bystanders`: one org on each shard that does not move. Each client in
    `clients` uses its own set of routers. Each stub in `stubs` also uses its own set of routers, and never retries.
    `folder` has only the histories of this work."""

    org: str
    bystanders: Mapping[str, str]
    folder: Path
    clients: Sequence[windrow.Client]
    stubs: Sequence[queue_pb2_grpc.QueueAsyncStub]
    recorder: Recorder
    orders: Orders = field(default_factory=Orders)
    # Jobs that become due long after the test, so that there are always jobs to move.
    scheduled: list[str] = field(default_factory=list[str])
    # `missing`: jobs that were not found although their enqueue had been acknowledged. `lookups_failed`: errors of
    # lookups.
    missing: set[str] = field(default_factory=set[str])
    lookups_failed: list[str] = field(default_factory=list[str])
    _keys: Iterator[str] = field(
        default_factory=lambda: itertools.cycle(f"key-{number}" for number in range(_KEYS_MAX))
    )
    _held: list[windrow.Job] = field(default_factory=list[windrow.Job])
    _stored: list[str] = field(default_factory=list[str])
    _producing: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    _enough: asyncio.Event = field(default_factory=asyncio.Event)

    # ── The org that moves ───────────────────────────────────────────────────────────────────────────────────────────

    async def _produce(self) -> None:
        """Begins one round after another, even if earlier rounds have failed or have not ended."""
        ways = itertools.cycle([(first, other) for first in self.clients for other in self.clients])
        async with asyncio.TaskGroup() as rounds:
            while not self._enough.is_set():
                rounds.create_task(self._round(*next(ways)))
                await self._pause()

    async def _round(self, first: windrow.Client, other: windrow.Client) -> None:
        """Enqueues new jobs, and repeats them through routers whose copy of the catalog may be older or newer. If the
        jobs have dedup keys, also enqueues other jobs with these keys."""
        jobs = [_new_job(self.org) for _ in range(3)]
        for client in (first, other):
            await self._enqueue(client, [*jobs, _new_job(self.org, key=next(self._keys))])

    async def _look(self) -> None:
        """Looks up jobs that were acknowledged."""
        for client in itertools.cycle(self.clients):
            if self._enough.is_set():
                return
            ids = [*self.scheduled, *self._stored[-_LOOKED_FOR_MAX:]]
            try:
                self.missing.update(set(ids) - set(await client.get_jobs(ids)))
            except windrow.WindrowError as error:
                self.lookups_failed.append(str(error))
            await self._pause()

    async def hold_leases(self) -> None:
        """Takes leases, which last until `ack_held` is called."""
        await self._enqueue(self.clients[0], [_new_job(self.org, queue=HELD) for _ in range(2)])
        number = self.recorder.begin(Verb.DEQUEUE, self.org, {"window_s": _HELD_S})
        self._held = await self.clients[0].dequeue(HELD, max_jobs=2, visibility_window=_HELD_S)
        got = [leased(lease=job.lease, attempt=job.attempt, payload=job.payload) for job in self._held]
        self.recorder.got(number, got)
        self.recorder.end(number, Outcome.OK)
        assert len(got) == 2

    async def ack_held(self) -> None:
        """Acks the held leases, which have not ended. Uses other routers than those from which the leases came."""
        asked = {"leases": [job.lease.hex() for job in self._held], "span_s": 0.0}
        number = self.recorder.begin(Verb.ACK, self.org, asked)
        answers = [Answer(answer.value) for answer in await self.clients[1].ack(self._held)]
        self.recorder.end(number, Outcome.OK, answered=answers)
        assert answers == [Answer.OK] * 2
        self._held = []

    async def schedule(self, count: int) -> None:
        jobs = [_new_job(self.org, delay_s=3600.0) for _ in range(count)]
        await self._enqueue(self.clients[0], jobs)
        self.scheduled += [str(job.id) for job in jobs]

    async def _enqueue(self, client: windrow.Client, jobs: Sequence[windrow.NewJob]) -> None:
        number = self.recorder.begin(Verb.ENQUEUE, self.org, [calls.asked(job) for job in jobs])
        try:
            stored = await client.enqueue_many(jobs)
        except windrow.WindrowError as error:
            self.recorder.end(number, Outcome.UNKNOWN, code=str(error))
            return
        answered = [{"job": one.id, "duplicate": one.duplicate} for one in stored]
        self.recorder.end(number, Outcome.OK, answered=answered)
        self._stored += [one.id for one in stored]

    async def _cancel_scheduled(self) -> None:
        number = self.recorder.begin(Verb.CANCEL, self.org, self.scheduled)
        answers = [Answer(answer.value) for answer in await self.clients[0].cancel_jobs(self.scheduled)]
        self.recorder.end(number, Outcome.OK, answered=answers)
        assert set(answers) <= {Answer.OK}
        self.scheduled = []

    # ── Orgs at rest ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _stand_by(self, org: str) -> None:
        """Makes one call after another, without retries."""
        for stub in itertools.cycle(self.stubs):
            if self._enough.is_set():
                return
            job = _new_job(org)
            number = self.recorder.begin(Verb.ENQUEUE, org, [calls.asked(job)])
            request = queue_pb2.EnqueueRequest(org=org)
            template = job_pb2.JobTemplate(queue=job.queue, kind=job.kind, payload=payload_of(org, str(job.id), 0))
            request.jobs.add(id=job.id, template=template)
            try:
                response = await stub.Enqueue(request, timeout=PATIENCE_S)
            except grpc.aio.AioRpcError as error:
                outcome, code = calls.outcome_of(error)
                self.recorder.end(number, outcome, code=code)
            else:
                answered = [{"job": one.id, "duplicate": one.duplicate} for one in response.results]
                self.recorder.end(number, Outcome.OK, answered=answered)
            await self._pause()

    # ── All of them ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def orgs(self) -> list[str]:
        return [self.org, *self.bystanders.values()]

    def _consumers(self) -> list[Consumer]:
        """Returns one consumer of the org that moves for each set of routers, and one consumer for each org that does
        not move."""
        site = Site(
            address="",
            folder=str(self.folder),
            name="streams",
            generation=0,
            seed=1,
            orgs=self.orgs,
            mine=0,
            places=1,
            window_s=_WINDOW_S,
        )
        moving = [Consumer(site, self.orders, stub, self.recorder, org=self.org) for stub in self.stubs]
        turns = itertools.cycle(self.stubs)
        resting = [Consumer(site, self.orders, next(turns), self.recorder, org=org) for org in self.bystanders.values()]
        return [*moving, *resting]

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PAUSE_S):
                await self._enough.wait()

    def start(self, group: asyncio.TaskGroup) -> None:
        """Starts tasks of this group, which run until `end`."""
        bystanders = [self._stand_by(org) for org in self.bystanders.values()]
        self._producing = [group.create_task(work) for work in (self._produce(), self._look(), *bystanders)]
        for consumer in self._consumers():
            group.create_task(consumer.run())

    async def drain(self, shards: Iterable[Place]) -> None:
        """Waits until there has been some load, stops the producers, and waits until all jobs are done."""
        await until(self._has_worked, "there has been some load", every_s=_LOOK_S)
        self._enough.set()
        await asyncio.wait(self._producing)
        await self._cancel_scheduled()
        orgs = ", ".join(f"'{org}'" for org in self.orgs)
        counted = f"SELECT count(*) FROM windrow.job j JOIN windrow.queue q USING (queue_id) WHERE q.org IN ({orgs})"

        async def nothing_left() -> bool:
            counts = [await asyncio.to_thread(ask, shard.direct_dsn, counted) for shard in shards]
            return not any(count for ((count,),) in counts)

        await until(nothing_left, "every job is done", every_s=_LOOK_S)

    def end(self) -> None:
        self._enough.set()
        self.orders.over.set()

    def seen(self) -> History:
        return history.read(self.folder)

    def _has_worked(self) -> bool:
        seen = self.seen()
        return min(len(seen.enqueues), len(seen.deliveries)) > _LOAD_MIN

    def failed(self, orgs: Iterable[str]) -> list[Call]:
        """Returns the enqueues of these orgs that were answered with an error."""
        among = set(orgs)
        return [
            call
            for call in self.seen().calls
            if call.verb is Verb.ENQUEUE and call.outcome is not Outcome.OK and call.org in among
        ]

    def wrong(self, shards: Sequence[Place], address: str) -> list[Violation]:
        """Returns the violations found in the histories and in the tables of all shards."""
        orgs = set(self.orgs)
        return check(
            Evidence(
                history=self.seen(),
                rows=[row for row in tables.read_rows(shards) if row.org in orgs],
                books=[one for one in tables.read_books(address, [shard.name for shard in shards]) if one.org in orgs],
                # `calm_s` is now, because delays are not checked here.
                calm_s=time.monotonic(),
                late_s_max=PATIENCE_S,
            )
        )


@contextlib.asynccontextmanager
async def working(
    addresses: Sequence[str], *, org: str, bystanders: Mapping[str, str], folder: Path
) -> AsyncGenerator[Work, None]:
    """Runs the load during the block. After drain() no jobs are left."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [windrow.Client(address, org=org, create_spans=False) for address in addresses]
        channels = [calls.connect(address) for address in addresses]
        work = Work(
            org=org,
            bystanders=bystanders,
            folder=folder,
            clients=[await stack.enter_async_context(client) for client in clients],
            stubs=[queue_pb2_grpc.QueueStub(await stack.enter_async_context(channel)) for channel in channels],
            recorder=stack.enter_context(Recorder(folder, "client")),
        )
        # Consumers ack all jobs that they get.
        work.orders.calm.set()
        await work.schedule(5)
        async with asyncio.TaskGroup() as group:
            work.start(group)
            yield work
            work.end()


def _new_job(org: str, *, queue: str = QUEUE, key: str = "", delay_s: float = 0.0) -> windrow.NewJob:
    name = windrow.uuid7()
    return windrow.NewJob(
        queue,
        "work",
        payload_of(org, name, 0),
        id=name,
        delay=delay_s or None,
        dedup_key=key,
        dedup_window=86_400.0 if key else None,
    )

"""`python -m chaos.clients.producer`: enqueues jobs one by one, several at once, in batches, with dedup keys, for
later, or as workflows. Some nodes of the workflows then get signals. Repeats a call after an error that does not say
whether the call was executed. Sometimes enqueues an acknowledged job again, looks it up or cancels it."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import grpc

import windrow
from chaos.clients import flows
from proof.clients import calls
from proof.clients.fates import pick_org
from proof.clients.site import QUEUE, Orders, Site, main
from proof.history import Answer, Outcome, Recorder, Verb, payload_of

# The load is open: a call begins every _EVERY_S seconds on average, without waiting for earlier calls. At most
# _CALLS_MAX calls may be under way at the same time.
_EVERY_S = 0.15
_CALLS_MAX = 200
_TRIES_MAX = 20
_TIMEOUT_S, _TRY_S = 6.0, 2.0
# Most delayed jobs have a short delay. Some jobs wait so long that their slot may move meanwhile.
_DELAY_S_MAX, _LONG_DELAY_S_MAX = 4.0, 20.0
_KEYS = 40
_KEY_WINDOW_S = 86_400.0
_REMEMBERED = 200
_BIG_BYTES = 20_000


class Producer:
    def __init__(self, site: Site, orders: Orders, channel: grpc.aio.Channel, recorder: Recorder) -> None:
        self._site = site
        self._orders = orders
        self._orgs = list(site.orgs)
        self._calls = calls.Calls([channel], recorder)
        self._recorder = recorder
        self._client = windrow.Client(
            site.address, org=self._orgs[0], timeout=_TIMEOUT_S, try_timeout=_TRY_S, channels=3, create_spans=False
        )
        # `_recent`: acknowledged jobs without a dedup key. `_keyed`: acknowledged jobs with a dedup key. For these, the
        # answer to the enqueue may name another job with the same key.
        self._recent: deque[tuple[str, windrow.NewJob]] = deque(maxlen=_REMEMBERED)
        self._keyed: deque[tuple[str, windrow.NewJob]] = deque(maxlen=_REMEMBERED)

    async def run(self) -> None:
        async with self._client, asyncio.TaskGroup() as group:
            group.create_task(self._call_on(group))
            group.create_task(self._probe())

    async def _call_on(self, group: asyncio.TaskGroup) -> None:
        luck = self._site.luck()
        turns = asyncio.Semaphore(_CALLS_MAX)
        while not (self._orders.calm.is_set() or self._orders.over.is_set()):
            # Each call has a random generator of its own. So the random choices do not depend on the order in which
            # calls end.
            group.create_task(self._once(turns, random.Random(luck.random())))
            await self._orders.pause(luck.expovariate(1 / _EVERY_S))

    async def _once(self, turns: asyncio.Semaphore, luck: random.Random) -> None:
        async with turns:
            await self._call(luck)

    async def _call(self, luck: random.Random) -> None:
        org = pick_org(luck, self._orgs)
        dice = luck.random()
        if dice < 0.45:
            await self._until_stored(org, [_job(org, luck)], self._one)
        elif dice < 0.65:
            # Enqueue several jobs at the same time, so that the client puts them into one call.
            jobs = [_job(org, luck) for _ in range(luck.randint(2, 6))]
            await asyncio.gather(*(self._until_stored(org, [job], self._one) for job in jobs))
        elif dice < 0.8:
            await self._until_stored(org, [_job(org, luck) for _ in range(luck.randint(2, 25))], self._together)
        elif dice < 0.87:
            await self._until_stored(org, [_job(org, luck) for _ in range(luck.randint(2, 25))], self._independent)
        elif dice < 0.92:
            await self._until_started(org, luck)
        elif dice < 0.95 and self._recent:
            # Enqueue a job again that was acknowledged before.
            org, job = luck.choice([*self._recent, *self._keyed])
            await self._until_stored(org, [job], self._together)
        elif dice < 0.97 and self._recent:
            org, _ = luck.choice(self._recent)
            await self._look_up(org, [job.id for of, job in self._recent if of == org])
        elif self._recent:
            org, job = luck.choice(self._recent)
            await self._cancel(org, job.id)

    async def _probe(self) -> None:
        """Waits for the command `probe`, and then enqueues one job for each org. The command comes when no fault is
        active."""
        over = asyncio.create_task(self._orders.over.wait())
        probe = asyncio.create_task(self._orders.probe.wait())
        await asyncio.wait({over, probe}, return_when=asyncio.FIRST_COMPLETED)
        if probe.done():
            mine = self._orgs[self._site.mine :: self._site.places]
            for org in mine:
                await self._until_stored(org, [_job(org, None)], self._one)
        probe.cancel()
        # A client that ends before it is told to end counts as failed.
        await over

    async def _until_stored(self, org: str, jobs: Sequence[windrow.NewJob], send: _Send) -> None:
        asked = [calls.asked(job) for job in jobs]
        for _ in range(_TRIES_MAX):
            number = self._recorder.begin(Verb.ENQUEUE, org, asked)
            try:
                stored = await send(org, jobs)
            except windrow.WindrowError as error:
                refused = isinstance(error, windrow.InvalidRequest)
                self._recorder.end(number, Outcome.ERROR if refused else Outcome.UNKNOWN, code=calls.error_code(error))
                if refused or self._orders.over.is_set():
                    return
                continue
            answered = [None if one.error else {"job": one.id, "duplicate": one.duplicate} for one in stored]
            failed = next((one.error for one in stored if one.error), None)
            outcome = Outcome.OK if failed is None else Outcome.UNKNOWN
            self._recorder.end(number, outcome, code=calls.error_code(failed) if failed else "", answered=answered)
            if failed is None:
                for job in jobs:
                    (self._keyed if job.dedup_key else self._recent).append((org, job))
                return

    async def _until_started(self, org: str, luck: random.Random) -> None:
        flow, asked = flows.draw(org, luck)
        for _ in range(_TRIES_MAX):
            number = self._recorder.begin(Verb.START, org, asked)
            try:
                started = await self._client.for_org(org).start(flow)
            except windrow.WindrowError as error:
                self._recorder.end(number, Outcome.UNKNOWN, code=calls.error_code(error))
                if self._orders.over.is_set():
                    return
                continue
            jobs = list(started.job_ids.values())
            if jobs != [node["job"] for node in asked]:
                raise AssertionError(f"workflow {flow.id} has other jobs than expected: {jobs}")
            answered = [{"job": job, "duplicate": started.duplicate} for job in jobs]
            self._recorder.end(number, Outcome.OK, answered=answered)
            async with asyncio.TaskGroup() as group:
                for signal in flows.draw_signals(flow, luck):
                    group.create_task(self._signal(org, flow.id, signal))
                if luck.random() < 0.2:
                    group.create_task(self._cancel(org, luck.choice(jobs)))
            return

    async def _signal(self, org: str, workflow: str, signal: flows.Signal) -> None:
        await self._orders.pause(signal.after_s)
        await self._calls.signal(org, workflow, signal.node, signal.payload)

    async def _one(self, org: str, jobs: Sequence[windrow.NewJob]) -> Sequence[windrow.Enqueued]:
        (job,) = jobs
        options: windrow.JobOptions = {
            "id": job.id,
            "priority": job.priority,
            "delay": job.delay,
            "dedup_key": job.dedup_key,
            "dedup_window": job.dedup_window,
            "max_attempts": job.max_attempts,
        }
        return [await self._client.for_org(org).enqueue(job.queue, job.kind, job.payload, **options)]

    async def _together(self, org: str, jobs: Sequence[windrow.NewJob]) -> Sequence[windrow.Enqueued]:
        return await self._client.for_org(org).enqueue_many(jobs)

    async def _independent(self, org: str, jobs: Sequence[windrow.NewJob]) -> Sequence[windrow.Enqueued]:
        return await self._client.for_org(org).enqueue_many(jobs, independent=True)

    async def _cancel(self, org: str, job: str) -> None:
        number = self._recorder.begin(Verb.CANCEL, org, [job])
        try:
            answers = await self._client.for_org(org).cancel_jobs([job], reason="chaos")
        except windrow.WindrowError as error:
            self._recorder.end(number, Outcome.UNKNOWN, code=calls.error_code(error))
        else:
            self._recorder.end(number, Outcome.OK, answered=[Answer(answer.value) for answer in answers])

    async def _look_up(self, org: str, jobs: Sequence[str]) -> None:
        number = self._recorder.begin(Verb.LOOK_UP, org, jobs)
        try:
            found = await self._client.for_org(org).get_jobs(jobs)
        except windrow.WindrowError as error:
            self._recorder.end(number, Outcome.UNKNOWN, code=calls.error_code(error))
        else:
            self._recorder.end(number, Outcome.OK, answered=list(found))


_Send = Callable[[str, Sequence[windrow.NewJob]], Awaitable[Sequence[windrow.Enqueued]]]


def _job(org: str, luck: random.Random | None) -> windrow.NewJob:
    """Returns a job that the generator chooses at random. Without a generator, returns a plain job that is due at
    once."""
    name = windrow.uuid7()
    if luck is None:
        return windrow.NewJob(QUEUE, "work", payload_of(org, name, 0), id=name)
    keyed = luck.random() < 0.15
    return windrow.NewJob(
        QUEUE,
        "work",
        payload_of(org, name, _BIG_BYTES if luck.random() < 0.02 else luck.randint(0, 500)),
        id=name,
        priority=luck.choice((None, None, None, 1, 9)),
        delay=_delay(luck),
        dedup_key=f"key-{luck.randrange(_KEYS)}" if keyed else "",
        dedup_window=_KEY_WINDOW_S if keyed else None,
        max_attempts=3 if luck.random() < 0.1 else None,
    )


def _delay(luck: random.Random) -> float | None:
    if luck.random() >= 0.2:
        return None
    return luck.uniform(0.1, _DELAY_S_MAX if luck.random() < 0.7 else _LONG_DELAY_S_MAX)


async def _work(site: Site, orders: Orders) -> None:
    async with calls.connect(site.address) as channel:
        with site.recorder() as recorder:
            await Producer(site, orders, channel, recorder).run()


if __name__ == "__main__":
    main(_work)

"""The scenarios: one class each, whose docstring says what a client must do.

`fake` plays the server's side for a client under test. `real` brings a real router and the reference client into the
situation of the scenario. `expect` judges the messages after `fake` and after `real`. The rules of rules.py apply in
every scenario.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from typing import TYPE_CHECKING
from urllib.parse import quote

from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode

from tests.conformance.fake_server import AWAY, TOO_LARGE, Refusal, Settle, refused
from tests.conformance.rules import EARLY, HANDLERS, ROOM, require
from tests.conformance.transcript import Request, Saying, Stream, Transcript, entries, too_large
from windrow.v1 import job_pb2, queue_pb2

if TYPE_CHECKING:
    from tests.conformance.real_router import Bench
    from tests.conformance.stage import Stage

STALE, CANCELLED = job_pb2.JOB_ANSWER_STALE, job_pb2.JOB_ANSWER_CANCELLED
# Handlers run for this many milliseconds unless their lease ends.
LONG = "600000"
# The window for a real router. If a busy machine delays an extend for two thirds of the window, the lease expires.
REAL_WINDOW_S = 9.0
PAUSE_FIRST_S = 0.05


class Scenario:
    """A situation, and what a client must do in it."""

    name = ""
    # The visibility window that the client uses.
    window_s = 30.0
    # How long the client waits for an answer, if that can be set.
    answer_s = 10.0
    # Why no real router can be brought into this situation; empty: a real router can.
    only_fake = ""
    # Whether `real` ends, cuts off or freezes something that other scenarios use.
    disturbs = False
    # The most credit that the reference client gives to a real router.
    room_real = ROOM

    @property
    def what(self) -> str:
        return " ".join(inspect.cleandoc(self.__doc__ or "").split())

    async def fake(self, stage: Stage) -> None:
        raise NotImplementedError

    async def real(self, bench: Bench) -> Transcript:
        raise NotImplementedError

    def expect(self, seen: Transcript) -> None:
        """Raises Unmet if the client did not do what it must."""


class Work(Scenario):
    """Acks each job with its result."""

    name = "work"

    async def fake(self, stage: Stage) -> None:
        await stage.until_acked(*stage.server.give("0", "20", "1"))

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker() as worker:
            await bench.until_succeeded(await bench.store("0", "20", "1"))
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        for lease, job in seen.jobs.items():
            results = [said.result for said in seen.sayings(lease, "ack") if said.answer == "OK"]
            require(results == [job.payload], "one ack of each job, with its payload as result", f"{results}; {seen}")


class Org(Scenario):
    """Sends the metadata windrow-org with every call, percent-encoded."""

    name = "org"

    async def fake(self, stage: Stage) -> None:
        await stage.until_acked(*stage.server.give("0", kind="enqueue"))

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker() as worker:
            await bench.until_succeeded(await bench.store("0", kind="enqueue"))
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        require(seen.enqueues, "an Enqueue by the job of kind `enqueue`", seen)
        right = quote(seen.org, safe="")
        calls = [call.metadata for call in (*seen.streams, *seen.calls)] + [call.metadata for call in seen.enqueues]
        for metadata in calls:
            said = metadata.get("windrow-org")
            require(said == right, f"windrow-org: {right}", said or "no metadata windrow-org")


class RetryEnqueue(Scenario):
    """Repeats an Enqueue that was answered UNAVAILABLE, with the same job ids, and not before RetryInfo says."""

    name = "retry"
    disturbs = True

    async def fake(self, stage: Stage) -> None:
        refusal = Refusal(code=StatusCode.UNAVAILABLE, reason="SHARD_UNAVAILABLE", retry_after_s=0.4)
        stage.server.enqueue_refusals += [refusal, refusal]
        await stage.until_acked(*stage.server.give("0", kind="enqueue"))

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker() as worker:
            async with bench.outage():
                storing = asyncio.create_task(worker.enqueue())
                await bench.until(lambda: worker.seen.enqueues, "an Enqueue that is refused")
            stored = await storing
            await bench.until_succeeded([stored])
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        calls = seen.enqueues
        codes = ", ".join(call.code.name for call in calls)
        require(len(calls) >= 2 and calls[-1].code is StatusCode.OK, "calls until one is answered OK", codes)
        require(len({call.ids for call in calls}) == 1, "the same ids in each call", [call.ids for call in calls])
        for call, again in itertools.pairwise(calls):
            asked_s = call.retry_after_s or 0.0
            pause_s = again.at_s - call.answered_s
            require(pause_s >= EARLY * asked_s, f"a pause of {asked_s:g} s at least", f"{pause_s:.3f} s")


class RepeatSettlements(Scenario):
    """Repeats a message that was answered with an error, not before RetryInfo says, and without its credit."""

    name = "settle-error"
    disturbs = True

    async def fake(self, stage: Stage) -> None:
        refusals = [Refusal(code=StatusCode.UNAVAILABLE, reason="SHARD_BUSY", retry_after_s=0.2)] * 6

        def settle(request: queue_pb2.ConsumeRequest) -> queue_pb2.Settled:
            return refused(request, refusals.pop()) if refusals else stage.server.settled(request)

        stage.server.settle = settle
        leases = stage.server.give(*["0"] * 8)
        await stage.until_acked(*leases)
        # Give one more job. If the client gave credit again with a repeated message, it has too much credit after this
        # job.
        await stage.until_acked(*stage.server.give("0"))

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker() as worker:
            worker.hold()
            ids = await bench.store("0", "0")
            await bench.until(lambda: len(worker.seen.jobs) == 2, "two leased jobs")
            async with bench.outage():
                worker.let_go()
                await bench.until(lambda: self._errors(worker.seen), "a message that gets an error, or no answer")
            await bench.until_succeeded(ids)
        return worker.seen

    @staticmethod
    def _errors(seen: Transcript) -> list[Saying]:
        ended = {at for at, stream in enumerate(seen.streams) if stream.ended is not None}
        failed = [said for said in seen.sayings() if said.answer.startswith("error")]
        return failed + [said for said in seen.sayings() if not said.answer and said.stream in ended]

    def expect(self, seen: Transcript) -> None:
        require(self._errors(seen), "messages that the server does not settle", seen)
        for said in (said for said in seen.sayings() if said.answer.startswith("error")):
            again = [one for one in seen.sayings(said.lease, said.verb) if one.at_s > said.at_s]
            require(again, "the same leases again", seen)
            if again[0].stream == said.stream:
                pause_s, asked_s = again[0].at_s - said.answered_s, said.retry_after_s or 0.0
                require(pause_s >= EARLY * asked_s, f"a pause of {asked_s:g} s at least", f"{pause_s:.3f} s")
        require(seen.acked(*seen.jobs), "an ack of each job, answered OK", seen)


class Backoff(Scenario):
    """Opens a stream that is refused again and again, after pauses that double from 50 ms to 2 s."""

    name = "backoff"
    disturbs = True
    refusals = 6

    async def fake(self, stage: Stage) -> None:
        stage.server.greet = lambda number: AWAY if number <= self.refusals else None
        await stage.until_acked(*stage.server.give("0"))

    async def real(self, bench: Bench) -> Transcript:
        async with bench.outage(), bench.worker() as worker:
            await bench.until(lambda: len(_failed(worker.seen)) >= 3, "three streams that are refused")
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        for at, (stream, after) in enumerate(zip(_failed(seen), seen.streams[1:], strict=False)):
            least_s = EARLY * min(2.0, PAUSE_FIRST_S * 2**at) / 2
            pause_s = after.opened_s - stream.ended_s
            require(pause_s >= least_s, f"{least_s:.3f} s at least before stream {at + 2}", f"{pause_s:.3f} s")


class Pause(Scenario):
    """Waits for the delay of RetryInfo before it opens a stream again that was refused with it."""

    name = "pause"
    disturbs = True

    async def fake(self, stage: Stage) -> None:
        full = Refusal(code=StatusCode.RESOURCE_EXHAUSTED, reason="ROUTER_FULL", retry_after_s=1.0)
        stage.server.greet = lambda number: full if number <= 2 else None
        await stage.until_acked(*stage.server.give("0"))

    async def real(self, bench: Bench) -> Transcript:
        async with bench.outage(), bench.worker() as worker:
            await bench.until(lambda: len(worker.seen.streams) >= 2, "a second stream")
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        # A rule of every scenario checks that the pause is long enough.
        require(any(stream.retry_after_s for stream in seen.streams), "a stream that is refused with RetryInfo", seen)


class Credit(Scenario):
    """Gives credit for the jobs that it has room for, and again as jobs are done."""

    name = "credit"

    async def fake(self, stage: Stage) -> None:
        leases = stage.server.give(*["700"] * ROOM, *["1"] * 40)
        await stage.until_acked(*leases)

    async def real(self, bench: Bench) -> Transcript:
        ids = await bench.store(*["700"] * ROOM, *["1"] * 40)
        async with bench.worker() as worker:
            await bench.until_succeeded(ids)
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        given = 0
        for request in seen.streams[0].requests:
            if request.acks:
                break
            given += request.credit
        wanted = f"credit for {HANDLERS} to {ROOM} jobs before the first one is done"
        require(HANDLERS <= given <= ROOM, wanted, f"credit for {given}")
        require(seen.acked(*seen.jobs), "an ack of each job, answered OK", seen)


class Extend(Scenario):
    """Extends the lease of a job that takes longer than its window, and acks it once."""

    name = "extend"
    window_s = 2.0

    async def fake(self, stage: Stage) -> None:
        await stage.until_acked(*stage.server.give("4500"))

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker(window_s=REAL_WINDOW_S) as worker:
            worker.hold()
            ids = await bench.store("0")
            # The third extend comes when a whole window has passed.
            await bench.until(
                lambda: any(len(self._extends(worker.seen, lease)) >= 3 for lease in worker.seen.jobs), "extends"
            )
            worker.let_go()
            await bench.until_succeeded(ids)
        return worker.seen

    @staticmethod
    def _extends(seen: Transcript, lease: bytes) -> list[Saying]:
        return [said for said in seen.sayings(lease, "extend") if said.answer == "OK"]

    def expect(self, seen: Transcript) -> None:
        for lease in seen.jobs:
            require(len(self._extends(seen, lease)) >= 2, "two extends or more before the ack", seen)
        require(len(seen.jobs) == 1, "a job that is leased once", seen)


class Stale(Scenario):
    """Drops a job whose ack is answered STALE, and goes on."""

    name = "stale"
    answer = STALE

    async def fake(self, stage: Stage) -> None:
        ended = stage.server.new_job("0")
        stage.server.answers[ended.lease] = self.answer
        stage.server.give_jobs(ended)
        await stage.until(lambda: stage.seen.sayings(ended.lease, "ack"), "an ack of the job")
        await stage.until_acked(*stage.server.give(*["0"] * ROOM))

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker() as worker:
            worker.hold()
            ids = await bench.store("0")
            await bench.until(lambda: worker.seen.jobs, "a leased job")
            # The job is leased again, and then finished.
            await bench.release(*worker.seen.jobs)
            worker.let_go()
            await bench.until_succeeded(ids)
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        wanted = job_pb2.JobAnswer.Name(self.answer).removeprefix("JOB_ANSWER_")
        said = [one for one in seen.sayings(verb="ack") if one.answer == wanted]
        require(len(said) == 1, f"one ack that is answered {wanted}", seen)
        require(len(seen.streams) == 1, "the same stream for all jobs", seen)
        others = [lease for lease in seen.jobs if lease != said[0].lease]
        require(others and seen.acked(*others), "acks of the other jobs", seen)


class Cancelled(Stale):
    """Drops a job whose ack is answered CANCELLED, and goes on."""

    name = "cancelled"
    answer = CANCELLED

    async def real(self, bench: Bench) -> Transcript:
        # The worker ignores `revoked`, which is only a hint.
        async with bench.worker(hears_revoked=False) as worker:
            worker.hold()
            ids = await bench.store("0")
            await bench.until(lambda: worker.seen.jobs, "a leased job")
            await bench.cancel(*ids)
            worker.let_go()
            await bench.until_succeeded(await bench.store("0"))
        return worker.seen


class LostLease(Scenario):
    """Stops working on a job whose extend is not answered OK, and gives credit for its place."""

    name = "lost"
    window_s = 2.0

    async def fake(self, stage: Stage) -> None:
        *lost, _ = await stage.fill(LONG)
        stage.server.answers.update(dict.fromkeys(lost, STALE))
        await stage.until_acked(*stage.server.give("0"))

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker(window_s=self.window_s, hears_revoked=False) as worker:
            ids = await bench.store(*[LONG] * HANDLERS)
            await bench.until(lambda: len(worker.seen.jobs) == HANDLERS, "leased jobs")
            await bench.cancel(*ids[1:])
            await bench.until_succeeded(await bench.store("0"))
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        _expect_stopped(seen, [said.lease for said in seen.sayings(verb="extend") if said.answer not in ("", "OK")])


class Revoke(Scenario):
    """Stops working on a job whose lease is revoked, and gives credit for its place."""

    name = "revoke"
    # A long window: the scenario ends before an extend, whose answer would also tell that the lease has ended.
    window_s = 90.0

    async def fake(self, stage: Stage) -> None:
        *cancelled, taken, _ = await stage.fill(LONG)
        # A router also revokes leases on this stream that another stream of the worker has got.
        await stage.server.revoke([b"a lease of another stream", *cancelled], CANCELLED)
        await stage.server.revoke([taken], STALE)
        await stage.until_acked(*stage.server.give("0"))

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker(window_s=self.window_s) as worker:
            ids = await bench.store(*[LONG] * HANDLERS)
            await bench.until(lambda: len(worker.seen.jobs) == HANDLERS, "leased jobs")
            await bench.cancel(*ids[1:])
            await bench.until_succeeded(await bench.store("0"))
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        told = [one.lease for stream in seen.streams for said in stream.responses for one in said.revoked]
        _expect_stopped(seen, [lease for lease in told if lease in seen.jobs])


class Snooze(Scenario):
    """Snoozes a job for as long as its handler says, and works on it when it comes back; the attempt is not counted."""

    name = "snooze"

    async def fake(self, stage: Stage) -> None:
        job = stage.server.new_job("400", kind="snooze")
        (first,) = stage.server.give_jobs(job)
        await stage.until(lambda: stage.seen.sayings(first, "snooze"), "a snooze of the job")
        again = stage.server.new_job("400", kind="snooze")
        again.id = job.id
        await stage.until_acked(*stage.server.give_jobs(again))

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker() as worker:
            await bench.until_succeeded(await bench.store("400", kind="snooze"))
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        streams = [*seen.streams, *seen.calls]
        snoozes = [one for stream in streams for request in stream.requests for one in request.snoozes]
        for_s = {one.after.ToMilliseconds() / 1000 for one in snoozes}
        require(for_s == {0.4}, "a snooze for 0.4 s", for_s)
        attempts = [job.attempt for job in seen.jobs.values()]
        require(attempts == [1, 1], "the job twice, each time as its first attempt", attempts)


class MaxRuntime(Scenario):
    """Stops working on a job when its max_runtime is over, although its window is longer, and does not ack it."""

    name = "max-runtime"
    # A long window: the scenario ends before an extend, whose answer would also tell that the lease has ended.
    window_s = 90.0

    async def fake(self, stage: Stage) -> None:
        jobs = [stage.server.new_job(LONG) for _ in range(HANDLERS)]
        for job in jobs:
            job.max_runtime.FromMilliseconds(1000)
        await stage.until_sent(*stage.server.give_jobs(*jobs))
        await stage.until_acked(*stage.server.give("0"))

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker(window_s=self.window_s) as worker:
            await bench.store(*[LONG] * HANDLERS, max_runtime=Duration(seconds=1))
            await bench.until(lambda: len(worker.seen.jobs) >= HANDLERS, "leased jobs")
            await bench.until_succeeded(await bench.store("0"))
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        _expect_stopped(seen, [lease for lease, job in seen.jobs.items() if job.HasField("max_runtime")])


class Drain(Scenario):
    """Closes its side of a stream that is draining, although handlers run, and goes on with another stream."""

    name = "drain"
    window_s = 2.0
    disturbs = True

    async def fake(self, stage: Stage) -> None:
        # A client that waits for its handlers never closes its side.
        (running,) = stage.server.give(LONG)
        await stage.until_sent(running)
        await stage.server.drain()
        await stage.until(lambda: stage.seen.streams[0].closed_after is not None, "the client closes its side")
        await stage.until(lambda: len(stage.seen.streams) > 1, "another stream")
        await stage.until_acked(*stage.server.give("0"))
        await stage.until(lambda: self._is_kept(stage.seen, running), "an extend of the running job")

    @staticmethod
    def _is_kept(seen: Transcript, lease: bytes) -> bool:
        return any(said.stream > 0 for said in seen.sayings(lease))

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker(window_s=REAL_WINDOW_S) as worker:
            # The job runs for longer than the router waits for the client to close its side.
            ids = await bench.store("4000")
            await bench.until(lambda: worker.seen.jobs, "a leased job")
            await bench.drain()
            await bench.until_succeeded([*ids, *await bench.store("0")])
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        drained = seen.streams[0]
        at = drained.drained_after
        require(at is not None, "a stream that is told `draining`", seen)
        require(drained.ended is StatusCode.OK, "a stream that the client closes, and that ends with OK", seen)
        after = [event.message for event in drained.events[(at or 0) + 1 :] if isinstance(event.message, Request)]
        late = [request.credit for request in after if request.credit]
        # One message of the client may cross the server's `draining`.
        require(len(late) <= 1, "no credit on a stream that is draining", f"credit in {len(late)} messages")
        require(self._is_kept(seen, drained.jobs[0].lease), "the running job on another stream", seen)


class StreamEnds(Scenario):
    """Goes on with another stream after {status}: says again what was not answered, and keeps its jobs."""

    disturbs = True

    def __init__(self, name: str, status: StatusCode, *, real: bool = False) -> None:
        self.name = f"end-{name}"
        self.status = status
        self.only_fake = "" if real else f"a router ends no stream with {status.name} unless it has a fault"

    @property
    def what(self) -> str:
        return super().what.format(status=self.status.name)

    async def fake(self, stage: Stage) -> None:
        stage.server.settle = _answers_on_later_streams(stage)
        unanswered, running = stage.server.give("0", "1500")
        await stage.until(lambda: stage.seen.sayings(unanswered, "ack"), "an ack of the first job")
        await stage.until_sent(running)
        stage.server.end(Refusal(code=self.status))
        await stage.until(lambda: len(stage.seen.streams) > 1, "another stream")
        await stage.until_acked(unanswered, running)

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker() as worker:
            worker.hold()
            ids = await bench.store("0", "0")
            await bench.until(lambda: len(worker.seen.jobs) == 2, "two leased jobs")
            with bench.frozen_router():
                worker.let_go()
                await bench.until(lambda: worker.seen.sayings(verb="ack"), "an ack")
                await bench.kill()
            await bench.until_succeeded(ids)
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        first = seen.streams[0]
        require(first.ended is self.status, f"a first stream that ends with {self.status.name}", seen)
        require(seen.acked(*seen.jobs), "an ack of each job, answered OK", seen)
        silent = {said.lease for said in seen.sayings(verb="ack") if said.stream == 0 and not said.answer}
        again = {said.lease for said in seen.sayings(verb="ack") if said.stream > 0}
        require(silent <= again, "the acks that were not answered, again on the next stream", seen)


class Fatal(Scenario):
    """After {status}, the client must end with an exit code other than 0, and must open no other stream."""

    def __init__(self, name: str, status: StatusCode, *, real: bool = False) -> None:
        self.name = f"fatal-{name}"
        self.status = status
        self.only_fake = "" if real else f"no router answers a Consume with {status.name}"

    @property
    def what(self) -> str:
        return super().what.format(status=self.status.name)

    async def fake(self, stage: Stage) -> None:
        stage.server.greet = lambda _: Refusal(code=self.status)
        await stage.until(
            lambda: stage.client.code is not None or len(stage.seen.streams) > 1, "the client ends by itself"
        )

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker(queue="not a queue") as worker:
            await bench.until(lambda: worker.seen.code is not None, "the client ends by itself")
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        require(len(seen.streams) == 1, "no other stream", seen)
        require(seen.streams[0].ended is self.status, f"a stream that ends with {self.status.name}", seen)
        require(seen.code, "an exit code other than 0", seen)


class Oversize(Scenario):
    """Splits a message that was too large, and sends its credit again."""

    name = "oversize"
    room_real = 260
    rounds = 6

    async def fake(self, stage: Stage) -> None:
        def settle(request: queue_pb2.ConsumeRequest) -> queue_pb2.Settled:
            # The server behaves as if each lease had a large result.
            return refused(request, TOO_LARGE) if len(entries(request)) > 1 else stage.server.settled(request)

        stage.server.settle = settle
        for _ in range(self.rounds):
            await self._round(stage)

    @staticmethod
    async def _round(stage: Stage) -> None:
        with stage.server.silence():
            leases = stage.server.give(*["0"] * HANDLERS)
            await stage.until_sent(*leases)

            def said_all() -> bool:
                said = {one.lease for one in stage.seen.sayings(verb="ack")}
                return said >= set(leases) or len(stage.seen.streams[-1].unanswered) >= 2

            await stage.until(said_all, "acks of the jobs")
            # The other jobs are done meanwhile, and their acks go into one message.
            await stage.watch(0.2)
        await stage.until_acked(*leases)

    async def real(self, bench: Bench) -> Transcript:
        # No library that follows the contract sends such a message. The reference client does, because it has no limit
        # here.
        async with bench.worker(handlers=self.room_real, message_bytes_max=60 << 20) as worker:
            worker.hold()
            # The results have more than 16 MiB in total.
            ids = await bench.store(*["0".zfill(64 << 10)] * self.room_real)
            await bench.until(lambda: len(worker.seen.jobs) == self.room_real, "leased jobs")
            worker.let_go()
            await bench.until_succeeded(ids)
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        refusals = 0
        for stream in seen.streams:
            sent = [frozenset(lease for _, lease, _ in entries(request)) for request in stream.requests]
            numbers = [request.request_id for request in stream.requests]
            for settled in (one for response in stream.responses for one in response.settled if too_large(one)):
                refusals += 1
                leases = sent[numbers.index(settled.request_id)]
                require(sent.count(leases) == 1, "smaller messages after one that was too large", "the same message")
        require(refusals, "a message with several leases, because two messages were unanswered meanwhile", seen)
        require(seen.acked(*seen.jobs), "an ack of each job, answered OK", seen)


class HalfOpen(Scenario):
    """Leaves a stream on which a message has no answer after 10 s, and says the same on another one."""

    name = "half-open"
    disturbs = True
    answer_s = 1.0

    async def fake(self, stage: Stage) -> None:
        stage.server.settle = _answers_on_later_streams(stage)
        (lease,) = stage.server.give("0")
        await stage.until(lambda: stage.seen.sayings(lease, "ack"), "an ack of the job")
        # If a client's waiting time cannot be set, the client waits for 10 s.
        await stage.until(lambda: len(stage.seen.streams) > 1, "another stream", within_s=10 + stage.patience_s)
        await stage.until_acked(lease)
        await stage.until(lambda: stage.seen.streams[0].ended, "the client cancels the first stream")

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker(answer_s=self.answer_s) as worker:
            worker.hold()
            ids = await bench.store("0")
            await bench.until(lambda: worker.seen.jobs, "a leased job")
            with bench.frozen_router():
                worker.let_go()
                await bench.until(lambda: len(worker.seen.streams) > 1, "another stream")
            await bench.until_succeeded(ids)
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        require(seen.streams[0].ended, "a first stream that the client cancels", seen)
        silent = {said.lease for said in seen.sayings() if said.stream == 0 and not said.answer}
        require(silent and seen.acked(*silent), "the same leases again, on another stream", seen)


class Collect(Scenario):
    """Has at most two unanswered messages, and collects everything else for the next message."""

    name = "collect"

    async def fake(self, stage: Stage) -> None:
        for _ in range(3):
            with stage.server.silence():
                leases = stage.server.give(*["0", "30", "60", "90"])
                await stage.until_sent(*leases)
                await stage.watch(0.4)
            await stage.until_acked(*leases)

    async def real(self, bench: Bench) -> Transcript:
        ids = await bench.store(*["0", "3"] * 40)
        async with bench.worker() as worker:
            await bench.until_succeeded(ids)
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        # A rule of every scenario checks that at most two messages are unanswered.
        require(seen.acked(*seen.jobs), "an ack of each job, answered OK", seen)


class Stop(Scenario):
    """Lets the running jobs finish after SIGTERM, acks them, closes its side, and ends with code 0."""

    name = "stop"
    window_s = 2.0

    async def fake(self, stage: Stage) -> None:
        (lease,) = stage.server.give("2500")
        # Before its first extend, the job may still be on its way to the client. Such a job may come too late, so that
        # the client does not begin it.
        await stage.until(lambda: stage.seen.sayings(lease, "extend"), "an extend of the running job")
        stage.client.stop()
        await stage.until_ended("the client ends after SIGTERM")

    async def real(self, bench: Bench) -> Transcript:
        async with bench.worker() as worker:
            ids = await bench.store("800")
            await bench.until(lambda: worker.seen.jobs, "a leased job")
            worker.stop()
            await bench.until(lambda: worker.seen.code is not None, "the client ends")
            await bench.until_succeeded(ids)
        return worker.seen

    def expect(self, seen: Transcript) -> None:
        require(seen.acked(*seen.jobs), "an ack of each job, answered OK", seen)
        _expect_orderly(seen)


class StopLate(Scenario):
    """Releases a job that arrives after it has closed its side."""

    name = "stop-late"
    only_fake = "a router sends no job after the client has closed its side; a job may only be on its way then"

    async def fake(self, stage: Stage) -> None:
        await stage.until(lambda: stage.seen.streams[0].credit > 0, "credit")
        stage.server.parting = stage.server.new_job("0")
        stage.client.stop()
        await stage.until_ended("the client ends after SIGTERM")

    def expect(self, seen: Transcript) -> None:
        require(seen.jobs, "a client that closes its side", seen)
        for lease in seen.jobs:
            released = [said for said in seen.sayings(lease) if (said.verb, said.answer) == ("release", "OK")]
            require(released, "a release of the job", seen)
        _expect_orderly(seen)


def _answers_on_later_streams(stage: Stage) -> Settle:
    """Answers no message of the first stream."""
    return lambda request: stage.server.settled(request) if len(stage.seen.streams) > 1 else None


def _failed(seen: Transcript) -> list[Stream]:
    """Returns the streams that have ended with an error."""
    return [stream for stream in seen.streams if stream.ended not in (None, StatusCode.OK, StatusCode.CANCELLED)]


def _expect_stopped(seen: Transcript, leases: list[bytes]) -> None:
    require(leases, "leases that have ended", seen)
    acked = [said for lease in leases for said in seen.sayings(lease, "ack")]
    require(not acked, "no ack of a job whose lease has ended", seen)
    require(len(seen.streams) == 1, "the same stream for all jobs", seen)


def _expect_orderly(seen: Transcript) -> None:
    last = seen.streams[-1]
    require(last.closed_after is not None and last.ended is StatusCode.OK, "a stream that the client closes", seen)
    require(seen.code == 0, "exit code 0", seen)


SCENARIOS: tuple[Scenario, ...] = (
    Work(),
    Org(),
    RetryEnqueue(),
    RepeatSettlements(),
    Backoff(),
    Pause(),
    Credit(),
    Extend(),
    Stale(),
    Cancelled(),
    LostLease(),
    Revoke(),
    Snooze(),
    MaxRuntime(),
    Drain(),
    StreamEnds("unavailable", StatusCode.UNAVAILABLE, real=True),
    StreamEnds("internal", StatusCode.INTERNAL),
    StreamEnds("unknown", StatusCode.UNKNOWN),
    StreamEnds("exhausted", StatusCode.RESOURCE_EXHAUSTED),
    Fatal("unauthenticated", StatusCode.UNAUTHENTICATED),
    Fatal("permission-denied", StatusCode.PERMISSION_DENIED),
    Fatal("unimplemented", StatusCode.UNIMPLEMENTED),
    Fatal("invalid-argument", StatusCode.INVALID_ARGUMENT, real=True),
    Oversize(),
    HalfOpen(),
    Collect(),
    Stop(),
    StopLate(),
)

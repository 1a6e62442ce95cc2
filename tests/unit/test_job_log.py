"""What handlers log: how much of the log is kept, and with which messages the log is sent. The tests with bad input
come first."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from typing import Any, Literal

import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode

from tests.unit import isolated_handlers
from tests.unit.client_fake import FakeRouter, FakeStream
from tests.unit.test_client_worker import running
from tests.unit.test_worker_processes import PATIENCE_S, isolating, until
from windrow import Client, Job, Kill, Progress, Retry, Snooze, Worker
from windrow.job_log import JobLog
from windrow.v1 import queue_pb2


def log_of(*texts: str) -> str:
    job = Job()
    for text in texts:
        job.log(text)
    return job.logged.read()[0]


@pytest.mark.parametrize("line", [None, 7, b"bytes", ["a", "b"], object()])
def test_what_is_not_text_is_refused_in_the_handler(line: Any) -> None:
    job = Job()
    with pytest.raises(TypeError, match="a log line must be a str, not "):
        job.log(line)
    assert job.logged.read() == ("", 0)


@pytest.mark.parametrize("char", ["x", "é", "€", "🐘", "\0", "\udcff"], ids=ascii)
@pytest.mark.parametrize("count", [1_000_000, 513, 512, 511, 256, 129, 128])
def test_of_a_long_line_the_first_512_bytes_are_kept(char: str, count: int) -> None:
    line = log_of(char * count)
    kept = {"\0": "�", "\udcff": "?"}.get(char, char)
    if len(kept.encode()) * count <= 512:
        assert line == kept * count
    else:
        assert 505 <= len(line.encode()) <= 512
        assert line == kept * (len(line) - 1) + "…"


@pytest.mark.parametrize("at_once", [True, False], ids=["in one call", "in many"])
def test_of_many_lines_the_newest_are_kept_and_the_first_line_tells_the_others(at_once: bool) -> None:
    lines = [f"line {n}" for n in range(10_000)]
    log = log_of("\n".join(lines)) if at_once else log_of(*lines)
    assert log.splitlines() == ["... 9,950 earlier lines were dropped", *lines[-50:]]
    assert log_of(*lines[:50]).splitlines() == lines[:50]


def test_a_log_has_at_most_4_kib_whatever_the_handler_does() -> None:
    log = log_of(*["€" * 10_000] * 10_000)
    assert 3_500 < len(log.encode()) <= 4_096
    assert log.splitlines()[0] == "... 9,993 earlier lines were dropped"
    assert {len(line.encode()) for line in log.splitlines()[1:]} == {510}


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r", "\x0b", "\x85", "\u2028"], ids=ascii)
def test_a_text_of_several_lines_is_several_lines(ends: str) -> None:
    assert log_of(f"one{ends}two{ends}", "", "three") == "one\ntwo\nthree"


def test_other_control_characters_are_left_to_the_router() -> None:
    assert log_of("\x1b[31mred\x07\tbell\x7f") == "\x1b[31mred\x07\tbell\x7f"


def test_many_threads_log_at_once_and_no_line_is_lost_or_torn() -> None:
    job = Job()

    def write() -> None:
        for _ in range(1_000):
            job.log("x" * 40)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log, count = job.logged.read()
    assert count == 8_000
    assert log.splitlines() == ["... 7,950 earlier lines were dropped", *["x" * 40] * 50]


def test_a_log_can_be_copied_with_its_job() -> None:
    job = Job(id="1")
    job.log("one")
    for twin in (pickle.loads(pickle.dumps(job)), copy.deepcopy(job)):
        twin.log("two")
        assert twin.logged.read()[0] == "one\ntwo"
    assert job.logged.read()[0] == "one"
    assert job == Job(id="1")


def test_what_is_written_to_a_closed_log_is_dropped() -> None:
    log = JobLog()
    log.write("before")
    log.close()
    log.write("after")
    assert log.read() == ("before", 1)


@pytest.mark.parametrize("in_thread", [False, True], ids=["async def", "def"])
async def test_the_log_goes_with_whatever_ends_the_attempt(router: FakeRouter, client: Client, in_thread: bool) -> None:
    ends = {
        "ack": None,
        "nack": ValueError("no"),
        "retry": Retry("again", after=5),
        "snooze": Snooze("later", after=5),
        "kill": Kill("never"),
        "exit": SystemExit(3),
    }
    worker = Worker(client, "q")

    def work(job: Job) -> None:
        job.log(f"begun {job.kind}")
        if (error := ends[job.kind]) is not None:
            raise error

    async def work_here(job: Job) -> None:
        work(job)

    worker.handler(*ends)(work if in_thread else work_here)
    jobs = [router.give(kind) for kind in ends]
    async with running(worker):
        await router.until(lambda: len(router.acks()) + len(router.nacks()) + len(router.settled("Snooze")) == 6)
    sent = {
        entry.lease: entry.log
        for message in router.of("Consume")
        for entry in (*message.acks, *message.nacks, *message.snoozes)
    }
    assert sent == {job.lease: f"begun {job.kind}" for job in jobs}
    assert not router.settled("Extend"), "no message of its own"


async def test_a_job_that_logs_nothing_sends_nothing_more(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")

    @worker.handler("work")
    async def work(job: Job) -> None:
        job.log("")

    router.give("work")
    async with running(worker):
        await router.until(router.acks)
    (message,) = [message for message in router.of("Consume") if message.acks]
    assert message.acks[0] == queue_pb2.Ack(lease=message.acks[0].lease)


async def test_lines_since_the_last_extend_go_with_the_next_one_and_none_goes_twice(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q", visibility_window=1.5)
    more = asyncio.Event()
    finish = asyncio.Event()

    @worker.handler("work")
    async def work(job: Job) -> None:
        job.log("one")
        await more.wait()
        job.log("two")
        await finish.wait()

    def logs() -> list[str]:
        return [extend.log for message in router.of("Consume") for extend in message.extends]

    router.give("work")
    async with running(worker):
        await router.until(lambda: len(logs()) >= 2)
        more.set()
        await router.until(lambda: "one\ntwo" in logs())
        finish.set()
        await router.until(router.acks)
    assert [log for log in logs() if log] == ["one", "one\ntwo"]
    assert router.acks()[0].log == "one\ntwo", "the whole log, again: the last extend may have been lost"


async def test_a_report_takes_the_log_along(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")

    @worker.handler("work")
    async def work(job: Job) -> None:
        job.log("half")
        job.report(Progress(done=1))

    router.give("work")
    async with running(worker):
        await router.until(router.acks)
    (extend,) = [extend for message in router.of("Consume") for extend in message.extends]
    assert (extend.progress.done, extend.log) == (1, "half")


async def test_a_log_is_sent_again_on_the_next_stream(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")
    finish = asyncio.Event()

    async def silent_at_first(_: Any, stream: FakeStream) -> queue_pb2.Settled | None:
        return None if stream is router.streams[0] else queue_pb2.Settled()

    router.scripts["Settle"] = silent_at_first

    @worker.handler("work")
    async def work(job: Job) -> None:
        job.log("once")
        job.report(Progress(done=1))
        await finish.wait()

    def logs() -> list[str]:
        return [extend.log for message in router.of("Consume") for extend in message.extends]

    router.give("work")
    async with running(worker):
        await router.until(logs)
        router.stream.cut(StatusCode.UNAVAILABLE)
        await router.until(lambda: len(logs()) == 2)
        finish.set()
        await router.until(router.acks)
    assert logs() == ["once", "once"]


async def test_a_handler_that_is_stopped_keeps_its_log(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", grace=0)
    begun = [asyncio.Event() for _ in range(2)]

    @worker.handler("logs")
    async def logs(job: Job) -> None:
        job.log("begun")
        begun[0].set()
        await asyncio.Event().wait()

    @worker.handler("silent")
    async def silent(job: Job) -> None:
        begun[1].set()
        await asyncio.Event().wait()

    one, other = router.give("logs"), router.give("silent")
    async with running(worker):
        await begun[0].wait()
        await begun[1].wait()
    # A Release message has a lease and no log. So the worker releases a job that has a log by a snooze with a delay of
    # zero.
    (snooze,) = [snooze for message in router.of("Consume") for snooze in message.snoozes]
    assert snooze == queue_pb2.Snooze(lease=one.lease, log="begun")
    assert router.settled("Release") == [other.id]


async def test_a_thread_that_has_timed_out_adds_nothing_to_its_log(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")
    late = threading.Event()
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    # The timeout is long, so that even a busy machine starts the thread before it ends.
    @worker.handler("work", timeout=0.5)
    def work(job: Job) -> None:
        job.log("before")
        late.wait()
        job.log("after")
        loop.call_soon_threadsafe(done.set)

    router.give("work")
    async with running(worker):
        await router.until(router.nacks)
        late.set()
        await done.wait()
    (nack,) = router.nacks()
    assert (nack.failure.type, nack.log) == ("windrow.TimedOut", "before")


async def test_a_process_sends_its_lines_as_they_come_and_its_crash_loses_none(
    router: FakeRouter, client: Client
) -> None:
    worker = isolating(client, "logs", "logs_later", "logs_much", "logs_and_crashes")
    jobs = [router.give(kind) for kind in ("logs", "logs_later", "logs_much", "logs_and_crashes")]
    async with running(worker, within_s=PATIENCE_S):
        ended = await until(router, len(jobs))
    plain, later, much, crashed = (ended[job.lease] for job in jobs)
    assert plain.log == "one\ntwo"
    assert later.log == "mine", "not that of the thread which the job before it has left"
    assert [extend.lease for message in router.of("Consume") for extend in message.extends] == []
    assert much.log.splitlines()[0] == "... 99,950 earlier lines were dropped"
    assert (crashed.failure.type, crashed.log) == ("windrow.Crashed", "about to crash")


async def test_a_process_that_is_killed_with_its_worker_leaves_its_log(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", grace=0)
    worker.handler("work", isolate="process")(isolated_handlers.logs_and_hangs)
    job = router.give("work")
    async with running(worker, within_s=PATIENCE_S):
        await router.until(lambda: router.settled("Extend"), within_s=PATIENCE_S)
    (snooze,) = [snooze for message in router.of("Consume") for snooze in message.snoozes]
    assert snooze == queue_pb2.Snooze(lease=job.lease, log="about to hang")


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit"])
@pytest.mark.parametrize("isolate", [None, "process"], ids=["thread", "process"])
async def test_an_interrupt_that_a_handler_raises_fails_its_own_attempt_only(
    router: FakeRouter, client: Client, error: str, isolate: Literal["process"] | None
) -> None:
    worker = Worker(client, "q")
    worker.handler("interrupted", isolate=isolate)(isolated_handlers.interrupted)
    worker.handler("add", isolate=isolate)(isolated_handlers.add)
    first, then = router.give("interrupted", error.encode()), router.give("add", b"[1]")
    async with running(worker, within_s=PATIENCE_S):
        ended = await until(router, 2)
    assert (ended[first.lease].failure.type, ended[first.lease].failure.message) == (error, "mine")
    assert "in interrupted" in ended[first.lease].failure.stack
    assert ended[then.lease].result


async def test_a_consumer_without_a_worker_logs_with_its_calls(router: FakeRouter, client: Client) -> None:
    jobs = [Job(lease=b"%d" % n) for n in range(4)]
    jobs[0].log("of 0")
    await client.extend(jobs[:2])
    await client.ack(jobs[:2])
    await client.ack(jobs[0])
    await client.nack(jobs[:2], error="no")
    await client.snooze(jobs[:2], after=5)
    await client.release(jobs[2:])
    await client.release(iter(jobs[:2]))
    assert [(one.lease, one.log) for (request,) in [router.of("Extend")] for one in request.extends] == [
        (b"0", "of 0"),
        (b"1", ""),
    ]
    assert [[one.log for one in request.acks] for request in router.of("Ack")] == [["of 0", ""], ["of 0"]]
    assert [one.log for one in router.of("Nack")[0].nacks] == ["of 0", ""]
    assert [[(one.log, one.after) for one in request.snoozes] for request in router.of("Snooze")] == [
        [("of 0", Duration(seconds=5)), ("", Duration(seconds=5))],
        [("of 0", Duration()), ("", Duration())],
    ]
    assert [list(request.leases) for request in router.of("Release")] == [[b"2", b"3"]]

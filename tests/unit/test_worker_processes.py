"""Handlers that run in separate processes: their results and errors reach the worker, and damage to a process affects
only the job in that process."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit import isolated_handlers, plain_handlers
from tests.unit.client_fake import WAIT_S, FakeRouter
from tests.unit.test_client_worker import CHECKOUT, running
from windrow import Client, InvalidRequest, Job, Worker, fork_server
from windrow.processes import HandlerProcess
from windrow.v1 import queue_pb2

# Each process imports the client, and on a busy machine the import takes long.
PATIENCE_S = 6 * WAIT_S


async def until(router: FakeRouter, count: int) -> dict[bytes, Any]:
    """Waits for the outcomes of this many jobs, and returns them by lease."""

    def ended() -> dict[bytes, Any]:
        messages = router.of("Consume")
        return {one.lease: one for sent in messages for one in (*sent.acks, *sent.nacks, *sent.snoozes)}

    async with asyncio.timeout(PATIENCE_S):
        while len(ended()) < count:
            await router.next_news()
    return ended()


def isolating(client: Client, *names: str, **timeouts: float) -> Worker:
    worker = Worker(client, "q", name="w1", concurrency=1, prefetch=0)
    for name in names:
        worker.handler(name, isolate="process", timeout=timeouts.get(name))(getattr(isolated_handlers, name))
    return worker


async def test_what_a_handler_in_a_process_returns_raises_and_reports_comes_back(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "windrow.worker")
    worker = isolating(client, "add", "report", "broken", "unpicklable", "outcome")
    jobs = [
        router.give(kind, payload)
        for kind, payload in (
            ("add", b"[1,2]"),
            ("report", b""),
            ("broken", b""),
            ("unpicklable", b""),
            ("outcome", b"retry"),
            ("outcome", b"snooze"),
            ("outcome", b"kill"),
            ("add", b"[3]"),
        )
    ]
    async with running(worker, within_s=PATIENCE_S):
        ended = await until(router, len(jobs))
    added, reported, broken, unpicklable, retried, snoozed, killed, again = (ended[job.lease] for job in jobs)
    first, second = (Job(payload=ack.result).json() for ack in (added, again))
    assert (first["sum"], second["sum"]) == (3, 3)
    assert first["process"] == second["process"] != os.getpid()
    (extend,) = [extend for message in router.of("Consume") for extend in message.extends]
    assert (extend.lease, extend.checkpoint, extend.progress.done) == (jobs[1].lease, b"half", 1)
    assert reported.result == b"reported"
    assert (broken.failure.type, broken.failure.message) == ("LookupError", "ada")
    assert "in innermost" in broken.failure.stack
    assert "ValueError: no such user" in broken.failure.stack
    assert broken.failure.stack.count("File ") == broken.failure.stack.count(isolated_handlers.__file__)
    assert unpicklable.failure.type == "tests.unit.isolated_handlers.NotPicklable"
    assert unpicklable.failure.message == "the bank said 7"
    assert (retried.failure.message, retried.retry_after.seconds) == ("busy", 90)
    assert (snoozed.reason, snoozed.after.seconds) == ("not yet", 60)
    assert (killed.failure.type, killed.failure.message, killed.failure.permanent) == (
        "ValueError",
        "no such user",
        True,
    )
    logged = {
        job.kind + job.payload.decode(): record
        for job in jobs
        for record in caplog.records
        if job.id in record.getMessage()
    }
    assert {name: record.levelname for name, record in logged.items()} == {
        "broken": "WARNING",
        "unpicklable": "WARNING",
        "outcomeretry": "INFO",
        "outcomesnooze": "INFO",
        "outcomekill": "WARNING",
    }
    assert "in innermost" in logged["broken"].getMessage()


async def test_a_handler_in_a_process_can_wait_until_its_reports_are_stored(router: FakeRouter, client: Client) -> None:
    stored_at: list[float] = []

    async def settle(message: queue_pb2.ConsumeRequest, _: Any) -> queue_pb2.Settled:
        if message.extends:
            assert (message.extends[0].checkpoint, message.extends[0].log) == (b"half", "halfway")
            # A handler that does not wait for the answer ends within this pause.
            await asyncio.sleep(0.3)
            stored_at.append(time.monotonic())
        return queue_pb2.Settled()

    router.scripts["Settle"] = settle
    worker = isolating(client, "waits_until_stored")
    jobs = [router.give("waits_until_stored") for _ in range(2)]
    async with running(worker, within_s=PATIENCE_S):
        ended = await until(router, len(jobs))
    went_on_at = [Job(payload=ended[job.lease].result).json() for job in jobs]
    assert all(went_on >= stored for went_on, stored in zip(went_on_at, stored_at, strict=True))


async def test_a_process_that_ends_or_hangs_fails_the_attempt_of_its_own_job_only(
    router: FakeRouter, client: Client
) -> None:
    worker = isolating(client, "crash", "leave", "hang", "add", hang=0.5)
    jobs = [router.give(kind, b"[1]") for kind in ("crash", "leave", "hang", "add")]
    async with running(worker, within_s=PATIENCE_S):
        ended = await until(router, len(jobs))
    crashed, left, hung, added = (ended[job.lease] for job in jobs)
    assert (crashed.failure.type, crashed.failure.message) == (
        "windrow.Crashed",
        "the handler's process was ended by SIGKILL",
    )
    assert (left.failure.type, left.failure.message) == (
        "windrow.Crashed",
        "the handler's process ended with exit code 3",
    )
    assert (hung.failure.type, hung.failure.message) == (
        "windrow.TimedOut",
        "the handler did not finish within 0.5 s",
    )
    assert Job(payload=added.result).json()["sum"] == 1


async def test_no_job_gets_a_process_that_is_about_to_be_killed(
    router: FakeRouter, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, kill = threading.Event(), HandlerProcess.kill

    def kill_late(process: HandlerProcess) -> None:
        ended.wait(WAIT_S)
        kill(process)

    monkeypatch.setattr(HandlerProcess, "kill", kill_late)
    worker = Worker(client, "q", concurrency=2, prefetch=10)
    worker.handler("hang", isolate="process", timeout=0.5)(isolated_handlers.hang)
    worker.handler("add", isolate="process")(isolated_handlers.add)
    jobs = [router.give(kind, b"[1]") for kind in ("hang", "hang", "add", "add")]
    async with running(worker, within_s=PATIENCE_S):
        outcomes = await until(router, len(jobs))
        ended.set()
    assert [type(outcomes[job.lease]) for job in jobs] == [queue_pb2.Nack] * 2 + [queue_pb2.Ack] * 2


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no server that forks processes")
async def test_the_end_of_a_process_is_seen_even_if_a_process_that_its_handler_forked_goes_on(
    router: FakeRouter, client: Client
) -> None:
    """For example, the processes of a pool continue if the system has killed the handler's process because memory ran
    out."""
    worker = isolating(client, "forks_and_crashes", "add")
    crashing = router.give("forks_and_crashes")
    async with running(worker, within_s=PATIENCE_S):
        ended = await until(router, 1)
        crashed = ended[crashing.lease]
        os.kill(int(crashed.log.removeprefix("forked ")), signal.SIGKILL)
        router.give("add", b"[1]")
        await until(router, 2)
    assert (crashed.failure.type, crashed.failure.message) == (
        "windrow.Crashed",
        "the handler's process was ended by SIGKILL",
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has pidfd_open")
async def test_no_handler_goes_on_when_the_server_that_has_forked_its_process_is_killed(
    router: FakeRouter, client: Client
) -> None:
    """In this case the worker does not know whether the process still runs. The worker must not kill another process
    that has got the same id."""
    worker = isolating(client, "hang", "add")
    hanging = router.give("hang")

    def notes() -> list[str]:
        return [told.progress.note for sent in router.of("Consume") for told in sent.extends if told.progress.note]

    async with running(worker, within_s=PATIENCE_S):
        await router.until(notes, within_s=PATIENCE_S)
        process = os.pidfd_open(int(notes()[0]))
        os.kill(vars(fork_server)["_server"]._forkserver_pid, signal.SIGKILL)
        failed = (await until(router, 1))[hanging.lease]
        ended, _, _ = await asyncio.to_thread(select.select, [process], [], [], WAIT_S)
        os.close(process)
        router.give("add", b"[1]")
        await until(router, 2)
    assert ended == [process]
    assert failed.failure.message.endswith("or the server that started it was killed")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no server that forks processes")
async def test_a_process_need_not_import_the_client_when_it_starts(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", name="w1")
    worker.handler("loaded", isolate="process")(plain_handlers.loaded)
    job = router.give("loaded")
    async with running(worker, within_s=PATIENCE_S):
        ended = await until(router, 1)
    assert Job(payload=ended[job.lease].result).json() is True


async def test_a_process_is_replaced_after_so_many_jobs(
    router: FakeRouter, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windrow.processes._JOBS_MAX", 2)
    worker = isolating(client, "add")
    jobs = [router.give("add", b"[1]") for _ in range(3)]
    async with running(worker, within_s=PATIENCE_S):
        ended = await until(router, len(jobs))
        one, other, third = (Job(payload=ended[job.lease].result).json()["process"] for job in jobs)
        assert one == other != third
        await router.until(lambda: not alive(one))


def alive(process: int) -> bool:
    """Returns whether the process runs, and is not only a zombie."""
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2][:3]
    except OSError:
        return False


async def test_a_worker_that_stops_kills_its_processes_and_gives_their_jobs_back(
    router: FakeRouter, client: Client
) -> None:
    worker = isolating(client, "hang")
    job = router.give("hang")
    async with running(worker, within_s=PATIENCE_S):
        async with asyncio.timeout(PATIENCE_S):
            while not (extends := [extend for message in router.of("Consume") for extend in message.extends]):
                await router.next_news()
        worker.stop()
        worker.stop()
    assert router.settled("Release") == [job.id]
    # The process is not a zombie either, because its parent has waited for its end.
    await router.until(lambda: not Path(f"/proc/{extends[0].progress.note}").exists())


async def test_what_a_handler_starts_takes_signals_and_ends_with_the_handlers_process(
    router: FakeRouter, client: Client
) -> None:
    worker = isolating(client, "starts_another")
    router.give("starts_another")
    async with running(worker, within_s=PATIENCE_S):
        async with asyncio.timeout(PATIENCE_S):
            while not (extends := [extend for message in router.of("Consume") for extend in message.extends]):
                await router.next_news()
        process, ended_by = extends[0].progress.note.split()
        assert int(ended_by) == -signal.SIGTERM
        assert alive(int(process))
        worker.stop()
        worker.stop()
    await router.until(lambda: not alive(int(process)))


OTHER_PROCESSES = """
import asyncio, multiprocessing, time
multiprocessing.set_forkserver_preload(["colorsys"])
import windrow, windrow.testing

worker = windrow.Worker(windrow.Client(org="acme"), "q")

@worker.handler("isolated", isolate="process")
def isolated(job):
    return "ran"

if __name__ == "__main__":
    ran = asyncio.run(windrow.testing.run_job(worker, windrow.NewJob("q", "isolated")))
    context = multiprocessing.get_context("forkserver")
    with context.Pool(1) as pool:
        is_preloaded = pool.apply(eval, ("'colorsys' in __import__('sys').modules",))
    sleeping = context.Process(target=time.sleep, args=(600,))
    sleeping.start()
    sleeping.terminate()
    sleeping.join(20)
    print(ran.result, is_preloaded, sleeping.exitcode)
    sleeping.kill()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no server that forks processes")
async def test_the_programs_own_processes_are_as_without_a_worker(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(OTHER_PROCESSES)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), cwd=CHECKOUT, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE_S):
        output, _ = await process.communicate()
    assert output.decode().split() == ["b'ran'", "True", str(-signal.SIGTERM)]


async def test_only_plain_functions_of_a_module_can_be_isolated(client: Client) -> None:
    worker = Worker(client, "q")

    async def coroutine(job: Job) -> None: ...

    def nested(job: Job) -> None: ...

    with pytest.raises(InvalidRequest, match="only a def can run in a process"):
        worker.handler("coroutine", isolate="process")(coroutine)
    worker.handler("nested", isolate="process")(nested)
    with pytest.raises(InvalidRequest, match=r"nested.* cannot be imported by name"):
        await worker.run()


PROGRAM = """
import multiprocessing, sys, windrow

worker = windrow.Worker(windrow.Client(sys.argv[1], org="acme"), "q")

@worker.handler("where", isolate="process")
def where(job):
    return multiprocessing.parent_process().pid

windrow.run(worker)
"""


async def test_a_program_needs_no_guard_around_its_run(router: FakeRouter, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = router.give("where")
    process = await asyncio.create_subprocess_exec(sys.executable, str(program), router.address, cwd=CHECKOUT)
    try:
        ended = await until(router, 1)
        assert ended[job.lease].result == str(process.pid).encode()
        process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

"""Handlers that a worker's processes import by name."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time

from windrow import Job, Kill, Progress, Retry, Snooze


class NotPicklable(Exception):
    def __init__(self, code: int, *, bank: str) -> None:
        super().__init__(f"{bank} said {code}")


def add(job: Job) -> dict[str, int]:
    return {"sum": sum(job.json()), "process": os.getpid()}


def report(job: Job) -> str:
    job.report(Progress(done=1, total=2), checkpoint=b"half")
    return "reported"


def waits_until_stored(job: Job) -> float:
    job.log("halfway")
    job.report(checkpoint=b"half")
    asyncio.run(job.reporter.stored(job.lease))
    return time.monotonic()


def hang(job: Job) -> None:
    job.report(Progress(note=str(os.getpid())))
    while True:
        time.sleep(60)


def starts_another(job: Job) -> str:
    ended = subprocess.Popen(["sleep", "600"])
    ended.terminate()
    stays = subprocess.Popen(["sleep", "600"])
    job.report(Progress(note=f"{stays.pid} {ended.wait()}"))
    stays.wait()
    return "not reached"


def logs(job: Job) -> None:
    job.log("one")
    job.log("two")
    threading.Thread(target=_goes_on, args=(job,), daemon=True).start()


_next_has_begun, _has_gone_on = threading.Event(), threading.Event()


def _goes_on(job: Job) -> None:
    _next_has_begun.wait()
    job.log("of a job that has ended")
    job.report(Progress(done=13))
    _has_gone_on.set()


def logs_later(job: Job) -> None:
    _next_has_begun.set()
    _has_gone_on.wait()
    job.log("mine")


def logs_and_crashes(job: Job) -> None:
    job.log("about to crash")
    os.kill(os.getpid(), signal.SIGKILL)


def forks_and_crashes(job: Job) -> None:
    child = os.fork()
    if child == 0:
        # The child has inherited the pipe to the worker, and keeps the pipe open.
        threading.Event().wait()
    job.log(f"forked {child}")
    os.kill(os.getpid(), signal.SIGKILL)


def logs_and_hangs(job: Job) -> None:
    job.log("about to hang")
    job.report(Progress(done=1))
    threading.Event().wait()


def logs_much(job: Job) -> None:
    job.log("x\n" * 100_000)


def crash(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(job: Job) -> None:
    os._exit(3)


def broken(job: Job) -> None:
    def innermost() -> None:
        raise ValueError("no such user")

    try:
        innermost()
    except ValueError as error:
        raise LookupError("ada") from error


def unpicklable(job: Job) -> None:
    raise NotPicklable(7, bank="the bank")


def interrupted(job: Job) -> None:
    raise {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}[job.text()]("mine")


def outcome(job: Job) -> None:
    match job.text():
        case "retry":
            raise Retry("busy", after=90)
        case "snooze":
            raise Snooze("not yet", after=60)
        case _:
            raise Kill("no such user") from ValueError("ada")

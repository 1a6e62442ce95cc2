"""Handlers that a worker's processes import by name."""

from __future__ import annotations

import os
import signal
import subprocess
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


def outcome(job: Job) -> None:
    match job.text():
        case "retry":
            raise Retry("busy", after=90)
        case "snooze":
            raise Snooze("not yet", after=60)
        case _:
            raise Kill("no such user") from ValueError("ada")

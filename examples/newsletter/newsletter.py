"""The newsletter: its subscribers, its schedule, and the worker that both web applications run in a thread."""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from zoneinfo import ZoneInfo

import windrow

# The queue of the digests, which the schedule stores, and the queue of the mails. Only the queue of the mails has a
# limit on starts, so a digest never waits because many mails wait.
DIGESTS, MAILS = "newsletter-digests", "newsletter-mails"
EVERY, TZ = "0 8 * * 1-5", "Europe/Paris"
ANSWER_S = 10.0
# For how long Windrow recognises a mail of an issue that is enqueued again.
KNOWN_S = 7 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    org: str
    # The URL of the mail server.
    mail: str
    # The database with the subscribers.
    file: Path
    port: int


class Subscribers:
    """The application's own database. Any number of threads and processes may use it."""

    def __init__(self, file: Path) -> None:
        self._database = sqlite3.connect(file, isolation_level=None, timeout=30, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("CREATE TABLE IF NOT EXISTS subscriber (address TEXT PRIMARY KEY) STRICT")

    def add(self, address: str) -> None:
        self._database.execute("INSERT OR IGNORE INTO subscriber VALUES (?)", (address,))

    def all(self) -> list[str]:
        return [address for (address,) in self._database.execute("SELECT address FROM subscriber")]


def mail_to(address: str, subject: str) -> windrow.NewJob:
    """Makes the job of a mail. If this mail to this address is stored already, an enqueue of the job stores nothing."""
    return windrow.NewJob(
        MAILS,
        "send_mail",
        {"to": address, "subject": subject},
        dedup_key=f"{subject} {address}",
        dedup_window=KNOWN_S,
    )


def send_mail(job: windrow.Job, server: str) -> None:
    mail = job.json()
    request = Request(
        f"{server}/messages",
        data=json.dumps(mail).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": f"{mail['subject']} {mail['to']}"},
    )
    try:
        urlopen(request, timeout=ANSWER_S).close()
    except HTTPError as error:
        with error:
            if error.code == 429:
                # The server is busy because other programs send, too. Nothing has failed, so snooze: the attempt then
                # does not count.
                raise windrow.Snooze("the mail server is busy", after=float(error.headers["Retry-After"])) from error
            raise windrow.Retry(f"the mail server answered {error.code}") from error
    except OSError as error:
        raise windrow.Retry(f"no answer of the mail server: {error}") from error


def make_worker(settings: Settings) -> windrow.Worker:
    client = windrow.Client(org=settings.org)
    subscribers = Subscribers(settings.file)
    worker = windrow.Worker(client, [DIGESTS, MAILS], concurrency=20, visibility_window=5)

    @worker.every(EVERY, tz=TZ)
    async def send_digest(job: windrow.Job) -> dict[str, int]:
        """Enqueues the mails of an issue. May run again, in this process or in another: each mail is stored once."""
        assert job.scheduled_run is not None
        # Use the day of the run's instant, and not today, because the run may be late.
        subject = f"The news of {job.scheduled_run.at.astimezone(ZoneInfo(TZ)):%d %B %Y}"
        mails = [mail_to(address, subject) for address in subscribers.all()]
        stored = await client.enqueue_many(mails, independent=True)
        return {"mails": len(stored), "known": sum(one.duplicate for one in stored)}

    @worker.handler("send_mail")
    def send(job: windrow.Job) -> None:
        send_mail(job, settings.mail)

    return worker


@contextlib.contextmanager
def working(worker: windrow.Worker) -> Generator[threading.Thread, None, None]:
    """Runs a worker in a thread of this process, while the process does other things. Yields the thread. At the end of
    the block, running handlers may finish. Jobs whose handlers have not begun are given back for other processes."""
    # `windrow.run` makes its own event loop in the thread. The web server handles the signals.
    thread = threading.Thread(target=windrow.run, args=(worker,), name="newsletter")
    thread.start()
    try:
        yield thread
    finally:
        worker.stop()
        thread.join()


def settings_of(description: str, port: int) -> Settings:
    """Reads the arguments of the program."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("org")
    parser.add_argument("--port", type=int, default=port, help=f"default: {port}")
    parser.add_argument("--mail", default="http://127.0.0.1:9200", metavar="URL", help="the mail server")
    parser.add_argument("--file", type=Path, default=Path("newsletter.db"), help="default: newsletter.db")
    given = parser.parse_args()
    return Settings(org=given.org, mail=given.mail, file=given.file, port=given.port)

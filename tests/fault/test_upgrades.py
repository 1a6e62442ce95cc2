"""Under load, routers of one release are replaced one after another by routers of the next release, and then by routers
of the first release again. The first release has made the schema. The next release migrates it while routers of both
releases serve.

There are two pairs of releases. The first pair is an earlier commit of this repository and this checkout, so the
migrations between them are real. The second pair is this checkout and a copy of it. The copy has one more migration,
which adds a column to every table.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import quantiles

import psycopg
import pytest

from shard.postgres import schema
from tests.effort import THOROUGH, trials
from tests.fault.upgrade_load import WINDOW_S
from tests.postgres import EMPTY, Server
from tests.routers import CHECKOUT, PATIENCE_S, first_line, reserved_address, stubs, until, write_cluster
from windrow.v1 import job_pb2, queue_pb2

PER_SECOND = trials(200, thorough=2000)
# No router is replaced until the load of this many seconds is stored. What clients see during the replacements is
# compared with this calm time.
CALM_S = trials(2, thorough=30)
# How many seconds of load are stored between two replacements.
BETWEEN_S = trials(0, thorough=10)
# The folders that a router and a client need.
_PARTS = ("router", "shard", "clients/python/windrow")
_MIGRATIONS = "shard/postgres/migrations"
_numbers = itertools.count(1)

# A migration like the migrations of a usual release.
_ONE_COLUMN = b"ALTER TABLE windrow.job ADD COLUMN of_the_next_release integer"
# A migration that breaks statements without column names, and breaks plans that Postgres keeps. It locks all tables
# until it ends.
_ALL_TABLES = b"""DO $$
DECLARE
    wide regclass;
BEGIN
    FOR wide IN
        SELECT oid FROM pg_class
        WHERE relnamespace = 'windrow'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
        ORDER BY relname
    LOOP
        EXECUTE format('ALTER TABLE %s ADD COLUMN of_the_next_release integer', wide);
    END LOOP;
END
$$;
"""
# The first migration runs only in order to be measured: whatever it breaks, the second migration breaks too.
_ADDED = ({"a column": _ONE_COLUMN} if THOROUGH else {}) | {"a column in every table": _ALL_TABLES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    name: str
    folder: Path

    @property
    def newest_migration(self) -> int:
        return max(int(path.name[:4]) for path in (self.folder / _MIGRATIONS).glob("*.sql"))

    def start(self, *arguments: object, stdout: int | None = None, log: Path) -> subprocess.Popen[str]:
        """Starts Python with the code of this release and of no other."""
        path = os.pathsep.join((str(self.folder), str(self.folder / "clients/python")))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        with log.open("a") as errors:
            return subprocess.Popen(
                [sys.executable, "-P", *map(str, arguments)],
                cwd=self.folder,
                env=clean | {"PYTHONPATH": path},
                stdout=stdout,
                stderr=errors,
                text=True,
            )


@pytest.fixture
def today(tmp_path: Path) -> Release:
    return Release(name="today", folder=_copied(CHECKOUT, tmp_path / "today"))


@pytest.fixture(params=_ADDED.items(), ids=lambda one: one[0])
def following(tmp_path: Path, request: pytest.FixtureRequest) -> Release:
    added, migration = request.param
    release = Release(name=f"{added} more", folder=_copied(CHECKOUT, tmp_path / "following"))
    number = release.newest_migration + 1
    (release.folder / _MIGRATIONS / f"{number:04}_wider.sql").write_bytes(migration)
    return release


@pytest.fixture
def earlier(tmp_path: Path) -> Release:
    """Returns the commit before the newest migration was added. The upgrade works only if the migrations of that commit
    have not been edited since then. Before the first release, migrations were still edited."""
    ours = schema.migrations()
    newest = f"{_MIGRATIONS}/{ours[-1].number:04}_{ours[-1].name}.sql"
    # The newest migration may have been added by a merge.
    log = ("log", "--first-parent", "-m", "--diff-filter=A", "--format=%H", "-1", "--", newest)
    added = _git(*log).decode().strip()
    if not added:
        pytest.skip("the newest migration is in no commit yet, or the clone is shallow")
    folder = tmp_path / "earlier"
    archive = tmp_path / "earlier.tar"
    archive.write_bytes(_git("archive", "--format=tar", f"{added}^", *_PARTS))
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    files = sorted((folder / _MIGRATIONS).glob("*.sql"))
    theirs = [schema.Migration(number=0, name=path.stem, script=path.read_bytes()).checksum for path in files]
    if theirs != [one.checksum for one in ours[:-1]]:
        pytest.skip(f"{added[:10]}^ has other migrations than this checkout had before its newest one")
    return Release(name="earlier", folder=folder)


def _git(*arguments: str) -> bytes:
    """Runs git in the checkout. Skips the test if git fails, as in a shallow clone or an unpacked archive."""
    try:
        return subprocess.run(["git", "-C", CHECKOUT, *arguments], capture_output=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("there is no git")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"git {arguments[0]}: {error.stderr.decode().strip()}")


def _copied(checkout: Path, folder: Path) -> Path:
    """Copies the folders `_PARTS` with their compiled modules, because to compile these again would take seconds."""
    for part in _PARTS:
        shutil.copytree(checkout / part, folder / part)
    return folder


@dataclass(slots=True, kw_only=True)
class Cluster:
    """Routers with an address each, and a database that the first router has made."""

    dsn: str
    config: Path
    addresses: Sequence[str]
    running: dict[str, subprocess.Popen[str]]

    def start(self, address: str, release: Release) -> None:
        supervisor = release.start(
            *("-m", "router", "--config", self.config, "--listen", address, "--processes", 1),
            stdout=subprocess.PIPE,
            log=self.log,
        )
        self.running[address] = supervisor
        assert first_line(supervisor).startswith("listening on "), self.log.read_text()

    def stop(self, address: str) -> None:
        with self.running.pop(address) as supervisor:
            supervisor.terminate()
            assert supervisor.wait(PATIENCE_S) == 0, self.log.read_text()

    def roll_to(self, release: Release, pause: Callable[[], None]) -> None:
        """Restarts one router after another, as deploy/README.md says, with a pause after each."""
        for address in self.addresses:
            self.stop(address)
            self.start(address, release)
            pause()

    @property
    def log(self) -> Path:
        return self.config.with_suffix(".log")

    @property
    def newest_migration(self) -> int:
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute("SELECT max(number) FROM windrow.migration").fetchone()
        assert row is not None
        return int(row[0])


@contextlib.contextmanager
def cluster_of(release: Release, postgres: Server, folder: Path) -> Generator[Cluster, None, None]:
    name = f"upgrades_{next(_numbers)}"
    dsn = postgres.create(name, template=EMPTY)
    config = write_cluster(folder / "cluster.toml", {"s1": dsn})
    with reserved_address() as one, reserved_address() as another:
        cluster = Cluster(dsn=dsn, config=config, addresses=(one, another), running={})
        try:
            for address in cluster.addresses:
                cluster.start(address, release)
            yield cluster
        finally:
            for supervisor in cluster.running.values():
                supervisor.terminate()
            for supervisor in cluster.running.values():
                with supervisor:
                    supervisor.wait(PATIENCE_S)
    postgres.drop(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What clients saw: when calls were due, how long the calls took, when each job ran, and in which attempt."""

    stored: dict[str, tuple[float, float]]
    ran: dict[str, list[tuple[float, int]]]
    failed: list[str]

    @classmethod
    def read(cls, log: Path) -> Seen:
        stored: dict[str, tuple[float, float]] = {}
        ran: dict[str, list[tuple[float, int]]] = defaultdict(list)
        failed: list[str] = []
        for line in log.read_text().splitlines():
            said = json.loads(line)
            if "stored" in said:
                stored[said["stored"]] = said["at"], said["took"]
            elif "ran" in said:
                ran[said["ran"]].append((said["at"], said["attempt"]))
            else:
                failed.append(said["failed"])
        return cls(stored=stored, ran=ran, failed=failed)

    def p99_ms(self, since_s: float, until_s: float) -> float:
        took_s = [took for at, took in self.stored.values() if since_s <= at < until_s]
        return quantiles(took_s, n=100)[98] * 1000


def go_on(log: Path, seconds: float) -> None:
    """Waits until the load of this many seconds is stored."""
    # The last line of the log may be incomplete, so this counts occurrences of a word and does not parse the lines.
    jobs = log.read_bytes().count(b'"stored"') + PER_SECOND * seconds
    until(lambda: log.read_bytes().count(b'"stored"') >= jobs, "the load goes on", within_s=seconds + PATIENCE_S)


def roll_there_and_back(old: Release, new: Release, postgres: Server, folder: Path) -> None:
    log, errors = folder / "load.jsonl", folder / "load.err"
    with cluster_of(old, postgres, folder) as cluster:
        assert cluster.newest_migration == old.newest_migration
        # Clients are upgraded after their routers.
        script = CHECKOUT / "tests/fault/upgrade_load.py"
        load = old.start(script, "acme", log, PER_SECOND, *cluster.addresses, log=errors)
        with load:
            try:
                until(lambda: log.exists() and log.stat().st_size > 0, "the load begins")
                calm_s = time.monotonic()
                go_on(log, CALM_S)
                marks = [time.monotonic()]
                for release in (new, old):
                    cluster.roll_to(release, partial(go_on, log, BETWEEN_S))
                    marks.append(time.monotonic())
                    assert cluster.newest_migration == new.newest_migration
                # SIGTERM would stop the workers.
                load.send_signal(signal.SIGUSR1)
                load.wait(PATIENCE_S)
            finally:
                load.kill()
        seen = Seen.read(log)
        again = [job for job, runs in seen.ran.items() if len(runs) > 1]
        with stubs(cluster.addresses[0]) as both:
            (books,) = both.books("s1").values()
            ran_again = [
                job
                for at in range(0, len(again), 1000)
                for job in both.queue.GetJobs(
                    queue_pb2.GetJobsRequest(org="acme", ids=again[at : at + 1000]), timeout=PATIENCE_S
                ).jobs
            ]
    assert (load.returncode, seen.failed) == (0, []), errors.read_text()
    assert len(seen.stored) > PER_SECOND * CALM_S
    assert seen.stored.keys() - seen.ran.keys() == set(), "jobs that were lost"
    # A job runs again only if its lease has ended. The new run has a higher attempt number. On a busy machine a handler
    # may begin long after the start of its lease, so the test uses only the times of the shard.
    assert len(ran_again) == len(again)
    for job in ran_again:
        numbers = [attempt for _, attempt in seen.ran[job.id]]
        assert numbers == sorted(set(numbers)), job.id
        ended = {one.attempt: one for one in job.attempts}
        for number in numbers[:-1]:
            lease = ended[number]
            assert lease.outcome == job_pb2.ATTEMPT_OUTCOME_EXPIRED, job.id
            assert lease.ended_at.ToDatetime() - lease.leased_at.ToDatetime() >= timedelta(seconds=WINDOW_S), job.id
    assert (books.accepted, books.succeeded) == (len(seen.ran), len(seen.ran))
    late = sum(runs[0][1] > 1 for runs in seen.ran.values())
    print(
        f"{old.name} -> {new.name} -> {old.name}: {len(seen.stored)} jobs at {PER_SECOND}/s; {len(again)} ran twice, "
        f"{late} ran only after their lease had ended once; p99 of an enqueue, of all its tries: "
        f"{seen.p99_ms(calm_s, marks[0]):.0f} ms undisturbed, {seen.p99_ms(marks[0], marks[1]):.0f} ms during the "
        f"upgrade, {seen.p99_ms(marks[1], marks[2]):.0f} ms during the downgrade"
    )


@pytest.mark.thorough
@pytest.mark.turns(2)
@pytest.mark.timeout(300)
def test_routers_of_an_earlier_commit_are_upgraded_to_this_checkout_and_back_under_load(
    earlier: Release, today: Release, postgres: Server, tmp_path: Path
) -> None:
    roll_there_and_back(earlier, today, postgres, tmp_path)


@pytest.mark.thorough
@pytest.mark.turns(2)
@pytest.mark.timeout(300)
def test_routers_of_this_checkout_are_upgraded_to_a_release_with_wider_tables_and_back_under_load(
    today: Release, following: Release, postgres: Server, tmp_path: Path
) -> None:
    roll_there_and_back(today, following, postgres, tmp_path)

"""`windrow demo`: sends recorded pushes of real organizations through a local cluster, and checks that each push is
counted exactly once.

This module only orchestrates and displays; the application code is in examples/pushes. A run passes only if the totals
are exactly equal, every acknowledged job is found succeeded, and the books of every shard balance.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import grpc
import rich.box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import windrow
from cli.local import LocalCluster, local_cluster
from cli.standard_error import standard_error_to
from embedded import EmbeddedError, open_clusters
from examples.pushes import tables
from examples.pushes.producer import produce
from examples.pushes.totals import Difference, Push, Sums, differences, read_pushes, total
from router.errors import CannotListen, RouterFailed
from windrow.v1 import cluster_pb2, cluster_pb2_grpc

SHARDS = ("s1", "s2")
ROUTERS = 2
WORKERS = 2

# How often faults occur, and where. The jobs of a killed worker come back when their visibility window ends, so the
# window is short in runs with faults.
WORKER_KILLED_EVERY_S = 1.0
ROUTER_KILLED_EVERY_S = 3.0
POSTGRES_KILLED = "s1"
POSTGRES_KILLS = 2
WINDOW_S = 30.0
WINDOW_WITH_FAULTS_S = 5.0

_ROOT = Path(__file__).resolve().parent.parent
_LOOK_S = 0.5
_LINE_EVERY_S = 2.0
# During faults a working cluster may make no progress for some seconds, but never for this long.
_STUCK_S = 90.0
_CALL_S = 10.0
_HEAL_S = 60.0
_END_S = 10.0
_ROWS_SHOWN = 10
_WIDTH = 120
_LOG_LINES = 20


class DemoFailed(Exception):
    """The run cannot continue, or would prove nothing if it did. The message has the reason."""


@dataclass(slots=True, kw_only=True)
class Run:
    """The progress of a run."""

    pushes: Sequence[Push]
    # Ids of acknowledged jobs, by org.
    acknowledged: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    acknowledged_jobs: int = 0
    # Jobs that were sent twice: the first call stored them, but its answer was lost.
    resent: int = 0
    # Succeeded jobs, according to the books of the shards.
    done: int = 0
    checks: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])
    enqueue_s: float = 0.0
    total_s: float = 0.0

    def acknowledge(self, org: str, stored: Sequence[windrow.Enqueued]) -> None:
        self.acknowledged[org] += [job.id for job in stored]
        self.acknowledged_jobs += len(stored)
        self.resent += sum(job.duplicate for job in stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the checks after a run have found."""

    records: Mapping[str, Sequence[windrow.JobRecord]]
    # Acknowledged ids that were not found or have not succeeded, each with its org and state.
    missing: Sequence[str]
    imbalances: Sequence[str]
    differences: Sequence[Difference]
    rows: int
    repeats: int

    @property
    def passed(self) -> bool:
        return not (self.missing or self.imbalances or self.differences)


def run_demo(*, events: int | None = None, faults: bool = False, seconds: float = 30.0) -> int:
    """Runs the demo. Returns its exit code, which is 0 only if every check passed.

    `events`: use only the first `events` events. `faults`: kill workers, routers and a Postgres again and again. In
    this case the enqueues are spread over `seconds`, so that there is time for faults.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    # Use a file without a name, because such a file disappears no matter how this process ends.
    with tempfile.TemporaryFile() as log:
        try:
            with standard_error_to(log.fileno()):
                passed = asyncio.run(_demo(console, events=events, seconds=seconds if faults else 0.0))
        except KeyboardInterrupt:
            console.print("stopped")
            return 130
        except (DemoFailed, EmbeddedError, CannotListen, RouterFailed, windrow.WindrowError) as error:
            console.print(f"[red]demo failed:[/] {error}")
            passed = False
        except BaseException:
            _save_log(log, console)
            raise
        if not passed:
            _save_log(log, console)
        return 0 if passed else 1


async def _demo(console: Console, *, events: int | None, seconds: float) -> bool:
    """Runs the demo with faults, and spreads the enqueues over `seconds`. If `seconds` is 0, there are no faults."""
    _stop_on_sigterm()
    run = Run(pushes=read_pushes(most=events))
    if not run.pushes:
        raise DemoFailed("there are no events to enqueue")
    orgs = sorted({push.org for push in run.pushes})
    console.print(
        f"Starting {len(SHARDS)} shards, {ROUTERS} router processes, {WORKERS} workers, "
        "and a Postgres for the application's totals"
    )
    async with (
        _application() as database,
        local_cluster(root=None, shards=SHARDS, processes=ROUTERS, listen="127.0.0.1:0") as cluster,
        grpc.aio.insecure_channel(cluster.address, options=[("grpc.max_reconnect_backoff_ms", 500)]) as channel,
    ):
        console.print(f"Enqueueing {len(run.pushes):,} pushes of {len(orgs)} orgs through {cluster.address}")
        stub = cluster_pb2_grpc.ClusterStub(channel)
        workers = Workers(
            address=cluster.address,
            database=database,
            orgs=orgs,
            window_s=WINDOW_WITH_FAULTS_S if seconds else WINDOW_S,
        )
        background: list[Coroutine[Any, Any, None]] = [workers.keep(number) for number in range(1, WORKERS + 1)]
        if seconds:
            background += [
                _kill_workers(run, workers),
                _kill_routers(run, cluster),
                _kill_postgres(run, cluster, console, seconds),
            ]
        work = _work(run, cluster.address, stub, list(cluster.postgres), seconds)
        await _run_with(work, *background, _show(run, console))
        verdict = await _judge(run, cluster, stub, database)
    report(console, run, verdict)
    return verdict.passed


async def _work(
    run: Run, address: str, stub: cluster_pb2_grpc.ClusterAsyncStub, shards: Sequence[str], seconds: float
) -> None:
    """Enqueues all jobs, and waits until the shards' books show that every job is done."""
    began_s = time.monotonic()

    async def enqueue() -> None:
        await produce(address, run.pushes, acknowledged=run.acknowledge, seconds=seconds)
        run.enqueue_s = time.monotonic() - began_s

    await asyncio.gather(enqueue(), _watch_books(run, stub, shards))
    run.total_s = time.monotonic() - began_s


# ── The parts ────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def _application() -> AsyncGenerator[str, None]:
    """Runs the application's own Postgres, separate from Windrow's and without tables. Yields the DSN."""
    opened = open_clusters(["app"], ephemeral=True)
    clusters = await asyncio.to_thread(opened.__enter__)
    try:
        yield clusters["app"].dsn
    finally:
        await asyncio.to_thread(opened.__exit__, None, None, None)


class Workers:
    """Worker processes. A worker that was killed is restarted. A worker ends when its standard input closes, so all
    workers end when this process ends, no matter how this process ends."""

    def __init__(self, *, address: str, database: str, orgs: Sequence[str], window_s: float) -> None:
        self._command = (
            *(sys.executable, "-m", "examples.pushes.worker", "--until-stdin-closes"),
            *("--address", address, "--visibility-window", f"{window_s:g}", "--orgs", *orgs),
        )
        # Do not pass the DSN as an argument: the DSN contains a password, and every user of this machine can read
        # arguments.
        self._environ = os.environ | {"DATABASE_URL": database}
        self._running: dict[int, Process] = {}
        self._killed: set[Process] = set()

    async def keep(self, number: int) -> None:
        """Keeps one worker running until cancelled. Raises DemoFailed if the worker ends without being killed by
        kill()."""
        while True:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--name", f"worker-{number}"),
                stdin=PIPE,
                cwd=_ROOT,
                env=self._environ,
                # Ctrl-C in the terminal must reach only this process, which ends the workers gracefully.
                start_new_session=True,
            )
            self._running[number] = process
            try:
                code = await process.wait()
            finally:
                del self._running[number]
                await _end(process)
            if process not in self._killed:
                raise DemoFailed(f"worker {number} ended by itself, with exit code {code}")
            self._killed.discard(process)

    def kill(self) -> bool:
        """Kills a random worker, as a fault. Returns False if none was running."""
        alive = [process for process in self._running.values() if process not in self._killed]
        if not alive:
            return False
        process = random.choice(alive)
        self._killed.add(process)
        process.kill()
        return True


async def _end(process: Process) -> None:
    """Lets a worker finish its jobs. Kills the worker if it takes too long."""
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _watch_books(run: Run, stub: cluster_pb2_grpc.ClusterAsyncStub, shards: Sequence[str]) -> None:
    """Polls the books of the shards until they show that every job is done. Raises DemoFailed if a job is dead or
    cancelled, if books do not balance, or if there is no progress."""
    done = dict.fromkeys(shards, 0)
    moved_s = time.monotonic()
    while run.done < len(run.pushes):
        await asyncio.sleep(_LOOK_S)
        before = (run.acknowledged_jobs, run.done)
        for shard in shards:
            # A shard that was just killed does not answer for a moment.
            with contextlib.suppress(grpc.aio.AioRpcError):
                books = await _books(stub, shard)
                for org_books in books:
                    if not org_books.balanced or org_books.dead or org_books.cancelled:
                        raise DemoFailed(f"the books of {org_books.org} on {shard} are wrong: {_entries(org_books)}")
                done[shard] = sum(org_books.succeeded for org_books in books)
                run.checks += 1
        run.done = sum(done.values())
        if (run.acknowledged_jobs, run.done) != before:
            moved_s = time.monotonic()
        elif time.monotonic() - moved_s > _STUCK_S:
            raise DemoFailed(
                f"no progress for {_STUCK_S:g} s: of {len(run.pushes):,} jobs {run.acknowledged_jobs:,} are enqueued "
                f"and {run.done:,} done"
            )


async def _books(stub: cluster_pb2_grpc.ClusterAsyncStub, shard: str) -> list[cluster_pb2.OrgBooks]:
    request = cluster_pb2.CheckShardRequest(shard=shard)
    return [one async for part in stub.CheckShard(request, timeout=_CALL_S) for one in part.orgs]


def _entries(books: cluster_pb2.OrgBooks) -> str:
    return (
        f"{books.accepted:,} accepted; {books.scheduled:,} scheduled, {books.ready:,} ready, {books.leased:,} leased, "
        f"{books.succeeded:,} succeeded, {books.dead:,} dead, {books.cancelled:,} cancelled"
    )


# ── Faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _fault_times(every_s: float, progress: Callable[[], int]) -> AsyncGenerator[None]:
    """Yields each time a fault is due: every `every_s`, if `progress` has changed since the last fault. Without
    progress no fault is due, because on a busy machine processes start slowly, and killing a cluster that does not work
    yet proves nothing."""
    before = progress()
    while True:
        await asyncio.sleep(every_s)
        if progress() != before:
            yield
            before = progress()


async def _kill_workers(run: Run, workers: Workers) -> None:
    async for _ in _fault_times(WORKER_KILLED_EVERY_S, lambda: run.done):
        if workers.kill():
            run.faults["worker"] += 1


async def _kill_routers(run: Run, cluster: LocalCluster) -> None:
    """Kills the router that has run longest, because a router that has just started may not serve yet."""
    by_age: list[int] = []
    async for _ in _fault_times(ROUTER_KILLED_EVERY_S, lambda: run.acknowledged_jobs + run.done):
        alive = cluster.routers.pids
        by_age = [pid for pid in by_age if pid in alive] + [pid for pid in alive if pid not in by_age]
        if by_age:
            with contextlib.suppress(ProcessLookupError):
                os.kill(by_age.pop(0), signal.SIGKILL)
                run.faults["router"] += 1


async def _kill_postgres(run: Run, cluster: LocalCluster, console: Console, seconds: float) -> None:
    """Kills a Postgres server after one third and after two thirds of `seconds`. The killed server is restarted, and
    recovers from its WAL."""
    for _ in range(POSTGRES_KILLS):
        await asyncio.sleep(seconds / (POSTGRES_KILLS + 1))
        await asyncio.to_thread(cluster.postgres[POSTGRES_KILLED].kill)
        run.faults["Postgres"] += 1
        console.print(f"  kill -9 of the Postgres of shard {POSTGRES_KILLED}")
    await asyncio.Event().wait()


# ── Judgement ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _judge(run: Run, cluster: LocalCluster, stub: cluster_pb2_grpc.ClusterAsyncStub, database: str) -> Verdict:
    records: dict[str, list[windrow.JobRecord]] = {}
    missing: list[str] = []
    async with windrow.Client(cluster.address, org=run.pushes[0].org, timeout=_HEAL_S) as client:
        for org, ids in run.acknowledged.items():
            found = await client.for_org(org).get_jobs(ids)
            records[org] = list(found.values())
            missing += [f"{org} {name}: not found" for name in ids if name not in found]
            missing += [
                f"{org} {record.id}: {record.state.value}"
                for record in found.values()
                if record.state is not windrow.JobState.SUCCEEDED
            ]
    imbalances = await _imbalances(run, stub, list(cluster.postgres))
    async with tables.open_pool(database) as pool, pool.connection() as connection:
        applied = await tables.read_applied(connection)
    if applied.jobs != run.acknowledged_jobs:
        imbalances.append(f"{applied.jobs:,} jobs were applied, {run.acknowledged_jobs:,} were acknowledged")
    return Verdict(
        records=records,
        missing=missing,
        imbalances=imbalances,
        differences=await compare(database, run.pushes),
        rows=len(total(run.pushes)),
        repeats=applied.repeats,
    )


async def compare(database: str, pushes: Sequence[Push]) -> list[Difference]:
    """Returns the differences between the application's totals and the totals that this process computes from the
    pushes in memory."""
    async with tables.open_pool(database) as pool, pool.connection() as connection:
        return differences(total(pushes), await tables.read_totals(connection))


async def _imbalances(run: Run, stub: cluster_pb2_grpc.ClusterAsyncStub, shards: Sequence[str]) -> list[str]:
    """Checks three things: the books of every shard balance, all jobs have succeeded, and the shards have accepted as
    many jobs of each org as were acknowledged. Returns what is wrong."""
    wrong: list[str] = []
    accepted = Counter[str]()
    for shard in shards:
        for books in await _books_with_retry(stub, shard):
            accepted[books.org] += books.accepted
            if not books.balanced or books.succeeded != books.accepted:
                wrong.append(f"{books.org} on {shard}: {_entries(books)}")
        run.checks += 1
    acknowledged = {org: len(ids) for org, ids in run.acknowledged.items()}
    wrong += [
        f"{org}: {accepted[org]:,} accepted, {acknowledged.get(org, 0):,} acknowledged"
        for org in sorted(accepted.keys() | acknowledged.keys())
        if accepted[org] != acknowledged.get(org, 0)
    ]
    return wrong


async def _books_with_retry(stub: cluster_pb2_grpc.ClusterAsyncStub, shard: str) -> list[cluster_pb2.OrgBooks]:
    """Returns the books of a shard. Retries for a while, because the last fault may have been a moment ago."""
    deadline_s = time.monotonic() + _HEAL_S
    while True:
        try:
            return await _books(stub, shard)
        except grpc.aio.AioRpcError as error:
            if time.monotonic() > deadline_s:
                raise DemoFailed(f"shard {shard} could not be checked: {error.details()}") from error
            await asyncio.sleep(_LOOK_S)


# ── Display ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _show(run: Run, console: Console) -> None:
    """Shows progress bars on a terminal, plain lines elsewhere. Runs until cancelled."""
    if not console.is_terminal:
        began_s = time.monotonic()
        while True:
            await asyncio.sleep(_LINE_EVERY_S)
            console.print(
                f"{time.monotonic() - began_s:5.0f} s   {run.acknowledged_jobs:7,} enqueued   {run.done:7,} done"
                f"{_faults(run)}"
            )
    progress = Progress(
        TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    enqueued = progress.add_task("enqueued", total=len(run.pushes))
    done = progress.add_task("done", total=len(run.pushes))

    def render() -> Group:
        progress.update(enqueued, completed=run.acknowledged_jobs)
        progress.update(done, completed=run.done)
        return Group(progress, *([_faults(run).strip()] if run.faults else []))

    with Live(get_renderable=render, console=console, redirect_stderr=False):
        await asyncio.Event().wait()


def _faults(run: Run) -> str:
    if not run.faults:
        return ""
    return "   killed: " + ", ".join(f"{count} × {what}" for what, count in sorted(run.faults.items()))


def report(console: Console, run: Run, verdict: Verdict) -> None:
    records = [record for of_org in verdict.records.values() for record in of_org]
    jobs = len(run.pushes)
    figures = Table.grid(padding=(0, 2))
    figures.add_column()
    figures.add_column(justify="right")
    figures.add_column()
    figures.add_row("events in", f"{jobs:,}", f"{len(run.acknowledged)} orgs")
    figures.add_row("jobs done", f"{run.done:,}", "")
    most = max((record.attempt - 1 for record in records), default=0)
    figures.add_row(
        "redeliveries", f"{_redeliveries(records):,}", f"leases after a job's first; at most {most} for one job"
    )
    figures.add_row("repeats", f"{verdict.repeats:,}", "deliveries of a job that the totals had already; counted once")
    figures.add_row(
        "resent", f"{run.resent:,}", "jobs sent again after a call that broke but had stored them; stored once"
    )
    figures.add_row("enqueue", f"{run.enqueue_s:.1f} s", f"{jobs / run.enqueue_s:,.0f} jobs/s")
    figures.add_row("total", f"{run.total_s:.1f} s", f"{jobs / run.total_s:,.0f} jobs/s, until the last one was done")
    if run.faults:
        figures.add_row("kill -9", f"{run.faults.total():,}", _faults(run).partition(":")[2].strip())
    console.print()
    console.print(figures)

    largest = Table("org", "shard", "jobs", "redeliveries", title="The largest orgs", box=rich.box.SIMPLE)
    for column in largest.columns[2:]:
        column.justify = "right"
    by_size = sorted(verdict.records.items(), key=lambda item: len(item[1]), reverse=True)
    for org, of_org in by_size[:_ROWS_SHOWN]:
        shards = " ".join(sorted({record.shard for record in of_org}))
        largest.add_row(org, shards, f"{len(of_org):,}", f"{_redeliveries(of_org):,}")
    console.print(largest)

    _say(console, verdict.missing, f"every acknowledged job is found, succeeded: {len(records):,}")
    _say(
        console,
        verdict.imbalances,
        f"the books of every shard balance, at the end and in {run.checks:,} checks on the way",
    )
    _say(
        console,
        [_difference_text(difference) for difference in verdict.differences],
        f"the totals equal those of the file, to the last digit: {verdict.rows:,} rows (org, repo, week) of 4 sums",
    )


def _redeliveries(records: Sequence[windrow.JobRecord]) -> int:
    return sum(record.attempt - 1 for record in records)


def _difference_text(difference: Difference) -> str:
    def sums(found: Sums | None) -> str:
        return "no row" if found is None else ", ".join(f"{value:,} {name}" for name, value in found._asdict().items())

    return f"{' '.join(difference.key)}: expected {sums(difference.expected)}; found {sums(difference.found)}"


def _say(console: Console, wrongs: Sequence[str], claim: str) -> None:
    """Prints one line if the claim holds, and otherwise the first few texts of `wrongs`, which contradict the claim."""
    if not wrongs:
        console.print(f"[green]ok[/]    {claim}")
        return
    console.print(f"[red]WRONG[/] not true: {claim}")
    for wrong in wrongs[:_ROWS_SHOWN]:
        console.print(f"      {wrong}", markup=False)
    if len(wrongs) > _ROWS_SHOWN:
        console.print(f"      and {len(wrongs) - _ROWS_SHOWN:,} more")


# ── This process ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def _run_with(work: Coroutine[Any, Any, None], *background: Coroutine[Any, Any, None]) -> None:
    """Runs the work, and runs the background coroutines until the work ends. Raises the first error of the work or of a
    background coroutine."""
    tasks = [asyncio.create_task(coroutine) for coroutine in (work, *background)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stop_on_sigterm() -> None:
    """Makes SIGTERM end this process gracefully, as Ctrl-C does."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)


def _save_log(log: IO[bytes], console: Console) -> None:
    """Saves the log of a failed run. Prints the end of the log and the file's name."""
    log.seek(0)
    content = log.read()
    with tempfile.NamedTemporaryFile(prefix="windrow-demo-", suffix=".log", delete=False) as file:
        file.write(content)
    for line in content.decode(errors="replace").splitlines()[-_LOG_LINES:]:
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"log of the processes: {file.name}")

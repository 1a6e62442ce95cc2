"""Enqueues jobs inside your own Postgres transactions: the jobs are stored with your rows, or not at all.

    connection.execute(outbox.SCHEMA)                                 # once
    with connection.transaction():
        connection.execute("INSERT INTO orders ...")
        outbox.add(connection, "acme", NewJob("emails", "send_receipt", {"order": 7}))

    windrow.run(outbox.Relay("postgresql://...", client))             # one or more, anywhere

If a relay dies between the router's OK and its own DELETE, a job is relayed twice. The job is stored once, because its
id is made with the NewJob. Jobs are relayed in the order of their ids. This module owns the table windrow_outbox and
needs `windrow[outbox]`. The relay polls: your database needs no triggers and no LISTEN.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, overload

from google.protobuf.message import DecodeError

try:
    import psycopg
    from psycopg.rows import class_row
except ImportError as error:
    raise ImportError("windrow.outbox needs psycopg: install windrow[outbox]") from error

from opentelemetry import trace

from windrow.calls import patient_pause_s
from windrow.client import Client
from windrow.errors import (
    TRANSIENT,
    ClientClosed,
    DeadlineExceeded,
    InvalidJob,
    InvalidRequest,
    PermissionDenied,
    RouterTooOld,
    TlsFailed,
    Unauthenticated,
    Violation,
    WindrowError,
)
from windrow.job_rules import age_fault, job_faults, org_fault
from windrow.new_jobs import NewJob, enqueue_request
from windrow.payloads import checked_text, duration
from windrow.signals import stopped_by_signals
from windrow.tracing import trace_context
from windrow.v1 import job_pb2, queue_pb2

log = logging.getLogger("windrow.outbox")

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS windrow_outbox (
    -- The job's id, a UUIDv7.
    id uuid PRIMARY KEY,
    org text NOT NULL,
    -- A windrow.v1.NewJob.
    job bytea NOT NULL,
    added_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Set for a job that can never be stored as it is. To try again, set it back to NULL; to give up, delete the row.
    set_aside_at timestamptz,
    error text
) WITH (autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX IF NOT EXISTS windrow_outbox_waiting ON windrow_outbox (id) WHERE set_aside_at IS NULL;
"""

_ADD: Final = """
INSERT INTO windrow_outbox (id, org, job)
SELECT new.id::uuid, %(org)s, new.job FROM unnest(%(ids)s::text[], %(jobs)s::bytea[]) AS new (id, job)
ON CONFLICT (id) DO NOTHING
"""

# Locks up to rows_max rows that no other relay has locked, and returns the first of these rows, with up to bytes_max
# bytes. Takes only rows of the orgs in `only`. If `only` is NULL, takes rows of every org.
_TAKE: Final = """
WITH taken AS MATERIALIZED (
    SELECT id, org, job, added_at FROM windrow_outbox
    WHERE set_aside_at IS NULL AND org <> ALL (%(skipped)s::text[])
        AND (%(only)s::text[] IS NULL OR org = ANY (%(only)s::text[]))
    ORDER BY id LIMIT %(rows_max)s FOR UPDATE SKIP LOCKED
), sized AS (
    SELECT *, sum(octet_length(job)) OVER (ORDER BY id) - octet_length(job) AS bytes_before FROM taken
)
SELECT id::text, org, job, extract(epoch FROM clock_timestamp() - added_at)::float8 AS age_s
FROM sized WHERE bytes_before < %(bytes_max)s ORDER BY id
"""

_DELETE: Final = "DELETE FROM windrow_outbox WHERE id = ANY (%s::text[]::uuid[])"

_SET_ASIDE: Final = """
UPDATE windrow_outbox AS o SET set_aside_at = clock_timestamp(), error = bad.error
FROM unnest(%s::text[]::uuid[], %s::text[]) AS bad (id, error) WHERE o.id = bad.id
"""

ROWS_MAX = 1000
_BYTES_MAX = 8 * 1024 * 1024
_ORGS_AT_ONCE_MAX = 8
_FAULTS_SHOWN_MAX = 5
# A reason of docs/errors.md.
_SCOPE_MISSING = "SCOPE_MISSING"
# The position of a job in a relay's request. It does not help somebody who reads the row of one job.
_PLACE = re.compile(r"jobs\[\d+\]\.")
_IDLE_FIRST_S, _IDLE_MAX_S = 0.02, 1.0
_REST_FIRST_S, _REST_MAX_S = 0.5, 30.0
# While an org's jobs wait, a log line says so once in this time.
_TELL_AGAIN_S = 60.0
# How long to wait for an org's jobs to be stored. The next batch must also wait for this time. The time starts at
# _SEND_FIRST_S and doubles after each timeout of the org. _SEND_FIRST_S is no longer than the pause that a router asks
# for when a shard is away, so a call to that shard fails at once, without a second try. After a timeout the org is
# slow, and its jobs are relayed in separate batches.
_SEND_FIRST_S, _SEND_MAX_S = 1.0, 10.0
# Errors after which a retry may succeed. The two timeouts are raised if a transaction that waits for the router stays
# open for longer than the server allows. ReadOnlySqlTransaction is raised if the server is a standby, or not yet the
# primary.
_OUTAGES = (
    psycopg.OperationalError,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.TransactionTimeout,
    psycopg.errors.ReadOnlySqlTransaction,
)


@overload
def add(connection: psycopg.Connection[Any], org: str, *jobs: NewJob) -> list[str]: ...
@overload
def add(connection: psycopg.AsyncConnection[Any], org: str, *jobs: NewJob) -> Awaitable[list[str]]: ...
def add(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], org: str, *jobs: NewJob
) -> list[str] | Awaitable[list[str]]:
    """Adds jobs to the outbox in the connection's transaction. Returns the ids of the jobs. If the connection is async,
    await the call.

    A `delay` counts from now. If a router would refuse a job, raises InvalidRequest or InvalidJob before anything is
    added. Some faults, such as too many queues of an org, can only be found by a router: the relay sets such a job
    aside.
    """
    request = enqueue_request(checked_text("org", org), jobs)
    _refuse_faults(request)
    context = trace_context(trace.get_current_span().get_span_context())
    if context is not None:
        for job in request.jobs:
            job.trace.CopyFrom(context)
    ids = [job.id for job in request.jobs]
    parameters = {"org": org, "ids": ids, "jobs": [job.SerializeToString() for job in request.jobs]}
    if isinstance(connection, psycopg.AsyncConnection):
        return _add_async(connection, parameters, ids)
    connection.execute(_ADD, parameters)
    return ids


def _refuse_faults(request: queue_pb2.EnqueueRequest) -> None:
    if fault := org_fault(request.org):
        raise InvalidRequest(f"org: {fault}", [Violation("org", fault)])
    faults = [(at, job.id, fault) for at, job in enumerate(request.jobs) for fault in job_faults(job)]
    if faults:
        raise InvalidJob(
            "; ".join(
                f"job {name}: {fault.field}: {fault.description}" for _, name, fault in faults[:_FAULTS_SHOWN_MAX]
            ),
            [Violation(f"jobs[{at}].{fault.field}", fault.description) for at, _, fault in faults],
        )


async def _add_async(connection: psycopg.AsyncConnection[Any], parameters: dict[str, Any], ids: list[str]) -> list[str]:
    await connection.execute(_ADD, parameters)
    return ids


class Relayed(NamedTuple):
    """How many jobs of one batch were sent, how many were set aside, and how many were left for a retry because their
    org could not be reached."""

    sent: int = 0
    set_aside: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    id: str
    org: str
    job: bytes
    # How long the row has been in the outbox, by the database's clock.
    age_s: float


@dataclass(frozen=True, slots=True)
class _Bad:
    error: str


@dataclass(slots=True)
class _Rest:
    """The pause of an org that cannot be reached. Its jobs are skipped, so that they do not delay other orgs."""

    until: float
    next_s: float
    # How long the next try may take.
    timeout_s: float
    # The time from which the log may say again that the org's jobs wait.
    tell_at: float = 0.0


class Relay:
    """Moves jobs from the outbox to the router. Each job is sent at least once and stored once. Several relays may run
    at the same time.

    `connect`: a libpq connection string, or a function that opens a psycopg.AsyncConnection. The client's org does not
    matter, because each row has its own. `rows_max` (1 to 1,000; default 500): how many jobs one batch may have. A
    batch also has at most about 8 MiB.

    The relay waits one second for an org's jobs to be stored. If they are not stored, the relay skips the org for up to
    30 s, and continues with the jobs of other orgs. After each timeout of an org, the relay waits longer for this org,
    up to 10 s. `run` relays the jobs of such slow orgs over a second connection, so that no other org waits for them.
    If a failed call did store jobs, the next try finds them as duplicates by their ids.
    """

    def __init__(
        self,
        connect: str | Callable[[], Awaitable[psycopg.AsyncConnection[Any]]],
        client: Client,
        *,
        rows_max: int = 500,
    ) -> None:
        if not 1 <= rows_max <= ROWS_MAX:
            raise InvalidRequest(f"rows_max must be 1 to {ROWS_MAX:,}, not {rows_max}")
        self.client = client
        self._connect = connect
        self._rows_max = rows_max
        self._resting: dict[str, _Rest] = {}
        self._refusals = client.calls.refusals()
        # Why no org's jobs can be relayed.
        self._fatal: WindrowError | None = None
        # The last pause during an outage of the database; 0 while there is no outage.
        self._outage_pause_s = 0.0
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False

    def stop(self) -> None:
        """Ends run() after the current batch. Does nothing if the relay has ended. Thread-safe."""
        self._stopped = True
        if self._loop is not None:
            # A loop that is closed has no relay to stop.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)

    async def run(self) -> None:
        """Relays until stop(). In the main thread, SIGTERM and SIGINT end run() too, unless the program handles SIGTERM
        itself. Continues after outages of the database or the router.

        Raises a WindrowError that no retry can fix and that concerns every org: Unauthenticated, PermissionDenied if
        the token has no scope to enqueue, TlsFailed, RouterTooOld or ClientClosed. If a router refuses the jobs of one
        org, that org's jobs wait."""
        self._loop = asyncio.get_running_loop()
        if self._stopped:
            return
        with stopped_by_signals(self.stop):
            while not self._stopping.is_set():
                try:
                    async with await self._open() as connection:
                        await self._run_on(connection)
                except _OUTAGES as error:
                    if not self._outage_pause_s:
                        log.warning("the outbox's database cannot be used; trying again: %s", error)
                    self._outage_pause_s = min(_REST_MAX_S, max(_REST_FIRST_S, self._outage_pause_s * 2))
                    await self._pause(self._outage_pause_s * random.uniform(0.5, 1.0))

    async def run_once(self) -> Relayed:
        """Relays one batch and returns its counts. This method is for cron jobs and tests. Raises the errors that end
        run()."""
        async with await self._open() as connection:
            return await self._relay_batch(connection)

    async def _open(self) -> psycopg.AsyncConnection[Any]:
        if isinstance(self._connect, str):
            return await psycopg.AsyncConnection.connect(self._connect, connect_timeout=10)
        return await self._connect()

    async def _run_on(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Relays until stop(). Jobs of slow orgs are relayed in a task of their own, and other jobs in this task."""
        idle_s = _IDLE_FIRST_S
        slow: asyncio.Task[None] | None = None
        try:
            while not self._stopping.is_set():
                if slow is not None and slow.done():
                    # This raises the error that has ended the task.
                    slow.result()
                    slow = None
                if slow is None and self._slow_orgs():
                    slow = asyncio.create_task(self._run_slow())
                relayed = await self._relay_batch(connection, skipped=self._slow_orgs())
                # Only a batch proves that the outage is over. A connection does not prove it, because a standby accepts
                # connections, too.
                if self._outage_pause_s:
                    log.info("the outbox's database can be used again")
                    self._outage_pause_s = 0.0
                if relayed.sent or relayed.set_aside:
                    idle_s = _IDLE_FIRST_S
                    continue
                await self._pause(idle_s * random.uniform(0.5, 1.0))
                idle_s = min(_IDLE_MAX_S, idle_s * 2)
            if slow is not None:
                await slow
        finally:
            if slow is not None:
                slow.cancel()
                await asyncio.wait({slow})

    async def _run_slow(self) -> None:
        """Relays the jobs of slow orgs, until no org is slow."""
        async with await self._open() as connection:
            while (slow := self._slow_orgs()) and not self._stopping.is_set():
                now = time.monotonic()
                due = [org for org in slow if self._resting[org].until <= now]
                if not due:
                    await self._pause(min(self._resting[org].until for org in slow) - now)
                elif await self._relay_batch(connection, only=due) == Relayed():
                    # No job of these orgs waits any more, so there is nothing to retry.
                    for org in due:
                        self._resting.pop(org, None)

    def _slow_orgs(self) -> list[str]:
        """Returns the orgs whose last calls have timed out."""
        return [org for org, rest in self._resting.items() if rest.timeout_s > _SEND_FIRST_S]

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _relay_batch(
        self,
        connection: psycopg.AsyncConnection[Any],
        *,
        skipped: Sequence[str] = (),
        only: Sequence[str] | None = None,
    ) -> Relayed:
        """Relays one batch of jobs. With `only`, takes jobs of these orgs, otherwise jobs of all orgs. Leaves out orgs
        that rest, and the orgs in `skipped`."""
        now = time.monotonic()
        resting = [org for org, rest in self._resting.items() if rest.until > now]
        taken = {
            "skipped": [*resting, *skipped],
            "only": None if only is None else list(only),
            "rows_max": self._rows_max,
            "bytes_max": _BYTES_MAX,
        }
        # The rows stay locked until the router has answered, so that no other relay sends them meanwhile.
        async with connection.transaction(), connection.cursor(row_factory=class_row(_Row)) as cursor:
            await cursor.execute(_TAKE, taken)
            rows = await cursor.fetchall()
            if not rows:
                return Relayed()
            sent, bad = await self._send(rows)
            await self._conclude(connection, sent, bad)
        for id, error in bad.items():  # noqa: A001
            log.error("outbox: job %s is set aside: %s", id, error)
        if (fatal := self._fatal) is not None:
            self._fatal = None
            raise fatal
        return Relayed(sent=len(sent), set_aside=len(bad), left=len(rows) - len(sent) - len(bad))

    async def _conclude(
        self, connection: psycopg.AsyncConnection[Any], sent: Sequence[str], bad: dict[str, str]
    ) -> None:
        if sent:
            await connection.execute(_DELETE, [sent])
        if bad:
            await connection.execute(_SET_ASIDE, [list(bad), list(bad.values())])

    async def _send(self, rows: Sequence[_Row]) -> tuple[list[str], dict[str, str]]:
        """Sends the rows' jobs. Returns the ids of the stored jobs, and the ids of jobs that can never be stored, each
        with the reason."""
        sent: list[str] = []
        bad: dict[str, str] = {}
        requests: dict[str, queue_pb2.EnqueueRequest] = {}
        for row in rows:
            match _read(row):
                case _Bad(error=error):
                    bad[row.id] = error
                case job:
                    request = requests.setdefault(row.org, queue_pb2.EnqueueRequest(org=row.org, independent=True))
                    request.jobs.append(job)
        slots = asyncio.Semaphore(_ORGS_AT_ONCE_MAX)
        deadline = time.monotonic() + _SEND_FIRST_S

        async def send(request: queue_pb2.EnqueueRequest) -> None:
            async with slots:
                # After the deadline, leave the jobs of this org to the next batch. That batch leaves out the orgs that
                # could not be reached now, so they do not use up its time again.
                if time.monotonic() < deadline:
                    await self._send_org(request, sent, bad)

        async with asyncio.TaskGroup() as group:
            # Begin with the orgs that could be reached the last time.
            for request in sorted(requests.values(), key=lambda request: request.org in self._resting):
                group.create_task(send(request))
        return sent, bad

    async def _send_org(self, request: queue_pb2.EnqueueRequest, sent: list[str], bad: dict[str, str]) -> None:
        ids = [job.id for job in request.jobs]
        rest = self._resting.get(request.org)
        timeout_s = _SEND_FIRST_S if rest is None else rest.timeout_s
        try:
            # Do not use the client's whole timeout: the other orgs wait meanwhile, and the relay retries anyway.
            results = await self.client.send(request, timeout=min(timeout_s, self.client.calls.timeout_s))
        except InvalidRequest as error:
            # The request is independent, so no single job is the cause: the org is invalid, or every job is too large.
            bad.update((id, _PLACE.sub("", str(error))) for id in ids)  # noqa: A001
            return
        except WindrowError as error:
            if isinstance(error, Unauthenticated) and not self._refusals.is_final():
                self._rest(request.org, error)
            elif _concerns_every_org(error):
                # Raise this error later: first delete from the outbox what the calls of other orgs have stored.
                self._fatal = error
            else:
                self._rest(request.org, error)
            return
        self._refusals.accepted()
        failure: WindrowError | None = None
        for id, result in zip(ids, results, strict=True):  # noqa: A001
            match result.error:
                case None:
                    sent.append(id)
                case InvalidRequest():
                    bad[id] = _PLACE.sub("", str(result.error))
                case other:
                    failure = other
        if failure is None:
            self._resting.pop(request.org, None)
        else:
            self._rest(request.org, failure)

    def _rest(self, org: str, error: WindrowError) -> None:
        now = time.monotonic()
        rest = self._resting.get(org)
        if rest is None:
            rest = self._resting[org] = _Rest(until=0.0, next_s=_REST_FIRST_S, timeout_s=_SEND_FIRST_S)
        if now >= rest.tell_at:
            level = logging.WARNING if isinstance(error, TRANSIENT) else logging.ERROR
            log.log(level, "outbox: the jobs of org %s wait and will be retried: %s", org, error)
            rest.tell_at = now + _TELL_AGAIN_S
        pause_s = patient_pause_s(error, own_s=rest.next_s * random.uniform(0.5, 1.0))
        rest.until = now + pause_s
        rest.next_s = min(_REST_MAX_S, rest.next_s * 2)
        if isinstance(error, DeadlineExceeded):
            # The org's shard may be slow, and not away. The org's jobs would never be stored if each try had the same
            # time.
            rest.timeout_s = min(_SEND_MAX_S, rest.timeout_s * 2)


def _concerns_every_org(error: WindrowError) -> bool:
    """Returns whether a retry cannot help for any org. Any PermissionDenied other than Unauthenticated and
    _SCOPE_MISSING may concern only the org that was refused, because the token may be for one org only."""
    if isinstance(error, PermissionDenied):
        return isinstance(error, Unauthenticated) or error.reason == _SCOPE_MISSING
    return isinstance(error, TlsFailed | RouterTooOld | ClientClosed)


def _read(row: _Row) -> job_pb2.NewJob | _Bad:
    """Returns the job to send. Shortens the job's delay by the time that the job spent in the outbox."""
    try:
        job = job_pb2.NewJob.FromString(row.job)
        too_old = age_fault(job.id)
    except (DecodeError, ValueError) as error:
        return _Bad(f"the row's job cannot be read: {error}")
    if too_old is not None:
        return _Bad(f"its id {too_old}; add the job again with a new id and delete this row")
    if job.HasField("delay"):
        left_s = job.delay.ToNanoseconds() / 1e9 - row.age_s
        job.delay.CopyFrom(duration(max(0.0, left_s)))
    return job

"""Enqueueing inside a Postgres transaction of your own: jobs are stored with your rows, or not at all.

    connection.execute(outbox.SCHEMA)                                 # once
    with connection.transaction():
        connection.execute("INSERT INTO orders ...")
        outbox.add(connection, "acme", NewJob("emails", "send_receipt", {"order": 7}))

    windrow.run(outbox.Relay("postgresql://...", client))             # one or more, anywhere

A job's id is made with the NewJob, so relaying it twice stores it once: a relay that dies between the router's OK and
its own DELETE does no harm. Order is kept as far as ids tell it. Owns the table windrow_outbox; needs the extra
`windrow[outbox]`. Polls, for it is your database: no triggers, no LISTEN.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple, overload

from google.protobuf.message import DecodeError

try:
    import psycopg
    from psycopg.rows import class_row
except ImportError as error:
    raise ImportError("windrow.outbox needs psycopg, which the extra windrow[outbox] brings") from error

from opentelemetry import trace

from windrow.calls import patient_pause_s
from windrow.client import Client
from windrow.errors import TRANSIENT, DeadlineExceeded, InvalidRequest, WindrowError
from windrow.ids import made_at
from windrow.jobs import NewJob, enqueue_request
from windrow.payloads import duration
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

# Locks up to rows_max rows that no other relay has, and returns the first of them, up to bytes_max.
_TAKE: Final = """
WITH taken AS MATERIALIZED (
    SELECT id, org, job, added_at FROM windrow_outbox
    WHERE set_aside_at IS NULL AND org <> ALL (%(resting)s::text[])
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
# The router's dedup horizon: an older id would not be recognised as a duplicate, and is refused.
_HORIZON = timedelta(days=7)
_IDLE_FIRST_S, _IDLE_MAX_S = 0.02, 1.0
_REST_FIRST_S, _REST_MAX_S = 0.5, 30.0
# How long an org's jobs may take to be stored, and so hold up the next batch; longer only where no answer came in time.
# No longer than a router asks to wait for a dead shard, so that nobody waits for one here.
_SEND_FIRST_S, _SEND_MAX_S = 1.0, 10.0
# Time heals these. Those that are no OperationalError: the transaction was open for longer than the server allows,
# while the router answered; and the server is a standby now, or not yet the primary.
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
    """Adds jobs to the outbox in the connection's transaction; returns their ids. Await it for an async connection.

    `delay` counts from now, `run_at` and `expires_at` stay as they are. Raises InvalidJob for a job that has no form on
    the wire; one that breaks a limit of the router is set aside when it is relayed.
    """
    request = enqueue_request(org, jobs)
    told = trace_context(trace.get_current_span().get_span_context())
    for job in request.jobs if told is not None else ():
        job.trace.CopyFrom(told or job.trace)
    ids = [job.id for job in request.jobs]
    parameters = {"org": org, "ids": ids, "jobs": [job.SerializeToString() for job in request.jobs]}
    if isinstance(connection, psycopg.AsyncConnection):
        return _add_async(connection, parameters, ids)
    connection.execute(_ADD, parameters)
    return ids


async def _add_async(connection: psycopg.AsyncConnection[Any], parameters: dict[str, Any], ids: list[str]) -> list[str]:
    await connection.execute(_ADD, parameters)
    return ids


class Relayed(NamedTuple):
    """What became of the jobs of one batch. `left`: to be tried again, because their org could not be reached."""

    sent: int = 0
    set_aside: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    id: str
    org: str
    job: bytes
    # By the clock of the database, the same that said when it was added.
    age_s: float


@dataclass(frozen=True, slots=True)
class _Bad:
    error: str


@dataclass(slots=True)
class _Rest:
    """An org whose jobs wait, so that they hold up no other org's."""

    until: float
    next_s: float
    # How long the next try may take.
    patience_s: float


class Relay:
    """Takes jobs out of the outbox and enqueues them, each at least once, stored once. Several may run side by side.

    `connect`: a libpq connection string, or a function that opens a psycopg.AsyncConnection. The client's org does not
    matter: rows say theirs. `rows_max` (1 to 1,000): jobs of one batch; at most about 8 MiB go together.

    An org that cannot be reached is given a second (one that is slow, up to 10 s), and then rests for up to 30 s, while
    the others' jobs go on. Whatever of it was stored all the same is told as a duplicate by its id.
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
        # The last pause of an outage of the database that goes on; 0: there is none.
        self._away_s = 0.0
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False

    def stop(self) -> None:
        """Ends run() after the batch under way. From any thread."""
        self._stopped = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def run(self) -> None:
        """Relays until stop(), or, in the main thread, until SIGTERM or SIGINT. Outlives outages of either side."""
        self._loop = asyncio.get_running_loop()
        if self._stopped:
            return
        with stopped_by_signals(self.stop):
            while not self._stopping.is_set():
                try:
                    async with await self._open() as connection:
                        await self._run_on(connection)
                except _OUTAGES as error:
                    if not self._away_s:
                        log.warning("the outbox's database cannot be used; trying again: %s", error)
                    self._away_s = min(_REST_MAX_S, max(_REST_FIRST_S, self._away_s * 2))
                    await self._pause(self._away_s * random.uniform(0.5, 1.0))

    async def run_once(self) -> Relayed:
        """Relays one batch. For cron, and for tests."""
        async with await self._open() as connection:
            return await self._relay_batch(connection)

    async def _open(self) -> psycopg.AsyncConnection[Any]:
        if isinstance(self._connect, str):
            return await psycopg.AsyncConnection.connect(self._connect, connect_timeout=10)
        return await self._connect()

    async def _run_on(self, connection: psycopg.AsyncConnection[Any]) -> None:
        idle_s = _IDLE_FIRST_S
        while not self._stopping.is_set():
            relayed = await self._relay_batch(connection)
            # Not before: a standby lets connect, too.
            if self._away_s:
                log.info("the outbox's database can be used again")
                self._away_s = 0.0
            if relayed.sent or relayed.set_aside:
                idle_s = _IDLE_FIRST_S
                continue
            await self._pause(idle_s * random.uniform(0.5, 1.0))
            idle_s = min(_IDLE_MAX_S, idle_s * 2)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _relay_batch(self, connection: psycopg.AsyncConnection[Any]) -> Relayed:
        now = time.monotonic()
        resting = [org for org, rest in self._resting.items() if rest.until > now]
        # The rows stay locked until their fate is known: no other relay sends them meanwhile.
        async with connection.transaction(), connection.cursor(row_factory=class_row(_Row)) as cursor:
            await cursor.execute(_TAKE, {"resting": resting, "rows_max": self._rows_max, "bytes_max": _BYTES_MAX})
            rows = await cursor.fetchall()
            if not rows:
                return Relayed()
            sent, bad = await self._send(rows)
            await self._conclude(connection, sent, bad)
        for id, error in bad.items():  # noqa: A001
            log.error("outbox: job %s is set aside: %s", id, error)
        return Relayed(sent=len(sent), set_aside=len(bad), left=len(rows) - len(sent) - len(bad))

    async def _conclude(
        self, connection: psycopg.AsyncConnection[Any], sent: Sequence[str], bad: dict[str, str]
    ) -> None:
        if sent:
            await connection.execute(_DELETE, [sent])
        if bad:
            await connection.execute(_SET_ASIDE, [list(bad), list(bad.values())])

    async def _send(self, rows: Sequence[_Row]) -> tuple[list[str], dict[str, str]]:
        """The ids that are stored now, and those that never can be, with the reason."""
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
        turns = asyncio.Semaphore(_ORGS_AT_ONCE_MAX)
        until = time.monotonic() + _SEND_FIRST_S

        async def send(request: queue_pb2.EnqueueRequest) -> None:
            async with turns:
                # Those that had to wait for so long go with the next batch, which has fewer that cannot be reached.
                if time.monotonic() < until:
                    await self._send_org(request, sent, bad)

        async with asyncio.TaskGroup() as group:
            # Those that could not be reached the last time come last.
            for request in sorted(requests.values(), key=lambda request: request.org in self._resting):
                group.create_task(send(request))
        return sent, bad

    async def _send_org(self, request: queue_pb2.EnqueueRequest, sent: list[str], bad: dict[str, str]) -> None:
        ids = [job.id for job in request.jobs]
        rest = self._resting.get(request.org)
        patience_s = _SEND_FIRST_S if rest is None else rest.patience_s
        try:
            # Not for all the time the client has: the other orgs wait meanwhile, and it is tried again anyway.
            results = await self.client.send(request, timeout=min(patience_s, self.client.calls.timeout_s))
        except InvalidRequest as error:
            # Each job stands alone: what is wrong is the org, or else the jobs are too large one by one.
            bad.update((id, str(error)) for id in ids)  # noqa: A001
            return
        except WindrowError as error:
            self._rest(request.org, error)
            return
        failure: WindrowError | None = None
        for id, result in zip(ids, results, strict=True):  # noqa: A001
            match result.error:
                case None:
                    sent.append(id)
                case InvalidRequest():
                    bad[id] = str(result.error)
                case other:
                    failure = other
        if failure is None:
            self._resting.pop(request.org, None)
        else:
            self._rest(request.org, failure)

    def _rest(self, org: str, error: WindrowError) -> None:
        rest = self._resting.get(org)
        if rest is None:
            level = logging.WARNING if isinstance(error, TRANSIENT) else logging.ERROR
            log.log(level, "outbox: the jobs of org %s wait; they are tried again: %s", org, error)
            rest = self._resting[org] = _Rest(until=0.0, next_s=_REST_FIRST_S, patience_s=_SEND_FIRST_S)
        pause_s = patient_pause_s(error, own_s=rest.next_s * random.uniform(0.5, 1.0))
        rest.until = time.monotonic() + pause_s
        rest.next_s = min(_REST_MAX_S, rest.next_s * 2)
        if isinstance(error, DeadlineExceeded):
            # It may only be slow, and would never be done.
            rest.patience_s = min(_SEND_MAX_S, rest.patience_s * 2)


def _read(row: _Row) -> job_pb2.NewJob | _Bad:
    """The job to send, its delay shortened by the time it spent in the outbox."""
    try:
        job = job_pb2.NewJob.FromString(row.job)
        made = made_at(job.id)
    except (DecodeError, ValueError) as error:
        return _Bad(f"the row's job cannot be read: {error}")
    age_s = time.time() - made
    if age_s > _HORIZON.total_seconds():
        return _Bad(
            f"its id was made {age_s / 86400:.1f} days ago, and one older than {_HORIZON.days} days is refused: "
            "a second copy could no longer be told; add the job anew and delete this row"
        )
    if job.HasField("delay"):
        left_s = job.delay.ToNanoseconds() / 1e9 - row.age_s
        job.delay.CopyFrom(duration(max(0.0, left_s)))
    return job

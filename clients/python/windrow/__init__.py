"""Windrow's client: enqueues jobs and runs them.

    async with windrow.Client(org="acme") as client:
        await client.enqueue("emails", "send_email", {"to": "ada@example.com"})

`Client` is for asyncio, `SyncClient` has the same methods for synchronous code, `Worker` runs handlers, and
`windrow.outbox` (install `windrow[outbox]`) enqueues jobs inside your own Postgres transactions.
"""

from windrow.admin import JobPage, QueueRecord, QueueStats, Restored, RestoreRefusal, Stats
from windrow.batches import Batch
from windrow.client import Client
from windrow.errors import (
    AlreadyExists,
    ClientClosed,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidJob,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    RouterError,
    RouterTooOld,
    Unavailable,
    Violation,
    WindrowError,
)
from windrow.failures import Failure, TimedOut
from windrow.ids import nth_id, uuid7
from windrow.job_changes import BulkChange, JobFilter
from windrow.jobs import (
    Answer,
    Attempt,
    AttemptOutcome,
    Enqueued,
    ExponentialRetry,
    FixedRetry,
    Job,
    JobOptions,
    JobRecord,
    JobState,
    Lost,
    LostReason,
    NewJob,
    RetryPolicy,
)
from windrow.outcomes import Kill, Retry, Snooze
from windrow.payloads import Payload
from windrow.processes import Crashed
from windrow.reports import Progress
from windrow.server_info import ServerInfo
from windrow.signals import run
from windrow.sync_client import SyncClient
from windrow.worker import Worker

__all__ = [
    "AlreadyExists",
    "Answer",
    "Attempt",
    "AttemptOutcome",
    "Batch",
    "BulkChange",
    "Client",
    "ClientClosed",
    "Crashed",
    "DeadlineExceeded",
    "Enqueued",
    "ExponentialRetry",
    "FailedPrecondition",
    "Failure",
    "FixedRetry",
    "InvalidJob",
    "InvalidRequest",
    "Job",
    "JobFilter",
    "JobOptions",
    "JobPage",
    "JobRecord",
    "JobState",
    "Kill",
    "Lost",
    "LostReason",
    "NewJob",
    "NotFound",
    "Payload",
    "PermissionDenied",
    "Progress",
    "QueueRecord",
    "QueueStats",
    "ResourceExhausted",
    "RestoreRefusal",
    "Restored",
    "Retry",
    "RetryPolicy",
    "RouterError",
    "RouterTooOld",
    "ServerInfo",
    "Snooze",
    "Stats",
    "SyncClient",
    "TimedOut",
    "Unavailable",
    "Violation",
    "WindrowError",
    "Worker",
    "nth_id",
    "run",
    "uuid7",
]

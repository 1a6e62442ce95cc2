"""Windrow's client: enqueue jobs, and work them.

    async with windrow.Client(org="acme") as client:
        await client.enqueue("emails", "send_email", {"to": "ada@example.com"})

`Client` is the asyncio face, `SyncClient` the same one for plain code, `Worker` runs handlers, and `windrow.outbox`
(the extra `windrow[outbox]`) enqueues inside a Postgres transaction of your own.
"""

from windrow.client import Client
from windrow.errors import (
    AlreadyExists,
    ClientClosed,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidJob,
    InvalidRequest,
    Kill,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Retry,
    RouterError,
    RouterTooOld,
    Unavailable,
    Violation,
    WindrowError,
)
from windrow.ids import uuid7
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
    NewJob,
    RetryPolicy,
)
from windrow.payloads import Payload
from windrow.signals import run
from windrow.sync import SyncClient
from windrow.worker import Worker

__all__ = [
    "AlreadyExists",
    "Answer",
    "Attempt",
    "AttemptOutcome",
    "Client",
    "ClientClosed",
    "DeadlineExceeded",
    "Enqueued",
    "ExponentialRetry",
    "FailedPrecondition",
    "FixedRetry",
    "InvalidJob",
    "InvalidRequest",
    "Job",
    "JobOptions",
    "JobRecord",
    "JobState",
    "Kill",
    "NewJob",
    "NotFound",
    "Payload",
    "PermissionDenied",
    "ResourceExhausted",
    "Retry",
    "RetryPolicy",
    "RouterError",
    "RouterTooOld",
    "SyncClient",
    "Unavailable",
    "Violation",
    "WindrowError",
    "Worker",
    "run",
    "uuid7",
]

"""The names of `windrow`, which `import windrow` makes available."""

from windrow.admin import JobPage, QueueRecord, QueueStats, Restored, RestoreRefusal, Stats
from windrow.batches import Batch
from windrow.causes import Cause, JobExplanation, QueueExplanation
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
    TlsFailed,
    Unauthenticated,
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
    RunCause,
    ScheduledRun,
)
from windrow.limits import Limit, LimitMeasure, LimitReached
from windrow.outcomes import Kill, Retry, Snooze
from windrow.payloads import Payload
from windrow.processes import Crashed
from windrow.reports import Progress
from windrow.schedules import (
    Backfilled,
    CatchUp,
    Overlap,
    RunOutcome,
    Schedule,
    ScheduleRecord,
    ScheduleRun,
    SkipReason,
)
from windrow.server_info import ServerInfo
from windrow.signals import run
from windrow.sync_client import SyncClient
from windrow.tls import Tls
from windrow.tokens import Token
from windrow.worker import ALL, Worker

__all__ = [
    "ALL",
    "AlreadyExists",
    "Answer",
    "Attempt",
    "AttemptOutcome",
    "Backfilled",
    "Batch",
    "BulkChange",
    "CatchUp",
    "Cause",
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
    "JobExplanation",
    "JobFilter",
    "JobOptions",
    "JobPage",
    "JobRecord",
    "JobState",
    "Kill",
    "Limit",
    "LimitMeasure",
    "LimitReached",
    "Lost",
    "LostReason",
    "NewJob",
    "NotFound",
    "Overlap",
    "Payload",
    "PermissionDenied",
    "Progress",
    "QueueExplanation",
    "QueueRecord",
    "QueueStats",
    "ResourceExhausted",
    "RestoreRefusal",
    "Restored",
    "Retry",
    "RetryPolicy",
    "RouterError",
    "RouterTooOld",
    "RunCause",
    "RunOutcome",
    "Schedule",
    "ScheduleRecord",
    "ScheduleRun",
    "ScheduledRun",
    "ServerInfo",
    "SkipReason",
    "Snooze",
    "Stats",
    "SyncClient",
    "TimedOut",
    "Tls",
    "TlsFailed",
    "Token",
    "Unauthenticated",
    "Unavailable",
    "Violation",
    "WindrowError",
    "Worker",
    "nth_id",
    "run",
    "uuid7",
]

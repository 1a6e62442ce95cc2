"""For tests of who may call which method: a request for each method of the contract, and the ways in which routers
refuse a caller.

A new way to prove an identity adds its rows to `WAYS`, or to a list like it; tests then run them for every method.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import grpc
import psycopg
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc.error_details_pb2 import ErrorInfo

from router.codec.lease_verbs import VERBS, LeaseVerb
from router.codec.scaler import METRIC
from router.gate.auth.access import access_of
from router.gate.auth.scopes import Scope
from router.keda import externalscaler_pb2
from shard.admin import api_keys
from shard.postgres.pool import Database
from shard.vocabulary import CATALOG, OrgId
from tests.issuers import BAD_TOKENS
from tests.issuers import token as signed_token
from tests.jobs import job_id
from tests.routers import PATIENCE_S, Routers, detail
from tests.streams import QUEUE, acks, extends, new_job, start, window
from tests.verbs import lease_request
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, limits_pb2, queue_pb2, schedules_pb2, server_pb2, workflows_pb2

Metadata = tuple[tuple[str, str], ...]
SERVICES = (
    queue_pb2.DESCRIPTOR.services_by_name["Queue"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
    cluster_pb2.DESCRIPTOR.services_by_name["Cluster"],
    schedules_pb2.DESCRIPTOR.services_by_name["Schedules"],
    workflows_pb2.DESCRIPTOR.services_by_name["Workflows"],
    externalscaler_pb2.DESCRIPTOR.services_by_name["ExternalScaler"],
)
METHODS = {f"{service.full_name}/{method.name}": method for service in SERVICES for method in service.methods}
IN_ORG = [scope.value for scope in Scope if scope is not Scope.CLUSTER]
ALL = [scope.value for scope in Scope]
# Routers change these tables by themselves. Among them are the audit log of what callers may do, counts of jobs, and
# the consumers that routers have seen. Routers also merge rows of the tally, which does not change the sums of the
# tally.
_VOLATILE = ("mark", "shard", "audit", "org_figures", "org_figures_counted", "consumer_seen")
# These tables have a row for each slot.
_LARGE = {"placement", "owned_slot"}
_TABLES = """
SELECT relname FROM pg_class
WHERE relnamespace = 'windrow'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An org, and the things of this org that a caller may name."""

    org: str
    queue: str = QUEUE
    # The ids of a ready, a dead and a finished job.
    ready: str = field(default_factory=job_id)
    dead: str = field(default_factory=job_id)
    finished: str = field(default_factory=job_id)
    lease: bytes = b""
    dedup_key: str = "once"
    # The page tokens of a ListJobs call and of a ListQueues call.
    page_token: str = ""
    queue_page_token: str = ""
    # A schedule, and the page token of a ListSchedules call.
    schedule: str = "daily"
    schedule_page_token: str = ""
    # A workflow whose node "second" waits for "first", the lease of the job of "first", and two page tokens: of a list
    # of the workflow's nodes, and of a ListWorkflows call.
    workflow: str = field(default_factory=job_id)
    cancelled_workflow: str = field(default_factory=job_id)
    node_lease: bytes = b""
    node_page_token: str = ""
    workflow_page_token: str = ""

    def told_to(self, org: str) -> Target:
        """Returns these things with another org. A caller of the other org then names things that do not belong to
        it."""
        return replace(self, org=org)


def new_schedule(org: str, name: str) -> schedules_pb2.CreateScheduleRequest:
    """Returns a request for a schedule that is not due for a year."""
    spec = schedules_pb2.ScheduleSpec(cron="0 0 1 1 *", start=Timestamp(seconds=int(time.time()) + 86_400))
    job = job_pb2.JobTemplate(queue=QUEUE, kind="send")
    return schedules_pb2.CreateScheduleRequest(org=org, name=name, spec=spec, job=job)


def new_node(name: str, *after: str) -> workflows_pb2.NewNode:
    job = job_pb2.NewJob(template=job_pb2.JobTemplate(queue="flows", kind="send"))
    return workflows_pb2.NewNode(name=name, job=job, after=[workflows_pb2.WorkflowEdge(node=one) for one in after])


def signal_node(name: str) -> workflows_pb2.NewNode:
    node = new_node(name)
    node.job.delay.FromSeconds(3600)
    node.signal = True
    return node


def new_workflow(org: str, workflow: str) -> workflows_pb2.StartWorkflowRequest:
    nodes = [new_node("first"), new_node("second", "first"), signal_node("approved")]
    return workflows_pb2.StartWorkflowRequest(org=org, id=workflow, nodes=nodes)


def scaled(org: str, queue: str) -> externalscaler_pb2.ScaledObjectRef:
    metadata = {"org": org, "queue": queue, "jobsPerWorker": "10"}
    return externalscaler_pb2.ScaledObjectRef(scalerMetadata=metadata)


def _naming_lease(verb: LeaseVerb, it: Target) -> Message:
    request: Message = lease_request(verb, [it.lease], it.org)
    return request


# For each method, a request that callers of the org may make. If the method changes data, this request changes some
# data.
REQUESTS: Mapping[str, Callable[[Target], Message]] = {
    "externalscaler.ExternalScaler/IsActive": lambda it: scaled(it.org, it.queue),
    "externalscaler.ExternalScaler/StreamIsActive": lambda it: scaled(it.org, it.queue),
    "externalscaler.ExternalScaler/GetMetricSpec": lambda it: scaled(it.org, it.queue),
    "externalscaler.ExternalScaler/GetMetrics": lambda it: externalscaler_pb2.GetMetricsRequest(
        scaledObjectRef=scaled(it.org, it.queue), metricName=METRIC
    ),
    "windrow.v1.Queue/Enqueue": lambda it: queue_pb2.EnqueueRequest(org=it.org, jobs=[new_job()]),
    "windrow.v1.Queue/Dequeue": lambda it: queue_pb2.DequeueRequest(org=it.org, queues=[it.queue], max_jobs=10),
    "windrow.v1.Queue/Consume": lambda it: queue_pb2.ConsumeRequest(start=start(it.org, it.queue), credit=10),
    **{f"windrow.v1.Queue/{verb.method}": partial(_naming_lease, verb) for verb in VERBS},
    "windrow.v1.Queue/Extend": lambda it: queue_pb2.ExtendRequest(
        org=it.org, extends=extends(it.lease), visibility_window=window(3600)
    ),
    "windrow.v1.Queue/GetJobs": lambda it: queue_pb2.GetJobsRequest(org=it.org, ids=[it.ready, it.dead, it.finished]),
    "windrow.v1.Queue/FindJob": lambda it: queue_pb2.FindJobRequest(org=it.org, queue=it.queue, dedup_key=it.dedup_key),
    "windrow.v1.Queue/CancelJobs": lambda it: queue_pb2.CancelJobsRequest(org=it.org, ids=[it.ready, it.dead]),
    "windrow.v1.Queue/AlterJobs": lambda it: queue_pb2.AlterJobsRequest(org=it.org, ids=[it.ready], priority=2),
    "windrow.v1.Queue/RedriveJobs": lambda it: queue_pb2.RedriveJobsRequest(org=it.org, ids=[it.dead]),
    "windrow.v1.Queue/GetServerInfo": lambda _: server_pb2.GetServerInfoRequest(),
    "windrow.v1.Queue/WaitJob": lambda it: queue_pb2.WaitJobRequest(org=it.org, id=it.finished),
    "windrow.v1.Admin/CreateQueue": lambda it: admin_pb2.CreateQueueRequest(org=it.org, queue="new"),
    "windrow.v1.Admin/UpdateQueue": lambda it: admin_pb2.UpdateQueueRequest(
        org=it.org, queue=it.queue, config=admin_pb2.QueueConfig(max_attempts=7)
    ),
    "windrow.v1.Admin/GetQueue": lambda it: admin_pb2.GetQueueRequest(org=it.org, queue=it.queue),
    "windrow.v1.Admin/ListQueues": lambda it: admin_pb2.ListQueuesRequest(org=it.org),
    "windrow.v1.Admin/DeleteQueue": lambda it: admin_pb2.DeleteQueueRequest(org=it.org, queue="empty"),
    "windrow.v1.Admin/PauseQueue": lambda it: admin_pb2.PauseQueueRequest(org=it.org, queue=it.queue),
    "windrow.v1.Admin/ResumeQueue": lambda it: admin_pb2.ResumeQueueRequest(org=it.org, queue=it.queue),
    "windrow.v1.Admin/ListQuarantines": lambda it: admin_pb2.ListQuarantinesRequest(org=it.org),
    "windrow.v1.Admin/QuarantineKind": lambda it: admin_pb2.QuarantineKindRequest(
        org=it.org, queue=it.queue, kind="none"
    ),
    "windrow.v1.Admin/ReleaseKind": lambda it: admin_pb2.ReleaseKindRequest(org=it.org, queue=it.queue, kind="none"),
    "windrow.v1.Admin/PurgeQueue": lambda it: admin_pb2.PurgeQueueRequest(org=it.org, queue=it.queue),
    "windrow.v1.Admin/ListJobs": lambda it: admin_pb2.ListJobsRequest(org=it.org, page_token=it.page_token),
    "windrow.v1.Admin/CountJobs": lambda it: admin_pb2.CountJobsRequest(org=it.org),
    "windrow.v1.Admin/RestoreJobs": lambda it: admin_pb2.RestoreJobsRequest(
        org=it.org, jobs=[admin_pb2.RestoreJob(id=it.finished)]
    ),
    "windrow.v1.Admin/RedriveQueue": lambda it: admin_pb2.RedriveQueueRequest(org=it.org, queue=it.queue),
    "windrow.v1.Admin/GetStats": lambda it: admin_pb2.GetStatsRequest(org=it.org),
    "windrow.v1.Admin/ExplainJob": lambda it: admin_pb2.ExplainJobRequest(org=it.org, id=it.ready),
    "windrow.v1.Admin/ExplainQueue": lambda it: admin_pb2.ExplainQueueRequest(org=it.org, queue=it.queue),
    "windrow.v1.Schedules/CreateSchedule": lambda it: new_schedule(it.org, "new"),
    "windrow.v1.Schedules/UpdateSchedule": lambda it: schedules_pb2.UpdateScheduleRequest(
        org=it.org, name=it.schedule, spec=schedules_pb2.ScheduleSpec(note="changed")
    ),
    "windrow.v1.Schedules/GetSchedule": lambda it: schedules_pb2.GetScheduleRequest(org=it.org, name=it.schedule),
    "windrow.v1.Schedules/ListSchedules": lambda it: schedules_pb2.ListSchedulesRequest(org=it.org),
    "windrow.v1.Schedules/DeleteSchedule": lambda it: schedules_pb2.DeleteScheduleRequest(org=it.org, name="other"),
    "windrow.v1.Schedules/PauseSchedule": lambda it: schedules_pb2.PauseScheduleRequest(org=it.org, name=it.schedule),
    "windrow.v1.Schedules/ResumeSchedule": lambda it: schedules_pb2.ResumeScheduleRequest(org=it.org, name=it.schedule),
    "windrow.v1.Schedules/TriggerSchedule": lambda it: schedules_pb2.TriggerScheduleRequest(
        org=it.org, name=it.schedule
    ),
    "windrow.v1.Schedules/BackfillSchedule": lambda it: schedules_pb2.BackfillScheduleRequest(
        org=it.org, name=it.schedule, begin=Timestamp(seconds=86_400 * 20_000), end=Timestamp(seconds=86_400 * 20_002)
    ),
    "windrow.v1.Schedules/PreviewSchedule": lambda it: schedules_pb2.PreviewScheduleRequest(
        org=it.org, name=it.schedule
    ),
    "windrow.v1.Workflows/StartWorkflow": lambda it: new_workflow(it.org, job_id()),
    "windrow.v1.Workflows/AddNodes": lambda it: workflows_pb2.AddNodesRequest(
        org=it.org, id=it.workflow, lease=it.node_lease, nodes=[new_node("third")]
    ),
    "windrow.v1.Workflows/GetWorkflow": lambda it: workflows_pb2.GetWorkflowRequest(org=it.org, id=it.workflow),
    "windrow.v1.Workflows/ListNodes": lambda it: workflows_pb2.ListNodesRequest(org=it.org, id=it.workflow),
    "windrow.v1.Workflows/ListWorkflows": lambda it: workflows_pb2.ListWorkflowsRequest(org=it.org),
    "windrow.v1.Workflows/CancelWorkflow": lambda it: workflows_pb2.CancelWorkflowRequest(org=it.org, id=it.workflow),
    "windrow.v1.Workflows/PauseWorkflow": lambda it: workflows_pb2.PauseWorkflowRequest(org=it.org, id=it.workflow),
    "windrow.v1.Workflows/ResumeWorkflow": lambda it: workflows_pb2.ResumeWorkflowRequest(org=it.org, id=it.workflow),
    "windrow.v1.Workflows/SkipNode": lambda it: workflows_pb2.SkipNodeRequest(
        org=it.org, id=it.workflow, node="second"
    ),
    "windrow.v1.Workflows/SignalNode": lambda it: workflows_pb2.SignalNodeRequest(
        org=it.org, id=it.workflow, node="approved"
    ),
    "windrow.v1.Workflows/RetryWorkflow": lambda it: workflows_pb2.RetryWorkflowRequest(
        org=it.org, id=it.cancelled_workflow, new_id=job_id()
    ),
    "windrow.v1.Workflows/ListParents": lambda it: workflows_pb2.ListParentsRequest(org=it.org, id=it.workflow, node=1),
    "windrow.v1.Admin/ListLimits": lambda it: admin_pb2.ListLimitsRequest(org=it.org),
    "windrow.v1.Cluster/ListShards": lambda _: cluster_pb2.ListShardsRequest(),
    "windrow.v1.Cluster/CheckShard": lambda _: cluster_pb2.CheckShardRequest(shard="s1"),
    "windrow.v1.Cluster/ListOrgs": lambda _: cluster_pb2.ListOrgsRequest(),
    "windrow.v1.Cluster/SetLimit": lambda _: cluster_pb2.SetLimitRequest(
        org="limited", measure=limits_pb2.LIMIT_MEASURE_JOBS, amount=1, interval=window(10)
    ),
    "windrow.v1.Cluster/ClearLimit": lambda _: cluster_pb2.ClearLimitRequest(
        org="limited", measure=limits_pb2.LIMIT_MEASURE_JOBS
    ),
    "windrow.v1.Cluster/SetWeight": lambda _: cluster_pb2.SetWeightRequest(org="weighed", weight=2),
    "windrow.v1.Cluster/ListWeights": lambda _: cluster_pb2.ListWeightsRequest(),
    "windrow.v1.Cluster/ListAllLimits": lambda _: cluster_pb2.ListAllLimitsRequest(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """Routers of a cluster that authenticates its callers. Its catalog is on the shard s1. Connections to the shards
    stay open: tests make hundreds of keys and read all rows hundreds of times."""

    routers: Routers
    _runner: asyncio.Runner
    _catalog: Database
    _shards: Mapping[str, psycopg.Connection[tuple[Any, ...]]]

    def new_key(self, *, org: str | None = None, scopes: Iterable[str] = IN_ORG) -> str:
        """Creates a key. Without an org, the key is for all orgs."""
        of_org = None if org is None else OrgId(org)
        _, text = self._runner.run(
            api_keys.create(self._catalog, org=of_org, scopes=list(scopes), name="", expires_in_s=None)
        )
        return text

    def key_of(self, org: str, *, scopes: Iterable[str] = IN_ORG) -> str:
        return self.new_key(org=org, scopes=scopes)

    def revoke(self, key: str) -> None:
        self._runner.run(api_keys.revoke(self._catalog, id_of(key)[3:]))

    def expire(self, key: str) -> None:
        changed = self._shards["s1"].execute(
            "UPDATE windrow.api_key SET expires_at = now() - interval '1 s' WHERE id = %s", [id_of(key)[3:]]
        )
        assert changed.rowcount == 1

    def rows(self) -> dict[tuple[str, str], list[str]]:
        """Returns all rows of all tables, by shard and table. Rows of partitions are with their table. For a large
        table, returns only a hash of the rows, because tests call this function hundreds of times."""
        rows: dict[tuple[str, str], list[str]] = {}
        for shard, database in self._shards.items():
            for (table,) in database.execute(_TABLES).fetchall():
                source = f"windrow.{table}"
                if table == "tally":
                    source = "(SELECT org_id, sum(accepted) FROM windrow.tally GROUP BY org_id)"
                told = "(to_jsonb(t) - 'last_used')::text"
                if table in _LARGE:
                    told = "concat(count(*), ' ', sum(hash_record_extended(t, 0)))"
                if table not in _VOLATILE:
                    found = database.execute(f"SELECT {told} FROM {source} t ORDER BY 1".encode())
                    rows[shard, table] = [text for (text,) in found.fetchall()]
        return rows


@contextlib.contextmanager
def open_secured(routers: Routers, dsns: Mapping[str, str]) -> Generator[Secured, None, None]:
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        catalog = Database(CATALOG, dsns["s1"], connections=1)
        runner.run(catalog.open())
        stack.callback(lambda: runner.run(catalog.close()))
        shards = {name: stack.enter_context(psycopg.connect(dsn, autocommit=True)) for name, dsn in dsns.items()}
        yield Secured(routers=routers, _runner=runner, _catalog=catalog, _shards=shards)


def id_of(key: str) -> str:
    """Returns the id by which operators name a key: the text before the key's secret. The secret may contain a _
    too."""
    return "_".join(key.split("_")[:2])


def bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


def call(channel: grpc.Channel, name: str, request: Message, metadata: Metadata) -> list[Any]:
    """Calls a method with one request. Returns its answers, but only the first answer of a StreamIsActive. A Consume
    closes its side after the request. Raises grpc.RpcError."""
    method: MethodDescriptor = METHODS[name]
    decode = message_factory.GetMessageClass(method.output_type).FromString
    path, encoded = f"/{name}", request.SerializeToString()
    if method.client_streaming:
        stream: Any = channel.stream_stream(path, response_deserializer=decode)
        return list(stream(iter([encoded]), timeout=PATIENCE_S, metadata=metadata))
    if method.server_streaming:
        answers: Any = channel.unary_stream(path, response_deserializer=decode)
        answered = answers(encoded, timeout=PATIENCE_S, metadata=metadata)
        if method.name != "StreamIsActive":
            return list(answered)
        first = [next(answered)]
        answered.cancel()
        return first
    unary: Any = channel.unary_unary(path, response_deserializer=decode)
    return [unary(encoded, timeout=PATIENCE_S, metadata=metadata)]


def refusal(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Returns the code and the reason of a refused call."""
    info = detail(error, ErrorInfo)
    assert info is not None, error
    # The error that a call raises is a grpc.Call, too.
    return cast("grpc.Call", error).code(), info.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way in which a caller is refused. `metadata` returns the metadata of a call. Its arguments are the org of the
    call, and the scope that the method needs, if any."""

    what: str
    metadata: Callable[[Secured, str, Scope | None], Metadata]
    code: grpc.StatusCode
    reason: str
    # Whether a method refuses callers in this way.
    concerns: Callable[[str], bool] = lambda _: True


UNAUTHENTICATED, PERMISSION_DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


def scope_of(method: str) -> Scope | None:
    return access_of(METHODS[method], org_elsewhere=method.startswith("externalscaler.")).scope


def _names_org(method: str) -> bool:
    return scope_of(method) not in (None, Scope.CLUSTER)


def _but(scope: Scope | None) -> list[str]:
    return [one for one in IN_ORG if scope is None or one != scope.value]


def _wrong_secret(it: Secured, org: str, _: Scope | None) -> Metadata:
    return bearer(f"{id_of(it.key_of(org))}_{secrets.token_urlsafe(32)}")


def _revoked(it: Secured, org: str, _: Scope | None) -> Metadata:
    key = it.key_of(org)
    it.revoke(key)
    return bearer(key)


def _expired(it: Secured, org: str, _: Scope | None) -> Metadata:
    key = it.key_of(org)
    it.expire(key)
    return bearer(key)


def _twice(it: Secured, org: str, _: Scope | None) -> Metadata:
    key = it.key_of(org)
    return bearer(key) + bearer(key)


WAYS = [
    Way(what="no token", metadata=lambda *_: (), code=UNAUTHENTICATED, reason="CREDENTIALS_MISSING"),
    *(
        Way(what=what, metadata=metadata, code=UNAUTHENTICATED, reason="CREDENTIALS_INVALID")
        for what, metadata in (
            ("another scheme", lambda *_: (("authorization", "Basic d2luZHJvdw=="),)),
            ("a token of no kind", lambda *_: bearer("windrow")),
            ("no characters", lambda *_: bearer("")),
            ("a malformed key", lambda *_: bearer("wr_abcdefgh2345_short")),
            ("a key with a bad character", lambda *_: bearer(f"wr_abcdefgh234'_{secrets.token_urlsafe(32)}")),
            ("an unknown key", lambda *_: bearer(f"wr_abcdefgh2345_{secrets.token_urlsafe(32)}")),
            ("an oversized token", lambda *_: bearer("wr_" + "a" * 7000)),
            ("a wrong secret", _wrong_secret),
            ("two tokens", _twice),
        )
    ),
    Way(what="an expired key", metadata=_expired, code=UNAUTHENTICATED, reason="CREDENTIALS_EXPIRED"),
    Way(what="a revoked key", metadata=_revoked, code=UNAUTHENTICATED, reason="CREDENTIALS_REVOKED"),
    Way(
        what="all scopes but the one that is needed",
        metadata=lambda it, org, scope: bearer(it.key_of(org, scopes=_but(scope))),
        code=PERMISSION_DENIED,
        reason="SCOPE_MISSING",
        concerns=lambda method: scope_of(method) is not None,
    ),
    Way(
        what="the scope cluster only",
        metadata=lambda it, _org, _scope: bearer(it.new_key(scopes=["cluster"])),
        code=PERMISSION_DENIED,
        reason="SCOPE_MISSING",
        concerns=_names_org,
    ),
    Way(
        what="all orgs without the scope cluster",
        metadata=lambda it, _org, _scope: bearer(it.new_key()),
        code=PERMISSION_DENIED,
        reason="SCOPE_MISSING",
        concerns=lambda method: scope_of(method) is Scope.CLUSTER,
    ),
    Way(
        what="a key of another org",
        metadata=lambda it, org, _scope: bearer(it.key_of(f"not-{org}")),
        code=PERMISSION_DENIED,
        reason="ORG_FORBIDDEN",
        concerns=_names_org,
    ),
]


def _jwt(make: Callable[[], str]) -> Callable[[Secured, str, Scope | None], Metadata]:
    return lambda *_: bearer(make())


# The ways in which routers that know one key of the issuer refuse a caller.
OF_JWT = [
    *(
        Way(
            what=f"a JSON Web Token: {what}",
            metadata=_jwt(bad.make),
            code=UNAUTHENTICATED,
            reason="CREDENTIALS_EXPIRED" if what == "expired" else "CREDENTIALS_INVALID",
        )
        for what, bad in BAD_TOKENS.items()
    ),
    Way(
        what="a JSON Web Token with all scopes but the one that is needed",
        metadata=lambda _, org, scope: bearer(signed_token(org=org, scope=_but(scope))),
        code=PERMISSION_DENIED,
        reason="SCOPE_MISSING",
        concerns=lambda method: scope_of(method) is not None,
    ),
    Way(
        what="a JSON Web Token of another org",
        metadata=lambda _, org, _scope: bearer(signed_token(org=f"not-{org}")),
        code=PERMISSION_DENIED,
        reason="ORG_FORBIDDEN",
        concerns=_names_org,
    ),
]


def things_of(channel: grpc.Channel, org: str, metadata: Metadata) -> Target:
    """Makes the things of an org that a Target names."""
    ready, dead, finished, leased = (job_id() for _ in range(4))

    def do(name: str, request: Message) -> Any:
        return call(channel, f"windrow.v1.{name}", request, metadata)[0]

    def lease(queue: str) -> list[job_pb2.LeasedJob]:
        request = queue_pb2.DequeueRequest(org=org, queues=[queue], visibility_window=window(3600))
        return list(do("Queue/Dequeue", request).jobs)

    do("Queue/Enqueue", queue_pb2.EnqueueRequest(org=org, jobs=[new_job(id=dead)]))
    failure = job_pb2.Failure(message="as the test wants", permanent=True)
    nacks = [queue_pb2.Nack(lease=job.lease, failure=failure) for job in lease(QUEUE)]
    do("Queue/Nack", queue_pb2.NackRequest(org=org, nacks=nacks))
    do("Queue/Enqueue", queue_pb2.EnqueueRequest(org=org, jobs=[new_job(id=finished)]))
    do("Queue/Ack", queue_pb2.AckRequest(org=org, acks=acks(lease(QUEUE))))
    do("Queue/Enqueue", queue_pb2.EnqueueRequest(org=org, jobs=[new_job(id=leased)]))
    (held,) = lease(QUEUE)
    keyed = new_job(id=ready)
    keyed.dedup.key = "once"
    do("Queue/Enqueue", queue_pb2.EnqueueRequest(org=org, jobs=[keyed]))
    do("Admin/CreateQueue", admin_pb2.CreateQueueRequest(org=org, queue="empty"))
    for name in ("daily", "other"):
        do("Schedules/CreateSchedule", new_schedule(org, name))
    schedules = do("Schedules/ListSchedules", schedules_pb2.ListSchedulesRequest(org=org, page_size=1))
    assert schedules.next_page_token
    cancelled_workflow, workflow = job_id(ahead_ms=-1000), job_id()
    for one in (cancelled_workflow, workflow):
        do("Workflows/StartWorkflow", new_workflow(org, one))
    do("Workflows/CancelWorkflow", workflows_pb2.CancelWorkflowRequest(org=org, id=cancelled_workflow))
    (node,) = lease("flows")
    workflows = do("Workflows/ListWorkflows", workflows_pb2.ListWorkflowsRequest(org=org, page_size=1))
    assert workflows.next_page_token
    nodes = do("Workflows/ListNodes", workflows_pb2.ListNodesRequest(org=org, id=workflow, page_size=1))
    assert nodes.next_page_token
    page = do("Admin/ListJobs", admin_pb2.ListJobsRequest(org=org, page_size=1))
    queues = do("Admin/ListQueues", admin_pb2.ListQueuesRequest(org=org, page_size=1))
    assert page.next_page_token
    assert queues.next_page_token
    return Target(
        org=org,
        ready=ready,
        dead=dead,
        finished=finished,
        lease=held.lease,
        page_token=page.next_page_token,
        queue_page_token=queues.next_page_token,
        schedule_page_token=schedules.next_page_token,
        workflow=workflow,
        node_lease=node.lease,
        cancelled_workflow=cancelled_workflow,
        node_page_token=nodes.next_page_token,
        workflow_page_token=workflows.next_page_token,
    )

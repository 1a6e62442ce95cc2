"""Reads the state of the cluster after a run: the shards' tables directly, the books as `windrow check` does, and a
router's answers about jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import grpc

from proof.checker.evidence import Flow, Found, Health, Key, OrgBooks, Past, Row, RunName, State, StoredSchedule
from proof.postgres import ask
from shard.schedule import ScheduledRun
from windrow.v1 import admin_pb2, admin_pb2_grpc, cluster_pb2, cluster_pb2_grpc, job_pb2, queue_pb2, queue_pb2_grpc

_CHECK_S_MAX = 60.0
_ASK_AGAIN_S = 0.5
_JOBS_AT_ONCE = 1000
_STATES = {
    job_pb2.JOB_STATE_SCHEDULED: State.LIVE,
    job_pb2.JOB_STATE_READY: State.LIVE,
    job_pb2.JOB_STATE_LEASED: State.LIVE,
    job_pb2.JOB_STATE_BLOCKED: State.LIVE,
    job_pb2.JOB_STATE_SUCCEEDED: State.SUCCEEDED,
    job_pb2.JOB_STATE_DEAD: State.DEAD,
    job_pb2.JOB_STATE_CANCELLED: State.CANCELLED,
}
_COLUMNS = (
    # A job that a signal ended has the lease number 0, which stands for no lease.
    "j.id::text, q.org, q.queue, j.dedup_key, nullif(j.lease, 0), (extract(epoch FROM j.leased_at) * 1000000)::bigint, "
    "j.history, j.scheduled_run, j.attributes->>'terms', (extract(epoch FROM j.enqueued_at) * 1000000)::bigint"
)
_SIGNALS = (
    "CASE WHEN j.lease = 0 THEN convert_from(j.result, 'UTF8') END, "
    "CASE WHEN j.reason = 'no signal came in time' THEN (extract(epoch FROM j.finished_at) * 1000000)::bigint END"
)
_NO_SIGNALS = "NULL::text, NULL::bigint"
_ROWS = f"""
SELECT {_COLUMNS}, 'live', false, {_NO_SIGNALS} FROM windrow.job j JOIN windrow.queue q USING (queue_id)
UNION ALL SELECT {_COLUMNS}, 'dead', false, {_NO_SIGNALS} FROM windrow.dead j JOIN windrow.queue q USING (queue_id)
UNION ALL SELECT {_COLUMNS}, j.state, false, {_SIGNALS} FROM windrow.finished j JOIN windrow.queue q USING (queue_id)
UNION ALL SELECT {_COLUMNS}, CASE WHEN j.reason IS NULL THEN 'live' ELSE 'dead' END, true, {_NO_SIGNALS}
    FROM windrow.departing j JOIN windrow.queue q USING (queue_id)
"""
_FLOWS = """
SELECT
    w.id::text, o.org, w.state, jsonb_object_agg(n.job_id, n.state),
    coalesce(jsonb_object_agg(n.job_id, n.name) FILTER (WHERE n.added_by IS NOT NULL), '{}'),
    coalesce(array_agg(n.job_id::text) FILTER (WHERE n.callback IS NOT NULL), '{}'),
    coalesce(w.retry_of::text, ''), jsonb_object_agg(n.job_id, n.name), w.paused_at IS NOT NULL
FROM windrow.workflow w
JOIN windrow.org o USING (org_id)
JOIN windrow.workflow_node n USING (flow)
GROUP BY w.flow, o.org
"""
_SCHEDULES = """
SELECT s.id::text, o.org, s.name, (extract(epoch FROM s.created_at) * 1000000)::bigint
FROM windrow.schedule s
JOIN windrow.org o USING (org_id)
"""
_KEYS = "SELECT q.org, q.queue, d.key, d.job_id::text FROM windrow.dedup d JOIN windrow.queue q USING (queue_id)"


class Place(Protocol):
    """A shard whose database can be reached directly. It does not matter who started the database."""

    @property
    def name(self) -> str: ...

    @property
    def direct_dsn(self) -> str: ...


_Answer = TypeVar("_Answer", queue_pb2.GetJobsResponse, admin_pb2.GetStatsResponse)


def live_jobs(shards: Iterable[Place]) -> int:
    """Returns the number of live jobs, including the jobs that are departing."""
    count = "SELECT (SELECT count(*) FROM windrow.job) + (SELECT count(*) FROM windrow.departing WHERE reason IS NULL)"
    return sum(int(ask(shard.direct_dsn, count)[0][0]) for shard in shards)


def read_rows(shards: Iterable[Place]) -> list[Row]:
    return [row for shard in shards for row in rows_in(shard.direct_dsn, shard.name)]


def read_flows(shards: Iterable[Place]) -> list[Flow]:
    return [flow for shard in shards for flow in flows_in(shard.direct_dsn, shard.name)]


def flows_in(dsn: str, shard: str) -> list[Flow]:
    """Returns the workflows in a shard's database."""
    return [
        Flow(
            workflow=workflow,
            org=org,
            shard=shard,
            state=state,
            nodes=nodes,
            added=added,
            callbacks=frozenset(callbacks),
            retry_of=retry_of,
            names=names,
            is_paused=is_paused,
        )
        for workflow, org, state, nodes, added, callbacks, retry_of, names, is_paused in ask(dsn, _FLOWS)
    ]


def open_runs(shards: Iterable[Place]) -> int:
    """Returns the number of runs of schedules that wait for other runs, plus the number of schedules that still have
    instants to decide."""
    count = "SELECT count(*) FILTER (WHERE next_at IS NOT NULL) + coalesce(sum(buffered), 0) FROM windrow.schedule"
    return sum(int(ask(shard.direct_dsn, count)[0][0]) for shard in shards)


def read_schedules(shards: Iterable[Place]) -> list[StoredSchedule]:
    return [schedule for shard in shards for schedule in schedules_in(shard.direct_dsn, shard.name)]


def schedules_in(dsn: str, shard: str) -> list[StoredSchedule]:
    """Returns the schedules in a shard's database."""
    return [
        StoredSchedule(id=schedule, org=org, name=name, shard=shard, created_us=created_us)
        for schedule, org, name, created_us in ask(dsn, _SCHEDULES)
    ]


def keys_in(dsn: str) -> frozenset[Key]:
    """Returns the dedup keys in a shard's database."""
    return frozenset(Key._make(row) for row in ask(dsn, _KEYS))


def rows_in(dsn: str, shard: str) -> Iterator[Row]:
    """Yields a row for each job in a shard's database."""
    for row in ask(dsn, _ROWS):
        job, org, queue, key, lease, leased_at_us, history, run, terms, stored_us, state, departing, *ended = row
        signal, unsignalled_us = ended
        entries = json.loads(history) if isinstance(history, str) else history
        yield Row(
            job=job,
            org=org,
            queue=queue,
            shard=shard,
            state=State(state),
            key=key or "",
            lease=lease,
            leased_at_us=leased_at_us,
            past=[
                Past(
                    lease=int(entry["lease"]),
                    outcome=entry["outcome"],
                    leased_at_us=entry["leased_at_us"],
                    ended_at_us=entry["ended_at_us"],
                )
                for entry in entries or ()
            ],
            departing=departing,
            run=None if run is None else _run_name(run, terms),
            stored_us=stored_us,
            signal=signal,
            unsignalled_us=unsignalled_us,
        )


def _run_name(stored: str, terms: str | None) -> RunName:
    run = ScheduledRun.from_json(stored)
    return RunName(run.schedule, run.at, int(terms or 0))


def read_books(address: str, shards: Iterable[str]) -> list[OrgBooks]:
    """Returns the books of all orgs on these shards. Raises grpc.RpcError."""
    with grpc.insecure_channel(address) as channel:
        cluster = cluster_pb2_grpc.ClusterStub(channel)
        return [
            OrgBooks(shard=shard, org=one.org, accepted=one.accepted, balanced=one.balanced)
            for shard in shards
            for part in cluster.CheckShard(
                cluster_pb2.CheckShardRequest(shard=shard), timeout=_CHECK_S_MAX, wait_for_ready=True
            )
            for one in part.orgs
        ]


def read_found(address: str, jobs: Mapping[str, Sequence[str]]) -> list[Found]:
    """Returns, for each org, a router's answers about these jobs and the router's counts of the org's jobs. Raises
    grpc.RpcError."""
    with grpc.insecure_channel(address) as channel:
        queues, admin = queue_pb2_grpc.QueueStub(channel), admin_pb2_grpc.AdminStub(channel)
        return [
            Found(org=org, jobs=list(_look_up(queues, org, ids)), counted=_count(admin, org))
            for org, ids in jobs.items()
        ]


def _look_up(queues: queue_pb2_grpc.QueueStub, org: str, ids: Sequence[str]) -> Iterator[tuple[str, State]]:
    for at in range(0, len(ids), _JOBS_AT_ONCE):
        rest = ids[at : at + _JOBS_AT_ONCE]
        while rest:
            request = queue_pb2.GetJobsRequest(org=org, ids=rest)
            answer = _from_all_shards(partial(queues.GetJobs, request, timeout=_CHECK_S_MAX, wait_for_ready=True))
            yield from ((job.id, _STATES[job.state]) for job in answer.jobs)
            rest = list(answer.omitted_ids)


def _count(admin: admin_pb2_grpc.AdminStub, org: str) -> Mapping[State, int]:
    request = admin_pb2.GetStatsRequest(org=org, include_finished=True)
    counted = dict.fromkeys(State, 0)
    stats = _from_all_shards(lambda: admin.GetStats(request, timeout=_CHECK_S_MAX, wait_for_ready=True))
    for one in stats.queues:
        counted[State.LIVE] += one.scheduled + one.ready + one.leased + one.blocked
        counted[State.SUCCEEDED] += one.succeeded
        counted[State.DEAD] += one.dead
        counted[State.CANCELLED] += one.cancelled
    return counted


def read_health(address: str, shard: str, *, seconds_max: float) -> Health:
    """Returns the health of a shard as one router sees it. The kernel picks the router. Raises grpc.RpcError."""
    at_s = time.monotonic()
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        cluster = cluster_pb2_grpc.ClusterStub(channel)
        told = cluster.ListShards(cluster_pb2.ListShardsRequest(), timeout=seconds_max)
        (one,) = [one for one in told.shards if one.name == shard]
        return Health(at_s=at_s, reachable=one.reachable, error=one.error)


def _from_all_shards(ask: Callable[[], _Answer]) -> _Answer:
    """Returns the first answer that names no unreachable shards. Asks again until then, because on a busy machine a
    router may fail to reach a shard although there is no fault. Raises TimeoutError."""
    give_up_s = time.monotonic() + _CHECK_S_MAX
    while True:
        answer = ask()
        if not answer.unavailable_shards:
            return answer
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"shards {', '.join(answer.unavailable_shards)} did not answer for {_CHECK_S_MAX:g} s")
        time.sleep(_ASK_AGAIN_S)


def read_digest(address: str, *, seconds_max: float) -> str:
    """Returns the digest of the cluster file that a router uses. The kernel picks the router process, and may pick
    another one for each call. Raises grpc.RpcError."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        cluster = cluster_pb2_grpc.ClusterStub(channel)
        shards = cluster.ListShards(cluster_pb2.ListShardsRequest(), timeout=seconds_max)
        return str(shards.cluster_file.digest)

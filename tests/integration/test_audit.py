"""The audit log contains every change by an operator before the change begins, and later also the outcome of the
change."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
import typer
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from cli.audit import recorded
from cli.exits import ExitCode
from embedded import BinariesNotFound, open_clusters
from router.gate.audit import CLUSTER_CHANGES
from router.gate.change_rate import CHANGES_AT_ONCE, CHANGES_PER_S
from shard.admin import audit
from shard.placement.cluster_file import ClusterFileError, parse_cluster, read_cluster
from shard.postgres.pool import Database
from tests.access import bearer, open_secured
from tests.access import refusal as access_refusal
from tests.collector import collecting
from tests.command import windrow
from tests.jobs import job_id, job_message
from tests.postgres import Server, kill
from tests.routers import PATIENCE_S, Routers, Stubs, detail, running_routers, stubs, until, write_cluster
from windrow import Workflow
from windrow.v1 import access_pb2, admin_pb2, cluster_pb2, limits_pb2, queue_pb2, workflows_pb2

QUEUE = "mail"
_numbers = itertools.count(1)
SERVICES = (
    queue_pb2.DESCRIPTOR.services_by_name["Queue"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
    cluster_pb2.DESCRIPTOR.services_by_name["Cluster"],
)


def methods(scope: access_pb2.Scope.ValueType) -> dict[str, str]:
    """Returns the full names of all methods with this scope, by their short names."""
    return {
        method.name: f"{service.full_name}/{method.name}"
        for service in SERVICES
        for method in service.methods
        if method.GetOptions().Extensions[access_pb2.scope] == scope
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """A cluster with an audit log."""

    dsn: str
    config: Path
    routers: Routers
    stubs: Stubs

    def sql(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def ended(self, org: str, many: int = 1) -> list[tuple[Any, ...]]:
        """Waits until this many changes of the org have ended. Returns (method, outcome, counts, request) of each
        change, the oldest change first."""
        found: list[tuple[Any, ...]] = []

        def look() -> bool:
            found[:] = self.sql(
                "SELECT method, outcome, counts, request FROM windrow.audit "
                "WHERE org = %s AND ended_at IS NOT NULL ORDER BY at, method",
                org,
            )
            return len(found) >= many

        until(look, "the outcome is in the audit log")
        return found

    def enqueue(self, org: str, *, marker: str = "", many: int = 1) -> list[str]:
        jobs = [
            job_message(
                id=job_id(), queue=QUEUE, kind="greet", payload=marker.encode(), attributes={"campaign": marker or "1"}
            )
            for _ in range(many)
        ]
        self.stubs.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=jobs), timeout=PATIENCE_S)
        return [job.id for job in jobs]


@contextlib.contextmanager
def audited(dsn: str, folder: Path, *, catalog_dsn: str | None = None) -> Generator[Audited, None, None]:
    config = write_cluster(folder / "cluster.toml", {"s1": dsn}, catalog_dsn=catalog_dsn)
    config.write_text(config.read_text() + "\n[audit]\ndays = 30\n")
    with running_routers(config) as routers, stubs(routers.address) as both:
        yield Audited(dsn=catalog_dsn or dsn, config=config, routers=routers, stubs=both)


@pytest.fixture(scope="module")
def cluster(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Audited, None, None]:
    with audited(postgres.create("audited"), tmp_path_factory.mktemp("audited")) as made:
        yield made


@pytest.fixture
def name() -> str:
    return f"org-{next(_numbers)}"


def refusal(call: Callable[[], object]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value


def changes(org: str, one: str) -> dict[str, Message]:
    """Returns a request of each method that changes something. A new method needs a request here."""
    config = admin_pb2.QueueConfig(max_attempts=3)
    return {
        "CreateQueue": admin_pb2.CreateQueueRequest(org=org, queue="new", config=config),
        "UpdateQueue": admin_pb2.UpdateQueueRequest(
            org=org, queue=QUEUE, config=config, update_mask=FieldMask(paths=["max_attempts"])
        ),
        "DeleteQueue": admin_pb2.DeleteQueueRequest(org=org, queue="new"),
        "PauseQueue": admin_pb2.PauseQueueRequest(org=org, queue=QUEUE),
        "ResumeQueue": admin_pb2.ResumeQueueRequest(org=org, queue=QUEUE),
        "QuarantineKind": admin_pb2.QuarantineKindRequest(org=org, queue=QUEUE, kind="poison", reason="bad"),
        "ReleaseKind": admin_pb2.ReleaseKindRequest(org=org, queue=QUEUE, kind="poison"),
        "AlterJobs": queue_pb2.AlterJobsRequest(org=org, ids=[one], priority=2),
        "CancelJobs": queue_pb2.CancelJobsRequest(org=org, ids=[one], reason="no longer wanted"),
        "RedriveJobs": queue_pb2.RedriveJobsRequest(org=org, ids=[one]),
        "RedriveQueue": admin_pb2.RedriveQueueRequest(org=org, queue=QUEUE, kind="greet"),
        "RestoreJobs": admin_pb2.RestoreJobsRequest(org=org, jobs=[admin_pb2.RestoreJob(id=one)]),
        "PurgeQueue": admin_pb2.PurgeQueueRequest(org=org, queue=QUEUE, limit=10),
    }


def send(both: Stubs, method: str, request: Message) -> Any:
    stub = next(one for one in (both.queue, both.admin, both.cluster) if hasattr(one, method))
    return getattr(stub, method)(request, timeout=PATIENCE_S)


# ── What is refused, and what fails ──────────────────────────────────────────────────────────────────────────────────


def test_a_change_is_refused_while_its_intent_cannot_be_written_and_reads_go_on(
    postgres: Server, tmp_path: Path, name: str
) -> None:
    try:
        with open_clusters(["catalog"], ephemeral=True) as servers:
            dsn = postgres.create("unaudited")
            with audited(dsn, tmp_path, catalog_dsn=servers.dsns["catalog"]) as cluster:
                cluster.enqueue(name)
                kill(servers["catalog"])
                request = admin_pb2.PurgeQueueRequest(org=name, queue=QUEUE)
                error = refusal(lambda: send(cluster.stubs, "PurgeQueue", request))
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert "nothing was changed, because the audit log cannot be written" in (error.details() or "")
                info = detail(error, error_details_pb2.ErrorInfo)
                assert info is not None
                assert info.reason == "SHARD_UNAVAILABLE"
                cluster.enqueue(name)
                stats = send(cluster.stubs, "GetStats", admin_pb2.GetStatsRequest(org=name))
                assert [one.ready for one in stats.queues] == [2]
                servers["catalog"].start()

                def purged() -> bool:
                    try:
                        return bool(send(cluster.stubs, "PurgeQueue", request).cancelled == 2)
                    except grpc.RpcError:
                        return False

                until(purged, "the change is made once the catalog is back")
                assert [row[:3] for row in cluster.ended(name)] == [
                    ("windrow.v1.Admin/PurgeQueue", "OK", {"cancelled": 2})
                ]
    except BinariesNotFound as error:
        pytest.skip(str(error))


def test_after_kill_9_the_intent_of_an_unfinished_change_is_in_the_log(
    postgres: Server, tmp_path: Path, name: str
) -> None:
    with audited(postgres.create("killed"), tmp_path) as cluster:
        cluster.enqueue(name)
        with psycopg.connect(cluster.dsn) as holder:
            holder.execute("LOCK TABLE windrow.job IN EXCLUSIVE MODE")
            call = cluster.stubs.admin.PurgeQueue.future(
                admin_pb2.PurgeQueueRequest(org=name, queue=QUEUE), timeout=PATIENCE_S
            )
            rows = "SELECT method, outcome, ended_at FROM windrow.audit WHERE org = %s"
            until(lambda: cluster.sql(rows, name), "the intent is in the audit log")
            for pid in cluster.routers.pids:
                os.kill(pid, signal.SIGKILL)
            refusal(call.result)
            assert cluster.sql(rows, name) == [("windrow.v1.Admin/PurgeQueue", None, None)]
        (shown,) = windrow("audit", "--org", name, "--json", "--config", str(cluster.config)).documents
        assert (shown["outcome"], shown["ended_at"]) == (None, None)
        assert "not known" in windrow("audit", "--org", name, "--config", str(cluster.config)).out


def test_the_callers_of_an_org_cannot_fill_the_log(postgres: Server, tmp_path: Path) -> None:
    dsn = postgres.create("changes")
    config = write_cluster(tmp_path / "cluster.toml", {"s1": dsn})
    config.write_text(config.read_text() + "\n[auth]\n")
    with (
        running_routers(config) as routers,
        open_secured(routers, {"s1": dsn}) as cluster,
        stubs(routers.address) as both,
    ):
        noisy, quiet, operator = cluster.key_of("noisy"), cluster.key_of("quiet"), cluster.new_key()
        ids = [job_id() for _ in range(100)]

        def change(org: str, key: str) -> None:
            request = queue_pb2.CancelJobsRequest(org=org, ids=ids, reason="x" * 1000)
            both.queue.CancelJobs(request, timeout=PATIENCE_S, metadata=bearer(key))

        made, began_s = 0, time.monotonic()

        def change_until_refused() -> None:
            nonlocal made
            # A machine that makes fewer than five calls a second is never refused. Without this bound, the loop would
            # not end on such a machine.
            while made < 5_000:
                change("noisy", noisy)
                made += 1

        with pytest.raises(grpc.RpcError) as refused:
            change_until_refused()
        took_s = time.monotonic() - began_s
        assert access_refusal(refused.value) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CHANGES")
        assert detail(refused.value, error_details_pb2.RetryInfo) is not None
        assert CHANGES_AT_ONCE <= made <= CHANGES_AT_ONCE + CHANGES_PER_S * took_s + 1
        # The refusals do not affect the callers of another org, nor callers who may change every org.
        change("quiet", quiet)
        change("noisy", operator)
        with psycopg.connect(dsn) as connection:
            rows = connection.execute(
                "SELECT octet_length(concat(id, principal, peer, method, org, queue, request)), "
                "jsonb_array_length(request -> 'ids') FROM windrow.audit WHERE org = 'noisy'"
            ).fetchall()
        assert len(rows) == made + 1
        assert max(size for size, _ in rows) <= 1024
        # The `ids` of each row have eleven entries: ten ids, and the number of all ids.
        assert {many for _, many in rows} == {11}


def test_a_change_that_fails_is_in_the_log_with_its_reason(cluster: Audited, name: str) -> None:
    cluster.enqueue(name)
    refusal(lambda: send(cluster.stubs, "PauseQueue", admin_pb2.PauseQueueRequest(org=name, queue="none")))
    assert [row[:2] for row in cluster.ended(name)] == [("windrow.v1.Admin/PauseQueue", "NOT_FOUND QUEUE_NOT_FOUND")]


def test_no_payload_and_no_value_of_an_attribute_is_in_the_log(cluster: Audited, name: str) -> None:
    marker = "marked-7f3a"
    ids = cluster.enqueue(name, marker=marker, many=30)
    altered = queue_pb2.AlterJobsRequest(org=name, ids=ids, attributes=queue_pb2.Attributes(values={"vip": marker}))
    send(cluster.stubs, "AlterJobs", altered)
    send(cluster.stubs, "PurgeQueue", admin_pb2.PurgeQueueRequest(org=name, queue=QUEUE))
    (altering, purging) = cluster.ended(name, 2)
    assert altering[3]["attributes"] == ["vip"]
    # If there are many ids, the log keeps the first ten.
    assert altering[3]["ids"] == [*ids[:10], "30 in all"]
    assert altering[2] == {"ok": 30}
    assert purging[2] == {"cancelled": 30}
    assert cluster.sql("SELECT count(*) FROM windrow.audit a WHERE a::text LIKE %s", f"%{marker}%") == [(0,)]


@pytest.mark.parametrize("days", ["0", "3651", '"90"', "true", "1.5"])
def test_days_that_cannot_be_are_refused(days: str) -> None:
    text = f'[[shard]]\nname = "s1"\ndsn = "host=localhost"\n[audit]\ndays = {days}\n'
    with pytest.raises(ClusterFileError, match="1 to 3650"):
        audit.days_of(parse_cluster(text, source="file"))


def test_without_auth_and_audit_nothing_is_written_down(postgres: Server, tmp_path: Path, name: str) -> None:
    dsn = postgres.create("quiet")
    config = write_cluster(tmp_path / "cluster.toml", {"s1": dsn})
    with running_routers(config) as routers, stubs(routers.address) as both:
        cluster = Audited(dsn=dsn, config=config, routers=routers, stubs=both)
        (one,) = cluster.enqueue(name)
        send(both, "CancelJobs", changes(name, one)["CancelJobs"])
        assert windrow("shards", "pin", name, "--to", "s1", "--config", str(config)).code == 0
        assert cluster.sql("SELECT count(*) FROM windrow.audit") == [(0,)]
        assert "neither [auth] nor [audit]" in windrow("audit", "--config", str(config)).err


# ── What is written down ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_collector_gets_each_change_as_a_log_record_and_no_content(
    postgres: Server, tmp_path: Path, name: str
) -> None:
    config = write_cluster(tmp_path / "cluster.toml", {"s1": postgres.create("exported_audit")})
    config.write_text(config.read_text() + "\n[audit]\n")
    with contextlib.contextmanager(collecting)(0) as collector:
        environ = {"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": collector.endpoint, "OTEL_BLRP_SCHEDULE_DELAY": "50"}
        with running_routers(config, environ=environ) as routers, stubs(routers.address) as both:
            job = job_message(id=job_id(), queue=QUEUE, kind="greet", payload=b"in-a-payload")
            both.queue.Enqueue(queue_pb2.EnqueueRequest(org=name, jobs=[job]), timeout=PATIENCE_S)
            request = queue_pb2.AlterJobsRequest(org=name, ids=[job.id])
            request.attributes.values["campaign"] = "in-an-attribute"
            send(both, "AlterJobs", request)
            send(both, "PurgeQueue", admin_pb2.PurgeQueueRequest(org=name, queue=QUEUE))
            refusal(lambda: send(both, "DeleteQueue", admin_pb2.DeleteQueueRequest(org=name, queue="none")))
            records = collector.records(3)
    told: list[dict[str, Any]] = [
        {one.key: one.value.string_value or one.value.int_value for one in record.attributes} for record in records
    ]
    assert [(one["rpc.method"].rpartition("/")[2], one["windrow.audit.outcome"]) for one in told] == [
        ("AlterJobs", "OK"),
        ("PurgeQueue", "OK"),
        ("DeleteQueue", "NOT_FOUND QUEUE_NOT_FOUND"),
    ]
    assert {one["windrow.org"] for one in told} == {name}
    assert told[1]["windrow.audit.count.cancelled"] == 1
    assert told[1]["windrow.queue"] == QUEUE
    everything = str(records)
    assert '"campaign"' in told[0]["windrow.audit.request"]
    assert "in-a-payload" not in everything
    assert "in-an-attribute" not in everything


def test_every_method_that_changes_something_is_in_the_log(cluster: Audited, name: str) -> None:
    (one,) = cluster.enqueue(name)
    wanted = methods(access_pb2.SCOPE_ADMIN)
    requests = changes(name, one)
    assert requests.keys() == wanted.keys(), "a method with the scope ADMIN has no request in this test"
    for method, request in requests.items():
        send(cluster.stubs, method, request)
    rows = cluster.ended(name, len(wanted))
    assert {method: outcome for method, outcome, _, _ in rows} == dict.fromkeys(wanted.values(), "OK")
    who = "SELECT DISTINCT principal, peer FROM windrow.audit WHERE org = %s"
    assert cluster.sql(who, name) == [("anonymous", "ipv4:127.0.0.1")]
    by_method = {method.rpartition("/")[2]: (counts, request) for method, _, counts, request in rows}
    assert by_method["CancelJobs"] == ({"ok": 1}, {"ids": [one], "reason": "no longer wanted"})
    assert by_method["UpdateQueue"][1] == {"config": {"max_attempts": 3}, "update_mask": "maxAttempts"}
    assert by_method["RestoreJobs"][0] == {"ok": 1, "refused": 0}


def test_a_signal_is_not_in_the_log_and_a_skip_of_its_node_is(cluster: Audited, name: str) -> None:
    flow = Workflow()
    flow.signal("approved", QUEUE, timeout=3600)
    flow.signal("paid", QUEUE, timeout=3600)
    workflows = cluster.stubs.workflows
    workflows.StartWorkflow(flow.request(name), timeout=PATIENCE_S)
    signal = workflows_pb2.SignalNodeRequest(org=name, id=flow.id, node="approved", payload=b"by ann")
    assert workflows.SignalNode(signal, timeout=PATIENCE_S).accepted
    workflows.SkipNode(workflows_pb2.SkipNodeRequest(org=name, id=flow.id, node="paid"), timeout=PATIENCE_S)
    assert [method for method, *_ in cluster.ended(name)] == ["windrow.v1.Workflows/SkipNode"]


def test_every_read_of_the_whole_cluster_is_counted_in_one_row_a_minute(cluster: Audited) -> None:
    requests: dict[str, Message] = {
        "ListShards": cluster_pb2.ListShardsRequest(),
        "CheckShard": cluster_pb2.CheckShardRequest(shard="s1"),
        "ListOrgs": cluster_pb2.ListOrgsRequest(),
        "ListAllLimits": cluster_pb2.ListAllLimitsRequest(),
        "ListWeights": cluster_pb2.ListWeightsRequest(),
    }
    wanted = {method: path for method, path in methods(access_pb2.SCOPE_CLUSTER).items() if path not in CLUSTER_CHANGES}
    assert requests.keys() == wanted.keys(), "a method with the scope CLUSTER has no request in this test"
    for method, request in requests.items():
        for _ in range(3):
            answer = send(cluster.stubs, method, request)
            if method == "CheckShard":
                assert list(answer)
    told = "SELECT method, sum(calls)::int FROM windrow.audit WHERE minute IS NOT NULL GROUP BY 1 ORDER BY 1"
    until(lambda: cluster.sql(told) == sorted((path, 3) for path in wanted.values()), "all reads are counted")
    # If a minute has ended between the calls, a method has two rows.
    assert len(cluster.sql("SELECT FROM windrow.audit WHERE minute IS NOT NULL")) <= 2 * len(wanted)


def test_changes_of_limits_and_weights_are_in_the_log_although_their_scope_is_the_cluster(
    cluster: Audited, name: str
) -> None:
    limited: dict[str, Any] = {"org": name, "queue": "mail", "measure": limits_pb2.LIMIT_MEASURE_JOBS}
    interval = Duration(seconds=10)
    send(cluster.stubs, "SetLimit", cluster_pb2.SetLimitRequest(**limited, amount=7, interval=interval))
    send(cluster.stubs, "ClearLimit", cluster_pb2.ClearLimitRequest(**limited))
    send(cluster.stubs, "SetWeight", cluster_pb2.SetWeightRequest(org=name, weight=2))
    rows = cluster.ended(name, 3)
    assert sorted((method, outcome, request) for method, outcome, _, request in rows) == [
        ("windrow.v1.Cluster/ClearLimit", "OK", {"measure": "LIMIT_MEASURE_JOBS"}),
        ("windrow.v1.Cluster/SetLimit", "OK", {"measure": "LIMIT_MEASURE_JOBS", "amount": 7, "interval": "10s"}),
        ("windrow.v1.Cluster/SetWeight", "OK", {"weight": 2.0}),
    ]


@pytest.mark.parametrize(
    ("code", "outcome"), [(ExitCode.INTERRUPTED, "CANCELLED"), (ExitCode.UNAVAILABLE, "FAILED UNAVAILABLE")]
)
async def test_the_log_says_how_a_command_ended_that_ends_with_an_exit_code(
    cluster: Audited, name: str, code: ExitCode, outcome: str
) -> None:
    async def end() -> None:
        raise typer.Exit(code)

    with pytest.raises(typer.Exit):
        await recorded(read_cluster(cluster.config), "shards rebalance", end(), org=name)
    ((method, found, _, _),) = cluster.ended(name)
    assert (method, found) == ("windrow shards rebalance", outcome)


def test_commands_are_in_the_log_and_the_command_shows_it(cluster: Audited, name: str) -> None:
    config = str(cluster.config)
    for arguments in (
        ("shards", "pin", name, "--to", "s1"),
        ("shards", "unpin", name),
        ("orgs", "hold", name, "--reason", "case 114"),
        ("orgs", "release", name),
        ("orgs", "keep", name, "--retention", "9d"),
    ):
        assert windrow(*arguments, "--config", config).code == 0
    assert windrow("orgs", "release", name, "--config", config).code == 4
    assert windrow("shards", "forget", "s9", "--config", config).code
    documents = windrow("audit", "--org", name, "--json", "--config", config).documents
    assert [(one["method"], one["outcome"]) for one in documents] == [
        ("windrow orgs release", "FAILED NotHeld"),
        ("windrow orgs keep", "OK"),
        ("windrow orgs release", "OK"),
        ("windrow orgs hold", "OK"),
        ("windrow shards unpin", "OK"),
        ("windrow shards pin", "OK"),
    ]
    assert documents[-1]["request"] == {"to": "s1"}
    assert all(one["principal"].startswith("command:") and one["peer"] for one in documents)
    (forget,) = windrow("audit", "--method", "FORGET", "--json", "--config", config).documents
    assert (forget["org"], forget["request"]["shard"]) == (None, "s9")
    shown = windrow("audit", "--org", name, "--limit", "1", "--config", config)
    assert "orgs release" in shown.out
    assert "FAILED NotHeld" in shown.out
    assert "no entry matches" in windrow("audit", "--principal", "nobody", "--config", config).err


async def test_old_entries_are_deleted_and_newer_ones_stay(database: Database) -> None:
    made = [audit.intent(principal="p", peer="h", method=f"m{at}", request={}) for at in range(3)]
    await audit.begin(database, made)
    # A repeat after a lost connection changes nothing.
    await audit.begin(database, made)
    old = b"UPDATE windrow.audit SET at = now() - interval '31 days' WHERE method <> 'm2'"
    await database.run(old, {})
    assert await audit.forget(database, days=32) == 0
    assert await audit.forget(database, days=30) == 2
    rows = await database.run(b"SELECT method FROM windrow.audit", {})
    assert [row[0] for row in rows] == ["m2"]

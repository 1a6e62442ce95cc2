"""These tests check who may call which method over gRPC. They cover every method of the contract, and every reason for
a refusal (tests/access.py). A call that is refused changes no row."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.codec.lease_verbs import VERBS
from router.gate.auth.scopes import Scope
from tests.access import (
    ALL,
    IN_ORG,
    METHODS,
    OF_JWT,
    REQUESTS,
    UNAUTHENTICATED,
    WAYS,
    Metadata,
    Secured,
    Target,
    Way,
    bearer,
    call,
    open_secured,
    refusal,
    scope_of,
    things_of,
)
from tests.issuers import jwks, jwt_table, put, signing_key
from tests.postgres import Server
from tests.routers import PATIENCE_S, running_routers, write_cluster
from tests.streams import start
from windrow.v1 import admin_pb2, queue_pb2, schedules_pb2, workflows_pb2


@pytest.fixture(scope="module")
def secured(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Secured, None, None]:
    dsns = {shard: postgres.create(f"access_{shard}") for shard in ("s1", "s2")}
    folder = tmp_path_factory.mktemp("access")
    config = write_cluster(folder / "cluster.toml", dsns)
    keys = folder / "keys.json"
    put(keys, jwks(signing_key("Ed25519")))
    config.write_text(f"{config.read_text()}\n[auth]\n{jwt_table(jwks_file=keys)}")
    with running_routers(config) as routers, open_secured(routers, dsns) as opened:
        yield opened


@pytest.fixture(scope="module")
def channel(secured: Secured) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(secured.routers.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def owned(secured: Secured, channel: grpc.Channel) -> Target:
    """Returns an org with jobs and other data that no other org may see or change."""
    return things_of(channel, "acme", bearer(secured.key_of("acme")))


def test_every_method_has_a_request_here() -> None:
    assert REQUESTS.keys() == METHODS.keys()


@pytest.mark.parametrize("way", [*WAYS, *OF_JWT], ids=lambda way: way.what)
def test_who_is_refused_gets_the_right_status_and_changes_no_row(
    secured: Secured, channel: grpc.Channel, owned: Target, way: Way
) -> None:
    proofs: dict[str, Metadata] = {}
    by_scope: dict[Scope | None, Metadata] = {}
    # Make the keys before the rows are compared, because a new key adds a row.
    for name in filter(way.concerns, METHODS):
        if scope_of(name) not in by_scope:
            by_scope[scope_of(name)] = way.metadata(secured, owned.org, scope_of(name))
        proofs[name] = by_scope[scope_of(name)]
    assert proofs
    before = secured.rows()
    for name, metadata in proofs.items():
        with pytest.raises(grpc.RpcError) as refused:
            call(channel, name, REQUESTS[name](owned), metadata)
        assert (name, *refusal(refused.value)) == (name, way.code, way.reason)
        message = str(refused.value)
        assert not any(secret in message for _, value in metadata for secret in value.split() if len(secret) > 20)
    assert secured.rows() == before


def test_the_health_of_a_router_is_told_to_anybody_and_its_methods_are_not(
    secured: Secured, channel: grpc.Channel
) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    reflected = stub.ServerReflectionInfo
    with pytest.raises(grpc.RpcError) as refused:
        list(reflected(iter(asked), timeout=PATIENCE_S))
    assert refusal(refused.value) == (UNAUTHENTICATED, "CREDENTIALS_MISSING")
    (listed,) = reflected(iter(asked), timeout=PATIENCE_S, metadata=bearer(secured.key_of("acme", scopes=["read"])))
    assert "windrow.v1.Queue" in {one.name for one in listed.list_services_response.service}


# Requests that another org sends. Each request names the sending org itself, but ids, leases, keys and page tokens that
# belong to the org `owned`.
NAMING: dict[str, Callable[[Target], Message]] = {
    **{
        name: REQUESTS[f"windrow.v1.{name}"]
        for name in (
            *(f"Queue/{verb.method}" for verb in VERBS),
            *("Queue/GetJobs", "Queue/FindJob", "Queue/CancelJobs", "Queue/AlterJobs", "Queue/RedriveJobs"),
            *("Admin/GetQueue", "Admin/UpdateQueue", "Admin/DeleteQueue", "Admin/PauseQueue", "Admin/PurgeQueue"),
            *("Queue/WaitJob", "Admin/QuarantineKind", "Admin/ReleaseKind"),
            *("Admin/ResumeQueue", "Admin/RedriveQueue", "Admin/ListJobs", "Admin/RestoreJobs", "Admin/GetStats"),
            *("Admin/ExplainJob", "Admin/ExplainQueue", "Schedules/GetSchedule", "Schedules/UpdateSchedule"),
            *("Schedules/DeleteSchedule", "Schedules/PauseSchedule", "Schedules/ResumeSchedule"),
            *("Schedules/TriggerSchedule", "Schedules/BackfillSchedule", "Schedules/PreviewSchedule"),
            *("Workflows/GetWorkflow", "Workflows/CancelWorkflow", "Workflows/PauseWorkflow", "Workflows/SkipNode"),
            "Workflows/SignalNode",
            *("Workflows/ResumeWorkflow", "Workflows/ListParents", "Workflows/RetryWorkflow", "Workflows/AddNodes"),
        )
    },
    "Queue/Consume": lambda it: queue_pb2.ConsumeRequest(
        request_id=1, start=start(it.org, it.queue), acks=[queue_pb2.Ack(lease=it.lease)]
    ),
    "Queue/Dequeue": lambda it: queue_pb2.DequeueRequest(
        org=it.org, queues=[it.queue], acks=[queue_pb2.Ack(lease=it.lease)]
    ),
    "Admin/ListQueues": lambda it: admin_pb2.ListQueuesRequest(org=it.org, page_token=it.queue_page_token),
    "Admin/CountJobs": lambda it: admin_pb2.CountJobsRequest(org=it.org, page_token=it.page_token),
    "Schedules/ListSchedules": lambda it: schedules_pb2.ListSchedulesRequest(
        org=it.org, page_token=it.schedule_page_token
    ),
    "Workflows/ListWorkflows": lambda it: workflows_pb2.ListWorkflowsRequest(
        org=it.org, page_token=it.workflow_page_token
    ),
    "Workflows/ListNodes": lambda it: workflows_pb2.ListNodesRequest(
        org=it.org, id=it.workflow, page_token=it.node_page_token
    ),
}


@pytest.mark.parametrize("name", NAMING)
def test_what_is_another_orgs_is_answered_as_what_does_not_exist(
    secured: Secured, channel: grpc.Channel, owned: Target, name: str
) -> None:
    org = f"asks-{name}"
    metadata = bearer(secured.key_of(org))

    def told(it: Target) -> object:
        """Returns the answers of a call. The ids and leases that the call names are left out."""
        try:
            answers = call(channel, f"windrow.v1.{name}", NAMING[name](it), metadata)
        except grpc.RpcError as error:
            return refusal(error)
        encoded = b"".join(answer.SerializeToString() for answer in answers)
        for named in (it.ready.encode(), it.dead.encode(), it.finished.encode(), it.lease):
            encoded = encoded.replace(named, b"")
        return encoded

    before = secured.rows()
    answer = told(owned.told_to(org))
    after = secured.rows()
    assert {table: rows for table, rows in after.items() if before[table] != rows} == {}
    # A page token only says where a page begins. So an org may send the page token of another org.
    nobodys = Target(
        org=org,
        lease=owned.lease[:-16] + secrets.token_bytes(16),
        node_lease=owned.node_lease[:-16] + secrets.token_bytes(16),
        page_token=owned.page_token,
        queue_page_token=owned.queue_page_token,
        node_page_token=owned.node_page_token,
        workflow_page_token=owned.workflow_page_token,
    )
    assert answer == told(nobodys)
    assert owned.org not in str(answer)


@pytest.mark.parametrize("name", METHODS)
def test_a_key_with_the_one_scope_that_a_method_needs_may_call_it(
    secured: Secured, channel: grpc.Channel, owned: Target, name: str
) -> None:
    scope = scope_of(name)
    if scope in (None, Scope.READ, Scope.CLUSTER):
        # A method with one of these scopes changes nothing of the org `owned`. All these methods share this org,
        # because making the things of an org takes 25 calls.
        target = owned
    else:
        org = f"may-{name}"
        target = things_of(channel, org, bearer(secured.key_of(org)))
    if scope is Scope.CLUSTER:
        keys = [secured.new_key(scopes=["cluster"])]
    else:
        scopes = [Scope.READ if scope is None else scope]
        keys = [secured.key_of(target.org, scopes=scopes)]
    for key in keys:
        call(channel, name, REQUESTS[name](target), bearer(key))


def test_a_key_for_all_orgs_may_name_any_org(secured: Secured, channel: grpc.Channel) -> None:
    key = bearer(secured.new_key(scopes=["enqueue", "read"]))
    for org in ("first", "second"):
        call(channel, "windrow.v1.Queue/Enqueue", REQUESTS["windrow.v1.Queue/Enqueue"](Target(org=org)), key)
        call(channel, "windrow.v1.Admin/ListQueues", admin_pb2.ListQueuesRequest(org=org), key)


@pytest.mark.parametrize(
    ("org", "scopes", "reason"),
    [
        ("acme", IN_ORG, "SCOPE_MISSING"),
        (None, [scope for scope in ALL if scope != "cluster"], "SCOPE_MISSING"),
        (None, [scope for scope in ALL if scope != "consume"], "SCOPE_MISSING"),
    ],
)
def test_only_a_key_for_all_orgs_with_the_scopes_consume_and_cluster_may_consume_all_orgs(
    secured: Secured, channel: grpc.Channel, owned: Target, org: str | None, scopes: list[str], reason: str
) -> None:
    del owned
    request = queue_pb2.ConsumeRequest(start=start(None, "mail"), credit=10)
    key = bearer(secured.new_key(org=org, scopes=scopes))
    before = secured.rows()
    with pytest.raises(grpc.RpcError) as refused:
        call(channel, "windrow.v1.Queue/Consume", request, key)
    assert refusal(refused.value) == (grpc.StatusCode.PERMISSION_DENIED, reason)
    assert secured.rows() == before


def test_the_key_that_the_refusal_of_all_orgs_names_may_consume_them(
    secured: Secured, channel: grpc.Channel, owned: Target
) -> None:
    del owned
    request = queue_pb2.ConsumeRequest(start=start(None, "nothing-here"))
    with pytest.raises(grpc.RpcError) as refused:
        call(channel, "windrow.v1.Queue/Consume", request, bearer(secured.new_key(org="acme", scopes=IN_ORG)))
    said = str(refused.value)
    assert "windrow keys create --all-orgs " in said
    named = re.findall(r"--scope (\w+)", said)
    call(channel, "windrow.v1.Queue/Consume", request, bearer(secured.new_key(scopes=list(dict.fromkeys(named)))))


def test_a_key_with_both_scopes_may_consume_all_orgs(secured: Secured, channel: grpc.Channel) -> None:
    key = bearer(secured.new_key(scopes=["consume", "cluster"]))
    request = queue_pb2.ConsumeRequest(start=start(None, "nothing-here"))
    call(channel, "windrow.v1.Queue/Consume", request, key)


@pytest.mark.parametrize("name", [name for name in METHODS if name.startswith("externalscaler.")])
def test_only_a_key_for_all_orgs_with_the_scopes_read_and_cluster_may_scale_by_all_orgs(
    secured: Secured, channel: grpc.Channel, name: str
) -> None:
    request: Any = REQUESTS[name](Target(org="acme"))
    metadata = (request.scaledObjectRef if name.endswith("GetMetrics") else request).scalerMetadata
    del metadata["org"]
    for all_orgs in ("true", None):
        if all_orgs is None:
            # A request that names no org and does not ask for all orgs is not answered for all orgs.
            del metadata["allOrgs"]
        else:
            metadata["allOrgs"] = all_orgs
        for org, scopes in (("acme", IN_ORG), (None, IN_ORG), (None, ["cluster"])):
            with pytest.raises(grpc.RpcError) as refused:
                call(channel, name, request, bearer(secured.new_key(org=org, scopes=scopes)))
            assert refusal(refused.value) == (grpc.StatusCode.PERMISSION_DENIED, "SCOPE_MISSING")
    metadata["allOrgs"] = "true"
    call(channel, name, request, bearer(secured.new_key(scopes=["read", "cluster"])))

"""deploy/grafana: a real Prometheus, which scrapes a router that works, answers every query of every panel."""

from __future__ import annotations

import asyncio
import copy
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from proof.dashboards import filled, read_dashboards
from shard.queue.store import Store
from shard.vocabulary import OrgId
from tests import dashboards
from tests.conftest import connected
from tests.jobs import job_id, job_message, some_jobs
from tests.prometheus import asked, scraping
from tests.routers import PATIENCE_S, Stubs, reserved_address, running_routers, stubs, until, write_cluster
from windrow.v1 import queue_pb2

# Panels that have no data in this test. For example, a cluster without TLS has no certificate.
WITHOUT_DATA = {"Time until a certificate expires"}


async def store_jobs(dsn: str, org: OrgId) -> None:
    async with connected(dsn) as database:
        await Store(database).enqueue(some_jobs(org, 3))


def values(address: str, query: str, org: OrgId) -> list[float]:
    """Returns those values of a query that are numbers. A query that Prometheus refuses fails the test."""
    variables = {"__rate_interval": "1m", "shard": "s1", "org": org}
    data = asked(address, "query", query=filled(query, variables))
    result = data["result"] if data else []
    return [value for one in result if not math.isnan(value := float(one["value"][1]))]


def use(both: Stubs, org: str) -> None:
    """Makes calls of each kind that the panels show. The calls enqueue a new job, enqueue the same job again, ack jobs,
    and ack the same jobs again when it is too late. One call is refused."""
    jobs = [job_message(id=job_id(), queue="emails", kind="greet")]
    for _ in range(2):
        both.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=jobs), timeout=PATIENCE_S)
    leased = both.queue.Dequeue(queue_pb2.DequeueRequest(org=org, queues=["emails"]), timeout=PATIENCE_S).jobs
    for _ in range(2):
        acks = [queue_pb2.Ack(lease=job.lease) for job in leased]
        both.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks), timeout=PATIENCE_S)
    with suppress(grpc.RpcError):
        both.queue.Enqueue(queue_pb2.EnqueueRequest(org="", jobs=jobs), timeout=PATIENCE_S)


@pytest.mark.timeout(300)
def test_prometheus_has_data_for_every_query_of_a_cluster_that_works(
    module_dsn: str, org: OrgId, tmp_path: Path
) -> None:
    # The routers count the jobs when they start.
    asyncio.run(store_jobs(module_dsn, org))
    config = write_cluster(tmp_path / "cluster.toml", {"s1": module_dsn}, metrics_queues=50)
    with reserved_address() as target:
        pass
    config.write_text(config.read_text() + f'metrics = "{target}"\n')
    with (
        running_routers(config) as routers,
        stubs(routers.address) as both,
        scraping(tmp_path, target, every_ms=500) as address,
    ):
        panels = [panel for one in read_dashboards().values() for panel in one["panels"]]
        assert {panel["title"] for panel in panels} > WITHOUT_DATA
        for panel in panels:
            for query in (target["expr"] for target in panel["targets"]):

                def has_data(query: str = query) -> bool:
                    # A rate needs two scrapes of a series. The value must have grown between these scrapes.
                    use(both, org)
                    return bool(values(address, query, org))

                if panel["title"] in WITHOUT_DATA:
                    assert not values(address, query, org)
                else:
                    # A router writes the figures of shards every minute, and a query may need two of these figures.
                    until(has_data, f"there is data for {panel['title']}: {query}", within_s=200)


def test_the_dashboards_are_sound() -> None:
    assert [list(dashboards.faults_of(one)) for one in read_dashboards().values()] == [[], [], []]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"description": ""}, "Calls: it has no description"),
        ({"fieldConfig": {"defaults": {}}}, "Calls: it has no unit"),
        ({"expr": "sum by (method) (rate(windrow_calls[1m]))"}, "Calls: no metric is called windrow_calls"),
        ({"expr": 'sum by (method) (windrow_calls_total{org="a"})'}, "Calls: windrow_calls_total has no label org"),
        (
            {"expr": "sum by (method, shard) (rate(windrow_calls_total[1m]))"},
            "Calls: the query groups by shard, which not all of its metrics have",
        ),
        (
            {"expr": "sum(rate(windrow_calls_total[1m]))"},
            "Calls: its legend shows method, by which the query does not group",
        ),
        ({"expr": "vector(1)"}, "Calls: the query names no metric"),
    ],
)
def test_a_panel_with_a_fault_is_found(change: dict[str, Any], complaint: str) -> None:
    dashboard = copy.deepcopy(read_dashboards()["cluster.json"])
    (panel,) = [panel for panel in dashboard["panels"] if panel["title"] == "Calls"]
    panel["targets"][0].update({key: value for key, value in change.items() if key == "expr"})
    panel.update({key: value for key, value in change.items() if key != "expr"})
    assert complaint in list(dashboards.faults_of(dashboard))

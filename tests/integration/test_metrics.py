"""Tests the metrics of a router, as the scrape endpoint and a real Prometheus show them, and the alert rules."""

from __future__ import annotations

import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Generator
from functools import partial
from pathlib import Path

import psutil
import pytest
from google.protobuf.duration_pb2 import Duration
from prometheus_client.parser import text_string_to_metric_families

from router.process.metrics import served
from shard.vocabulary import OrgId
from tests import alerts
from tests.jobs import job_id, job_message
from tests.prometheus import INSTALL, asked, scraping
from tests.routers import PATIENCE_S, Routers, first_line, metrics_of, running_routers, stubs, until, write_cluster
from windrow.v1 import job_pb2, queue_pb2

ENQUEUE = "windrow.v1.Queue/Enqueue"


@pytest.fixture(scope="module")
def routers(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[Routers, None, None]:
    config = write_cluster(tmp_path_factory.mktemp("metrics") / "cluster.toml", {"s1": module_dsn})
    config.write_text(config.read_text() + 'metrics = "127.0.0.1:0"\n')
    with running_routers(config, processes=2) as running:
        yield running


def figures(routers: Routers) -> dict[str, dict[tuple[str, ...], float]]:
    """Scrapes once. Returns the values of each series name, by the values of its labels. The labels are sorted by
    name."""
    with urllib.request.urlopen(metrics_of(routers), timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def run_jobs(routers: Routers, org: str, connections: int) -> None:
    """Over each connection, enqueues three jobs, enqueues one of them again, acks all three, and then tries to release
    them."""
    for _ in range(connections):
        with stubs(routers.address) as both:
            jobs = [job_message(id=job_id(), queue="emails", kind="greet") for _ in range(3)]
            both.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=jobs), timeout=PATIENCE_S)
            both.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=jobs[:1]), timeout=PATIENCE_S)
            request = queue_pb2.DequeueRequest(
                org=org, queues=["emails"], max_jobs=3, visibility_window=Duration(seconds=60)
            )
            leased = both.queue.Dequeue(request, timeout=PATIENCE_S).jobs
            assert len(leased) == 3
            leases = [job.lease for job in leased]
            acks = [queue_pb2.Ack(lease=lease) for lease in leases]
            both.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks), timeout=PATIENCE_S)
            # The leases have ended, so the release comes too late.
            both.queue.Release(queue_pb2.ReleaseRequest(org=org, leases=leases), timeout=PATIENCE_S)


def counted(routers: Routers) -> dict[str, float]:
    found = figures(routers)
    settled = found.get("windrow_leases_settled_total", {})
    return {
        "enqueues": found["windrow_calls_total"].get(("OK", ENQUEUE), 0),
        "timed": found["windrow_call_duration_seconds_count"].get((ENQUEUE,), 0),
        "new": found["windrow_jobs_enqueued_total"].get(("new", "s1"), 0),
        "known": found["windrow_jobs_enqueued_total"].get(("duplicate", "s1"), 0),
        "claimed": found["windrow_jobs_claimed_total"].get(("s1",), 0),
        "acked": settled.get(("ok", "s1", "ack"), 0),
        "stale": settled.get(("stale", "s1", "release"), 0),
        "acts": found["windrow_act_calls_sum"].get(("enqueue", "s1"), 0),
    }


def _replaced(routers: Routers, pid: int) -> bool:
    return len(routers.pids) == 2 and pid not in routers.pids


def test_the_figures_of_all_processes_are_what_was_done_also_after_each_process_was_killed(
    routers: Routers, org: OrgId
) -> None:
    def done(connections: int) -> dict[str, float]:
        jobs, calls = 3 * connections, 2 * connections
        return {
            "enqueues": calls, "timed": calls, "acts": calls, "new": jobs, "known": connections, "claimed": jobs,
            "acked": jobs, "stale": jobs,
        }  # fmt: skip

    run_jobs(routers, org, 8)
    assert counted(routers) == done(8)
    for pid in routers.pids:
        psutil.Process(pid).kill()
        until(partial(_replaced, routers, pid), "another process has started")
    assert counted(routers) == done(8)
    run_jobs(routers, org, 4)
    assert counted(routers) == done(12)
    until(lambda: figures(routers)["windrow_shard_up"] == {("s1",): 1}, "both processes can use the shard")


def test_the_files_of_a_killed_supervisor_are_deleted_by_the_next_one_and_those_of_a_living_one_are_not() -> None:
    serves = """
from router.process.metrics import served
with served("127.0.0.1:0") as own:
    print(*own.environ.values(), flush=True)
    input()
"""
    child = subprocess.Popen([sys.executable, "-c", serves], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child as other:
        left = Path(first_line(other))
        with served("127.0.0.1:0") as living:
            kept = Path(*living.environ.values())
            assert left.is_dir()
            other.kill()
            other.wait(PATIENCE_S)
            with served("127.0.0.1:0"):
                assert kept.is_dir()
                assert not left.exists()
    assert not kept.exists()


def test_waits_expired_leases_and_deaths_are_counted(routers: Routers, org: OrgId) -> None:
    def counted() -> tuple[float, ...]:
        found = figures(routers)
        names = ("windrow_pickup_seconds_count", "windrow_leases_expired_total", "windrow_jobs_dead_total")
        return tuple(found.get(name, {}).get(("s1",), 0) for name in names)

    def leased(window_s: float) -> job_pb2.LeasedJob:
        window = Duration(nanos=round(window_s * 1e9) % 10**9, seconds=int(window_s))
        request = queue_pb2.DequeueRequest(
            org=org, queues=["mail"], visibility_window=window, wait=Duration(seconds=30)
        )
        (job,) = both.queue.Dequeue(request, timeout=PATIENCE_S).jobs
        return job

    before = counted()
    with stubs(routers.address) as both:
        job = job_message(id=job_id(), queue="mail", kind="greet")
        both.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=[job]), timeout=PATIENCE_S)
        leased(0.1)
        again = leased(60)
        assert again.attempt == 2
        nack = queue_pb2.Nack(lease=again.lease, failure=job_pb2.Failure(permanent=True))
        both.queue.Nack(queue_pb2.NackRequest(org=org, nacks=[nack]), timeout=PATIENCE_S)
    assert counted() == (before[0] + 2, before[1] + 1, before[2] + 1)


def test_metrics_name_no_org_no_queue_and_no_job_unless_told_to(routers: Routers, org: OrgId) -> None:
    with stubs(routers.address) as both:
        job = job_message(id=job_id(), queue="secret-queue", kind="secret-kind", payload=b"secret-payload")
        both.queue.Enqueue(queue_pb2.EnqueueRequest(org=f"secret-{org}", jobs=[job]), timeout=PATIENCE_S)
    with urllib.request.urlopen(metrics_of(routers), timeout=PATIENCE_S) as answer:
        assert b"secret" not in answer.read()


def test_a_scrape_tells_the_slots_of_each_shard_the_signs_that_it_needs_somebody_and_whether_the_catalog_is_there(
    routers: Routers,
) -> None:
    until(lambda: "windrow_slots" in figures(routers), "the shards were read")
    found = figures(routers)
    assert found["windrow_slots"] == {("s1", "owned"): 16_384, ("s1", "leaving"): 0}
    assert found["windrow_catalog_up"] == {(): 1}
    for name in ("schedule_late_seconds", "partitions_missing"):
        assert found[f"windrow_{name}"] == {("s1",): 0}
    assert found["windrow_oldest_snapshot_seconds"][("s1",)] < PATIENCE_S
    assert 0 < found["windrow_connections_used_ratio"][("s1",)] < 1
    assert 0 < found["windrow_transaction_age"][("s1",)] < 2**31
    assert found["windrow_archive_late_seconds"][("s1",)] < 86_400


def test_every_series_is_declared(routers: Routers) -> None:
    created = {name for name in figures(routers) if not name.endswith("_created")}
    assert created <= alerts.series_names()


def test_prometheus_scrapes_a_router_and_loads_the_alerts(routers: Routers, tmp_path: Path) -> None:
    target = urllib.parse.urlsplit(metrics_of(routers)).netloc
    expected = figures(routers)["windrow_jobs_enqueued_total"]
    with scraping(tmp_path, target, every_ms=1000) as address:
        query = "windrow_jobs_enqueued_total"
        until(lambda: asked(address, "query", query=query), "Prometheus has scraped")
        found = asked(address, "query", query=query)
        assert {
            (one["metric"]["outcome"], one["metric"]["shard"]): float(one["value"][1]) for one in found["result"]
        } == expected
        loaded = asked(address, "rules", type="alert")
        assert len(loaded["groups"][0]["rules"]) == 18


@pytest.mark.parametrize("file", alerts.TESTS)
def test_each_alert_fires_and_resolves_as_its_unit_test_says_and_none_on_a_healthy_day(file: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip(f"promtool is not installed: {INSTALL}")
    done = subprocess.run(
        (promtool, "test", "rules", file),
        cwd=alerts.PROMETHEUS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"expr": "windrow_no_such_metric > 0"}, "Some: no metric is called windrow_no_such_metric"),
        ({"alert": "Other"}, "Other: docs/runbook.md has no heading of this name"),
        ({"annotations": {}}, "Some: its annotation `runbook` does not link its entry"),
    ],
)
def test_a_rule_with_a_fault_is_found(change: dict[str, object], complaint: str) -> None:
    rule = {"alert": "Some", "expr": "windrow_shard_up == 0", "annotations": {"runbook": "docs/runbook.md#some"}}
    tests = {"tests": [{"alert_rule_test": [{"alertname": "Some", "exp_alerts": [{}]}]}]}

    def found(rule: dict[str, object]) -> list[str]:
        return list(alerts.faults({"groups": [{"rules": [rule]}]}, tests, "## Some\n"))

    assert found(dict(rule)) == []
    assert complaint in found({**rule, **change})

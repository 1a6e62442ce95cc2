"""The programs that watch the cluster of deploy/compose.yaml. The spans of the cluster's routers arrive, Prometheus
starts with the configuration in deploy/, and the configurations of Grafana and of the collector fit together. Grafana
and the collector are not started, because they are not installed on this machine.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from proof.dashboards import read_dashboards
from shard.metrics import DECLARED
from tests.collector import collecting
from tests.deployed import databases, run_a_job_on_each_shard
from tests.integration.test_deploy import COMPOSE, DEPLOY, OURS, ROUTERS, SERVICES, container
from tests.postgres import Server
from tests.prometheus import asked, running_prometheus
from tests.routers import PATIENCE_S, until


def configs(name: str) -> dict[str, str]:
    """Returns the text of each file that a service is given, by the file's path in the container."""
    mounted = SERVICES[name]["configs"]
    return {one["target"]: (DEPLOY / COMPOSE["configs"][one["source"]]["file"]).read_text() for one in mounted}


def config(name: str, path: str) -> Any:
    return yaml.safe_load(configs(name)[path])


@pytest.mark.timeout(300)
def test_the_spans_of_a_router_reach_the_collector(tmp_path: Path, postgres: Server) -> None:
    with databases(postgres, "spans") as dsns, contextlib.contextmanager(collecting)(0) as collector:
        made = container("router1", tmp_path, dsns, collector=collector.endpoint)
        with made.running() as (process, address):
            with grpc.insecure_channel(address) as channel:
                run_a_job_on_each_shard(channel)
            process.terminate()
            process.communicate(timeout=PATIENCE_S)
        assert {one.service for one in collector.spans()} == {"windrow-router"}


def test_the_collector_listens_where_the_programs_send_and_each_pipeline_is_complete() -> None:
    (file,) = configs("collector")
    assert SERVICES["collector"]["command"] == [f"--config={file}"]
    settings = config("collector", file)
    assert settings["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == "0.0.0.0:4317"
    pipelines = settings["service"]["pipelines"]
    assert set(pipelines) == {"traces", "metrics", "logs"}
    for kind in ("receivers", "processors", "exporters"):
        used = {name for pipeline in pipelines.values() for name in pipeline[kind]}
        assert used == set(settings[kind])


def test_prometheus_starts_with_the_rules_and_scrapes_every_router(tmp_path: Path) -> None:
    for path, text in configs("prometheus").items():
        place = tmp_path / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text.replace("/etc/", f"{tmp_path}/etc/"))
    port = tomllib.loads((DEPLOY / "compose" / "cluster.toml").read_text())["router"]["metrics"].split(":")[1]
    scraped = {("windrow", f"{name}:{port}") for name in ROUTERS}
    command = [part.replace("=/", f"={tmp_path}/") for part in SERVICES["prometheus"]["command"]]
    with running_prometheus(tmp_path, *command) as address:
        until(lambda: instances(address) == scraped, "Prometheus knows every router")
        alerts = [rule["name"] for group in asked(address, "rules")["groups"] for rule in group["rules"]]
        assert "WindrowShardDown" in alerts


def instances(address: str) -> set[tuple[str, str]]:
    targets = (asked(address, "targets") or {"activeTargets": []})["activeTargets"]
    return {(one["labels"]["job"], one["labels"]["instance"]) for one in targets}


def test_grafana_gets_every_dashboard_and_the_source_that_they_name() -> None:
    (source,) = config("grafana", "/etc/grafana/provisioning/datasources/windrow.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["type"] == "prometheus"
    found = read_dashboards()
    panels = [panel for one in found.values() for panel in one["panels"]]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    (provider,) = config("grafana", "/etc/grafana/provisioning/dashboards/windrow.yaml")["providers"]
    folder = provider["options"]["path"]
    mounted = {path: json.loads(text) for path, text in configs("grafana").items() if path.startswith(folder)}
    assert mounted == {f"{folder}/{name}": one for name, one in found.items()}


def test_every_metric_is_on_a_dashboard() -> None:
    panels = [panel for one in read_dashboards().values() for panel in one["panels"]]
    queries = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    assert [one.name for one in DECLARED if one.name not in queries] == []


def test_those_who_talk_to_each_other_share_a_network() -> None:
    def share(one: str, other: str) -> bool:
        return bool(set(SERVICES[one]["networks"]) & set(SERVICES[other]["networks"]))

    assert all(share(name, "collector") for name in OURS)
    assert all(share(name, "prometheus") for name in ROUTERS)
    assert share("grafana", "prometheus")
    for name in ("collector", "prometheus", "grafana"):
        assert not share(name, "shard1")

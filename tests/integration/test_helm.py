"""Tests the chart deploy/helm/windrow: Kubernetes accepts the rendered objects, the objects fit together, and each
container starts with its arguments, environment and files (tests/deployed.py)."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from proof.certificates import Authority
from router.settings import END_S_MAX, RouterSettings, router_settings
from shard.placement.cluster_file import ShardState, parse_cluster
from tests.deployed import SHARDS, Program, databases, start_work_and_stop
from tests.postgres import Server
from tests.routers import PATIENCE_S, until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm" / "windrow"
HELM = shutil.which("helm")
KUBERNETES = "1.34.0"
ROLES = ("router", "balancer", "archiver")
Object = dict[str, Any]
pytestmark = pytest.mark.skipif(
    HELM is None, reason="helm is not installed: go install helm.sh/helm/v3/cmd/helm@latest, with its folder on PATH"
)


def helm(*arguments: str | Path, values: Object | None = None) -> subprocess.CompletedProcess[str]:
    more = () if values is None else ("--values", "-")
    text = None if values is None else yaml.safe_dump(values)
    return subprocess.run(
        (str(HELM), *arguments, *more), input=text, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def page() -> str:
    """Returns the section of deploy/README.md about Kubernetes."""
    return (DEPLOY / "README.md").read_text().partition("## On Kubernetes")[2].partition("\n## ")[0]


def example() -> Object:
    """Returns the example of chart values in that section."""
    (found,) = re.findall(r"^```yaml\n(.*?)^```", page(), re.DOTALL | re.MULTILINE)
    values: Object = yaml.safe_load(found)
    return values


def rendered(values: Object) -> list[Object]:
    done = helm("template", "windrow", CHART, "--kube-version", KUBERNETES, "--namespace", "default", values=values)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return rendered(example())


def of(objects: list[Object], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def deployment(objects: list[Object], role: str) -> Object:
    (found,) = [one for one in of(objects, "Deployment") if one["metadata"]["name"] == f"windrow-{role}"]
    return found


def pod_of(objects: list[Object], role: str) -> Object:
    spec: Object = deployment(objects, role)["spec"]["template"]["spec"]
    return spec


def container_of(objects: list[Object], role: str) -> Object:
    (found,) = pod_of(objects, role)["containers"]
    container: Object = found
    return container


def program(objects: list[Object], role: str, root: Path, dsns: dict[str, str], authority: Authority) -> Program:
    """Makes the files of a container: the files of the chart's ConfigMap, and the files of the Secrets to which the
    chart refers."""
    container, pod = container_of(objects, role), pod_of(objects, role)
    environment = {
        one["name"]: f"{root}{one['value']}" if one["value"].startswith("/") else one["value"]
        for one in container.get("env", [])
    }
    made = Program(root=root, command=["windrow", *container["args"]], environment=environment, dsns=dsns)
    (certificate,) = of(objects, "Certificate")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    for mount in container["volumeMounts"]:
        folder, volume = mount["mountPath"], volumes[mount["name"]]
        made.path(folder).mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            (config,) = [
                one for one in of(objects, "ConfigMap") if one["metadata"]["name"] == volume["configMap"]["name"]
            ]
            for name, text in config["data"].items():
                made.put_cluster_file(f"{folder}/{name}", text)
        elif "secret" in volume and volume["secret"]["secretName"] == certificate["spec"]["secretName"]:
            pair = authority.sign(hosts=certificate["spec"]["dnsNames"])
            pair.save(made.path(f"{folder}/tls.crt"), made.path(f"{folder}/tls.key"))
            authority.saved(made.path(f"{folder}/ca.crt"))
        elif "secret" in volume:
            assert volume["secret"]["secretName"] == example()["dsnSecret"]
            for shard, dsn in dsns.items():
                made.put(f"{folder}/{shard}", dsn)
        else:
            assert "emptyDir" in volume
    return made


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ROLES)
def test_each_container_starts_a_program_that_works_and_ends_in_time(
    role: str, objects: list[Object], tmp_path: Path, postgres: Server
) -> None:
    authority = Authority()
    with databases(postgres, f"helm_{role}") as dsns:
        made = program(objects, role, tmp_path, dsns, authority)

        def ran(command: list[str]) -> subprocess.CompletedProcess[str]:
            environment = {"PATH": "/usr/bin:/bin"} | made.environment
            return subprocess.run(
                made.resolved(command), env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
            )

        def succeeds(command: list[str]) -> bool:
            return ran(command).returncode == 0

        def connect(address: str) -> grpc.Channel:
            container = container_of(objects, role)
            for probe in ("startupProbe", "readinessProbe"):
                command = [part.replace("127.0.0.1:7419", address) for part in container[probe]["exec"]["command"]]
                until(partial(succeeds, command), f"{probe}: {command}")
            # Run the command of deploy/README.md, but create a key for all orgs, because the test uses two orgs.
            (create,) = re.findall(r"-- (windrow keys create .+)$", page(), re.MULTILINE)
            key = ran(create.replace("--org shop", "--all-orgs").split())
            assert key.returncode == 0, key.stderr
            (name, *_) = of(objects, "Certificate")[0]["spec"]["dnsNames"]
            return grpc.secure_channel(
                address,
                grpc.composite_channel_credentials(
                    grpc.ssl_channel_credentials(authority.pem), grpc.access_token_call_credentials(key.stdout.strip())
                ),
                options=[("grpc.ssl_target_name_override", name)],
            )

        grace_s = pod_of(objects, role)["terminationGracePeriodSeconds"]
        start_work_and_stop(made, stop=signal.SIGTERM, grace_s=grace_s, connect=connect)


def test_a_router_has_time_to_drain_and_memory_for_its_processes(objects: list[Object]) -> None:
    (config,) = of(objects, "ConfigMap")
    settings = tomllib.loads(config["data"]["cluster.toml"])["router"]
    container = container_of(objects, "router")
    pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    # After the drain, the supervisor waits END_S_MAX seconds, and then kills the processes that have not ended.
    assert pod_of(objects, "router")["terminationGracePeriodSeconds"] >= pause_s + settings["drain_seconds"] + END_S_MAX
    limit = re.fullmatch(r"(\d+)Mi", container["resources"]["limits"]["memory"])
    assert limit is not None
    assert int(limit[1]) > settings["processes"] * settings["memory_mib"]


def test_the_defaults_of_the_chart_are_those_of_a_router(objects: list[Object]) -> None:
    (config,) = of(objects, "ConfigMap")
    settings = router_settings(parse_cluster(without_secrets(config["data"]["cluster.toml"]), source="chart"))
    assert settings == replace(RouterSettings(), listen=settings.listen, metrics=settings.metrics)


def without_secrets(text: str) -> str:
    return re.sub(r'dsn_file = ".*"', 'dsn = "dbname=nowhere"', text)


def test_the_chart_has_no_lint() -> None:
    done = helm("lint", "--strict", CHART, "--kube-version", KUBERNETES, values=example())
    assert done.returncode == 0, done.stdout + done.stderr


def test_kubernetes_accepts_every_object(objects: list[Object]) -> None:
    missing = "kubernetes_validate is not installed: pip install kubernetes-validate"
    validate = pytest.importorskip("kubernetes_validate", reason=missing)
    own = [one for one in objects if one["kind"] not in ("Certificate", "ServiceMonitor")]
    assert len(own) == len(objects) - 2
    for one in own:
        validate.validate(one, KUBERNETES.rpartition(".")[0], strict=True)


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_can_do_little_more_than_its_work(role: str, objects: list[Object]) -> None:
    pod, container = pod_of(objects, role), container_of(objects, role)
    user = re.search(r"^USER (\d+):(\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    context = pod["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == tuple(map(int, user.groups()))
    assert context["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all(mount.get("readOnly") for mount in container["volumeMounts"] if mount["name"] != "tmp")


def selectors(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    for one in objects:
        spec = one.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is not None:
            yield f"{one['kind']} {one['metadata']['name']}", selector


def matches(selector: Object, labels: Object) -> bool:
    wanted = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    return all(labels.get(name) == value for name, value in wanted.items()) and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", [])
    )


def test_what_an_object_names_exists(objects: list[Object]) -> None:
    targets = [
        *(one["spec"]["template"]["metadata"]["labels"] for one in of(objects, "Deployment")),
        *(one["metadata"]["labels"] for one in of(objects, "Service")),
    ]
    found = list(selectors(objects))
    assert len(found) == 8
    for name, selector in found:
        assert any(matches(selector, labels) for labels in targets), name
    # Each pod is covered by exactly one of the two policies.
    policies = [one["spec"]["podSelector"] for one in of(objects, "NetworkPolicy")]
    for one in of(objects, "Deployment"):
        assert sum(matches(selector, one["spec"]["template"]["metadata"]["labels"]) for selector in policies) == 1
    ports = {port["name"]: port["containerPort"] for port in container_of(objects, "router")["ports"]}
    (service,), (scaler,), (monitor,) = (
        of(objects, kind) for kind in ("Service", "HorizontalPodAutoscaler", "ServiceMonitor")
    )
    assert {port["targetPort"] for port in service["spec"]["ports"]} == set(ports)
    (policy,) = [one for one in of(objects, "NetworkPolicy") if "ingress" in one["spec"]]
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == set(ports)
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment(objects, "router")["metadata"]["name"]
    assert "replicas" not in deployment(objects, "router")["spec"]
    (config,) = of(objects, "ConfigMap")
    settings = tomllib.loads(config["data"]["cluster.toml"])["router"]
    assert (settings["listen"], settings["metrics"]) == (f"0.0.0.0:{ports['grpc']}", f"0.0.0.0:{ports['metrics']}")


def test_a_chart_with_defaults_needs_neither_cert_manager_nor_the_prometheus_operator() -> None:
    made = rendered({"cluster": {"shards": [{"name": "shard1", "weight": 1000000, "state": "draining"}]}})
    assert {one["apiVersion"].partition("/")[0] for one in made} <= {
        "v1", "apps", "autoscaling", "networking.k8s.io", "policy",
    }  # fmt: skip
    (config,) = of(made, "ConfigMap")
    (shard,) = tomllib.loads(config["data"]["cluster.toml"])["shard"]
    assert (shard["weight"], shard["state"]) == (1000000, "draining")


def test_a_shard_has_the_labels_of_its_values() -> None:
    labels = {"region": "eu", "disk type": 'nv"me'}
    made = rendered({"cluster": {"shards": [SHARD | {"labels": labels}, {"name": "other"}]}})
    (config,) = of(made, "ConfigMap")
    cluster = parse_cluster(without_secrets(config["data"]["cluster.toml"]), source="chart")
    assert [dict(entry.labels) for entry in cluster.shards] == [labels, {}]


def test_a_router_that_waits_for_the_catalog_or_migrates_is_not_killed_for_an_hour(objects: list[Object]) -> None:
    probe = container_of(objects, "router")["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 3600


def test_the_schema_knows_every_state_of_a_shard() -> None:
    rendered({"cluster": {"shards": [{"name": state.value, "state": state.value} for state in ShardState]}})


SHARD = {"name": SHARDS[0]}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "/cluster/shards"),
        ({"cluster": {"shards": [SHARD]}, "router": {"replicas": 3}}, "'replicas' not allowed"),
        ({"cluster": {"shards": [SHARD]}, "ingress": {}}, "'ingress' not allowed"),
        ({"cluster": {"shards": [SHARD | {"wieght": 1}]}}, "'wieght' not allowed"),
        ({"cluster": {"shards": [SHARD | {"state": "drained"}]}}, "/cluster/shards/0/state"),
        ({"cluster": {"shards": [SHARD | {"labels": {"ssd": True}}]}}, "/cluster/shards/0/labels/ssd"),
        ({"cluster": {"shards": [SHARD], "tables": "[audit]\n"}}, "/cluster/tables"),
        ({"cluster": {"shards": [SHARD], "tables": "[auth]\n[router]\n"}}, "/cluster/tables"),
        ({"cluster": {"shards": [SHARD]}, "router": {"replicasMin": 9}}, "replicasMin is more than"),
        ({"cluster": {"shards": [SHARD]}, "tls": {"issuerKind": "Vault"}}, "/tls/issuerKind"),
    ],
)
def test_a_value_that_names_what_does_not_exist_is_refused(values: Object, complaint: str) -> None:
    done = helm("template", "windrow", CHART, "--kube-version", KUBERNETES, values=values)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_the_page_names_objects_that_exist(objects: list[Object]) -> None:
    named = set(re.findall(r"deploy/(windrow-\w+)", page()))
    assert named
    assert named <= {one["metadata"]["name"] for one in of(objects, "Deployment")}


def test_the_page_makes_the_secret_that_the_pods_mount(objects: list[Object], tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: https://kubernetes.io/docs/tasks/tools")
    (command,) = re.findall(r"^kubectl create secret .+$", page(), re.MULTILINE)
    shards = [one["name"] for one in example()["cluster"]["shards"]]
    for shard in shards:
        (tmp_path / f"{shard}.dsn").write_text(f"dbname={shard}")
    done = subprocess.run(
        (*command.split(), "--dry-run=client", "--output=yaml"),
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    secret = yaml.safe_load(done.stdout)
    assert sorted(secret["data"]) == shards
    for role in ROLES:
        mounted = [volume["secret"]["secretName"] for volume in pod_of(objects, role)["volumes"] if "secret" in volume]
        assert secret["metadata"]["name"] in mounted


def test_the_alerts_of_the_chart_are_those_of_the_one_file() -> None:
    chart = {"cluster": {"shards": [SHARD]}}
    assert of(rendered(chart), "PrometheusRule") == []
    (rule,) = of(rendered(chart | {"prometheusRule": True}), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())


def test_routers_that_demand_certificates_have_one_for_their_probes() -> None:
    made = rendered({"cluster": {"shards": [SHARD]}, "tls": {"issuer": "internal-ca", "clientCa": True}})
    (config,) = of(made, "ConfigMap")
    tls = tomllib.loads(config["data"]["cluster.toml"])["tls"]
    environment = {one["name"]: one.get("value") for one in container_of(made, "router")["env"]}
    assert tls["client_ca"] == environment["WINDROW_TLS_CA"]
    assert (tls["certificate"], tls["key"]) == (
        environment["WINDROW_TLS_CERTIFICATE"], environment["WINDROW_TLS_KEY"],
    )  # fmt: skip
    assert of(made, "Certificate")[0]["spec"]["usages"] == ["server auth", "client auth"]

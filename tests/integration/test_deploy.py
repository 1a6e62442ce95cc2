"""deploy/: programs start with the exact command, environment and files that the Dockerfile and compose.yaml name.

No container engine is needed (tests/deployed.py).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import re
import shlex
import signal
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from packaging.requirements import Requirement
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from archiver.settings import settings_of as archiver_settings_of
from balancer.settings import pace_of
from embedded import BinariesNotFound, Cluster, find_binaries
from router.settings import END_S_MAX, RouterSettings, host_and_port, router_settings
from router.tls_settings import tls_settings
from shard.placement.cluster_file import ClusterFileError, parse_cluster, read_cluster
from shard.postgres import schema
from shard.postgres.pool import Database
from shard.vocabulary import ShardName
from tests.deployed import SHARDS, Program, databases, start_work_and_stop
from tests.postgres import Server
from tests.routers import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
EXAMPLE = DEPLOY / "cluster.example.toml"
ROUTERS = ("router1", "router2")
# The services that run our image.
OURS = (*ROUTERS, "balancer", "archiver")

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def stages() -> list[list[tuple[str, str]]]:
    """Returns the Dockerfile's stages, each as its instructions: name and arguments."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    found: list[list[tuple[str, str]]] = []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if not line:
            continue
        word, _, arguments = line.partition(" ")
        if word == "FROM":
            found.append([])
        found[-1].append((word, arguments.strip()))
    return found


IMAGE = stages()[-1]


def the(word: str) -> str:
    """Returns the arguments of the final stage's only instruction with this name."""
    (arguments,) = [arguments for instruction, arguments in IMAGE if instruction == word]
    return arguments


def health_command() -> list[str]:
    command = json.loads(the("HEALTHCHECK").partition("CMD ")[2])
    assert isinstance(command, list)
    return command


def seconds(text: str) -> float:
    """Parses a duration of the compose file. All durations there are in seconds."""
    assert text.endswith("s")
    return float(text[:-1])


# The programs, as containers run them


def container(name: str, root: Path, dsns: dict[str, str], *, collector: str = "http://127.0.0.1:1") -> Program:
    """Creates the files of a service that runs our image, and reads the service's command and environment. The program
    sends its spans to the address `collector`, not to the service that is named collector."""
    service = SERVICES[name]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DOCKERFILE
    environment: dict[str, str] = {}
    for word, arguments in IMAGE:
        if word == "ENV":
            environment |= dict(part.split("=", 1) for part in shlex.split(arguments) if "$" not in part)
    command = [*json.loads(the("ENTRYPOINT")), *service.get("command", json.loads(the("CMD")))]
    environment |= service.get("environment", {})
    assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4317"
    environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector
    made = Program(root=root, command=command, environment=environment, dsns=dsns)

    secrets = root / "secrets-of-the-host"
    subprocess.run([DEPLOY / "compose" / "make-secrets.sh", secrets], check=True)
    for secret in service["secrets"]:
        text = (secrets / Path(COMPOSE["secrets"][secret]["file"]).name).read_text()
        # On the compose network this DSN leads to the service of a shard. The DSN names the role that role.sql creates.
        dsn = conninfo_to_dict(text.strip())
        assert dsn["host"] in SHARDS
        assert (dsn["user"], dsn["dbname"]) == ("windrow", "windrow")
        made.put(f"/run/secrets/{secret}", dsns[str(dsn["host"])] + "\n")
    for config in service["configs"]:
        text = (DEPLOY / COMPOSE["configs"][config["source"]]["file"]).read_text()
        made.put_cluster_file(config["target"], text)
    return made


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", OURS)
def test_the_image_and_compose_start_a_program_that_works_and_ends_well(
    name: str, tmp_path: Path, postgres: Server
) -> None:
    with databases(postgres, name) as dsns:
        stop = signal.Signals[the("STOPSIGNAL")]
        start_work_and_stop(
            container(name, tmp_path, dsns), stop=stop, grace_s=seconds(SERVICES[name]["stop_grace_period"])
        )


def test_the_health_check_of_the_image_tells_a_router_that_serves_from_one_that_ended(
    tmp_path: Path, postgres: Server
) -> None:
    with databases(postgres, "health") as dsns:
        made = container("router1", tmp_path, dsns)

        def healthy() -> bool:
            check = [address if ":" in part else part for part in made.resolved(health_command())]
            done = subprocess.run(check, cwd=tmp_path, check=False, timeout=PATIENCE_S, capture_output=True)
            return done.returncode == 0

        with made.running() as (_, address):
            until(healthy, "the router is healthy")
        assert not healthy()


# compose.yaml


def test_one_port_is_listened_on_exposed_published_and_checked() -> None:
    settings = router_settings_of(DEPLOY / "compose" / "cluster.toml")
    host, port = host_and_port(settings.listen, where="compose")
    assert host == "0.0.0.0"
    assert the("EXPOSE") == str(port)
    assert health_command()[-1] == f"127.0.0.1:{port}"
    published = [SERVICES[name]["ports"] for name in ROUTERS]
    assert published == [[f"127.0.0.1:{port}:{port}"], [f"127.0.0.1:{port + 1}:{port}"]]
    assert not any(SERVICES[name].get("ports") for name in SHARDS)


def test_the_grace_period_is_longer_than_a_router_takes_to_end() -> None:
    drain_s = router_settings_of(DEPLOY / "compose" / "cluster.toml").drain_seconds
    for name in ROUTERS:
        # The supervisor kills processes that have not ended within `END_S_MAX` after the drain.
        assert seconds(SERVICES[name]["stop_grace_period"]) >= drain_s + END_S_MAX


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_can_do_little_more_than_its_work(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    user = service.get("user", the("USER"))
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number that is not root's"
    assert re.fullmatch(r"[a-z/-]+:v?\d+\.\d+(\.\d+)?", service["image"]), "pinned to a release"
    for variable in service.get("environment", {}):
        assert "PASSWORD" not in variable or variable.endswith("_FILE"), "secrets come in files"
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), "strangers do not reach it"


def test_what_works_on_shards_waits_until_they_are_healthy() -> None:
    for name in OURS:
        assert SERVICES[name]["depends_on"] == {shard: {"condition": "service_healthy"} for shard in SHARDS}
    for name in SHARDS:
        assert "pg_isready" in SERVICES[name]["healthcheck"]["test"]


def test_secrets_are_made_once_and_closed_to_other_users(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make = (DEPLOY / "compose" / "make-secrets.sh", folder)
    subprocess.run(make, check=True)
    first = {path.name: path.read_text() for path in folder.iterdir()}
    subprocess.run(make, check=True, capture_output=True)
    assert {path.name: path.read_text() for path in folder.iterdir()} == first
    assert set(first) == {Path(secret["file"]).name for secret in COMPOSE["secrets"].values()}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    passwords = [text.strip() for name, text in first.items() if not name.endswith("_dsn")]
    assert len(set(passwords)) == len(passwords)
    assert all(len(password) == 48 for password in passwords)
    for shard in SHARDS:
        dsn = conninfo_to_dict(first[f"{shard}_dsn"].strip())
        assert (dsn["host"], dsn["password"]) == (shard, first[f"{shard}_password"].strip())


def test_a_server_starts_with_the_settings_of_a_shard() -> None:
    try:
        find_binaries()
    except BinariesNotFound:
        pytest.skip("no PostgreSQL programs on this machine")
    assert SERVICES["shard1"]["command"] == SERVICES["shard2"]["command"]
    program, *arguments = SERVICES["shard1"]["command"]
    assert program == "postgres"
    settings = dict(argument.removeprefix("-c").split("=", 1) for argument in arguments)
    # The test server sets `password_encryption` to the same value as the shards.
    chosen = {name: value for name, value in settings.items() if name != "password_encryption"}
    with (
        Cluster("compose", ephemeral=True, settings=chosen) as cluster,
        psycopg.connect(cluster.superuser_dsn) as connection,
    ):
        used = connection.execute("SELECT name, current_setting(name) FROM pg_settings").fetchall()
    assert settings.items() <= dict(used).items()


def test_the_role_that_compose_makes_can_make_the_schema(tmp_path: Path, postgres: Server) -> None:
    try:
        psql = find_binaries().program("psql")
    except BinariesNotFound:
        pytest.skip("no PostgreSQL programs on this machine")
    if not psql.exists():
        pytest.skip("no psql on this machine")
    secret = tmp_path / "password"
    secret.write_text("a'b\\c d\n")
    script = (DEPLOY / "compose" / "role.sql").read_text()
    for old, new in (
        ("/run/secrets/windrow_password", str(secret)),
        ("ROLE windrow", "ROLE made_by_compose"),
        ("TO windrow;", "TO made_by_compose;"),
        ("OWNER windrow", "OWNER made_by_compose"),
        ("DATABASE windrow", "DATABASE made_by_compose"),
    ):
        assert old in script
        script = script.replace(old, new)
    command = (str(psql), "--no-psqlrc", "-v", "ON_ERROR_STOP=1", "-q", "-d", postgres.superuser_dsn)
    subprocess.run(command, input=script, text=True, check=True, timeout=PATIENCE_S)
    try:
        dsn = make_conninfo(
            postgres.superuser_dsn, user="made_by_compose", password="a'b\\c d", dbname="made_by_compose"
        )
        asyncio.run(migrate(dsn))
        with psycopg.connect(dsn) as connection:
            row = connection.execute(
                "SELECT rolsuper, pg_has_role('pg_read_all_stats', 'USAGE') FROM pg_roles WHERE rolname = current_user"
            ).fetchone()
        assert row == (False, True)
    finally:
        postgres.drop("made_by_compose")
        with psycopg.connect(postgres.superuser_dsn, autocommit=True) as connection:
            connection.execute("DROP ROLE made_by_compose")


async def migrate(dsn: str) -> None:
    database = Database(ShardName("shard1"), dsn, connections=1)
    await database.open()
    assert await schema.migrate(database, cluster="compose")
    await database.close()


# Dockerfile


def test_every_package_of_the_server_is_in_the_image() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages: list[str] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    sources = [source for word, arguments in stages()[0] if word == "COPY" for source in arguments.split()[:-1]]
    assert {source for source in sources if (ROOT / source).is_dir()} == {"clients/python", *packages}
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE)
    assert sorted(allowed) == sorted(sources)


def test_the_build_backend_is_installed_with_all_that_it_needs() -> None:
    names: set[str] = set()
    wanted = ["hatchling"]
    while wanted:
        name = wanted.pop()
        names.add(name)
        needs = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
        wanted += [
            need.name.lower()
            for need in needs
            if need.name.lower() not in names and (need.marker is None or need.marker.evaluate({"extra": ""}))
        ]
    (listed,) = re.findall(r"for name in ([a-z -]+);", DOCKERFILE.read_text())
    assert set(listed.split()) == names
    lock = (ROOT / "requirements.lock").read_text()
    for name in names:
        assert f"\n{name}==" in lock


def test_no_index_is_asked_for_the_name_windrow() -> None:
    steps = [arguments for word, arguments in stages()[0] if word == "RUN"]
    (last,) = [step for step in steps if "/wheels" in step]
    for command in last.split(";"):
        assert {"--no-index", "--no-deps"} <= set(command.split())
    assert "\nwindrow" not in (ROOT / "requirements-server.lock").read_text()


# Cluster files


def router_settings_of(path: Path) -> RouterSettings:
    """Returns the [router] table of a cluster file whose secrets are in other files."""
    text = re.sub(r'dsn_(file|env) = ".*"', 'dsn = "dbname=nowhere"', path.read_text())
    return router_settings(parse_cluster(text, source=str(path)))


ONE_SHARD = '[[shard]]\nname = "s"\ndsn = "dbname=nowhere"\n'


def known_keys_of(table: str) -> list[str]:
    """Returns the keys that the code knows, as its error message for an unknown key lists them."""
    text = f"{ONE_SHARD}zzzz = 1" if table == "shard" else f"{ONE_SHARD}[{table}]\nzzzz = 1"

    def read() -> None:
        cluster = parse_cluster(text, source="probe")
        router_settings(cluster)
        tls_settings(cluster)
        pace_of(cluster)
        archiver_settings_of(cluster)

    with pytest.raises(ClusterFileError, match="known are") as caught:
        read()
    return str(caught.value).partition("known are ")[2].splitlines()[0].split(", ")


def section(table: str) -> str:
    """Returns the example's text from the first header of this table to the header of another table."""
    found = re.search(rf"^\[+{table}\]+\n((?:(?!\[+(?!\[*{table}\])).*\n)*)", EXAMPLE.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_example_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "dsn"
    secret.write_text("postgresql://windrow:three@db3/windrow?sslmode=require\n")
    file = tmp_path / "cluster.toml"
    file.write_text(re.sub(r'dsn_file = ".*"', f'dsn_file = "{secret}"', EXAMPLE.read_text()))
    for variable in re.findall(r'dsn_env = "(.*)"', EXAMPLE.read_text()):
        monkeypatch.setenv(variable, f"host=db sslmode=require dbname={variable.lower()}")
    cluster = read_cluster(file)
    assert [shard.name for shard in cluster.shards] == ["s1", "s2", "s3"]
    assert [shard.weight for shard in cluster.shards] == [1, 2, 1]
    assert cluster.catalog_dsn == "host=db sslmode=require dbname=windrow_catalog_dsn"
    # The example says that each of its values is the default.
    assert router_settings(cluster) == RouterSettings()
    assert tls_settings(cluster) is not None
    assert pace_of(cluster).jobs_per_s_max == 5000
    assert archiver_settings_of(cluster) == archiver_settings_of(parse_cluster(ONE_SHARD, source="defaults"))


@pytest.mark.parametrize("table", ["cluster", "shard", "catalog", "router", "tls", "balancer", "archiver"])
def test_the_example_explains_every_key(table: str) -> None:
    keys = known_keys_of(table)
    assert keys
    for key in keys:
        assert re.search(rf"\b{key}\b", section(table)), f"[{table}] {key} is not explained"


def test_the_example_has_every_table() -> None:
    with pytest.raises(ClusterFileError, match="known are") as caught:
        parse_cluster(f"zzzz = 1\n{ONE_SHARD}", source="probe")
    tables = str(caught.value).partition("known are ")[2].split(", ")
    assert set(tables) == set(tomllib.loads(EXAMPLE.read_text()))

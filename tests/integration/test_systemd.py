"""Tests the units in deploy/systemd: they start programs that work and end in time, and allow the programs little else.

No systemd runs in these tests. Instead, tests/deployed.py does what ExecStart, Environment and the signals say.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from router.settings import END_S_MAX, RouterSettings
from tests.deployed import BIN, SHARDS, Program, databases, start_work_and_stop
from tests.postgres import Server
from tests.routers import PATIENCE_S

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ROLES = ("router", "balancer", "archiver")
HEADING = "## On machines with systemd"


def settings(role: str) -> dict[str, list[str]]:
    """Returns the values of each setting of a unit, of all sections, in their order."""
    found: dict[str, list[str]] = {}
    for line in unit(role).read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def unit(role: str) -> Path:
    return DEPLOY / "systemd" / f"windrow-{role}.service"


def page() -> str:
    """Returns the section of deploy/README.md about systemd."""
    return (DEPLOY / "README.md").read_text().partition(HEADING)[2].partition("\n## ")[0]


def the_cluster_file() -> str:
    (found,) = re.findall(r"^```toml\n(.*?)^```", page(), re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ROLES)
def test_a_unit_starts_a_program_that_works_and_ends_in_time(role: str, tmp_path: Path, postgres: Server) -> None:
    found = settings(role)
    (start,), (stop,), (grace,) = found["ExecStart"], found["KillSignal"], found["TimeoutStopSec"]
    program, *arguments = shlex.split(start)
    assert program == "/opt/windrow/bin/windrow"
    environment = dict(shlex.split(one)[0].split("=", 1) for one in found["Environment"])
    with databases(postgres, f"unit_{role}") as dsns:
        made = Program(root=tmp_path, command=["windrow", *arguments], environment=environment, dsns=dsns)
        made.put_cluster_file("/etc/windrow/cluster.toml", the_cluster_file())
        for shard in SHARDS:
            made.put(f"/etc/windrow/dsn/{shard}", dsns[shard] + "\n")
        start_work_and_stop(made, stop=signal.Signals[stop], grace_s=float(grace))


def test_a_router_has_time_to_drain_and_enough_open_files() -> None:
    found = settings("router")
    # The supervisor kills processes that have not ended 5 s after the drain.
    assert float(found["TimeoutStopSec"][0]) >= RouterSettings().drain_seconds + END_S_MAX
    assert int(found["LimitNOFILE"][0]) >= RouterSettings().client_connections + 1250
    assert found["KillMode"] == ["mixed"]


@pytest.mark.parametrize("role", ROLES)
def test_systemd_finds_no_fault_in_a_unit_and_calls_it_closed(role: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed: apt-get install --no-install-recommends systemd")
    copy = tmp_path / unit(role).name
    # On the machine of the tests, `windrow` is in another directory.
    copy.write_text(unit(role).read_text().replace("/opt/windrow/bin", str(BIN)))
    for command in (("verify", "--man=no"), ("security", "--offline=true", "--threshold=20")):
        done = subprocess.run((analyze, *command, copy), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert unit(role).name not in done.stderr, done.stderr


def test_each_setting_of_confinement_is_the_same_in_every_unit() -> None:
    def confinement(role: str) -> str:
        return unit(role).read_text().partition("ProtectSystem=")[2]

    assert confinement("router") == confinement("balancer") == confinement("archiver")


def test_the_page_names_units_that_exist_and_all_of_them() -> None:
    named = set(re.findall(r"windrow-([a-z]+)", page()))
    assert named == set(ROLES)


def test_the_commands_of_the_page_make_the_user_and_the_files(tmp_path: Path) -> None:
    if shutil.which("systemd-sysusers") is None:
        pytest.skip("systemd-sysusers is not installed: apt-get install --no-install-recommends systemd")
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    commands = re.findall(r"^(?:install|systemd-sysusers).*", page(), re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        # Run the command under the test's own root directory. Do not name the group, which exists only under that root.
        local = re.sub(r"(?<= )/etc", f"{tmp_path}/etc", command).replace("-g windrow", "")
        local = re.sub(r"^systemd-sysusers$", f"systemd-sysusers --root={tmp_path}", local)
        subprocess.run(local, shell=True, cwd=DEPLOY.parent, check=True, timeout=PATIENCE_S)
    assert {found.name for found in (tmp_path / "etc/systemd/system").iterdir()} == {unit(role).name for role in ROLES}
    for role in ROLES:
        (user,) = settings(role)["User"]
        assert re.search(rf"^{user}:", (tmp_path / "etc/passwd").read_text(), re.MULTILINE)
    assert re.search(r"^windrow:", (tmp_path / "etc/group").read_text(), re.MULTILINE)
    assert (tmp_path / "etc/windrow/dsn").is_dir()


def test_the_page_installs_what_the_image_installs() -> None:
    installs = re.findall(r"^/opt/windrow/bin/pip install (.+)$", page(), re.MULTILINE)
    assert len(installs) == 2
    image = (DEPLOY / "Dockerfile").read_text()
    for lock in re.findall(r"requirements\S+", " ".join(installs)):
        assert (DEPLOY.parent / lock).is_file()
        assert f"-r {lock}" in image
    assert "--require-hashes" in installs[0]
    assert shlex.split(installs[1]) == ["--no-deps", "./clients/python", "."]

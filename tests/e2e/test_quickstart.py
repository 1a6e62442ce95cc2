"""Runs docs/quickstart.md from the top, on two databases of one server."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from embedded import find_binaries, open_clusters
from proof.processes import free_port
from tests.e2e.test_cli import environ
from tests.e2e.test_operations import Place
from tests.routers import until

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/quickstart.md").read_text()
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = ("windrow router", "windrow balancer", "windrow archiver")
WAIT_S = 60.0


@contextmanager
def program(place: Place, command: str) -> Generator[subprocess.Popen[str]]:
    """Runs a program of the page, as in a separate terminal. The program must run until Ctrl-C, and then end without an
    error."""
    with (place.folder / f"{command.split()[1]}.log").open("w+") as log:
        process = subprocess.Popen(
            ["bash", "-euc", f"exec {command}"], env=place.environ, cwd=place.folder, stderr=log, text=True
        )
        try:
            yield process
            assert process.poll() is None, Path(log.name).read_text()
        finally:
            process.terminate()
            process.wait(WAIT_S)
    assert process.returncode == 0, Path(log.name).read_text()
    assert "Traceback" not in Path(log.name).read_text()


@pytest.fixture
def place(tmp_path: Path) -> Generator[Place]:
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    with open_clusters(["pg"], ephemeral=True) as servers:
        dsn = servers["pg"].superuser_dsn
        programs = f"{find_binaries().folder}:{environ()['PATH']}"
        # `windrow login` writes its profile below XDG_CONFIG_HOME. The test must not change the profile of the person
        # who runs it.
        yield Place(folder=tmp_path, environ=environ(PG1=dsn, PG2=dsn, PATH=programs, XDG_CONFIG_HOME=str(tmp_path)))


@pytest.mark.timeout(300)
def test_every_command_of_the_page_does_what_it_says(place: Place) -> None:
    server = conninfo_to_dict(place.environ["PG1"])
    # In the test, the servers and addresses of the page are on loopback.
    here = {
        "@db1/": f"@{server['host']}:{server['port']}/",
        "@db2/": f"@{server['host']}:{server['port']}/",
        "?sslmode=verify-full": "",
        "localhost:7419": (listen := f"localhost:{free_port()}"),
        "127.0.0.1:7419": listen.replace("localhost", "127.0.0.1"),
        "127.0.0.1:9464": f"127.0.0.1:{free_port()}",
    }
    if shutil.which("promtool") is None:
        here["promtool"] = "true"
    health = f"WINDROW_TLS_CA=tls.crt windrow health {listen}"
    install, *blocks = BLOCK.findall(PAGE)
    code, out = replace(place, folder=ROOT).run(install)
    assert code == 0, out
    with ExitStack() as programs:
        for text in blocks:
            script = text
            for theirs, ours in here.items():
                script = script.replace(theirs, ours)
            if script.startswith(PROGRAMS):
                programs.enter_context(program(place, script.strip()))
                continue
            if "windrow login" in script:
                until(lambda: place.run(health)[0] == 0, "the router is not healthy", within_s=WAIT_S)
            code, out = place.run(script)
            assert code == 0, f"{text}\n{out}"
            assert "Traceback" not in out
    code, out = place.run("ls")
    assert {"shop.key", "operator.key", "cluster.toml"} <= set(out.split())

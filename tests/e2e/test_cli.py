"""The `windrow` command against a cluster that it has started: the examples of docs/cli.md, what scripts rely on, and
the messages when something is wrong."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import tomllib
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import grpc
import psutil
import psycopg
import pytest
import typer
from google.protobuf.message import Message
from grpc_status import rpc_status
from hypothesis import assume, given
from hypothesis import strategies as st

from cli import enqueue, local_file, output, values
from cli.exits import CommandFailed, ExitCode, RequestRefused
from cli.jobs import print_job
from cli.layout import ELSEWHERE
from cli.main import commands
from cli.messages import job_json
from cli.options import ADDRESS_DEFAULT
from router.codec.status import status_of
from router.services.server_info import server_info
from router.settings import LISTEN_DEFAULT
from shard.errors import ShardUnavailable
from shard.vocabulary import ShardName
from tests import command
from tests.command import Done
from tests.routers import until
from windrow import SyncClient, Workflow
from windrow.ids import uuid7
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, queue_pb2, server_pb2

ROOT = Path(__file__).resolve().parent.parent.parent
WAIT_S = 60.0
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
# No job has this id.
ID_OF_NONE = "019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55"
LEASE = re.compile(r"AQ[A-Za-z0-9+/]{37}=")
# An API key, or its id.
KEY = re.compile(r"\bwr_(?!a{12})[a-z2-7]{12}(?:_[A-Za-z0-9_-]{43})?(?![\w-])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A cluster that `windrow up --json` runs. The fields are those of the line that the command prints."""

    process: subprocess.Popen[str]
    address: str
    config: Path
    postgres: dict[str, int]
    routers: list[int]

    @property
    def environ(self) -> dict[str, str]:
        return environ(WINDROW_ADDRESS=self.address)


Windrow = Callable[..., Done]


def environ(**more: str) -> dict[str, str]:
    """Returns the environment of a user's shell. This checkout's `windrow` comes first in the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "COLUMNS": "80"} | more


@contextlib.contextmanager
def windrow_up(*arguments: str) -> Generator[tuple[subprocess.Popen[str], IO[str]], None, None]:
    """Starts `windrow up`. Yields the process and its output. Afterwards stops the process with Ctrl-C if it still
    runs."""
    with subprocess.Popen(
        ["windrow", "up", *arguments], env=environ(), stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(WAIT_S)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with windrow_up("--ephemeral", "--listen", "127.0.0.1:0", "--json") as (process, output):
        told = json.loads(output.readline())
        yield Running(
            process=process,
            address=told["address"],
            config=Path(told["config"]),
            postgres=told["postgres"],
            routers=told["routers"],
        )


@pytest.fixture
def windrow(running: Running, monkeypatch: pytest.MonkeyPatch) -> Windrow:
    """Returns a function that runs the command on that cluster."""
    monkeypatch.setenv("WINDROW_ADDRESS", running.address)
    return command.windrow


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yields a folder outside of `tmp_path`. If the tests run as root, `tmp_path` has mode 700, so the account of
    Postgres could not enter it."""
    base = Path(tempfile.mkdtemp(prefix="windrow-test-", dir="/tmp")).resolve()
    base.chmod(0o755)
    yield base
    shutil.rmtree(base)


def leased(windrow: Windrow, org: str, queue: str = "mail", count: int = 1) -> list[str]:
    """Enqueues jobs and leases them. Returns the leases."""
    lines = "\n".join(f"job {number}" for number in range(count))
    assert windrow("enqueue", org, queue, "greet", "--lines", stdin=lines).code == 0
    taken = windrow("dequeue", org, queue, "--max", str(count), "--window", "1m", "--json", "--worker", "ada")
    return [str(document["lease"]) for document in taken.documents]


# ── The documentation ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command of docs/cli.md, and the output and the exit code that the page shows for it."""

    command: str
    output: str
    code: int


def steps(text: str) -> list[Step]:
    """Returns every command of the ```console blocks. A step `$ echo $?` gives the exit code of the previous
    command."""
    found: list[Step] = []
    for block in re.findall(r"^```console\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        for part in block.removeprefix("$ ").split("\n$ "):
            command, _, output = part.partition("\n")
            if command == "echo $?":
                found[-1] = Step(command=found[-1].command, output=found[-1].output, code=int(output))
            else:
                found.append(Step(command=command, output=output.strip("\n"), code=0))
    return found


def in_shell(command: str, running: Running, folder: Path) -> tuple[int, str]:
    """Runs a command in a user's shell. Returns its exit code and everything it prints."""
    done = subprocess.run(
        ["bash", "-c", command],
        env=running.environ,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    return done.returncode, done.stdout.strip("\n")


def play(command: str, windrow: Windrow, running: Running, folder: Path) -> tuple[int, str]:
    """Runs a command as `in_shell` does. If it is a single `windrow` command, runs it in this process."""
    if "|" in command or not command.startswith("windrow "):
        return in_shell(command, running, folder)
    done = windrow(*shlex.split(command)[1:], together=True)
    return done.code, done.out.strip("\n")


class Names:
    """Maps the ids, leases and keys that the page shows to the ids, leases and keys at the same places in the real
    output. The real ones are new in every run."""

    def __init__(self) -> None:
        self._live: dict[str, str] = {}

    def learn(self, shown: str, real: str) -> None:
        for pattern in (ID, LEASE, KEY):
            for one, other in zip(pattern.findall(shown), pattern.findall(real), strict=False):
                self._live.setdefault(one, other)

    def apply(self, text: str) -> str:
        return re.sub(
            f"{ID.pattern}|{LEASE.pattern}|{KEY.pattern}", lambda found: self._live.get(found[0], found[0]), text
        )


def steady(text: str) -> str:
    """Replaces the texts that differ in every run: times, durations, versions and digests."""
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z", "TIME", text)
    text = re.sub(r"\b\d+(\.\d+)? ?(us|ms|s)\b(?!\.\.)", "SPAN", text)
    text = re.sub(r'("\w+_age_s": )[\d.]+', r"\1SPAN", text)
    text = re.sub(r"(cluster file )[0-9a-f]{12}\b", r"\1DIGEST", text)
    text = re.sub(r"(being erased )\([0-9a-f-]{36}\)", r"\1ERASURE", text)
    text = re.sub(r"windrow balancer \S+ \d+ by \S+ at \S+ \(process \d+", "BALANCER", text)
    text = re.sub(r"\b1\d\.\d+ +(\d+|…)", "VERSIONS", text)
    # On a busy machine, a command that waits reports its progress.
    text = re.sub(r"^[\d,]+ of [\d,]+ slots so far\n", "", text, flags=re.MULTILINE)
    # The line of `windrow doctor` about the server has counts that differ between runs.
    text = re.sub(r"^postgres 1\d.* connections$", "SERVER", text, flags=re.MULTILINE)
    # There are two partitions for days of finished jobs. Before three o'clock there are three.
    text = re.sub(r"\([23] partitions\)", "(DAYS)", text)
    text = re.sub(r"^ *(?:\d+ )?(\w+( \(DAYS\))?) .*\b[kM]B\b.*$", r"\1 SIZES", text, flags=re.MULTILINE)
    return re.sub(r" +", " ", text)


def test_the_documentation_shows_what_the_command_prints(
    windrow: Windrow, running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    documented = steps((ROOT / "docs/cli.md").read_text())
    shutil.copy(running.config, tmp_path / "cluster.toml")
    page = (ROOT / "docs/cli.md").read_text()
    (workflow,) = re.findall(r"`etl.json`:\n\n```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "etl.json").write_text(workflow)
    # The cluster says that it is ready before its balancer leads.
    once = ("balancer", "--once", "--config", "cluster.toml")
    until(lambda: windrow(*once).code == 5, "the cluster's balancer leads")
    names = Names()
    assert len(documented) > 30
    for step in documented:
        code, real = play(names.apply(step.command), windrow, running, tmp_path)
        names.learn(step.output, real)
        shown = names.apply(step.output)
        assert (code, steady(real)) == (step.code, steady(shown)), f"$ {step.command}\n{real}"


def test_the_page_about_schedules_shows_what_the_command_prints(
    windrow: Windrow, running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    documented = steps((ROOT / "docs/schedules.md").read_text())
    names = Names()
    assert len(documented) >= 8
    # The page about the command already uses an org of this name, so these commands get another one.
    for step in documented:
        typed = step.command.replace(" shop ", " calendar ")
        code, real = play(names.apply(typed), windrow, running, tmp_path)
        real = re.sub(r"\bcalendar\b", "shop", real)
        names.learn(step.output, real)
        assert (code, of_any_shard(steady(real))) == (step.code, of_any_shard(steady(names.apply(step.output))))


def of_any_shard(text: str) -> str:
    return re.sub(r'(shard"?:? "?)s[12]', r"\1s1", text)


def test_what_the_readme_shows_of_history_does_as_it_says(
    windrow: Windrow, running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(running.config, tmp_path / "cluster.toml")
    _, _, section = (ROOT / "README.md").read_text().partition("\n## History that stays findable")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("./run windrow ")]
    assert len(lines) == 5
    for line in lines:
        done = windrow(*shlex.split(line, comments=True)[2:])
        # The doctor may find problems of a busy machine, and another archiver may be running.
        codes = {"doctor": (0, 1), "archiver": (0, 1, 5)}.get(line.split()[2], (0,))
        assert done.code in codes, f"{line}\n{done.out}\n{done.err}"
    done = windrow("orgs", "release", "acme", "--config", "cluster.toml")
    assert done.out.startswith("org acme: released; finished jobs are kept for ")


def test_every_command_is_documented() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    names = [
        name if below == "" else f"{name} {below}"
        for name, command in commands().commands.items()
        for below in getattr(command, "commands", [""])
    ]
    missing = [name for name in names if f"$ windrow {name}" not in text and name not in ("demo", "chaos")]
    assert not missing


# ── up ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_up_says_what_to_paste_keeps_the_data_and_leaves_nothing_running(windrow: Windrow, folder: Path) -> None:
    data = ("--data", str(folder / "data"), "--shards", "1", "--processes", "1", "--listen", "127.0.0.1:0")
    with windrow_up(*data) as (process, output):
        said = [output.readline().strip() for _ in range(11)]
        address = re.fullmatch(r"Windrow is up at (127\.0\.0\.1:\d+): 1 shard, 1 router process\.", said[0])
        assert address is not None
        assert str(folder / "data") in said[1]
        assert said[2] == f"Cluster file: {folder / 'data' / 's1' / 'cluster.toml'}"
        pasted = [line for line in said if line.startswith("./run windrow ")]
        assert [line.split()[2] for line in pasted] == ["enqueue", "dequeue", "stats"]
        done = [windrow(*shlex.split(line)[2:]) for line in pasted]
        assert [one.code for one in done] == [0, 0, 0]
        assert "succeeded" in done[-1].out

        second = subprocess.run(
            ["windrow", "up", *data], env=environ(), capture_output=True, text=True, check=False, timeout=WAIT_S
        )
        assert second.returncode == 5
        assert f"another cluster runs on the data in {folder / 'data'}: use that one at {address[1]}, " in second.stderr
        assert "it is another `windrow up`, which has a Postgres server for each shard: " in second.stderr
        assert "Traceback" not in second.stderr

        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) > 3
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
        _, alive = psutil.wait_procs(children, timeout=WAIT_S)
        assert not alive
    assert (folder / "data" / "s1").is_dir()


def test_a_secure_cluster_prints_lines_to_paste_that_work_and_refuses_who_has_no_key(folder: Path) -> None:
    data = ("--data", str(folder / "data"), "--shards", "1", "--processes", "1", "--listen", "127.0.0.1:0", "--secure")
    with windrow_up(*data) as (_, output):
        said = [output.readline().strip() for _ in range(15)]
        address = said[0].split()[4].removesuffix(":")
        pasted = said[6:10]
        assert pasted[0].startswith("export WINDROW_TOKEN=wr_")
        assert [line.split()[2] for line in pasted[1:]] == ["enqueue", "dequeue", "stats"]
        here = environ(WINDROW_ADDRESS=address)
        script = "\n".join(pasted).replace("./run windrow", "windrow")
        done = subprocess.run(
            ["bash", "-ec", script], env=here, capture_output=True, text=True, check=False, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stderr
        assert "1 acked" in done.stderr
        # A call about all orgs is refused, and the error names the key that the call needs. The last of the printed
        # lines makes a key for all orgs.
        assert said[11].startswith("The key is for the org acme, and has the scopes enqueue, consume, read, admin.")
        script = f"{pasted[0]}\nwindrow shards || {said[14]}".replace("./run windrow", "windrow")
        done = subprocess.run(
            ["bash", "-ec", script], env=here, capture_output=True, text=True, check=False, timeout=WAIT_S
        )
        assert "it takes a key for all orgs with the scope 'cluster' (windrow keys create --all-orgs " in done.stderr
        of_all = environ(WINDROW_ADDRESS=address, WINDROW_TOKEN=done.stdout.strip())
        assert subprocess.run(["windrow", "shards"], env=of_all, check=False, timeout=WAIT_S).returncode == 0
        refused = subprocess.run(
            ["windrow", "stats", "acme"], env=here, capture_output=True, text=True, check=False, timeout=WAIT_S
        )
        assert (refused.returncode, refused.stdout) == (5, "")
        assert "a token comes from --token-file or WINDROW_TOKEN" in refused.stderr
    assert (folder / "data" / "s1" / "cluster.toml").read_text().count("[auth]") == 1
    # A later start prints the same key.
    with windrow_up(*data, "--json") as (_, output):
        assert json.loads(output.readline())["key"] == pasted[0].partition("=")[2]
    # A cluster that is started without --secure still requires keys. The start prints lines that work with an existing
    # key.
    with windrow_up(*data[:-1]) as (_, output):
        said = [line.strip() for line in itertools.takewhile(lambda line: "Ctrl-C" not in line, output)]
        assert said[4].startswith("This cluster asks callers for an API key: set WINDROW_TOKEN ")
        later = [line for line in said if line.startswith("./run windrow ")]
        assert [line.split()[2] for line in later] == ["enqueue", "dequeue", "stats"]
        script = "\n".join([pasted[0], *later]).replace("./run windrow", "windrow")
        done = subprocess.run(
            ["bash", "-ec", script], env=environ(), capture_output=True, text=True, check=False, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.timeout(300)
def test_a_shard_that_is_added_to_the_data_is_filled(windrow: Windrow, folder: Path) -> None:
    data = ("--data", str(folder / "data"), "--processes", "1", "--listen", "127.0.0.1:0", "--json")
    orgs = [f"org-{number}" for number in range(12)]
    with windrow_up(*data, "--shards", "1") as (_, output):
        address = json.loads(output.readline())["address"]
        for org in orgs:
            assert windrow("enqueue", org, "mail", "greet", "--address", address).code == 0
    config = folder / "data" / "s1" / "cluster.toml"
    # An operator has added a shard. The next start listens on another port.
    by_hand = '\n[[shard]]\nname = "s2"\ndsn = "host=127.0.0.1 port=1"\nstate = "off"\nweight = 0\n'
    config.write_text(config.read_text() + by_hand)
    (folder / "data" / "s1" / "cluster.json").unlink()
    with windrow_up(*data, "--shards", "2") as (_, output):
        told = json.loads(output.readline())
        assert told["config"] == str(config)
        assert by_hand in config.read_text()
        address = told["address"]
        assert windrow("shards", "rebalance", "--config", told["config"]).code == 0

        def leaving() -> dict[str, int]:
            documents = windrow("shards", "--json", "--address", address).documents
            return {one["shard"]: one["leaving_slots"] for one in documents}

        # The router reads the catalog a moment after the balancer has written to it.
        until(lambda: leaving() == {"s1": 0, "s2": 0, "s3": 0}, "no slots leave a shard")
        shards = set()
        for org in orgs:
            (job,) = windrow("jobs", "list", org, "mail", "--json", "--address", address).documents
            shards.add(job["shard"])
            assert windrow("dequeue", org, "mail", "--ack", "--address", address).code == 0
        assert shards == {"s1", "s3"}
        for shard in shards:
            assert windrow("check", "--shard", shard, "--address", address).code == 0


def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def start(*data: str) -> str:
        command = ["windrow", "up", *data, "--shards", "1", "--processes", "1", "--listen", listen]
        done = subprocess.run(command, env=environ(), capture_output=True, text=True, check=False, timeout=WAIT_S)
        assert done.returncode == 5
        assert "Traceback" not in done.stderr
        return done.stderr

    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"{listen} is in use, most likely by another cluster; stop that, or choose " in start("--ephemeral")
        local_file.keep_address(tmp_path, listen)
        by_itself = f"most likely by the cluster that runs on the data in {tmp_path} already: use that one, or stop it"
        assert by_itself in start("--data", str(tmp_path))


def test_up_serves_metrics_where_its_cluster_file_says_or_refuses_the_address(folder: Path) -> None:
    data = ("--data", str(folder / "data"), "--shards", "1", "--processes", "1", "--listen", "127.0.0.1:0", "--json")
    with windrow_up(*data) as (_, output):
        config = Path(json.loads(output.readline())["config"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config.write_text(config.read_text().replace("[router]\n", f'[router]\nmetrics = "{address}"\n'))
        refused = subprocess.run(
            ["windrow", "up", *data], env=environ(), capture_output=True, text=True, check=False, timeout=WAIT_S
        )
    assert refused.returncode == 5
    assert f"cannot serve metrics on {address}: Address already in use; choose another address" in refused.stderr
    assert "--listen" not in refused.stderr
    with windrow_up(*data) as (_, output):
        output.readline()
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as answer:
            assert 'shard="s1"' in answer.read().decode()


def test_a_router_of_a_cluster_file_serves_until_it_is_told_to_stop(windrow: Windrow, running: Running) -> None:
    command = ["windrow", "router", "--config", str(running.config), "--listen", "127.0.0.1:0", "--processes", "1"]
    with subprocess.Popen(command, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("listening on ").strip()
        healthy = windrow("health", address)
        process.terminate()
        _, log = process.communicate(timeout=WAIT_S)
    assert (process.returncode, healthy.code) == (0, 0)
    # When gRPC closes its socket, it must not report that as an error.
    assert "Closing acceptor" not in log


# ── What scripts rely on ─────────────────────────────────────────────────────────────────────────────────────────────


def test_every_line_becomes_one_job_in_order(windrow: Windrow) -> None:
    lines = [f"payload {number}" for number in range(1205)]
    done = windrow("enqueue", "lines", "bulk", "load", "--lines", stdin="\n\n".join(lines))
    assert done.code == 0
    assert len(done.lines) == len(set(done.lines)) == len(lines)
    assert done.lines == sorted(done.lines)
    first = windrow("jobs", "get", "lines", done.lines[0], done.lines[-1], "--json")
    assert [document["payload"] for document in first.documents] == [lines[0], lines[-1]]
    listed = windrow("jobs", "list", "lines", "bulk", "--state", "ready", "--limit", "1100", "--json")
    assert len(listed.lines) == 1100
    assert "there are more" in listed.err


def test_bytes_go_in_and_come_out_as_they_were(windrow: Windrow, tmp_path: Path) -> None:
    file = tmp_path / "payload"
    file.write_bytes(b"\xff\x00binary")
    (job_id,) = windrow("enqueue", "bytes", "q", "k", "--file", str(file)).lines
    (document,) = windrow("jobs", "get", "bytes", job_id, "--json").documents
    assert document["payload"] is None
    assert document["payload_base64"] == "/wBiaW5hcnk="
    (job_id,) = windrow("enqueue", "bytes", "q", "k", "-", stdin="from standard input\n").lines
    (document,) = windrow("jobs", "get", "bytes", job_id, "--json").documents
    assert document["payload"] == "from standard input\n"


def test_jobs_that_no_one_answer_has_room_for_come_in_their_order(windrow: Windrow, tmp_path: Path) -> None:
    file = tmp_path / "payload"
    file.write_bytes(b"x" * 1_048_576)
    ids = [windrow("enqueue", "large", "q", "k", "--file", str(file)).lines[0] for _ in range(4)]
    got = windrow("jobs", "get", "large", *ids[::-1], "--json")
    assert [document["id"] for document in got.documents] == ids[::-1]
    listed = windrow("jobs", "list", "large", "q", "--payload", "--json", "--limit", "3")
    assert [len(document["payload"]) for document in listed.documents] == [1_048_576] * 3
    assert "there are more that are ready: raise --limit" in listed.err


def test_a_terminal_is_never_told_what_a_job_says(windrow: Windrow) -> None:
    evil = "\x1b]0;owned\x07[red]x"
    windrow("enqueue", "evil", "q", "k", evil, "--attribute", f"label={evil}")
    (taken,) = windrow("dequeue", "evil", "q", "--json").documents
    windrow("nack", "evil", str(taken["lease"]), "--error", evil, "--type", evil[:20], "--permanent")
    shown = windrow("jobs", "get", "evil", str(taken["id"])).out
    assert "\x1b" not in shown
    assert r"\x1b]0;owned\x07[red]x" in shown
    assert "\x1b" not in windrow("jobs", "list", "evil", "q").out


def test_a_list_shows_the_first_line_of_an_error_and_one_job_all_of_them(windrow: Windrow) -> None:
    (lease,) = leased(windrow, "trace")
    error = 'ValueError: no such user\n\nTraceback (most recent call last):\n  File "app.py", line 7\n'
    windrow("nack", "trace", lease, "--type", "app.Oops", "--error", error, "--permanent")
    listed = windrow("jobs", "list", "trace", "mail")
    assert listed.lines[1].endswith("app.Oops: ValueError: no such user")
    assert len(listed.lines) == 2
    (job,) = windrow("jobs", "list", "trace", "mail", "--state", "dead", "--json").documents
    assert job["attempts"][0]["failure"] == {"type": "app.Oops", "message": error, "stack": None, "permanent": True}
    shown = windrow("jobs", "get", "trace", str(job["id"])).lines
    at = shown.index("    app.Oops: ValueError: no such user")
    assert shown[at:] == [
        *(
            "    app.Oops: ValueError: no such user",
            "",
            "    Traceback (most recent call last):",
            '      File "app.py", line 7',
        )
    ]


@pytest.mark.parametrize("stacks", [False, True])
def test_the_stack_of_a_failed_attempt_is_shown_only_on_request(
    stacks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_pb2.Job(id="019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55", queue="mail", kind="greet")
    failure = job_pb2.Failure(type="Oops", message="no such user", stack="File a\n  File b")
    job.attempts.add(attempt=1, outcome=job_pb2.ATTEMPT_OUTCOME_NACKED, failure=failure)
    print_job(job, stacks=stacks)
    shown = capsys.readouterr().out
    assert "Oops: no such user" in shown
    assert ("File b" in shown) == stacks


def test_what_attempts_have_logged_is_shown_line_by_line_and_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    job = job_pb2.Job(id="019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55", queue="mail", kind="greet", log="so far\nso good")
    job.retry.fixed.delay.seconds = 1
    job.attempts.add(attempt=1, outcome=job_pb2.ATTEMPT_OUTCOME_CANCELLED, log="\x1b]0;owned\x07one\ntwo")
    job.attempts.add(attempt=2, outcome=job_pb2.ATTEMPT_OUTCOME_RELEASED)
    print_job(job, stacks=False)
    shown = [line.strip() for line in capsys.readouterr().out.splitlines()]
    (at,) = [at for at, line in enumerate(shown) if line.split() == ["log", "so", "far"]]
    assert shown[at + 1] == "so good"
    assert shown[-2:] == [r"log of attempt 1  \x1b]0;owned\x07one", "two"]
    document: Any = job_json(job, payloads=False)
    assert (document["log"], [one["log"] for one in document["attempts"]]) == (
        "so far\nso good",
        ["\x1b]0;owned\x07one\ntwo", None],
    )
    assert [one["outcome"] for one in document["attempts"]] == ["cancelled", "released"]


def test_the_keys_of_a_job_are_the_documented_ones(windrow: Windrow) -> None:
    (lease,) = leased(windrow, "keys")
    assert windrow("nack", "keys", lease, "--error", "boom", "--permanent").code == 0
    (job,) = windrow("jobs", "list", "keys", "mail", "--state", "dead", "--json").documents
    assert set(job) == {
        *("id", "queue", "kind", "state", "priority", "attempt", "max_attempts", "enqueued_at", "run_at", "expires_at"),
        *("lease_deadline", "finished_at", "worker", "reason", "dedup_key", "attributes", "retry", "attempts", "shard"),
        *("progress", "log", "dedup_while_live", "max_runtime_s", "scheduled_run", "workflow", "group"),
    }
    assert job["state"] == "dead"
    (attempt,) = windrow("jobs", "get", "keys", str(job["id"]), "--json").documents[0]["attempts"]
    assert set(attempt) == {"attempt", "outcome", "worker", "leased_at", "ended_at", "failure", "log"}
    assert (attempt["outcome"], attempt["worker"], attempt["failure"]["message"]) == ("nacked", "ada", "boom")


def test_the_counts_of_an_org_add_up(windrow: Windrow) -> None:
    leased(windrow, "counts", count=3)
    windrow("enqueue", "counts", "later", "k", "--delay", "1h")
    (document,) = windrow("stats", "counts", "--finished", "--json").documents
    mail, later = sorted(document["queues"], key=lambda queue: queue["queue"], reverse=True)
    assert (mail["queue"], mail["leased"], mail["ready"], mail["succeeded"]) == ("mail", 3, 0, 0)
    assert (later["scheduled"], later["oldest_ready_age_s"]) == (1, None)
    assert later["next_due"].endswith("Z")


def test_a_snoozed_job_waits_uncounted_and_shows_why(windrow: Windrow) -> None:
    (lease,) = leased(windrow, "snoozed", count=1)
    refused = windrow("snooze", "snoozed", lease, "--after", "4000d")
    assert refused.code == 2
    assert "--after" in refused.err
    assert windrow("snooze", "snoozed", lease, "--after", "1h", "--reason", "not yet").lines == [f"{lease}  ok"]
    (job,) = windrow("jobs", "list", "snoozed", "mail", "--json").documents
    assert (job["state"], job["attempt"]) == ("scheduled", 0)
    (attempt,) = windrow("jobs", "get", "snoozed", str(job["id"]), "--json").documents[0]["attempts"]
    assert (attempt["outcome"], attempt["failure"]["message"]) == ("released", "not yet")


def test_leases_are_read_from_standard_input_and_answered_one_by_one(windrow: Windrow) -> None:
    first, second, third = leased(windrow, "settle", count=3)
    assert windrow("release", "settle", first).code == 0
    done = windrow("ack", "settle", "-", "--json", stdin=f"{first}\n\n{second}\n")
    assert done.code == 1
    assert [document["answer"] for document in done.documents] == ["stale", "ok"]
    urlsafe = third.rstrip("=").replace("+", "-").replace("/", "_")
    assert windrow("extend", "settle", urlsafe, "--window", "2m").code == 0
    elsewhere = windrow("ack", "someone-else", third)
    assert (elsewhere.code, elsewhere.lines) == (4, [f"{third}  not found"])


def test_a_dequeue_may_ack_what_it_has_printed(windrow: Windrow) -> None:
    windrow("enqueue", "at-once", "q", "k", "payload")
    (taken,) = windrow("dequeue", "at-once", "q", "--ack", "--json").documents
    (job,) = windrow("jobs", "get", "at-once", str(taken["id"]), "--json").documents
    assert job["state"] == "succeeded"
    nothing = windrow("dequeue", "at-once", "q")
    assert (nothing.code, nothing.out) == (1, "")


@dataclass(slots=True)
class Waited:
    """A fake router whose Dequeue gives the answers that the test prepared, and records the requests."""

    address: str = ""
    # For each call: for how long it asks the router to wait, and the time until the deadline of the call, in seconds.
    asked: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    answers: list[queue_pb2.DequeueResponse] = field(default_factory=list[queue_pb2.DequeueResponse])
    called: threading.Event = field(default_factory=threading.Event)
    # Set when the caller has ended the call.
    left: threading.Event = field(default_factory=threading.Event)

    def dequeue(self, request: queue_pb2.DequeueRequest, context: grpc.ServicerContext) -> queue_pb2.DequeueResponse:
        self.asked.append((request.wait.ToTimedelta().total_seconds(), context.time_remaining()))
        context.add_callback(self.left.set)
        self.called.set()
        if self.answers:
            return self.answers.pop(0)
        assert self.left.wait(WAIT_S)
        return queue_pb2.DequeueResponse()


@pytest.fixture
def waited() -> Iterator[Waited]:
    router = Waited()
    handler = grpc.unary_unary_rpc_method_handler(
        router.dequeue,  # pyrefly: ignore[bad-argument-type]
        request_deserializer=queue_pb2.DequeueRequest.FromString,
        response_serializer=queue_pb2.DequeueResponse.SerializeToString,
    )
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("windrow.v1.Queue", {"Dequeue": handler})])
    router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield router
    server.stop(None).wait(WAIT_S)


def test_a_wait_that_is_interrupted_ends_at_once_and_takes_nothing(waited: Waited) -> None:
    with subprocess.Popen(
        ["windrow", "dequeue", "acme", "mail", "--wait", "10m"],
        env=environ(WINDROW_ADDRESS=waited.address),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert waited.called.wait(WAIT_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    # The router notices the end of the call. So it can release jobs that it has just leased for the call.
    assert waited.left.wait(WAIT_S)


def test_a_wait_goes_on_where_a_router_that_shuts_down_answers_early(windrow: Windrow, waited: Waited) -> None:
    job = job_pb2.LeasedJob(id="019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55", lease=b"lease", queue="mail", kind="greet")
    waited.answers = [queue_pb2.DequeueResponse(), queue_pb2.DequeueResponse(jobs=[job])]
    done = windrow("dequeue", "acme", "mail", "--wait", "90s", "--timeout", "5s", "--json", "--address", waited.address)
    assert [document["id"] for document in done.documents] == [job.id]
    first, second = waited.asked
    # A call waits for at most a minute. Its deadline is 5 s after that minute, and gRPC rounds it up to 0.1 s.
    assert first[0] == second[0] == 60
    assert 60 < first[1] < 66


def test_a_job_that_falls_due_ends_the_wait_for_it(windrow: Windrow) -> None:
    (job_id,) = windrow("enqueue", "awaited", "q", "k", "--delay", "3s").lines
    assert windrow("dequeue", "awaited", "q").code == 1
    (taken,) = windrow("dequeue", "awaited", "q", "--wait", "30s", "--ack", "--json").documents
    assert taken["id"] == job_id


def test_dead_jobs_come_back_and_waiting_ones_are_cancelled(windrow: Windrow) -> None:
    for lease in leased(windrow, "mend", count=3):
        windrow("nack", "mend", lease, "--permanent")
    redrive = ("jobs", "redrive", "mend", "--queue", "mail", "--limit", "2", "--json")
    assert windrow(*redrive, "--yes").documents == [{"redriven": 2, "skipped": 0}]
    refused = windrow("jobs", "purge", "mend", "mail")
    assert refused.code == 2
    assert "--yes" in refused.err
    assert windrow("jobs", "purge", "mend", "mail", "--dead", "--yes", "--json").documents == [{"cancelled": 3}]
    assert windrow("queues", "delete", "mend", "mail").code == 0


def test_jobs_are_found_cancelled_and_redriven_by_their_attributes(windrow: Windrow) -> None:
    for campaign in ("42", "42", "43"):
        windrow("enqueue", "where", "mail", "greet", "--attribute", f"campaign={campaign}", "--attribute", "plan=pro")
    (newest, *_) = found = windrow("jobs", "list", "where", "--where", "campaign=42", "--json").documents
    assert [job["attributes"]["campaign"] for job in found] == ["42", "42"]
    assert windrow("jobs", "list", "where", "--where", "campaign=42", "--where", "plan=free", "--json").documents == []
    asked = windrow("jobs", "cancel", "where", "--where", "campaign=42")
    assert (asked.code, "this would cancel 2 jobs of org 'where': confirm with --yes" in asked.err) == (2, True)
    for wrong in ((), ("--state", "ready"), ("--queue", "mail", "--state", "succeeded"), ("mail",)):
        assert windrow("jobs", "cancel", "where", *wrong, "--yes").code == 2
    for beside_ids in (("--queue", "mail"), ("--state", "ready"), ("--limit", "1"), ("--dry-run",)):
        assert windrow("jobs", "cancel", "where", newest["id"], *beside_ids, "--yes").code == 2
    unknown = windrow("jobs", "cancel", "where", "--queue", "nope", "--yes")
    assert (unknown.code, unknown.err) == (4, "windrow: org 'where' has no queue 'nope'\n")
    tried = windrow("jobs", "cancel", "where", "--where", "campaign=42", "--dry-run", "--json")
    assert tried.documents == [{"found": 2, "first": [job["id"] for job in found]}]
    for count in (2, 0):
        done = windrow("jobs", "cancel", "where", "--where", "campaign=42", "--reason", "over", "--yes", "--json")
        assert done.documents == [{"cancelled": count, "skipped": 0}]
    (shown,) = windrow("jobs", "get", "where", newest["id"], "--json").documents
    assert (shown["state"], shown["reason"]) == ("cancelled", "over")
    windrow("nack", "where", *leased(windrow, "where"), "--permanent")
    for campaign, count in (("42", 0), ("43", 1)):
        redriven = windrow("jobs", "redrive", "where", "--where", f"campaign={campaign}", "--yes", "--json")
        assert redriven.documents == [{"redriven": count, "skipped": 0}]


def test_a_command_that_finds_no_job_says_that_where_means_attributes(windrow: Windrow) -> None:
    windrow("enqueue", "fields", "mail", "greet", "--attribute", "kind=personal")
    for verb, *options in (("list",), ("count",), ("cancel", "--dry-run"), ("redrive", "--yes")):
        wrong = windrow("jobs", verb, "fields", *options, "--where", "queue=mail", "--where", "priority=5")
        assert wrong.code == 0
        assert "--where queue=… means an attribute named 'queue', not the job's queue: use QUEUE or" in wrong.err
        assert "not the job's priority: no option selects jobs by it\n" in wrong.err
        right = windrow("jobs", verb, "fields", *options, "--where", "kind=personal")
        assert ("means an attribute" in right.err) == (verb == "redrive")


def test_a_preview_shows_why_jobs_are_dead_and_how_many_more_there_are(windrow: Windrow) -> None:
    for lease in leased(windrow, "preview", count=7):
        windrow("nack", "preview", lease, "--permanent", "--error", "no such user\nat all")
    tried = windrow("jobs", "redrive", "preview", "--queue", "mail", "--dry-run")
    assert tried.lines[0] == "would redrive 7 jobs of org 'preview'"
    shown = [line.split("  ")[2:] for line in tried.lines[1:6]]
    assert shown == [["mail", "dead", "greet", "failed permanently: no such user"]] * 5
    assert tried.lines[6:] == ["  and 2 more"]
    windrow("enqueue", "preview", "mail", "greet")
    waits = windrow("jobs", "cancel", "preview", "--queue", "mail", "--state", "ready", "--dry-run")
    assert (len(waits.lines), waits.lines[1].endswith("  mail  ready  greet")) == (2, True)


def test_an_org_without_queues_may_be_a_mistake(windrow: Windrow) -> None:
    windrow("enqueue", "typed", "mail", "greet")
    said = "org 'typedd' has no queues (is the name right?); the first job of a queue creates it\n"
    for arguments in (
        ("stats", "typedd"),
        ("queues", "list", "typedd"),
        ("jobs", "cancel", "typedd", "--where", "campaign=autumn", "--dry-run"),
        ("jobs", "cancel", "typedd", "--where", "campaign=autumn"),
        ("jobs", "redrive", "typedd", "--where", "campaign=autumn", "--yes"),
    ):
        done = windrow(*arguments)
        assert (done.code, done.err) == (0, said), arguments
    right = windrow("jobs", "cancel", "typed", "--where", "campaign=autumn", "--dry-run")
    assert (right.code, right.out, right.err) == (0, "would cancel 0 jobs of org 'typed'\n", "")


def test_a_list_has_the_workers_of_leased_jobs(windrow: Windrow) -> None:
    leased(windrow, "worked")
    windrow("enqueue", "worked", "mail", "greet")
    (titles, *rows) = (line.split() for line in windrow("jobs", "list", "worked", "mail").lines)
    assert titles[:3] == ["id", "state", "worker"]
    assert {(row[1], row[2]) for row in rows} == {("ready", "0/20"), ("leased", "ada")}
    assert "worker" not in windrow("jobs", "list", "worked", "--state", "ready").lines[0]


def test_dead_jobs_are_redriven_by_their_ids(windrow: Windrow) -> None:
    (lease,) = leased(windrow, "revive")
    windrow("nack", "revive", lease, "--permanent")
    (dead,) = windrow("jobs", "list", "revive", "--state", "dead", "--json").documents
    done = windrow("jobs", "redrive", "revive", dead["id"])
    assert (done.code, done.out) == (0, f"{dead['id']}  redriven\n")
    again = windrow("jobs", "redrive", "revive", dead["id"])
    assert (again.code, again.out) == (1, f"{dead['id']}  not redriven: it is not dead\n")
    assert windrow("jobs", "redrive", "revive", str(uuid7())).code == 4


def test_jobs_that_wait_are_altered_by_what_they_have_in_common(windrow: Windrow) -> None:
    for attribute, *delay in (("n=0",), ("n=1",), ("n=1", "--delay", "1h"), ("n=2",)):
        windrow("enqueue", "several", "mail", "greet", "--attribute", attribute, *delay)
    before = windrow("jobs", "list", "several", "--json").documents
    alter = ("jobs", "alter", "several", "--where", "n=1", "--priority", "1")
    tried = windrow(*alter, "--dry-run")
    assert (tried.code, tried.lines[0], len(tried.lines)) == (0, "would change 2 jobs of org 'several'", 3)
    asked = windrow(*alter)
    assert (asked.code, "this would change 2 jobs of org 'several': confirm with --yes" in asked.err) == (2, True)
    assert windrow("jobs", "list", "several", "--json").documents == before
    for count in (2, 0):
        assert windrow(*alter, "--yes", "--json").documents == [{"changed": count, "skipped": 0}]
    after = windrow("jobs", "list", "several", "--json").documents
    assert {(job["attributes"]["n"], job["priority"]) for job in after} == {("0", 5), ("1", 1), ("2", 5)}
    later = windrow("jobs", "alter", "several", "--where", "n=2", "--run-at", "2030-01-01T00:00:00Z", "--yes", "--json")
    assert (later.code, later.documents) == (0, [{"changed": 1, "skipped": 0}])
    nothing = windrow("jobs", "alter", "several", "--where", "n=2")
    assert (nothing.code, "no change is given" in nothing.err) == (2, True)


def test_jobs_are_counted_by_the_conditions_of_a_list(windrow: Windrow) -> None:
    for state, options in {"ready": ["--attribute", "n=1"], "scheduled": ["--delay", "1h"]}.items():
        assert windrow("enqueue", "many", "mail", "greet", *options).code == 0, state
    (done,) = windrow("enqueue", "many", "post", "print").lines
    windrow("jobs", "cancel", "many", done)
    assert windrow("jobs", "count", "many").out == "2\n"
    assert windrow("jobs", "count", "many", "--state", "all", "--json").documents == [{"count": 3}]
    for conditions, count in {
        ("mail",): 2,
        ("--where", "n=1"): 1,
        ("--made-after", "1h"): 2,
        ("--made-before", "1h"): 0,
        ("--kind", "print", "--state", "cancelled"): 1,
        ("--died-after", "1h"): 0,
    }.items():
        assert windrow("jobs", "count", "many", *conditions).out == f"{count}\n", conditions
    missing = windrow("jobs", "count", "many", "nope")
    assert (missing.code, "has no queue 'nope'" in missing.err) == (4, True)


def test_a_job_is_shown_by_its_dedup_key(windrow: Windrow) -> None:
    (job_id,) = windrow("enqueue", "unique", "mail", "greet", "--dedup-key", "user 7", "--while-live").lines
    get = ("jobs", "get", "unique", "--queue", "mail", "--key", "user 7")
    assert windrow(*get).lines[0] == job_id
    assert [job["id"] for job in windrow(*get, "--json").documents] == [job_id]
    windrow("jobs", "cancel", "unique", job_id)
    gone = windrow(*get)
    assert (gone.code, "no job of queue 'mail' of org 'unique' has the key 'user 7'" in gone.err) == (4, True)
    for wrong, words in {
        (): "give job ids, or --key and --queue",
        (job_id, "--key", "a", "--queue", "q"): "and not both",
        ("--key", "a"): "belong together",
        (job_id, "--queue", "q"): "belong together",
    }.items():
        refused = windrow("jobs", "get", "unique", *wrong)
        assert (refused.code, words in refused.err) == (2, True), refused.err


def test_a_watched_job_is_shown_until_its_end_and_then_its_result(running: Running, windrow: Windrow) -> None:
    (job_id,) = windrow("enqueue", "seen", "mail", "greet").lines
    (lease,) = leased(windrow, "seen")
    command = ["windrow", "jobs", "watch", "seen", job_id]
    with subprocess.Popen(command, env=running.environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("leased  attempt 1 of 20")
        assert windrow("ack", "seen", lease, "--result", "sent").code == 0
        assert process.stdout.read() == "succeeded  attempt 1 of 20\nsent\n"
        assert process.wait(WAIT_S) == 0
    (cancelled,) = windrow("enqueue", "seen", "mail", "greet").lines
    windrow("jobs", "cancel", "seen", cancelled)
    ended = windrow("jobs", "watch", "seen", cancelled, "--json")
    assert (ended.code, [job["state"] for job in ended.documents]) == (1, ["cancelled"])
    assert windrow("jobs", "watch", "seen", uuid7()).code == 4


def test_a_watched_job_that_fails_or_dies_is_shown_with_its_failure(windrow: Windrow) -> None:
    (job_id,) = windrow("enqueue", "failing", "mail", "greet", "--max-attempts", "1").lines
    (lease,) = leased(windrow, "failing")
    assert windrow("nack", "failing", lease, "--type", "SMTPError", "--error", "550 no mailbox\nfor ada").code == 0
    ended = windrow("jobs", "watch", "failing", job_id)
    words = "dead  attempt 1 of 1  reason out of attempts (1 of 1)  failure SMTPError: 550 no mailbox\n"
    assert (ended.code, ended.out) == (1, words)


def test_a_watch_looks_again_until_it_is_interrupted(running: Running, windrow: Windrow) -> None:
    windrow("enqueue", "watched", "q", "k")
    command = ["windrow", "stats", "watched", "--watch", "--interval", "50ms", "--json"]
    with subprocess.Popen(
        command, env=running.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
        assert process.stderr.read() == ""
    assert all(look["queues"][0]["ready"] == 1 for look in looks)


def test_a_router_tells_its_version_and_its_limits(windrow: Windrow) -> None:
    (told,) = windrow("server", "--json").documents
    info = server_info()
    features = sorted(
        name.removeprefix("SERVER_FEATURE_") for name in map(server_pb2.ServerFeature.Name, info.features)
    )
    assert "ORG_METADATA" in features
    assert (told["version"], told["features"]) == (info.version, features)
    assert told["consume_lists"] == sorted(info.consume_lists)
    fields = {name.removesuffix("_s"): value for name, value in told["limits"].items()}
    assert list(fields) == [field.name for field in info.limits.DESCRIPTOR.fields]
    assert (fields["max_message_bytes"], fields["min_visibility_window"]) == (info.limits.max_message_bytes, 0.1)
    shown = windrow("server").out.splitlines()
    assert len(shown) == 1 + len(fields) + 2
    assert shown[-2] == f"router {info.version}, features: {', '.join(features)}"
    assert shown[-1] == f"streams take {', '.join(sorted(info.consume_lists))}"
    assert re.search(r"^max_delay +3650d$", "\n".join(shown), re.MULTILINE)


def test_a_reader_that_has_gone_away_is_no_trouble(running: Running) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        ["windrow", "shards", "--json"],
        env=running.environ,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


# ── The cluster ──────────────────────────────────────────────────────────────────────────────────────────────────────


def owner_dsns(running: Running) -> dict[str, str]:
    return {entry["name"]: entry["dsn"] for entry in tomllib.loads(running.config.read_text())["shard"]}


def test_a_lost_job_is_told_by_the_check(windrow: Windrow, running: Running) -> None:
    windrow("enqueue", "cooked", "q", "k", "--lines", stdin="a\nb\nc\n")
    (queue,) = windrow("queues", "list", "cooked", "--json").documents
    with psycopg.connect(owner_dsns(running)[str(queue["shard"])], autocommit=True) as connection:
        query = "SELECT queue_id, org_id FROM windrow.queue WHERE org = 'cooked'"
        queue_id, org_id = connection.execute(query).fetchall()[0]
        connection.execute(
            "DELETE FROM windrow.job WHERE id = (SELECT id FROM windrow.job WHERE queue_id = %s LIMIT 1)", [queue_id]
        )
        try:
            done = windrow("check")
            documents = windrow("check", "--json").documents
        finally:
            # Repair the books for the other tests of this cluster.
            connection.execute("INSERT INTO windrow.tally (org_id, accepted) VALUES (%s, -1)", [org_id])
    assert done.code == 1
    assert re.search(r"^cooked +s\d +3 +2 +1 lost", done.out, flags=re.MULTILINE)
    (bad,) = [document for document in documents if document["unbalanced"]]
    assert bad["shard"] == queue["shard"]
    assert bad["unbalanced"] == [
        {"org": "cooked", "balanced": False, "accepted": 3, "found": 2}
        | {"scheduled": 0, "ready": 2, "leased": 0, "succeeded": 0, "dead": 0, "cancelled": 0}
        | {"archived": 0, "expired": 0}
    ]
    assert windrow("check", "--shard", str(queue["shard"]), "--orgs").code == 0


def list_half(
    _request: cluster_pb2.ListShardsRequest, _context: grpc.ServicerContext
) -> cluster_pb2.ListShardsResponse:
    there = cluster_pb2.ShardInfo(name="s1", slots=8192, reachable=True, postgres_version="18.6", schema_version=1)
    there.state, there.weight = cluster_pb2.SHARD_STATE_ACTIVE, 2
    there.labels["region"] = "eu"
    there.latency.FromMilliseconds(3)
    away = cluster_pb2.ShardInfo(name="s2", slots=8000, leaving_slots=192, error="no answer within 2 s")
    away.state = cluster_pb2.SHARD_STATE_DRAINING
    off = cluster_pb2.ShardInfo(
        name="s3", state=cluster_pb2.SHARD_STATE_OFF, error="shard 's3' is unavailable: it is off"
    )
    file = cluster_pb2.ClusterFile(digest="0123456789ab", needs_restart=["[router] listen"])
    file.refusal.reason, file.refusal.digest = "cluster.toml: every shard is gone", "ba9876543210"
    return cluster_pb2.ListShardsResponse(shards=[there, away, off], cluster_file=file)


def count_half(request: admin_pb2.GetStatsRequest, _context: grpc.ServicerContext) -> admin_pb2.GetStatsResponse:
    return admin_pb2.GetStatsResponse(queues=[admin_pb2.QueueStats(queue="q", ready=3)], unavailable_shards=["s2"])


def list_jobs_half(request: admin_pb2.ListJobsRequest, _context: grpc.ServicerContext) -> admin_pb2.ListJobsResponse:
    return admin_pb2.ListJobsResponse(unavailable_shards=["s2"])


def get_jobs_half(request: queue_pb2.GetJobsRequest, _context: grpc.ServicerContext) -> queue_pb2.GetJobsResponse:
    return queue_pb2.GetJobsResponse(unavailable_shards=["s2"])


def check_half(
    request: cluster_pb2.CheckShardRequest, context: grpc.ServicerContext
) -> Iterator[cluster_pb2.CheckShardResponse]:
    if request.shard == "s2":
        error = ShardUnavailable(ShardName("s2"), "connection refused")
        context.abort_with_status(rpc_status.to_status(status_of(error)))
    books = cluster_pb2.OrgBooks(org="acme", accepted=7, ready=3, succeeded=4, balanced=True)
    yield cluster_pb2.CheckShardResponse(orgs=[books])


def unary(answer: Callable[[Any, grpc.ServicerContext], Message], request: type[Message]) -> Any:
    def serialize(answer: Message) -> bytes:
        return answer.SerializeToString()

    return grpc.unary_unary_rpc_method_handler(
        answer,  # pyrefly: ignore[bad-argument-type]
        request_deserializer=request.FromString,
        response_serializer=serialize,
    )


@contextlib.contextmanager
def serving(services: Mapping[str, dict[str, Any]]) -> Generator[str]:
    """Yields the address of a server with these methods of services."""
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    for name, methods in services.items():
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(f"windrow.v1.{name}", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(WAIT_S)


@pytest.fixture
def half_away() -> Iterator[str]:
    """Yields the address of a router with a shard that does not answer."""
    admin = {
        "GetStats": unary(count_half, admin_pb2.GetStatsRequest),
        "ListJobs": unary(list_jobs_half, admin_pb2.ListJobsRequest),
    }
    cluster = {
        "ListShards": unary(list_half, cluster_pb2.ListShardsRequest),
        "CheckShard": grpc.unary_stream_rpc_method_handler(
            check_half,  # pyrefly: ignore[bad-argument-type]
            request_deserializer=cluster_pb2.CheckShardRequest.FromString,
            response_serializer=cluster_pb2.CheckShardResponse.SerializeToString,
        ),
    }
    queue = {"GetJobs": unary(get_jobs_half, queue_pb2.GetJobsRequest)}
    with serving({"Admin": admin, "Cluster": cluster, "Queue": queue}) as address:
        yield address


def test_a_purge_that_fails_says_how_many_jobs_it_has_cancelled(windrow: Windrow) -> None:
    answers = [admin_pb2.PurgeQueueResponse(cancelled=1000, limit_reached=True)]

    def purge(_: admin_pb2.PurgeQueueRequest, context: grpc.ServicerContext) -> admin_pb2.PurgeQueueResponse:
        if not answers:
            context.abort(grpc.StatusCode.INTERNAL, "away")
        return answers.pop()

    admin = {
        "GetStats": unary(count_half, admin_pb2.GetStatsRequest),
        "PurgeQueue": unary(purge, admin_pb2.PurgeQueueRequest),
    }
    with serving({"Admin": admin}) as address:
        done = windrow("jobs", "purge", "acme", "q", "--yes", "--json", "--address", address)
    assert (done.code, done.documents) == (3, [{"cancelled": 1000}])


def test_a_restore_that_fails_says_how_to_repeat_it_without_a_second_copy(windrow: Windrow) -> None:
    asked: list[admin_pb2.RestoreJobsRequest] = []

    def restore(request: admin_pb2.RestoreJobsRequest, context: grpc.ServicerContext) -> admin_pb2.RestoreJobsResponse:
        asked.append(request)
        if len(asked) == 2:
            context.abort(grpc.StatusCode.INTERNAL, "away")
        restored = [admin_pb2.RestoredJob(id=job.new_id) for job in request.jobs]
        return admin_pb2.RestoreJobsResponse(results=[admin_pb2.RestoreResult(restored=one) for one in restored])

    ids = "\n".join(uuid7() for _ in range(1001))
    with serving({"Admin": {"RestoreJobs": unary(restore, admin_pb2.RestoreJobsRequest)}}) as address:
        command = ("jobs", "restore", "acme", "-", "--json", "--address", address)
        failed = windrow(*command, stdin=ids)
        # The command prints the answers of its first call.
        assert (failed.code, len(failed.documents)) == (3, 1000)
        found = re.search(r"--batch (\S+)", failed.err)
        assert found is not None
        done = windrow(*command, "--batch", found[1], stdin=ids)
    assert (done.code, len(done.documents)) == (0, 1001)
    assert asked[:2] == asked[2:]


def test_jobs_that_wait_for_others_are_cancelled_by_their_state(windrow: Windrow, running: Running) -> None:
    flow = Workflow("w", org="blocked-ones")
    flow.job("q", "second", after=[flow.job("q", "first")])
    with SyncClient(running.address, org="blocked-ones") as client:
        client.start(flow)
    cancel = ("jobs", "cancel", "blocked-ones", "--queue", "q", "--state", "blocked", "--yes", "--json")
    assert windrow(*cancel).documents == [{"cancelled": 1, "skipped": 0}]


def test_a_shard_that_does_not_answer_is_told_with_those_that_do(windrow: Windrow, half_away: str) -> None:
    done = windrow("shards", "--address", half_away)
    assert done.code == 1
    assert re.search(r"^s1 +8,192 +2 +active +up +3\.0ms +18\.6 +1 +region=eu$", done.out, flags=re.MULTILINE)
    assert re.search(r"^s2 +8,000 +192 +0 +draining +unreachable +no answer within", done.out, flags=re.MULTILINE)
    assert re.search(r"^s3 +0 +0 +off +off ", done.out, flags=re.MULTILINE)
    assert "cluster file 0123456789ab, in use since " in done.out
    assert "[router] listen has changed in the file: restart the routers" in done.err
    assert "is refused, and the previous one stays in use: cluster.toml: every shard is gone" in done.err
    good, bad, off = windrow("shards", "--address", half_away, "--json").documents
    assert (good["shard"], good["reachable"], good["latency_ms"], good["error"]) == ("s1", True, 3.0, None)
    assert (good["state"], good["weight"], good["labels"]) == ("active", 2.0, {"region": "eu"})
    assert (bad["shard"], bad["reachable"], bad["latency_ms"]) == ("s2", False, None)
    assert (bad["state"], bad["slots"], bad["leaving_slots"], off["state"]) == ("draining", 8000, 192, "off")
    assert good["cluster_file"] == {
        "digest": "0123456789ab",
        "used_since": None,
        "needs_restart": ["[router] listen"],
        "refusal": "cluster.toml: every shard is gone",
        "refused_digest": "ba9876543210",
    }


def test_answers_without_a_shard_that_is_away_are_told_not_to_be_all(windrow: Windrow, half_away: str) -> None:
    for arguments in (["stats", "acme"], ["jobs", "list", "acme", "q"], ["jobs", "get", "acme", str(uuid7())]):
        done = windrow(*arguments, "--address", half_away)
        assert done.code == 3
        assert "incomplete: these shards are off or did not answer: s2" in done.err
    assert windrow("stats", "acme", "--address", half_away, "--json").documents[0]["unavailable_shards"] == ["s2"]


def test_a_router_that_is_older_than_the_command_is_named(windrow: Windrow, half_away: str) -> None:
    done = windrow("queues", "list", "acme", "--address", half_away)
    assert done.code == 3
    assert f"the server at {half_away} does not know this call" in done.err
    assert "upgrade the routers first" in done.err


def test_a_check_tells_of_a_shard_that_did_not_answer(windrow: Windrow, half_away: str) -> None:
    done = windrow("check", "--address", half_away)
    assert done.code == 3
    assert re.search(r"^s1 +1 +7 +7 +balance$", done.out, flags=re.MULTILINE)
    assert re.search(r"^s2 +\? +\? +\? +no answer$", done.out, flags=re.MULTILINE)
    assert "shard 's2' is unavailable: connection refused; try again in 1 s" in done.err
    good, bad, _ = windrow("check", "--address", half_away, "--json").documents
    assert (good["balanced"], good["accepted"], good["found"]) == (True, 7, 7)
    assert (bad["answered"], bad["balanced"]) == (False, None)
    assert windrow("check", "--address", half_away, "--shard", "s1").code == 0


def test_migrate_tells_of_each_shard_what_became_of_it(windrow: Windrow, running: Running, tmp_path: Path) -> None:
    dsns = owner_dsns(running)
    nowhere = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:1", dsns["s2"])
    config = tmp_path / "cluster.toml"
    config.write_text(running.config.read_text().replace(dsns["s2"], nowhere))
    done = windrow("migrate", "--config", str(config), "--json")
    assert done.code == 1
    good, bad = done.documents
    assert good == {"database": "s1", "migrated": [], "error": None}
    assert "shard 's2' is unavailable" in str(bad["error"])
    assert dsns["s2"].split(":")[2].split("@")[0] not in done.out + done.err
    assert windrow("migrate", "--config", str(running.config)).code == 0


# ── What users are told ──────────────────────────────────────────────────────────────────────────────────────────────


def test_where_no_router_is_every_command_says_so(windrow: Windrow) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nowhere = f"127.0.0.1:{free.getsockname()[1]}"
    for arguments in (["stats", "acme"], ["shards"], ["check"], ["enqueue", "acme", "q", "k"], ["queues", "list", "a"]):
        done = windrow(*arguments, "--address", nowhere)
        assert done.code == 3
        assert done.out == ""
        first = done.err.splitlines()[0]
        assert first.startswith(f"windrow: no router at {nowhere} (")
        assert first.endswith("start one with ./run up, or set WINDROW_ADDRESS")
    assert windrow("health", nowhere).code == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["enqueue", "a", "q", "k", "--delay", "10"], 2, "'10' is not a duration"),
        (["enqueue", "a", "q", "k", "--run-at", "tomorrow"], 2, "'tomorrow' is not a time"),
        # In an option that takes a time, a duration such as 1h means a time in the past. So it cannot be the time at
        # which a job is to run.
        (["enqueue", "a", "q", "k", "--run-at", "1h"], 2, "'1h' is not a time"),
        (["jobs", "list", "a", "--made-after", "yesterday"], 2, "or how long ago it was, such as 1h or 7d"),
        (["jobs", "redrive", "a", "--died-after", "99999999d"], 2, "'99999999d' is not a time"),
        (["enqueue", "a", "q", "k", "--delay", "1s", "--run-at", "2030-01-01"], 2, "not both"),
        (["enqueue", "a", "q", "k", "--attribute", "label"], 2, "'label' is not KEY=VALUE"),
        (["enqueue", "a", "q", "k", "--file", "/nope"], 2, "'/nope': No such file"),
        (["enqueue", "a", "q", "k", "--lines", "--dedup-key", "x"], 2, "all lines would be the same job"),
        (["enqueue", "a", "q", "k", "--retry", "1h..1s..2s"], 2, "'1h..1s..2s' is not a retry policy"),
        (["queues", "create", "a", "q", "--retention", "0.5d"], 2, "'0.5d' is not a retention: write a whole number"),
        (["queues", "create", "a", "q", "--retention", "-1d"], 2, "'-1d' is not a retention"),
        (["queues", "create", "a", "q", "--retention", "4000d"], 2, "'4000d' is not a retention"),
        (["queues", "update", "a", "q", "--retention", "14"], 2, "'14' is not a retention"),
        (["enqueue", "a", "q", "k", "--retry", "foo"], 2, "'foo' is not a retry policy"),
        (["enqueue", "a", "q", "k", "--retry", "1h..1s"], 2, "'1h..1s' ends with a shorter delay"),
        (["enqueue", "a", "q", "k", "--retry", "1s..1h,x900"], 2, "--retry: must be 1 to 100, not 900.0"),
        (["enqueue", "a", "q", "k", "--expires-at", "2020-01-01T00:00:00Z"], 2, "has passed: the job would never run"),
        (
            ["enqueue", "a", "q", "k", "--dedup-window", "1d"],
            2,
            "it needs a --dedup-key, and none is given",
        ),
        (["enqueue", "a", "q", "k", "--while-live"], 2, "it needs a --dedup-key, and none is given"),
        (["enqueue", "a", "q", "k", "--dedup-key", "x", "--while-live", "--dedup-window", "1d"], 2, "not both"),
        (["enqueue", "a", "q", "k", "--max-attempts", "0"], 2, "0 is out of range: it must be 1 to 1000"),
        (["enqueue", "a", "q", "k", "--priority", "high"], 2, "'high' is not a whole number"),
        (["enqueue", "a", "q", "k", "--retry", "1s..1h,2"], 2, "is not a retry policy"),
        (["enqueue", "a", "q", "k", "--id", "7"], 2, "'7' is not a job id"),
        (["enqueue", "a", "two words", "k"], 2, "QUEUE: must be 1 to 128 of"),
        (["enqueue", "a", "two words", "k"], 2, ", not 'two words'"),
        (["enqueue", "a", "q", "k", "--delay", "9999d"], 2, "--delay: must be 0 s to 3,650 days, not 9,999 days"),
        (["enqueue", "a", "q", "k", "--max-attempts", "1001"], 2, "1001 is out of range: it must be 1 to 1000"),
        (["dequeue", "a", "q", "--window", "1ms"], 2, "--window: must be 100 ms to 12 h, not 1 ms"),
        (["ack", "a", "not/a lease!"], 2, "'not/a lease!' is not a lease"),
        (["ack", "a", "AAAA"], 2, "LEASE number 1: "),
        (["jobs", "get", "a", "123"], 2, "'123' is not a job id"),
        (["jobs", "list", "a", "q", "--state", "done"], 2, ": 'done' is not one of 'blocked', 'scheduled', 'ready'"),
        (["jobs", "list", "a", "nope"], 4, "org 'a' has no queue 'nope'"),
        (["jobs", "why", "a", "123"], 2, "'123' is not a job id"),
        (["jobs", "why", "a", ID_OF_NONE], 4, "has no job 019a9f5e"),
        (["queues", "why", "a", "nope"], 4, "org 'a' has no queue 'nope'"),
        (["jobs", "get", "a", ID_OF_NONE], 4, "has no job 019a9f5e"),
        (["queues", "show", "a", "nope"], 4, "org 'a' has no queue 'nope'"),
        (["queues", "update", "a", "nope"], 2, "give a setting to change"),
        (
            ["queues", "update", "a", "nope", "--max-attempts", "3", "--reset", "max_attempts"],
            2,
            "max_attempts is given a value and reset too",
        ),
        (["stats", "a", "nope"], 4, "org 'a' has no queue 'nope'"),
        (["stats", "a", "--address", "nowhere"], 2, "'nowhere' is not an address"),
        (["stats", "a", "--address", "http://127.0.0.1:7419"], 2, "write HOST:PORT, such as 127.0.0.1:7419"),
        (["check", "--shard", "s9"], 4, "the cluster has no shard 's9'"),
        (["migrate", "--config", "/nope.toml"], 2, "/nope.toml: No such file"),
        (["router", "--config", "/nope.toml"], 2, "/nope.toml: No such file"),
        (["up", "--listen", "7419"], 2, "must be HOST:PORT"),
        (["up", "--ephemeral", "--data", "/x"], 2, "keeps no data"),
        (["up", "--data", "/etc/passwd"], 2, "'/etc/passwd' is a file"),
        (
            ["up", "--listen", "127.0.0.1:0", "--data", f"/tmp/{'x' * 300}"],
            5,
            "File name too long; name another folder",
        ),
        (["up", "--shards", "99"], 2, "99 is out of range: it must be 1 to 16"),
        (["stats", "a", "--token-file", "f"], 2, "before the command: windrow --token-file … stats …"),
        (["jobs", "list", "a", "--profile=p"], 2, "before the command: windrow --profile … jobs list …"),
        (["jobs", "--token-file", "f", "list", "a"], 2, "before the command: windrow --token-file … jobs …"),
        (["--address", "x:1", "stats", "a"], 2, "--address stands after the command: windrow COMMAND … --address …"),
        (["jobs", "--json", "list", "a"], 2, "--json stands after the command: windrow jobs COMMAND … --json …"),
        (["--nonsense", "stats", "a"], 2, "No such option: --nonsense"),
        (["stats", "a", "--token-fil", "f"], 2, "No such option: --token-fil"),
        (["jobs", "count", "a", "--queue", "q"], 2, "--queue is no option of this command, but its argument QUEUE"),
        (["jobs", "cancel", "a", "mail"], 2, "8f0e-3f2b6d1c9a55; a queue is named by --queue"),
        (["jobs", "cancel", "a", "--dry-run"], 2, "neither job ids nor conditions are given"),
        (["jobs", "cancel", "a", "--state", "ready"], 2, "neither job ids nor conditions are given"),
        (["jobs", "redrive", "a", ID_OF_NONE, "--queue", "q"], 2, "job ids and conditions are both given"),
        (["workflows", "retry", "a", "foo"], 2, "Invalid value for 'ID': 'foo' is not the id of a workflow: those are"),
        (
            ["schedules", "trigger", "a", "s", "--request-id", "x"],
            2,
            "Invalid value for '--request-id': 'x' is not the id of a request",
        ),
        (
            ["workflows", "retry", "a", ID_OF_NONE, "--new-id", "x"],
            2,
            "Invalid value for '--new-id': 'x' is not the id",
        ),
        (["workflows", "start", "a", "/nope"], 2, "Invalid value for 'FILE': '/nope': No such file"),
        (["schedules", "create", "a", "s", "q", "k", "--every", "1h", "--file", "/nope"], 2, "'/nope': No such file"),
        (["weights", "set", "a", "0"], 2, "WEIGHT: must be"),
        (["workflows", "skip", "a", ID_OF_NONE, ""], 2, "NODE: must not be empty"),
        (["workflows", "start", "--id", "x", "a"], 2, "Invalid value for '--id': 'x' is not the id of a workflow"),
        (["stat"], 2, "Did you mean 'stats'"),
        (["get", "a", "x"], 2, "No such command 'get'. Did you mean `windrow jobs get`?"),
        (["queues", "purge", "a", "q"], 2, "No such command 'purge'. Did you mean `windrow jobs purge`?"),
        (["jobs", "show", "a", "x"], 2, "No such command 'show'. Did you mean `windrow jobs get`?"),
        (["dead", "a"], 2, "No such command 'dead'. Did you mean `windrow jobs list ORG --state dead`?"),
        (["jobs", "retry", "a"], 2, "No such command 'retry'. Did you mean `windrow jobs redrive`?"),
        (["stats", "a", "--timeout", "0s"], 2, "'0s' is no time for a call: write a longer one, such as 10s"),
        (["extend", "a", "x", "--note", "n"], 2, "it belongs to --progress, and none is given"),
    ],
)
def test_an_error_message_contains_the_wrong_value(
    windrow: Windrow, arguments: list[str], code: int, words: str
) -> None:
    done = windrow(*arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err


def test_a_node_that_waits_for_an_unknown_one_is_named_with_its_file(windrow: Windrow, tmp_path: Path) -> None:
    flow = tmp_path / "flow.json"
    node = {"name": "clean", "queue": "q", "kind": "k", "after": ["laod"]}
    flow.write_text(json.dumps({"nodes": [{"queue": "q", "kind": "k"}, node]}))
    done = windrow("workflows", "start", "flows", str(flow))
    assert (done.code, done.out) == (2, "")
    assert f"{flow}: node 'clean': after: names no node of the workflow: 'laod'" in done.err


def test_an_org_without_workflows_is_told_so_with_the_state_that_was_asked_for(windrow: Windrow) -> None:
    assert windrow("workflows", "list", "nobody").err == "org 'nobody' has no workflows\n"
    assert windrow("workflows", "list", "nobody", "--state", "failed").err == "org 'nobody' has no failed workflows\n"


def test_a_node_that_waits_for_a_signal_is_drawn_and_gets_it(windrow: Windrow, tmp_path: Path) -> None:
    flow = tmp_path / "flow.json"
    waits = {"name": "approved", "signal": True, "queue": "q", "timeout": "3d"}
    flow.write_text(json.dumps({"nodes": [waits, {"queue": "q", "kind": "deploy", "after": ["approved"]}]}))
    started = windrow("workflows", "start", "signalled", str(flow)).out.strip()
    shown = windrow("workflows", "show", "signalled", started).out
    assert re.search(r"signal: approved +released", shown)
    assert (
        'n0{{"signal: approved<br/>released"}}'
        in windrow("workflows", "show", "signalled", started, "--format", "mermaid").out
    )
    assert "shape=hexagon" in windrow("workflows", "show", "signalled", started, "--format", "dot").out
    (document,) = windrow("workflows", "show", "signalled", started, "--json").documents
    assert [node["signal"] for node in document["graph"]] == [True, False]
    job = document["graph"][0]["job_id"]
    assert "waits for a signal until" in windrow("jobs", "why", "signalled", job).out
    payload = tmp_path / "payload"
    payload.write_bytes(b'{"by": "ann"}')
    done = windrow("workflows", "signal", "signalled", started, "approved", "--file", str(payload))
    assert (done.code, done.out) == (0, "node 'approved' has its signal\n")
    again = windrow("workflows", "signal", "signalled", started, "approved", "no", "--json")
    assert again.documents == [{"org": "signalled", "id": started, "node": "approved", "accepted": False}]
    assert "had a signal before" in windrow("workflows", "signal", "signalled", started, "approved").out
    refused = windrow("workflows", "signal", "signalled", started, "deploy")
    assert (refused.code, "it is no node that waits for a signal" in refused.err) == (5, True)
    assert windrow("workflows", "signal", "signalled", started, "nobody").code == 4
    payload.write_bytes(bytes(64 * 1024 + 1))
    large = windrow("workflows", "signal", "signalled", started, "approved", "--file", str(payload))
    assert (large.code, "at most 65,536 fit into a signal" in large.err) == (2, True)
    both = windrow("workflows", "signal", "signalled", started, "approved", "x", "--file", str(payload))
    assert (both.code, "not both" in both.err) == (2, True)


def test_a_schedule_without_a_time_to_come_is_told_of(windrow: Windrow) -> None:
    create = ["schedules", "create", "late"]
    past = windrow(*create, "once", "q", "k", "--at", "2020-01-01T00:00:00Z", "--json")
    assert (past.code, past.documents[0]["next"]) == (0, [])
    assert "schedule 'once' has no time to come (once, 2020-01-01" in past.err
    ended = windrow(*create, "before", "q", "k", "--every", "1h", "--end", "2020-01-01T00:00:00Z")
    assert (ended.code, "(every 1h, until 2020-01-01" in ended.err) == (0, True)
    for open_one in (["later", "q", "k", "--at", "2099-01-01T00:00:00Z"], ["often", "q", "k", "--every", "1h"]):
        assert windrow(*create, *open_one).err == ""
    moved = windrow("schedules", "update", "late", "later", "--at", "2020-01-01T00:00:00Z")
    assert (moved.code, "'later' has no time to come" in moved.err) == (0, True)
    # A paused schedule has no next time either, until it is resumed.
    assert windrow("schedules", "pause", "late", "often").err == ""
    assert windrow("schedules", "resume", "late", "often").err == ""


def test_a_repeated_trigger_with_its_request_id_stores_one_run(windrow: Windrow) -> None:
    assert windrow("schedules", "create", "script", "digest", "q", "k", "--every", "1h").code == 0
    trigger = ["schedules", "trigger", "script", "digest"]
    first, again = (windrow(*trigger, "--request-id", uuid7().upper()) for _ in range(2))
    assert (first.code, first.out != again.out) == (0, True)
    asked = uuid7()
    assert len({windrow(*trigger, "--request-id", asked).out for _ in range(2)}) == 1
    assert len(windrow("jobs", "list", "script", "--json").documents) == 3


def test_what_other_systems_call_a_command_leads_to_one_that_exists() -> None:
    for target in ELSEWHERE.values():
        found: Any = commands()
        for word in itertools.takewhile(str.islower, target.split()):
            found = found.commands[word]


def test_a_dequeue_says_what_keeps_a_queue_from_giving_jobs(windrow: Windrow) -> None:
    windrow("enqueue", "resting", "mail", "k")
    assert windrow("queues", "pause", "resting", "mail").code == 0
    done = windrow("dequeue", "resting", "mail", "mial")
    assert (done.code, done.err) == (
        1,
        "nothing is due in mail, mial: queue 'mail' is paused (resume it with windrow queues resume resting mail); "
        "org 'resting' has no queue 'mial'\n",
    )
    windrow("queues", "resume", "resting", "mail")
    assert windrow("dequeue", "resting", "mail", "--ack").code == 0
    assert windrow("dequeue", "resting", "mail").err == "nothing is due in mail\n"


def test_a_dequeue_says_what_holds_the_jobs_that_are_ready(windrow: Windrow) -> None:
    def told(queue: str) -> str:
        """Returns what a dequeue prints while the queue has one more job."""
        assert windrow("enqueue", "held", queue, "k").code == 0
        return windrow("dequeue", "held", queue).err

    # Routers may learn of a limit or a quarantine a few seconds late.
    assert windrow("limits", "set", "--org", "held", "--queue", "few", "--in-flight", "1").code == 0
    few = (
        "nothing is due in few: queue 'few' may have 1 job leased at a time, and has 1: one must end first "
        "(windrow queues why held few says more)\n"
    )
    until(lambda: told("few") == few, "a dequeue names the limit in flight")

    assert windrow("limits", "set", "--org", "held", "--queue", "slow", "--starts", "1", "--per", "1h").code == 0
    slow = "nothing is due in slow: queue 'slow' may have 1 start per 60 min, and 1 is in use; the next job starts in "
    until(lambda: told("slow").startswith(slow), "a dequeue names the limit of starts")

    assert windrow("enqueue", "held", "bad", "k").code == 0
    assert windrow("queues", "quarantine", "held", "bad", "k").code == 0
    until(lambda: "bad: kind 'k' is quarantined since " in told("bad"), "a dequeue names the quarantine")
    for queue in ("few", "slow"):
        measure = "--in-flight" if queue == "few" else "--starts"
        assert windrow("limits", "clear", "--org", "held", "--queue", queue, measure).code == 0


def test_an_expiry_that_has_passed_is_no_fault_of_a_job_that_is_sent_again(windrow: Windrow) -> None:
    job = ("enqueue", "again", "q", "k", "--id", str(uuid7()), "--expires-at", "2020-01-01T00:00:00Z")
    assert windrow(*job).code == 0
    assert "existed already" in windrow(*job).err


def test_jobs_that_wait_are_altered(windrow: Windrow) -> None:
    job = windrow("enqueue", "altered", "q", "k", "--delay", "1h", "--attribute", "a=b").out.strip()
    altered = windrow("jobs", "alter", "altered", job, "--delay", "0s", "--priority", "2", "--attribute", "c=d")
    assert (altered.code, altered.out) == (0, f"{job}  changed\n")
    (shown,) = windrow("jobs", "get", "altered", job, "--json").documents
    assert (shown["state"], shown["priority"], shown["attributes"]) == ("ready", 2, {"c": "d"})
    assert windrow("dequeue", "altered", "q", "--ack").code == 0
    done = windrow("jobs", "alter", "altered", job, "--priority", "1", "--json")
    assert (done.code, done.documents) == (1, [{"id": job, "answer": "stale"}])
    assert windrow("jobs", "alter", "altered", str(uuid7()), "--priority", "1").code == 4
    assert windrow("jobs", "alter", "altered", job).code == 2


def test_an_id_of_another_job_is_refused_and_its_state_told(windrow: Windrow) -> None:
    job = ("enqueue", "another", "q", "k", "--id", str(uuid7()))
    assert windrow(*job, "one").code == 0
    assert windrow(*job, "one", "--json").documents == [
        {"id": job[-1], "duplicate": True, "state": "ready", "differs": False}
    ]
    done = windrow(*job, "two")
    assert (done.code, done.err) == (
        5,
        f"windrow: job {job[-1]} existed already and is ready, with another queue, kind or payload: nothing was "
        "stored under this id; a new job needs an id or a batch of its own\n",
    )


def test_an_address_that_routers_cannot_have_is_told_from_one_that_is_taken(
    windrow: Windrow, running: Running, tmp_path: Path
) -> None:
    text = running.config.read_text()
    assert text.count("[router]\n") == 1
    config = tmp_path / "cluster.toml"
    config.write_text(text.replace("[router]\n", "[router]\ninsecure = true\n"))
    router = ("router", "--config", str(config), "--listen")
    done = windrow(*router, "192.0.2.1:7419")
    assert (done.code, done.out) == (5, "")
    assert "cannot listen on 192.0.2.1:7419: " in done.err
    assert done.err.endswith("; choose an address of this machine\n")
    assert "stop what uses it" in windrow(*router, running.address).err


def test_a_cluster_file_that_does_not_fit_the_databases_is_refused_and_not_an_outage(
    windrow: Windrow, running: Running, tmp_path: Path
) -> None:
    text = running.config.read_text()
    assert text.count('name = "local"') == 1
    config = tmp_path / "cluster.toml"
    config.write_text(text.replace('name = "local"', 'name = "other"'))
    # The router process writes the reason to the standard error that it inherits.
    routers = windrow("router", "--listen", "127.0.0.1:0", "--config", str(config))
    assert routers.code == 5
    assert routers.err == "windrow: a router process gave up (exit code 78); see its message above\n"
    keys = windrow("keys", "list", "--config", str(config))
    assert keys.code == 5
    assert "leads to the catalog of cluster 'local', and this is 'other'; correct the cluster file" in keys.err


def test_a_clock_that_is_wrong_is_told_and_not_an_id_that_nobody_gave() -> None:
    why = "019a… was made at 2025-11-06 00:00:00 UTC; the time in an id must be at most 7 days before"

    def refuse(*_: object) -> None:
        raise RequestRefused([("jobs[0].id", why)], particulars=[f"ID: {why}"])

    router: Any = SimpleNamespace(call=refuse, queue=SimpleNamespace(Enqueue=None))
    with pytest.raises(CommandFailed, match="clock and the shard's are too far apart") as caught:
        enqueue._store(router, "acme", [], ids_given=False)
    assert (caught.value.code, caught.value.particulars) == (ExitCode.REFUSED, [why])
    with pytest.raises(CommandFailed, match="the router refused the request"):
        enqueue._store(router, "acme", [], ids_given=True)


def test_an_extend_reports_progress_and_a_checkpoint(windrow: Windrow) -> None:
    windrow("enqueue", "reports", "q", "k")
    (job,) = windrow("dequeue", "reports", "q", "--json").documents
    lease = str(job["lease"])
    done = windrow("extend", "reports", lease, "--progress", "3", "10", "--note", "a\nb", "--checkpoint", "page 3")
    assert done.code == 0
    shown = windrow("jobs", "get", "reports", str(job["id"])).lines
    # A line of a note must not look like a line of the answer.
    assert [line.strip().partition("  ")[0] for line in shown].count("progress") == 1
    assert not any(line.strip() == "b" for line in shown)
    assert re.search(r"^  checkpoint +page 3$", "\n".join(shown), flags=re.MULTILINE)
    assert windrow("extend", "reports", lease, "--checkpoint", "").code == 0
    (now,) = windrow("jobs", "get", "reports", str(job["id"]), "--json").documents
    assert (now["checkpoint"], cast("dict[str, object]", now["progress"])["done"]) == ("", 3)


def test_without_a_terminal_progress_is_a_line_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: now_s))
    with output.counting_to(2048, "slots") as show:
        for now_s in (101.0, 111.0, 112.0, 122.0):
            show(int(now_s))
    assert capsys.readouterr().err == "111 of 2,048 slots so far\n122 of 2,048 slots so far\n"


def test_a_queue_that_is_there_or_in_use_is_refused(windrow: Windrow) -> None:
    assert windrow("queues", "create", "busy", "q", "--retry", "1s..1h,x3,~0.2").code == 0
    again = windrow("queues", "create", "busy", "q")
    assert (again.code, "already has a queue" in again.err) == (5, True)
    windrow("enqueue", "busy", "q", "k")
    in_use = windrow("queues", "delete", "busy", "q")
    assert (in_use.code, "purge it first" in in_use.err) == (5, True)


def test_a_line_that_is_too_long_is_named_and_those_before_it_are_stored(windrow: Windrow) -> None:
    done = windrow("enqueue", "long", "q", "k", "--lines", stdin="fits\n" + "x" * 1_048_577 + "\nfits\n")
    assert done.code == 2
    assert len(done.lines) == 1
    assert "line 2 has 1048577 bytes" in done.err
    assert "1 job stored" in done.err
    # The line is corrected, and all lines are sent again with the option that the error names.
    batch = re.search(rf"--batch ({ID.pattern})", done.err)
    assert batch is not None
    again = windrow("enqueue", "long", "q", "k", "--lines", "--batch", batch[1], stdin="fits\nfits now\nfits\n")
    assert (again.code, again.lines[0], len(again.lines)) == (0, done.lines[0], 3)
    assert "3 jobs stored, 1 of them before" in again.err
    (counts,) = windrow("stats", "long", "--json").documents
    assert counts["queues"][0]["ready"] == 3


# ── Imports, and the style of texts ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("imports", "heavy"),
    [
        (
            "import cli.main; list(cli.main.commands().commands.values())",
            {"grpc", "rich", "psycopg", "embedded", "pyarrow", "obstore"},
        ),
        ("import cli.main", {"asyncio", "cli.jobs"}),
        ("import router.__main__", {"grpc", "protovalidate"}),
        ("import router.process.child", {"opentelemetry.sdk", "cryptography", "joserfc", "windrow.client"}),
    ],
)
def test_what_starts_often_imports_nothing_heavy_that_it_may_not_need(imports: str, heavy: set[str]) -> None:
    code = f"{imports}; import sys; print({heavy!r} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ(), capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    assert done.stdout.strip() == "set()"


def test_the_command_and_the_router_agree_on_the_default_address() -> None:
    assert ADDRESS_DEFAULT == LISTEN_DEFAULT


def test_the_version_is_told(windrow: Windrow) -> None:
    assert re.fullmatch(r"windrow \d+\.\d+\.\d+\n", windrow("--version").out)


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=3650)))
def test_a_duration_that_is_shown_can_be_typed_again(span: timedelta) -> None:
    assert values.duration(values.exact(span)) == span


def test_a_time_in_the_past_may_be_how_long_ago_it_was() -> None:
    before = datetime.now(UTC)
    told = values.past_moment("1h30m")
    assert before - timedelta(hours=1.5) <= told <= datetime.now(UTC) - timedelta(hours=1.5)
    assert values.past_moment("2026-11-20T09:30:00Z") == datetime(2026, 11, 20, 9, 30, tzinfo=UTC)


@given(
    st.builds(
        values.Retry,
        first=st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=1)),
        last=st.none() | st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=9)),
        multiplier=st.integers(1, 100).map(float),
        jitter=st.integers(0, 100).map(lambda percent: percent / 100),
    )
)
def test_a_retry_policy_that_is_shown_can_be_typed_again(policy: values.Retry) -> None:
    assume(policy.last is None or policy.first <= policy.last)
    again = values.retry(values.retry_text(policy))
    assert again == policy or (policy.last is None and again.first == policy.first)


@pytest.mark.parametrize("text", ["", "s", "10", "-1s", "1s2", "1.s", "1 h", "1w", "99999999999d", "1S"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        values.duration(text)

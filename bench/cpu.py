"""CPU time of processes, and how often they waited, from Linux's /proc. The resolution of CPU time is the kernel's
tick, mostly 10 ms."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def of_processes(pids: Iterable[int]) -> float:
    """Seconds that these processes have spent, all their threads included."""
    return sum(_own(_stat(pid)) for pid in pids)


def of_tree(root: int) -> float:
    """Seconds of a process, its living children and its children that have ended, such as those of a Postgres
    server."""
    stat = _stat(root)
    children = sum(
        _own(child) for entry in _PROC.glob("[0-9]*") if (child := _stat(int(entry.name))) and int(child[1]) == root
    )
    dead = (int(stat[13]) + int(stat[14])) / _TICKS if stat else 0.0
    return _own(stat) + dead + children


def waits_of_trees(roots: Iterable[int]) -> dict[int, int]:
    """How often each thread of these processes and of their children gave up its core by itself: to wait. Each is one
    wake-up later."""
    wanted = set(roots)
    found: dict[int, int] = {}
    for entry in _PROC.glob("[0-9]*"):
        pid = int(entry.name)
        if pid not in wanted and not ((stat := _stat(pid)) and int(stat[1]) in wanted):
            continue
        for status in entry.glob("task/*/status"):
            try:
                waits = status.read_text().partition("\nvoluntary_ctxt_switches:")[2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            found[int(status.parent.name)] = int(waits.split(None, 1)[0])
    return found


def of_machine() -> float:
    """Seconds that all cores together were busy, or taken away by the hypervisor."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _own(stat: list[str]) -> float:
    return (int(stat[11]) + int(stat[12])) / _TICKS if stat else 0.0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on (proc(5)): the second may hold blanks. Empty once it has ended."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []

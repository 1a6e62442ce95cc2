"""Reads from Linux's /proc how much CPU time processes have used, and how often they have waited. The resolution of CPU
time is the kernel's tick, mostly 10 ms."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def of_processes(pids: Iterable[int]) -> float:
    """Returns the CPU seconds of these processes, all their threads included."""
    return sum(_own(_stat(pid)) for pid in pids)


def of_trees(*groups: Iterable[int]) -> list[float]:
    """Returns for each group the CPU seconds of its processes and of their children. Children that have ended count
    too: a Postgres server has many of them. Reads every process of the machine, once for all groups."""
    stats = {pid: stat for pid in _pids() if (stat := _stat(pid))}
    children: defaultdict[int, float] = defaultdict(float)
    for stat in stats.values():
        children[int(stat[1])] += _own(stat)
    return [
        sum(_own(stats[pid]) + _ended(stats[pid]) + children[pid] for pid in group if pid in stats) for group in groups
    ]


def waits_of_trees(*groups: Collection[int]) -> list[dict[int, int]]:
    """Returns for each group, and for each thread of the group's processes and of their children, how often the thread
    gave up its core because it had to wait. Each wait ends with one wake-up."""
    found: list[dict[int, int]] = [{} for _ in groups]
    wanted = {root: at for at, roots in enumerate(groups) for root in roots}
    for pid in _pids():
        at = wanted.get(pid)
        if at is None and (stat := _stat(pid)):
            at = wanted.get(int(stat[1]))
        if at is None:
            continue
        for status in Path(f"/proc/{pid}").glob("task/*/status"):
            try:
                waits = status.read_text().partition("\nvoluntary_ctxt_switches:")[2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            found[at][int(status.parent.name)] = int(waits.split(None, 1)[0])
    return found


def of_machine() -> float:
    """Returns the sum, over all cores, of the seconds for which a core was busy, or was not available because the
    hypervisor used it for others."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _own(stat: list[str]) -> float:
    return (int(stat[11]) + int(stat[12])) / _TICKS if stat else 0.0


def _ended(stat: list[str]) -> float:
    """Returns the CPU seconds of the children that have ended."""
    return (int(stat[13]) + int(stat[14])) / _TICKS


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third field on (see proc(5)). The first two fields are left out,
    because the second field may contain blanks. Returns an empty list if the process has ended."""
    # Do not use `Path`: this function runs hundreds of times per measurement, and making a `Path` takes longer than the
    # read.
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []

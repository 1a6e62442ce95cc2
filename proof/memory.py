"""Measures the resident memory of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def resident_bytes(pids: Iterable[int]) -> dict[int, int]:
    """Returns the resident bytes of each of these processes that still runs, by process id."""
    sizes: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            sizes[pid] = psutil.Process(pid).memory_info().rss
    return sizes

"""Counts how many jobs all client processes together have taken, and how many they have finished. Each process maps the
same file into its memory, and counts at its own place in the file. A reader adds up all places. No process waits for
another."""

from __future__ import annotations

import mmap
from pathlib import Path


class Tally:
    def __init__(self, file: Path, *, places: int, mine: int) -> None:
        with file.open("r+b") as opened:
            opened.truncate(16 * places)
            self._map = mmap.mmap(opened.fileno(), 16 * places)
        self._counts = memoryview(self._map).cast("q")
        self._places = places
        self._mine = mine

    def finish(self, jobs: int) -> None:
        self._counts[self._mine] += jobs

    def take(self, jobs: int) -> None:
        self._counts[self._places + self._mine] += jobs

    def reset(self) -> None:
        self._counts[self._mine] = 0
        self._counts[self._places + self._mine] = 0

    @property
    def finished(self) -> int:
        return sum(self._counts[: self._places])

    @property
    def taken(self) -> int:
        return sum(self._counts[self._places :])

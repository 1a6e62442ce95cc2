"""Shows the progress of a run: counts what clients have written to their histories. Each call of line() reads only what
the clients have written since the last call."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

_MARKS = {
    "enqueues": b'"verb":"enqueue"',
    "jobs delivered": b'"attempt":',
    "acks": b'"verb":"ack"',
    "calls without an answer": b'"outcome":"unknown"',
}


class Progress:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: Counter[Path] = Counter()
        self._counts: Counter[str] = Counter()

    def line(self) -> str:
        """Returns one line about the run so far."""
        for path in self._folder.iterdir():
            with path.open("rb") as file:
                file.seek(self._read[path])
                # Count whole lines only, because the last line may be incomplete.
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] += len(whole) + len(newline)
            for what, mark in _MARKS.items():
                self._counts[what] += whole.count(mark)
        return ", ".join(f"{self._counts[what]:,} {what}" for what in _MARKS)

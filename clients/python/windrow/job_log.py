"""The log that a handler writes about its job: the newest lines of one attempt. No I/O."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from windrow.payloads import clipped

LINES_MAX = 50
LINE_BYTES_MAX = 512
LOG_BYTES_MAX = 4096
# The bytes reserved for the first line, which says how many lines were dropped.
_NOTICE_BYTES_MAX = 64
_CUT = "…"
# One lock for all logs: it is held for microseconds, and a lock for each job would cost more.
_LOCK = threading.Lock()


class Lines(NamedTuple):
    """Encoded lines, and the number of lines that were dropped before them."""

    newest: Sequence[bytes]
    # How many lines before `newest` were dropped.
    dropped: int = 0


def lines_of(text: str) -> Lines:
    """Returns the newest lines of a text, and cuts long lines. Raises TypeError."""
    if not isinstance(text, str):
        raise TypeError(f"a log line must be a str, not {text!r:.100}")
    lines = text.splitlines()
    return Lines([_cut(line) for line in lines[-LINES_MAX:]], max(0, len(lines) - LINES_MAX))


def _cut(line: str) -> bytes:
    # A character has at least one byte, so the rest of a long line need not be encoded.
    kept = clipped(line[: LINE_BYTES_MAX + 1], 4 * LINE_BYTES_MAX)
    if len(kept.encode()) > LINE_BYTES_MAX:
        kept = clipped(kept, LINE_BYTES_MAX - len(_CUT.encode())) + _CUT
    return kept.encode()


class JobLog:
    """The newest 50 lines, or fewer if these have more than 4 KiB. Thread-safe."""

    # The class has the values of a log without lines, because most jobs log nothing. Other logs store their own values.
    _lines: deque[bytes] | None = None
    # The total bytes of `_lines`, including a line end for each line.
    _bytes = 0
    # How many lines were logged, including the dropped lines.
    count = 0
    _closed = False

    def write(self, text: str) -> None:
        """Adds each line of a text. Raises TypeError."""
        self.add(lines_of(text))

    def add(self, lines: Lines) -> None:
        with _LOCK:
            if self._closed:
                return
            if self._lines is None:
                self._lines = deque()
            for line in lines.newest:
                self._lines.append(line)
                self._bytes += len(line) + 1
                while len(self._lines) > LINES_MAX or self._bytes > LOG_BYTES_MAX - _NOTICE_BYTES_MAX:
                    self._bytes -= len(self._lines.popleft()) + 1
            self.count += lines.dropped + len(lines.newest)

    def close(self) -> None:
        """Makes the log drop all further lines, because the attempt has ended."""
        with _LOCK:
            self._closed = True

    def read(self) -> tuple[str, int]:
        """Returns the lines as one text of at most 4 KiB, and `count`."""
        with _LOCK:
            lines, count = tuple(self._lines or ()), self.count
        dropped = count - len(lines)
        notice = [f"... {dropped:,} earlier lines were dropped".encode()] if dropped else []
        return b"\n".join([*notice, *lines]).decode(), count

"""How the command ends: its exit codes, and the one error that carries them.

The epilog of `windrow --help` and docs/cli.md list the same codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    # The question was answered, and the answer is no: nothing to take, not healthy, out of balance, a stale lease,
    # slots that are to move.
    NO = 1
    USAGE = 2
    UNAVAILABLE = 3
    NOT_FOUND = 4
    # The state forbids it: the queue exists, is not empty, the port is taken.
    REFUSED = 5
    INTERRUPTED = 130
    # As a shell tells it: 128 and the number of SIGPIPE.
    PIPE_CLOSED = 141


EPILOG = """\b
Exit codes:
    0  done; the answer is yes
    1  the answer is no: nothing to take, a stale lease, books that differ, slots that are to move
    2  the command or a value in it is wrong; nothing was done
    3  a router or a shard cannot be reached
    4  no such job, queue or shard
    5  refused: what is there now forbids it
  130  ended by Ctrl-C
  141  whoever read the output has gone
"""


class CommandFailed(Exception):
    """Ends the command: one sentence for the user, lines with particulars below it, and the exit code."""

    def __init__(self, message: str, code: ExitCode, *, particulars: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.particulars = particulars

"""The exit codes of the command, and the error that ends the command with one of them.

`windrow --help` and docs/cli.md list them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    # The command worked, but its answer is negative. For example: no job is due, a router is not healthy, counts do not
    # balance, a lease is stale, or slots still have to move.
    NO = 1
    USAGE = 2
    UNAVAILABLE = 3
    NOT_FOUND = 4
    # Trying again later does not help. For example: a queue exists already or is not empty, a port is in use, a limit
    # is smaller than the call, the cluster file does not fit the databases, or the caller's key lacks a scope.
    REFUSED = 5
    INTERRUPTED = 130
    # 128 plus the number of SIGPIPE: the code that shells report for a program that SIGPIPE ended.
    PIPE_CLOSED = 141


MEANINGS = {
    ExitCode.OK: "success, or the answer is yes",
    ExitCode.NO: "the answer is no: no due job, a stale lease, unbalanced counts, slots that still have to move",
    ExitCode.USAGE: "the command or one of its values is wrong; nothing was done",
    ExitCode.UNAVAILABLE: "a router or a shard cannot be reached, or has no room now: try again later",
    ExitCode.NOT_FOUND: "no such job, queue, org or shard",
    ExitCode.REFUSED: "refused: the current state does not allow it, or the caller may not do it",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
    ExitCode.PIPE_CLOSED: "the reader of the output closed the pipe",
}
EPILOG = "\b\nExit codes:\n" + "".join(f"  {code:>3}  {meaning}\n" for code, meaning in MEANINGS.items())


class CommandFailed(Exception):
    """Ends the command with a sentence for the user, optional lines of particulars, and an exit code."""

    def __init__(self, message: str, code: ExitCode, *, particulars: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.particulars = particulars


class RequestRefused(CommandFailed):
    """A router refused a request. `violations`: the names of the wrong fields, each with the router's description of
    what is wrong."""

    def __init__(self, violations: Sequence[tuple[str, str]], *, particulars: Sequence[str]) -> None:
        super().__init__("the router refused the request", ExitCode.USAGE, particulars=particulars)
        self.violations = violations

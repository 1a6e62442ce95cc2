"""Runs the programs of the examples as processes, and the commands on the pages of the examples. A test runs every
command of a page."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import Request, urlopen

from tests.e2e.conftest import CHECKOUT, RunningCluster
from tests.e2e.test_readme import blocks, run
from tests.routers import first_line, until
from windrow import JobRecord, JobState, SyncClient

_Found = TypeVar("_Found")
PYTHON, WINDROW = ".venv/bin/python", "./run windrow"


@contextlib.contextmanager
def started(
    cluster: RunningCluster, module: str, *arguments: str, listens: bool = False
) -> Generator[tuple[subprocess.Popen[str], str], None, None]:
    """Runs a program of the examples. Yields the process, and its address if it listens."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=CHECKOUT,
        env=os.environ | {"WINDROW_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, f"http://{first_line(process).split()[-1]}" if listens else ""
        finally:
            process.kill()


def call(url: str, body: object = None) -> Any:
    """Sends a GET, or a POST with JSON. Returns the answer."""
    content = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, content, {"Content-Type": "application/json"}), timeout=30) as answer:
        return json.load(answer)


def first(look: Callable[[], Sequence[_Found]], what: str) -> _Found:
    """Calls the function again and again until its result is not empty. Returns the first item of the result."""
    found: Sequence[_Found] = list[_Found]()

    def is_there() -> bool:
        nonlocal found
        found = look()
        return bool(found)

    until(is_there, what)
    return found[0]


def list_all(
    client: SyncClient,
    queue: str,
    *,
    state: JobState | None = None,
    kind: str = "",
    attributes: Mapping[str, str] | None = None,
) -> list[JobRecord]:
    """Lists jobs of a queue, with their payloads."""
    return [*client.iter_jobs(queue, state=state, kind=kind, attributes=attributes, include_payload=True)]


def most_at_once(jobs: Sequence[JobRecord]) -> int:
    """Returns the largest number of jobs that were leased at the same time, by the shard's clock."""
    attempts = [attempt for job in jobs for attempt in job.attempts]
    changes = [(one.leased_at, 1) for one in attempts] + [(one.ended_at, -1) for one in attempts]
    # If a lease ends at the instant when another lease begins, the end comes first.
    return max(accumulate(change for _, change in sorted(changes)))


class Page:
    """The commands of an example's page. `replaced`: words of the page, and the words with which a test replaces
    them."""

    def __init__(self, name: str, cluster: RunningCluster, replaced: Mapping[str, str]) -> None:
        page = f"examples/{name}/README.md"
        lines = [line for kind in ("sh", "console") for block in blocks(page, kind) for line in block.splitlines()]
        self._commands = [line.removeprefix("$ ") for line in lines]
        self._unused = set(self._commands)
        self._cluster = cluster
        self._replaced = replaced

    def run(self, of: str, *more: str) -> str:
        """Runs the one command that contains this text, with more arguments. Returns what it printed."""
        command = [*self.command(of), *more]
        done = run(command, self._cluster)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def started(
        self, of: str, *more: str, listens: bool = False
    ) -> Generator[tuple[subprocess.Popen[str], str], None, None]:
        """Runs the one command that contains this text, as started() does. If an option is given twice, the command
        uses the last one."""
        python, option, module, *arguments = self.command(of)
        assert (python, option) == (sys.executable, "-m")
        with started(self._cluster, module, *arguments, *more, listens=listens) as program:
            yield program

    def run_the_others(self) -> None:
        """Runs the commands that no test has run."""
        for line in [line for line in self._commands if line in self._unused]:
            self.run(line)

    def command(self, of: str) -> list[str]:
        """Returns the one command that contains this text. Marks the command as run, because the test runs it."""
        (line,) = dict.fromkeys(line for line in self._commands if of in line)
        self._unused.discard(line)
        text = line.replace(PYTHON, sys.executable).replace(WINDROW, str(Path(sys.executable).parent / "windrow"))
        return [self._replaced.get(word, word) for word in shlex.split(text)]

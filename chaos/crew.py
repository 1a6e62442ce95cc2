"""Starts, kills, restarts, commands and ends the client processes of a run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from proof import processes
from proof.clients.site import Site

_READY_S_MAX = 60.0
_END_S_MAX = 20.0


class ClientFailed(Exception):
    """A client ended although no fault had hit the client, so the run proves nothing."""


@dataclass(slots=True, eq=False)
class Member:
    """One client. After a kill, the client is started again as a new process."""

    sort: str
    site: Site
    process: Process | None = None

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None


class Crew:
    """The clients of a run. Calls identify a member by its name."""

    def __init__(self, members: Sequence[Member], log: IO[bytes]) -> None:
        self._members = {member.name: member for member in members}
        self._log = log
        # The commands so far. Clients that start later also get these commands.
        self._told: list[str] = []

    async def start(self, name: str) -> None:
        """Starts a member for the first time, or after a kill."""
        member = self._members[name]
        process = await processes.start(f"chaos.clients.{member.sort}", stderr=self._log)
        member.process = process
        self._say(process, member.site.to_json(), *self._told)
        assert process.stdout is not None
        async with asyncio.timeout(_READY_S_MAX):
            if not (await process.stdout.readline()).startswith(b"ready"):
                raise ClientFailed(f"{name} did not start; the log has its last words")

    async def start_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name in self._members:
                group.create_task(self.start(name))

    async def kill(self, name: str) -> None:
        member = self._members[name]
        assert member.process is not None
        if member.alive:
            member.process.kill()
        await member.process.wait()
        member.process = None
        member.site = replace(member.site, generation=member.site.generation + 1)

    def send(self, name: str, number: signal.Signals) -> None:
        process = self._members[name].process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def tell_all(self, word: str) -> None:
        self._told.append(word)
        for member in self._members.values():
            if member.process is not None:
                self._say(member.process, word)

    def check(self) -> None:
        """Raises ClientFailed if a client has ended by itself."""
        for member in self._members.values():
            if member.process is not None and member.process.returncode is not None:
                code = member.process.returncode
                raise ClientFailed(f"{member.name} ended by itself, with exit code {code}; the log has its last words")

    async def end(self, names: Iterable[str]) -> None:
        """Lets these members finish, and kills those that do not finish in time."""
        async with asyncio.TaskGroup() as group:
            for name in names:
                process = self._members[name].process
                self._members[name].process = None
                if process is not None:
                    group.create_task(processes.end(process, seconds_max=_END_S_MAX))

    async def end_all(self) -> None:
        await self.end(self._members)

    @staticmethod
    def _say(process: Process, *lines: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write("".join(f"{line}\n" for line in lines).encode())


@contextlib.asynccontextmanager
async def open_crew(members: Sequence[Member], log: Path) -> AsyncGenerator[Crew, None]:
    with log.open("ab") as lines:
        crew = Crew(members, lines)
        try:
            await crew.start_all()
            yield crew
        finally:
            await crew.end_all()

"""Adapts a peer that runs in a process of its own, so that a benchmark can measure the peer like any other system. Owns
that process and the communication with it.

Nothing in this module depends on a particular peer: the files in bench/systems say which program to start. Every peer's
program speaks bench.peers.wire, ends when its standard input ends, and uses no other module of ours.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict

from bench.peers import wire
from bench.peers.install import NODE_SOURCES, ROOT, go_program, node_folder, node_program, python_program
from bench.system import Finished, Site, Taken, Wrong

_END_S_MAX = 10.0
_REST_S_MAX = 60.0


class ChildSystem:
    """One peer, as one client process uses it. A subclass gives the peer's name, and the program to run."""

    title: ClassVar[str]

    def __init__(self, site: Site) -> None:
        self._site = site
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._work: asyncio.Future[Any] | None = None
        self._taken: Taken | None = None
        self._finished: Finished | None = None

    def command(self, cache: Path) -> list[str]:
        raise NotImplementedError

    @property
    def child_pids(self) -> list[int]:
        """The ids of the peer's processes, whose CPU time counts as the client's."""
        return [] if self._process is None else [self._process.pid]

    async def prepare(self, run: str) -> None:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *self.command(Path(self._site.cache)),
                stdin=PIPE,
                stdout=PIPE,
                limit=2**22,
                # The peers' interpreter must find bench.peers.
                env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            )
            self._reader = asyncio.create_task(self._read(self._process))
            await self._call("open", dsn=url(self._site.dsn), connections=self._site.callers)
        await self._call("prepare", run=run)

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        if not all(map(bytes.isascii, payloads)):
            raise Wrong(f"{self.title} keeps payloads as JSON, and can be compared only where they are ASCII text")
        answer = self._expect()
        self._send(wire.frame(wire.Kind.ENQUEUE, wire.U32.pack(answer[0]), wire.pack(payloads)))
        await answer[1]

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        self._taken, self._finished = taken, finished
        call, self._work = self._expect()
        self._send_call(call, "work", batch=batch, concurrency=concurrency)
        try:
            await self._work
            raise Wrong(f"{self.title} stopped working")
        finally:
            self._work = None
            if self._process is not None and self._process.returncode is None:
                async with asyncio.timeout(_REST_S_MAX):
                    # The peer finishes what it has begun, even if this process wants to end.
                    await asyncio.shield(asyncio.ensure_future(self._call("rest")))
            self._taken = self._finished = None

    async def left(self) -> int:
        counts = await self._call("counts")
        left: int = counts["left"]
        return left

    async def check(self, jobs: int) -> None:
        """Raises Wrong if the peer has jobs left, or if it has not accepted and finished exactly `jobs` jobs. A count
        of None is not checked: the system does not keep this count."""
        counts = await self._call("counts")
        if counts["left"] != 0 or any(counts[name] not in (None, jobs) for name in ("accepted", "finished")):
            raise Wrong(f"{self.title}: of {jobs} jobs, the database knows {counts}")

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_END_S_MAX):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        finally:
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.wait({self._reader})

    async def _call(self, verb: str, **arguments: object) -> Any:
        call, answer = self._expect()
        self._send_call(call, verb, **arguments)
        return await answer

    def _expect(self) -> tuple[int, asyncio.Future[Any]]:
        call = next(self._ids)
        answer = self._waiting[call] = asyncio.get_running_loop().create_future()
        return call, answer

    def _send_call(self, call: int, verb: str, **arguments: object) -> None:
        body = json.dumps({"id": call, "verb": verb, **arguments}).encode()
        self._send(wire.frame(wire.Kind.CALL, body))

    def _send(self, frame: bytes) -> None:
        if self._process is None or self._reader is None or self._reader.done():
            raise Wrong(f"{self.title}: its process has ended")
        assert self._process.stdin is not None
        # No drain() is needed: each caller waits for its answer, so the number of callers bounds the unsent bytes.
        self._process.stdin.write(frame)

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        failure = Wrong(f"{self.title}: its process has ended")
        try:
            while True:
                length, kind = wire.HEAD.unpack(await process.stdout.readexactly(wire.HEAD.size))
                self._receive(wire.Kind(kind), await process.stdout.readexactly(length))
        except asyncio.IncompleteReadError:
            pass
        except Exception as error:  # noqa: BLE001 - told to whoever waits
            failure = Wrong(f"{self.title}: {type(error).__name__}: {error}")
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(failure)
            self._waiting.clear()

    def _receive(self, kind: wire.Kind, body: bytes) -> None:
        match kind:
            case wire.Kind.TAKEN:
                if self._taken is not None:
                    payloads, times_ns = wire.read_taken(body)
                    try:
                        for at_ns, payload in zip(times_ns, payloads, strict=True):
                            self._taken(at_ns, payload)
                    except Exception as error:  # noqa: BLE001 - raised by work()
                        if self._work is not None and not self._work.done():
                            self._work.set_exception(error)
            case wire.Kind.FINISHED:
                if self._finished is not None:
                    self._finished(wire.U32.unpack(body)[0])
            case wire.Kind.ANSWER:
                told = json.loads(body)
                answer = self._waiting.pop(told["id"])
                if answer.done():
                    return
                if "error" in told:
                    answer.set_exception(Wrong(f"{self.title}: {told['error']}"))
                else:
                    answer.set_result(told["value"])
            case wire.Kind.CALL | wire.Kind.ENQUEUE:
                raise Wrong(f"{self.title} sent a {kind.name}")


class PythonPeer(ChildSystem):
    """A peer in bench/peers/python."""

    module: ClassVar[str]

    def command(self, cache: Path) -> list[str]:
        return [str(python_program(cache)), "-m", f"bench.peers.python.{self.module}"]


class NodePeer(ChildSystem):
    """A peer in bench/peers/node."""

    script: ClassVar[str]

    def command(self, cache: Path) -> list[str]:
        return [str(node_program(cache)), str(NODE_SOURCES / self.script), str(node_folder(cache))]


class GoPeer(ChildSystem):
    """The peer in bench/peers/go."""

    def command(self, cache: Path) -> list[str]:
        return [str(go_program(cache))]


def url(dsn: str) -> str:
    """Returns a connection string in the form of a URL, which every driver can read."""
    parts = {name: quote(str(value), safe="") for name, value in conninfo_to_dict(dsn).items() if value is not None}
    user = parts.get("user", "") + (f":{parts['password']}" if "password" in parts else "")
    return f"postgresql://{user}@{parts['host']}:{parts.get('port', '5432')}/{parts['dbname']}"

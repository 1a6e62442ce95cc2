"""One scenario with one client: the fake server, the client under test, and the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Protocol

from tests.conformance.fake_server import FakeServer, serving
from tests.conformance.rules import HANDLERS, Unmet, check_rules
from tests.conformance.transcript import Transcript

if TYPE_CHECKING:
    from tests.conformance.scenarios import Scenario

# The name of the org has characters that must be encoded in the metadata `windrow-org`.
ORG, QUEUE = "conformance ü/1", "conformance"
PATIENCE_S = 20.0
# Programs of some languages are compiled, or wait for each other, before they first connect.
START_S = 60.0
_SAID_CHARS_MAX = 2000


class Client(Protocol):
    """The client under test."""

    @property
    def code(self) -> int | None:
        """The exit code; None while the client runs."""
        ...

    def stop(self) -> None:
        """Asks the client to end in order, as SIGTERM does."""
        ...

    async def end(self) -> None:
        """Waits until the client has ended."""
        ...

    def said(self) -> str:
        """Returns the end of what the client printed."""
        ...


StartClient = Callable[[Mapping[str, str]], AbstractAsyncContextManager[Client]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    scenario: str
    passed: bool
    # If the client has passed, the text says what the scenario requires. Otherwise, it says what the client did not do.
    expected: str
    seen: str
    seconds: float


class Stage:
    """The fake server and the client under test, for one scenario."""

    def __init__(self, server: FakeServer, client: Client, *, patience_s: float) -> None:
        self.server = server
        self.client = client
        self.patience_s = patience_s

    @property
    def seen(self) -> Transcript:
        return self.server.seen

    async def until(self, holds: Callable[[], object], expected: str, *, within_s: float | None = None) -> None:
        """Waits for what the client is expected to do. Raises Unmet if the client does not do it in time, or ends."""
        await self._wait(lambda: holds() or self.client.code is not None, expected, within_s=within_s)
        if not holds():
            raise Unmet(expected, f"{self.seen} {self.client.said()}".strip())

    async def until_ended(self, expected: str) -> int:
        """Waits until the client has ended. Returns its exit code."""
        await self._wait(lambda: self.client.code is not None, expected)
        assert self.client.code is not None
        return self.client.code

    async def watch(self, for_s: float) -> None:
        """Waits, so that the client has time for mistakes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                while True:
                    await self.server.news()

    async def until_acked(self, *leases: bytes) -> None:
        await self.until(lambda: self.seen.acked(*leases), "an ack of each job, answered OK")

    async def until_sent(self, *leases: bytes) -> None:
        await self.until(lambda: set(leases) <= self.seen.jobs.keys(), "credit for the jobs that are due")

    async def fill(self, payload: str) -> list[bytes]:
        """Gives jobs until all handlers are busy and the credit is used. Returns their leases."""
        self.server.give(*[payload] * 2 * HANDLERS)

        def is_full() -> bool:
            stream = self.seen.streams[-1] if self.seen.streams else None
            return stream is not None and len(stream.jobs) >= HANDLERS and stream.credit <= 0

        await self.until(is_full, f"credit for {HANDLERS} jobs at least")
        self.server.keep_rest()
        return [job.lease for job in self.seen.streams[-1].jobs]

    async def _wait(self, holds: Callable[[], object], expected: str, *, within_s: float | None = None) -> None:
        if not self.seen.streams:
            await self._until(lambda: self.seen.streams or self.client.code is not None, "a first Consume", START_S)
        await self._until(holds, expected, self.patience_s if within_s is None else within_s)

    async def _until(self, holds: Callable[[], object], expected: str, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not holds():
                    await self.server.news()
        except TimeoutError:
            seen = f"not within {within_s:g} s: {self.seen} {self.client.said()}".strip()
            raise Unmet(expected, seen) from None


def environ_of(scenario: Scenario, address: str) -> dict[str, str]:
    """Returns the environment variables that tell the client under test what to do."""
    return {
        "WINDROW_ADDRESS": address,
        "WINDROW_SCENARIO": scenario.name,
        "WINDROW_ORG": ORG,
        "WINDROW_QUEUE": QUEUE,
        "WINDROW_WINDOW_MS": str(round(scenario.window_s * 1000)),
        "WINDROW_ANSWER_MS": str(round(scenario.answer_s * 1000)),
    }


async def play(
    scenario: Scenario, start: StartClient, *, address: str = "127.0.0.1:0", patience_s: float = PATIENCE_S
) -> Outcome:
    """Plays the server's side of a scenario against a client."""
    began_s = time.monotonic()
    server = FakeServer(org=ORG, queue=QUEUE)
    try:
        async with serving(server, address) as actual, start(environ_of(scenario, actual)) as client:
            async with _followed(client, server):
                await scenario.fake(Stage(server, client, patience_s=patience_s))
            # Judge before the client is killed, because the kill also ends its streams.
            check_rules(server.seen)
            scenario.expect(server.seen)
    except Unmet as unmet:
        passed, expected, seen = False, unmet.expected, unmet.seen
    else:
        passed, expected, seen = True, scenario.what, str(server.seen)
    return Outcome(
        scenario=scenario.name, passed=passed, expected=expected, seen=seen, seconds=time.monotonic() - began_s
    )


@contextlib.asynccontextmanager
async def _followed(client: Client, server: FakeServer) -> AsyncGenerator[None, None]:
    """Records the end of the client, if it ends during the block."""

    async def follow() -> None:
        await client.end()
        server.seen.code = client.code
        server.wake()

    following = asyncio.create_task(follow())
    try:
        yield
    finally:
        following.cancel()


class Program:
    """A client that is a process."""

    def __init__(self, process: asyncio.subprocess.Process, printed: IO[bytes]) -> None:
        self._process = process
        self._printed = printed

    @property
    def code(self) -> int | None:
        return self._process.returncode

    def stop(self) -> None:
        if self.code is None:
            self._process.send_signal(signal.SIGTERM)

    async def end(self) -> None:
        await self._process.wait()

    def said(self) -> str:
        self._printed.seek(0)
        text = self._printed.read().decode(errors="replace").strip()
        return f"it printed: …{text[-_SAID_CHARS_MAX:]}" if text else ""

    def kill(self) -> None:
        """Kills the client with all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def program(command: Sequence[str]) -> StartClient:
    """Returns a client that this command starts. What the client prints is shown if it fails."""

    @contextlib.asynccontextmanager
    async def start(environ: Mapping[str, str]) -> AsyncGenerator[Client, None]:
        with tempfile.TemporaryFile() as printed:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    env=os.environ | environ,
                    start_new_session=True,
                )
            except OSError as error:
                raise Unmet("a command that starts a client", f"{command[0]}: {error.strerror}") from None
            running = Program(process, printed)
            try:
                yield running
            finally:
                running.kill()
                await process.wait()

    return start


class _ByHand:
    """A client that a person starts and stops. The person types its exit code when it has ended."""

    code: int | None = None

    def stop(self) -> None:
        _tell("now send SIGTERM to the client")

    async def end(self) -> None:
        loop = asyncio.get_running_loop()
        typed: asyncio.Future[str] = loop.create_future()

        def tell(line: str) -> None:
            if not typed.done():
                typed.set_result(line)

        def read() -> None:
            line = sys.stdin.readline()
            # The loop may be closed when the line comes.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(tell, line)

        # A daemon thread, because the scenario may end before anything is typed.
        threading.Thread(target=read, daemon=True).start()
        text = (await typed).strip()
        if not text.isdecimal():
            await asyncio.Event().wait()
        self.code = int(text)

    def said(self) -> str:
        return ""


@contextlib.asynccontextmanager
async def by_hand(environ: Mapping[str, str]) -> AsyncGenerator[Client, None]:
    """A client that a person starts with these variables, which are printed for the person."""
    _tell("start the client, and type its exit code here if it ends:")
    _tell(shlex.join(["env", *[f"{name}={value}" for name, value in environ.items()], "COMMAND"]))
    yield _ByHand()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

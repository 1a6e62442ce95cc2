"""The circuit breaker: what counts as an answer, when it opens, and how it closes again."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator

import pytest

import shard.postgres.breaker
from shard.postgres.breaker import Breaker
from tests.conftest import SHARD

SILENCE_S = 0.2


class Server:
    """A fake server that answers, refuses or stays silent, as the test wants."""

    def __init__(self, *, patience: float = 1.0) -> None:
        self.asked = 0
        self.asking = 0
        self.asking_most = 0
        self.refuses: str | None = None
        self.opened: list[str | None] = []
        self.open = asyncio.Event()
        self._speaks = asyncio.Event()
        self._changed = asyncio.Event()
        self.breaker = Breaker(SHARD, ask=self._ask, opened=self._note, patience=patience)

    def _note(self) -> None:
        self.opened.append(self.breaker.trouble)
        self.open.set()

    def says_nothing(self) -> None:
        self._speaks.clear()

    def speaks(self) -> None:
        self._speaks.set()

    async def _ask(self) -> None:
        self.asked += 1
        self.asking += 1
        self.asking_most = max(self.asking, self.asking_most)
        self._changed.set()
        try:
            await self._speaks.wait()
            if self.refuses is not None:
                raise ConnectionRefusedError(self.refuses)
        finally:
            self.asking -= 1
            self._changed.set()

    async def until_asked(self, count: int) -> None:
        async with asyncio.timeout(60):
            while self.asked < count:
                self._changed.clear()
                await self._changed.wait()

    async def until_nobody_asks(self) -> None:
        async with asyncio.timeout(60):
            while self.asking:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Server, None]:
    intervals = {"_SILENCE_S": SILENCE_S, "_AGAIN_S": 0.0, "_PROBE_PAUSE_S": 0.01, "_REFUSED_PAUSE_S": 0.01}
    for name, value in intervals.items():
        monkeypatch.setattr(shard.postgres.breaker, name, value)
    made = Server()
    yield made
    await made.breaker.end()
    assert made.asking == 0


async def test_silence_opens_it_and_one_answer_closes_it(server: Server) -> None:
    server.breaker.doubt()
    await server.until_asked(1)
    assert server.breaker.trouble is None, "a doubt is no proof"
    await server.until_asked(2)
    assert server.opened == ["it does not answer"]
    server.speaks()
    await asyncio.wait_for(server.breaker.until_closed(), 60)
    assert server.breaker.trouble is None
    # The server falls silent a second time.
    server.says_nothing()
    server.open.clear()
    server.breaker.doubt()
    await asyncio.wait_for(server.open.wait(), 60)


@pytest.mark.parametrize("refuses", [None, "too many connections"])
async def test_a_refusal_also_proves_that_the_server_answers(server: Server, refuses: str | None) -> None:
    server.refuses = refuses
    server.speaks()
    server.breaker.doubt()
    await server.until_asked(1)
    await server.until_nobody_asks()
    await asyncio.wait({server.breaker._asking})  # type: ignore[type-var]
    assert server.breaker.trouble is None
    assert server.opened == []


async def test_a_statement_that_is_answered_meanwhile_settles_a_doubt(server: Server) -> None:
    server.breaker.doubt()
    await server.until_asked(1)
    server.breaker.answers += 1
    await server.until_nobody_asks()
    assert server.breaker.trouble is None


async def test_a_process_that_stood_still_hears_what_came_meanwhile(server: Server) -> None:
    server.breaker.doubt()
    await server.until_asked(1)
    # The answer arrives in the event loop iteration in which the timeout ends.
    asyncio.get_running_loop().call_soon(server.speaks)
    time.sleep(2 * SILENCE_S)  # noqa: ASYNC251 - this is the process that stands still
    await server.until_nobody_asks()
    assert server.opened == []


async def test_while_it_is_open_the_latest_trouble_is_told_and_probes_are_few(server: Server) -> None:
    server.breaker.open("connection refused")
    assert server.opened == ["connection refused"]
    await server.until_asked(4)
    server.refuses = "the database system is starting up"
    server.speaks()
    await server.until_asked(8)
    assert server.breaker.trouble == "the database system is starting up"
    assert server.asking_most <= 4
    assert server.opened == ["connection refused"], "it is open, and does not open again"
    server.refuses = None
    await asyncio.wait_for(server.breaker.until_closed(), 60)


async def test_once_ended_it_asks_no_more_and_holds_nobody_up(server: Server) -> None:
    server.breaker.open("connection refused")
    await server.until_asked(1)
    await server.breaker.end()
    await asyncio.wait_for(server.breaker.until_closed(), 60)
    asked = server.asked
    server.breaker.doubt()
    server.breaker.open("again")
    await asyncio.sleep(0)
    assert server.asked == asked
    assert server.opened == ["connection refused"]


async def test_a_server_that_is_silent_again_and_again_gets_more_time_each_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()

    async def seconds_until_open() -> float:
        server.says_nothing()
        server.open.clear()
        began_s = loop.time()
        server.breaker.doubt()
        await asyncio.wait_for(server.open.wait(), 60)
        lasted_s = loop.time() - began_s
        server.speaks()
        await asyncio.wait_for(server.breaker.until_closed(), 60)
        return lasted_s

    # The test does not check an upper bound, because a busy machine may take longer.
    for silence_s in (SILENCE_S, 2 * SILENCE_S, 4 * SILENCE_S):
        assert await seconds_until_open() >= silence_s
    monkeypatch.setattr(shard.postgres.breaker, "_CALM_S", 0.0)
    server.says_nothing()
    server.breaker.doubt()
    assert server.breaker._silence_s == SILENCE_S, "after a calm time it is as at first"


async def test_a_patient_breaker_lets_a_server_be_silent_for_longer(server: Server) -> None:
    patient, endless = Server(patience=4.0), Server(patience=1e6)
    began_s = asyncio.get_running_loop().time()
    for one in (patient, endless, server):
        one.breaker.doubt()
    await asyncio.wait_for(server.open.wait(), 60)
    await asyncio.wait_for(patient.open.wait(), 60)
    assert asyncio.get_running_loop().time() - began_s >= 4 * SILENCE_S
    assert endless.breaker.trouble is None
    await patient.breaker.end()
    await endless.breaker.end()


async def test_a_doubt_that_is_answered_gives_the_server_no_more_time_for_the_next(server: Server) -> None:
    # The server was silent a short time ago.
    server.breaker.doubt()
    await asyncio.wait_for(server.open.wait(), 60)
    server.speaks()
    await asyncio.wait_for(server.breaker.until_closed(), 60)
    for _ in range(3):
        server.breaker._asked_s = -math.inf
        server.breaker.doubt()
        await asyncio.wait({server.breaker._asking})  # type: ignore[type-var]
    assert server.breaker._silence_s == 2 * SILENCE_S


async def test_a_silent_server_is_probed_ever_more_rarely(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []
    heard = shard.postgres.breaker._heard

    async def noted(probes: set[asyncio.Task[str | None]], *, within_s: float) -> set[str | None]:
        pauses_s.append(within_s)
        return await heard(probes, within_s=within_s)

    monkeypatch.setattr(shard.postgres.breaker, "_heard", noted)
    monkeypatch.setattr(shard.postgres.breaker, "_PROBE_PAUSE_S_MAX", 0.04)
    server.breaker.open("connection refused")
    await server.until_asked(4)
    assert 0.0075 <= pauses_s[0] <= 0.01
    assert 0.015 <= pauses_s[1] <= 0.02
    assert all(0.03 <= pause_s <= 0.04 for pause_s in pauses_s[2:])
    assert server.breaker.trouble == "it does not answer"

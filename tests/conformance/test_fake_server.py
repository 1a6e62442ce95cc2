"""The scenarios against the fake server: the reference client passes all of them, and wrong clients fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping

import pytest

from tests.conformance.reference import ReferenceWorker
from tests.conformance.scenarios import SCENARIOS
from tests.conformance.stage import Client, Outcome, StartClient, play
from tests.conformance.wrong_clients import WRONG

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
# How long a scenario waits until the client does what is expected. A wrong client never does this. The time includes
# the earlier steps of the scenario, in which all clients are busy at the same time.
WRONG_PATIENCE_S = 12.0


class InProcess:
    """A worker in the event loop of the test."""

    def __init__(self, worker: ReferenceWorker) -> None:
        self.task = asyncio.create_task(worker.run())
        self.stop = worker.stop

    @property
    def code(self) -> int | None:
        if not self.task.done():
            return None
        return 1 if self.task.cancelled() or self.task.exception() else 0

    async def end(self) -> None:
        await asyncio.wait({self.task})

    def said(self) -> str:
        failed = self.task.done() and not self.task.cancelled() and self.task.exception()
        return repr(failed) if failed else ""


def in_process(kind: type[ReferenceWorker]) -> StartClient:
    @contextlib.asynccontextmanager
    async def start(environ: Mapping[str, str]) -> AsyncGenerator[Client, None]:
        client = InProcess(
            kind(
                environ["WINDROW_ADDRESS"],
                org=environ["WINDROW_ORG"],
                queue=environ["WINDROW_QUEUE"],
                window_s=int(environ["WINDROW_WINDOW_MS"]) / 1000,
                answer_s=int(environ["WINDROW_ANSWER_MS"]) / 1000,
            )
        )
        try:
            yield client
        finally:
            client.task.cancel()
            # Wrong clients may end with anything.
            await asyncio.gather(client.task, return_exceptions=True)

    return start


async def play_all(*plays: tuple[str, type[ReferenceWorker]], patience_s: float = 30.0) -> list[Outcome]:
    """Plays all scenarios at the same time, because most of them only wait."""
    return await asyncio.gather(*[play(BY_NAME[name], in_process(kind), patience_s=patience_s) for name, kind in plays])


@pytest.fixture(scope="module")
def reference_outcomes() -> dict[str, Outcome]:
    outcomes = asyncio.run(play_all(*[(name, ReferenceWorker) for name in BY_NAME]))
    return {outcome.scenario: outcome for outcome in outcomes}


@pytest.fixture(scope="module")
def wrong_outcomes() -> list[Outcome]:
    return asyncio.run(play_all(*[(name, kind) for name, kind, _ in WRONG], patience_s=WRONG_PATIENCE_S))


@pytest.mark.parametrize("name", BY_NAME)
def test_the_reference_client_passes(name: str, reference_outcomes: dict[str, Outcome]) -> None:
    outcome = reference_outcomes[name]
    assert outcome.passed, f"expected: {outcome.expected}; seen: {outcome.seen}"


@pytest.mark.parametrize("at", range(len(WRONG)), ids=[f"{name}-{kind.__name__}" for name, kind, _ in WRONG])
def test_a_wrong_client_is_caught_for_its_mistake(at: int, wrong_outcomes: list[Outcome]) -> None:
    outcome, mistake = wrong_outcomes[at], WRONG[at][2]
    assert not outcome.passed, outcome.seen
    assert mistake in outcome.expected, f"{outcome.expected}; seen: {outcome.seen}"


def test_every_scenario_catches_a_wrong_client_and_says_what_it_is_about() -> None:
    assert {name for name, _, _ in WRONG} == set(BY_NAME)
    assert len(BY_NAME) == len(SCENARIOS)
    assert all(scenario.what.endswith(".") and "{" not in scenario.what for scenario in SCENARIOS)

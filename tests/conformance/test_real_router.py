"""The scenarios against a real router. The router behaves like the fake server, so the expectations of the scenarios
hold for it, too."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import grpc
import pytest

from tests.conformance.real_router import Bench
from tests.conformance.rules import check_rules
from tests.conformance.scenarios import SCENARIOS, Scenario
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, write_cluster
from tests.streams import Client, client

# The first shard has the catalog, and always answers.
STEADY, SHAKY = "s1", "s2"
DATABASES = {STEADY: "conformance_steady", SHAKY: "conformance_shaky"}
CALM = {scenario.name: scenario for scenario in SCENARIOS if not (scenario.only_fake or scenario.disturbs)}
DISTURBING = {scenario.name: scenario for scenario in SCENARIOS if scenario.disturbs and not scenario.only_fake}


@pytest.fixture(scope="module")
def routers(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Routers, None, None]:
    dsns = {shard: postgres.create(database) for shard, database in DATABASES.items()}
    with running_routers(write_cluster(tmp_path_factory.mktemp("conformance") / "cluster.toml", dsns)) as running:
        yield running


async def play(scenario: Scenario, postgres: Server, routers: Routers) -> None:
    """Raises AssertionError if the client did not do what it must."""
    async with client(routers.address) as near:
        org = await _org_on_shaky(near)
        seen = await scenario.real(Bench(postgres, DATABASES[SHAKY], routers, near, org))
    check_rules(seen, room=scenario.room_real)
    scenario.expect(seen)


async def _org_on_shaky(near: Client) -> str:
    """Returns a new org. In the previous scenario, the shard may have stopped answering. The router notices the shard's
    return a moment later, so this waits."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await near.org_on(SHAKY)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def calm_plays(postgres: Server, routers: Routers) -> dict[str, BaseException | None]:
    """The results of the scenarios that do not disturb others. They run at the same time, because most of them only
    wait."""

    async def play_all() -> list[BaseException | None]:
        return await asyncio.gather(
            *[play(scenario, postgres, routers) for scenario in CALM.values()], return_exceptions=True
        )

    return dict(zip(CALM, asyncio.run(play_all()), strict=True))


@pytest.mark.parametrize("name", CALM)
def test_the_reference_client_passes_with_a_real_router(name: str, calm_plays: dict[str, BaseException | None]) -> None:
    if failure := calm_plays[name]:
        raise failure


@pytest.mark.parametrize("name", DISTURBING)
async def test_the_reference_client_passes_with_a_router_in_trouble(
    name: str, postgres: Server, routers: Routers
) -> None:
    await play(DISTURBING[name], postgres, routers)


def test_only_what_no_router_does_is_left_to_the_fake_server() -> None:
    only_fake = {scenario.name for scenario in SCENARIOS if scenario.only_fake}
    assert only_fake == {
        *("end-internal", "end-unknown", "end-exhausted"),
        *("fatal-unauthenticated", "fatal-permission-denied", "fatal-unimplemented"),
        "stop-late",
    }

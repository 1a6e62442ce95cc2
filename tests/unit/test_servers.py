"""Which servers a DSN names, and to which of them a connection is made."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

import shard.postgres.multi_host
from shard.postgres.multi_host import each_of, first_of


@pytest.mark.parametrize(
    ("dsn", "servers"),
    [
        ("postgresql://a:1,b:2/x?target_session_attrs=read-write", [("a", None, "1"), ("b", None, "2")]),
        ("postgresql://a,b:2/x", [("a", None, ""), ("b", None, "2")]),
        ("host=a,b,c port=7", [("a", None, "7"), ("b", None, "7"), ("c", None, "7")]),
        ("host=a,b hostaddr=::1,127.0.0.1", [("a", "::1", None), ("b", "127.0.0.1", None)]),
        ("host=a", [("a", None, None)]),
        ("dbname=x", [(None, None, None)]),
        # libpq's message says what is wrong.
        ("host=a,b port=1,2,3", [("a,b", None, "1,2,3")]),
    ],
)
def test_each_server_has_a_dsn_in_the_order_of_the_one_that_names_them(
    dsn: str, servers: list[tuple[str | None, str | None, str | None]]
) -> None:
    whole = conninfo_to_dict(dsn)
    found = [conninfo_to_dict(one) for one in each_of(dsn)]
    assert [(one.get("host"), one.get("hostaddr"), one.get("port")) for one in found] == servers
    rest = {"host", "hostaddr", "port"}
    for one in found:
        assert {key: one[key] for key in one if key not in rest} == {
            key: whole[key] for key in whole if key not in rest
        }


class Servers:
    """Four fake servers, which behave as the test says. A connection has its server, and records whether it was
    closed."""

    dsn = "host=a,b,c,d"

    def __init__(self) -> None:
        self.says = {name: asyncio.get_running_loop().create_future() for name in "abcd"}
        self.tried: list[str] = []
        self.all_tried = asyncio.Event()
        self.hung_up: list[str] = []

    async def connect(self, dsn: str) -> Any:
        name = str(conninfo_to_dict(dsn)["host"])
        self.tried.append(name)
        if len(self.tried) == len(self.says):
            self.all_tried.set()
        await self.says[name]
        return Connected(self, name)


class Connected:
    def __init__(self, servers: Servers, name: str) -> None:
        self.servers = servers
        self.name = name
        self.pgconn = self

    def finish(self) -> None:
        self.servers.hung_up.append(self.name)


@pytest.fixture
async def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    monkeypatch.setattr(shard.postgres.multi_host, "NEXT_S", 0.01)
    return Servers()


async def test_a_server_that_refuses_has_the_next_one_tried_at_once_and_the_rest_left_alone(servers: Servers) -> None:
    servers.says["a"].set_exception(psycopg.OperationalError("read-only"))
    servers.says["b"].set_result(None)
    assert (await first_of(servers.dsn, servers.connect)).name == "b"
    assert servers.tried == ["a", "b"]


async def test_while_a_server_is_silent_the_others_are_tried_too(servers: Servers) -> None:
    servers.says["d"].set_result(None)
    assert (await first_of(servers.dsn, servers.connect)).name == "d"
    assert servers.tried == list("abcd")
    assert all(servers.says[name].cancelled() for name in "abc")


async def test_where_no_server_lets_us_in_the_last_one_says_why(servers: Servers) -> None:
    for name, says in servers.says.items():
        says.set_exception(psycopg.OperationalError(f"{name} refuses"))
    with pytest.raises(psycopg.OperationalError, match="d refuses"):
        await first_of(servers.dsn, servers.connect)


async def test_of_two_connections_at_the_same_moment_the_second_is_hung_up(servers: Servers) -> None:
    coming = asyncio.create_task(first_of(servers.dsn, servers.connect))
    await servers.all_tried.wait()
    servers.says["b"].set_result(None)
    servers.says["c"].set_result(None)
    assert (await coming).name == "b"
    await asyncio.sleep(0)
    assert servers.hung_up == ["c"]


async def test_a_connection_that_comes_when_its_caller_leaves_is_hung_up(servers: Servers) -> None:
    coming = asyncio.create_task(first_of(servers.dsn, servers.connect))
    await servers.all_tried.wait()
    servers.says["b"].set_result(None)
    coming.cancel()
    await asyncio.wait({coming})
    assert coming.cancelled()
    await asyncio.sleep(0)
    assert servers.hung_up == ["b"]

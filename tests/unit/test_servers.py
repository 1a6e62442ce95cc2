"""Which servers a DSN names."""

from __future__ import annotations

import pytest
from psycopg.conninfo import conninfo_to_dict

from shard.servers import each_of


@pytest.mark.parametrize(
    ("dsn", "servers"),
    [
        ("postgresql://a:1,b:2/x?target_session_attrs=read-write", [("a", None, "1"), ("b", None, "2")]),
        ("postgresql://a,b:2/x", [("a", None, ""), ("b", None, "2")]),
        ("host=a,b,c port=7", [("a", None, "7"), ("b", None, "7"), ("c", None, "7")]),
        ("host=a,b hostaddr=::1,127.0.0.1", [("a", "::1", None), ("b", "127.0.0.1", None)]),
        ("host=a", [("a", None, None)]),
        ("dbname=x", [(None, None, None)]),
        # libpq says what is wrong with it.
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

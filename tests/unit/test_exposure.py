"""A router refuses an address that others can reach, unless it has TLS and authentication, or an operator allows such
an address."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import router.process.supervisor
from router.errors import ListensOpenly
from router.process.exposure import exposure
from router.process.supervisor import Supervisor
from shard.placement.cluster_file import Cluster
from tests.routers import until

TLS: dict[str, object] = {"certificate": "tls.crt", "key": "tls.key"}
OPEN = "0.0.0.0:7419"


def cluster(**tables: dict[str, object]) -> Cluster:
    return Cluster(name="c", shards=(), catalog_dsn="", tables=tables, source="cluster.toml")


@pytest.mark.parametrize("listen", [OPEN, "[::]:7419", "192.0.2.1:7419", "[2001:db8::1]:0"])
@pytest.mark.parametrize(
    ("tables", "missing", "danger"),
    [
        ({}, "[tls] and [auth]", "anyone who reaches"),
        ({"tls": TLS}, "[auth]", "anyone who reaches"),
        ({"auth": {}}, "[tls]", "the tokens with which to act"),
    ],
)
def test_an_open_address_without_protection_is_refused(
    listen: str, tables: dict[str, dict[str, object]], missing: str, danger: str
) -> None:
    with pytest.raises(ListensOpenly) as refused:
        exposure(cluster(**tables), listen, insecure=False)
    message = str(refused.value)
    assert message.startswith(f"refusing to listen on {listen} without {missing} in cluster.toml: anyone")
    assert danger in message
    assert "insecure = true in [router]" in message
    assert f": {exposure(cluster(**tables), listen, insecure=True)}. Add" in message


@pytest.mark.parametrize("listen", ["127.0.0.1:7419", "localhost:0", "[::1]:7419", "127.9.9.9:7419"])
def test_an_address_of_this_machine_only_needs_nothing(listen: str) -> None:
    assert exposure(cluster(), listen, insecure=False) is None


def test_an_open_address_with_both_needs_nothing_else() -> None:
    assert exposure(cluster(tls=TLS, auth={"api_keys": True}), OPEN, insecure=False) is None


async def test_the_log_repeats_what_strangers_can_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(router.process.supervisor, "_EXPOSED_S", 0.001)
    # No process can start. The supervisor waits for this pause before it tries again.
    monkeypatch.setattr(router.process.supervisor, "_PAUSE_S", 60.0)
    routers = Supervisor(
        tmp_path / "none.toml", listen="127.0.0.1:0", processes=1, drain_seconds=0, exposed="anyone can"
    )
    stop = asyncio.Event()
    running = asyncio.create_task(routers.run(ready=lambda _: None, stop=stop))
    await asyncio.to_thread(until, lambda: caplog.text.count("insecure = true: anyone can") >= 3, "it says so thrice")
    stop.set()
    await asyncio.wait({running})
    running.exception()

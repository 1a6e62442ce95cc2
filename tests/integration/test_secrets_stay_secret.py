"""A cluster never prints, answers or exports a secret, whether calls succeed or fail."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import cast

import grpc
import psutil
import pytest
from google.protobuf.message import Message
from psycopg.conninfo import conninfo_to_dict

from tests import preloaded
from tests.access import METHODS, REQUESTS, bearer, call, id_of, open_secured, things_of
from tests.collector import Collector, collecting
from tests.issuers import BAD_TOKENS, jwks, jwt_table, put, signing_key, token
from tests.postgres import Server
from tests.routers import PATIENCE_S, running_routers, until, write_cluster

ISSUERS_KEY = signing_key("Ed25519")


@pytest.fixture
def collector() -> Generator[Collector, None, None]:
    yield from collecting(0)


def test_nothing_that_a_cluster_says_contains_a_secret(postgres: Server, tmp_path: Path, collector: Collector) -> None:
    dsn = postgres.create("secrets")
    password = str(conninfo_to_dict(dsn)["password"])
    keys = tmp_path / "keys.json"
    put(keys, jwks(ISSUERS_KEY))
    config = write_cluster(tmp_path / "cluster.toml", {"s1": dsn})
    good = config.read_text() + f"\n[auth]\n{jwt_table(jwks_file=keys)}"
    config.write_text(good)
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    said: list[str] = []
    with (
        running_routers(config, processes=2, environ=environ) as routers,
        open_secured(routers, {"s1": dsn}) as cluster,
    ):
        key, revoked = cluster.key_of("acme"), cluster.key_of("acme")
        operator = cluster.new_key(scopes=["cluster", "read"])
        cluster.revoke(revoked)
        # This secret differs from a valid secret only at its end. With it, the test finds texts that quote what a
        # caller sent.
        wrong = f"{key[:-4]}{'aaaa' if key[-4:] != 'aaaa' else 'bbbb'}"
        tokens = [
            token(org="acme"),
            token(org="other"),
            token(scope="read"),
            *(bad.make() for bad in BAD_TOKENS.values()),
        ]
        with grpc.insecure_channel(routers.address) as channel:
            target = things_of(channel, "acme", bearer(key))
            for sent in (key, revoked, wrong, operator, *tokens):
                said += [outcome(channel, name, REQUESTS[name](target), sent) for name in METHODS]

        config.write_text(good.replace(password, f"{password}-of-nobody") + "[unknown]\n")
        until(lambda: "is refused" in routers.log.read_text(), "the file is refused")
        config.write_text(good)
        put(keys, b"<html>")
        until(lambda: "is not JSON" in routers.log.read_text(), "the keys are refused")

        key_file, operator_file = tmp_path / "key", tmp_path / "operator"
        key_file.write_text(key)
        operator_file.write_text(operator)
        wrong_file = tmp_path / "wrong"
        wrong_file.write_text(wrong)
        at, by = ("--address", routers.address), ("--config", str(config))
        said += [
            run("--token-file", str(key_file), "enqueue", "acme", "mail", "greet", "1", *at),
            run("--token-file", str(wrong_file), "enqueue", "acme", "mail", "greet", "1", *at),
            run("--token-file", str(operator_file), "shards", *at),
            *(run(*words, *by) for words in (("keys", "list"), ("check",), ("doctor",), ("shards", "plan"))),
            *(run(name, "--once", *by) for name in ("balancer", "archiver")),
        ]
        processes = [routers.supervisor.pid, *routers.pids]
        said += [" ".join(psutil.Process(pid).cmdline()) for pid in processes]
        until(collector.spans, "spans are exported")
    said.append(routers.log.read_text())
    said += [str(one) for one in collector.spans()]

    everything = "\n".join(said)
    assert id_of(key) in everything
    assert "windrow.v1.Queue/Enqueue" in everything
    secrets = {password, *(one.split("_", 2)[2] for one in (key, revoked, operator, wrong))}
    # Only these parts of a token must stay secret.
    secrets |= {part for sent in tokens for part in sent.split(".")[1:] if len(part) > 20}
    assert [secret for secret in secrets if secret in everything] == []


def outcome(channel: grpc.Channel, name: str, request: Message, sent: str) -> str:
    try:
        return str(call(channel, name, request, bearer(sent)))
    except grpc.RpcError as error:
        return f"{error} {cast('grpc.Call', error).trailing_metadata()}"


def run(*words: str) -> str:
    """Returns all that a command prints."""
    with (
        tempfile.TemporaryFile("w+") as said,
        preloaded.start("-m", "cli.main", *words, stdout=said.fileno(), stderr=said) as process,
    ):
        process.wait(PATIENCE_S)
        said.seek(0)
        return said.read()

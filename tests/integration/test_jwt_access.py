"""Routers accept the tokens of an identity provider over gRPC, while the provider's keys change, vanish or cannot be
fetched."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo

from tests.access import UNAUTHENTICATED, bearer, call, refusal
from tests.issuers import KeyServer, jwks, jwt_table, key_server, page, put, signing_key, token
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, detail, running_routers, until, write_cluster
from tests.streams import QUEUE, new_job, start
from windrow.v1 import queue_pb2

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
OLD, NEW = signing_key("Ed25519", "old"), signing_key("Ed25519", "new")


@contextlib.contextmanager
def cluster(dsn: str, folder: Path, **keys: object) -> Generator[tuple[Routers, grpc.Channel], None, None]:
    """Starts routers that accept only JSON Web Tokens. `keys`: settings that say where the keys of the issuer are."""
    config = write_cluster(folder / "cluster.toml", {"s1": dsn})
    config.write_text(f"{config.read_text()}\n[auth]\napi_keys = false\n{jwt_table(**keys)}")
    with running_routers(config) as routers, grpc.insecure_channel(routers.address) as channel:
        yield routers, channel


@pytest.fixture(scope="module")
def dsn(postgres: Server) -> str:
    return postgres.create("jwt_access")


@pytest.fixture
def keys() -> Generator[KeyServer, None, None]:
    with key_server() as served:
        served.answer = page(jwks(OLD))
        yield served


def enqueue(channel: grpc.Channel, sent: str) -> None:
    request = queue_pb2.EnqueueRequest(org="acme", jobs=[new_job()])
    call(channel, "windrow.v1.Queue/Enqueue", request, bearer(sent))


def refused(channel: grpc.Channel, sent: str) -> tuple[grpc.StatusCode, str, Any]:
    """Returns the code, the reason and the error of a call that is refused."""
    with pytest.raises(grpc.RpcError) as error:
        enqueue(channel, sent)
    code, reason = refusal(error.value)
    return code, reason, error.value


def test_a_token_of_the_issuer_calls_for_its_org_and_nobody_elses(dsn: str, tmp_path: Path) -> None:
    put(tmp_path / "keys.json", jwks(OLD))
    with cluster(dsn, tmp_path, jwks_file=tmp_path / "keys.json") as (_, channel):
        enqueue(channel, token(OLD))
        assert refused(channel, token(OLD, org="globex"))[:2] == (grpc.StatusCode.PERMISSION_DENIED, "ORG_FORBIDDEN")
        assert refused(channel, token(OLD, scope="read"))[:2] == (grpc.StatusCode.PERMISSION_DENIED, "SCOPE_MISSING")


def test_a_stream_ends_with_its_key_and_the_streams_of_other_keys_go_on(dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    put(file, jwks(OLD, NEW))
    with cluster(dsn, tmp_path, jwks_file=file) as (_, channel):
        opened = [consume(channel, token(key)) for key in (OLD, NEW)]
        put(file, jwks(NEW))
        with pytest.raises(grpc.RpcError) as ended:
            list(opened[0])
        assert refusal(ended.value) == (UNAUTHENTICATED, "CREDENTIALS_REVOKED")
        assert "no longer among the keys" in str(ended.value.details())
        assert refused(channel, token(OLD))[0] == UNAUTHENTICATED
        enqueue(channel, token(NEW))
        assert opened[1].is_active()
        opened[1].cancel()


def test_a_stream_ends_with_its_token(dsn: str, tmp_path: Path) -> None:
    put(tmp_path / "keys.json", jwks(OLD))
    with cluster(dsn, tmp_path, jwks_file=tmp_path / "keys.json", leeway_seconds=0) as (_, channel):
        # On a busy machine, seconds may pass before the router sees the token. If the token has expired by then, the
        # router refuses it with the same error.
        with pytest.raises(grpc.RpcError) as ended:
            list(consume(channel, token(OLD, exp=int(time.time()) + 3)))
        assert refusal(ended.value) == (UNAUTHENTICATED, "CREDENTIALS_EXPIRED")


def test_keys_that_cannot_be_had_are_no_fault_of_the_caller(dsn: str, tmp_path: Path, keys: KeyServer) -> None:
    keys.answer = keys.hang
    with cluster(dsn, tmp_path, jwks_url=keys.url) as (routers, channel):
        code, reason, error = refused(channel, token(OLD))
        assert (code, reason) == (UNAVAILABLE, "TOKEN_KEYS_UNAVAILABLE")
        assert "did not answer within 5 s" in error.details()
        retry = detail(error, RetryInfo)
        assert retry is not None
        assert retry.retry_delay == Duration(seconds=5)
        assert "there are no keys to verify tokens with" in routers.log.read_text()


ANSWERS = {
    "a page of a proxy": page(b"<!DOCTYPE html><title>Log in</title>", kind="text/html"),
    "an empty set": page(b'{"keys": []}'),
    "an error": page(b"", status=500),
    "a set without the key": page(jwks(NEW)),
}


def test_a_url_that_answers_badly_refuses_nobody_whose_key_is_known(dsn: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        # A router fetches the keys again after 10 s. The checks run in threads, so that they all wait during the same
        # 10 s.
        pool = stack.enter_context(ThreadPoolExecutor(len(ANSWERS)))
        checks = list[Future[None]]()
        for number, answer in enumerate(ANSWERS):
            keys = stack.enter_context(key_server())
            keys.answer = page(jwks(OLD))
            folder = tmp_path / str(number)
            folder.mkdir()
            routers, channel = stack.enter_context(cluster(dsn, folder, jwks_url=keys.url, refresh_seconds=10))
            enqueue(channel, token(OLD))
            checks.append(pool.submit(answer_badly, answer, keys, routers, channel))
        for check in checks:
            check.result()


def answer_badly(answer: str, keys: KeyServer, routers: Routers, channel: grpc.Channel) -> None:
    keys.answer = ANSWERS[answer]
    asked = keys.asked
    until(lambda: keys.asked > asked, f"the keys are fetched again: {answer}")
    until(lambda: keys.url in routers.log.read_text(), f"the answer is logged: {answer}")
    # This token is new to the router, and signed with the key that the router knows.
    enqueue(channel, token(OLD, sub="worker-2"))
    if answer == "a set without the key":
        until(lambda: "no longer has 'old'" in routers.log.read_text(), "the key is dropped")
        assert refused(channel, token(OLD))[0] == UNAUTHENTICATED


def test_a_new_key_of_the_issuer_is_fetched_when_its_first_token_comes(
    dsn: str, tmp_path: Path, keys: KeyServer
) -> None:
    with cluster(dsn, tmp_path, jwks_url=keys.url) as (_, channel):
        enqueue(channel, token(OLD))
        keys.answer = page(jwks(OLD, NEW))

        def is_taken() -> bool:
            with contextlib.suppress(grpc.RpcError):
                enqueue(channel, token(NEW))
                return True
            return False

        # The router does not fetch the keys again within 10 s. Until then, the new key is unknown.
        until(is_taken, "the new key is known")
        enqueue(channel, token(OLD, sub="worker-2"))
        assert keys.asked == 2


def consume(channel: grpc.Channel, sent: str) -> Any:
    """Opens a stream that consumes until the router ends it."""
    stream: Any = channel.stream_stream("/windrow.v1.Queue/Consume")
    first = queue_pb2.ConsumeRequest(start=start("acme", QUEUE), credit=1).SerializeToString()

    ended = threading.Event()

    def requests() -> Generator[bytes, None, None]:
        yield first
        ended.wait()

    opened = stream(requests(), timeout=PATIENCE_S, metadata=bearer(sent))
    if not opened.add_callback(ended.set):
        ended.set()
    # The headers say that the router serves the stream.
    opened.initial_metadata()
    return opened

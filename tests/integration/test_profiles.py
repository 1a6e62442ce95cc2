"""Tests `windrow login`, profiles and `windrow logout` with a router that speaks TLS."""

from __future__ import annotations

import tomllib
from collections.abc import Generator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from proof.certificates import Authority
from tests.command import windrow
from tests.routers import PATIENCE_S, reserved_address
from windrow.v1 import server_pb2

TOKEN = "wr_1234_hunter2-very-secret"


class Fake:
    """A router that records the metadata of the calls. It refuses all tokens except TOKEN."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def server_info(self, _: server_pb2.GetServerInfoRequest, context: Any) -> server_pb2.GetServerInfoResponse:
        found = dict(context.invocation_metadata()).get("authorization", "")
        self.tokens.append(found)
        if found not in ("", f"Bearer {TOKEN}"):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not one of this cluster")
        return server_pb2.GetServerInfoResponse(version="9.9.9")


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fake = Fake()
        authority = Authority()
        self.ca = authority.saved(folder / "ca.crt")
        pair = authority.sign()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        method: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
            self.fake.server_info,  # pyrefly: ignore[bad-argument-type]
            request_deserializer=server_pb2.GetServerInfoRequest.FromString,
            response_serializer=server_pb2.GetServerInfoResponse.SerializeToString,
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("windrow.v1.Queue", {"GetServerInfo": method}),)
        )
        credentials = grpc.ssl_server_credentials([(pair.key, pair.certificate)])
        self.address = f"localhost:{self._server.add_secure_port('127.0.0.1:0', credentials)}"
        self.file = folder / "config" / "windrow" / "profiles.toml"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait(PATIENCE_S)

    def profiles(self) -> dict[str, dict[str, str]]:
        return tomllib.loads(self.file.read_text())

    def log_in(self, *more: str, stdin: str = TOKEN + "\n") -> None:
        done = windrow(
            "login", "--address", self.address, "--tls-ca", str(self.ca), "--token-file", "-", *more, stdin=stdin
        )
        assert done.code == 0, done.err
        assert TOKEN not in done.out + done.err


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Place, None, None]:
    for name in ("WINDROW_ADDRESS", "WINDROW_TOKEN", "WINDROW_PROFILE", "WINDROW_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    made = Place(tmp_path)
    yield made
    made.stop()


def test_a_login_that_the_router_refuses_keeps_nothing_and_shows_no_token(place: Place) -> None:
    done = windrow(
        "login", "--address", place.address, "--tls-ca", str(place.ca), "--token-file", "-", stdin="wr_wrong\n"
    )
    assert done.code == 5
    assert done.err.startswith("windrow: the token is not one of this cluster")
    assert "wr_wrong" not in done.err
    assert not place.file.exists()


@pytest.mark.parametrize("token", ["two words", "\u00e4", "a" * 20_000, "a\x00b"])
def test_a_token_that_is_none_is_refused_without_being_shown(place: Place, token: str) -> None:
    done = windrow("login", "--address", place.address, "--token-file", "-", stdin=token)
    assert done.code == 2
    assert "is not a token: " in done.err
    assert token not in done.err
    assert place.fake.tokens == []


def test_a_token_is_not_sent_in_plain_text_to_another_machine(place: Place) -> None:
    done = windrow("login", "--address", "jobs.example.com:7419", "--token-file", "-", stdin=TOKEN)
    assert done.code == 2
    assert "the token would go to jobs.example.com:7419 in plain text: write the address as grpcs://" in done.err


def test_without_a_terminal_the_address_must_be_given(place: Place) -> None:
    done = windrow("login")
    assert (done.code, done.err) == (2, "windrow: --address is missing, and there is no terminal to ask on\n")


def test_a_router_that_is_not_trusted_is_told_and_nothing_is_kept(place: Place) -> None:
    done = windrow("login", "--address", f"grpcs://{place.address}")
    assert done.code == 3
    assert "comes from a CA that this client does not trust" in done.err
    assert not place.file.exists()


def test_the_default_profile_is_used_by_later_commands_and_only_its_owner_reads_it(place: Place) -> None:
    place.log_in()
    assert place.file.stat().st_mode & 0o777 == 0o600
    assert place.profiles() == {"default": {"address": place.address, "token": TOKEN, "tls_ca": str(place.ca)}}
    assert windrow("server").code == 0
    assert place.fake.tokens == [f"Bearer {TOKEN}"] * 2


def test_the_default_profile_gives_its_token_to_no_other_address(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.log_in()
    # Call the same router by another name.
    other = place.address.replace("localhost", "127.0.0.1")
    monkeypatch.setenv("WINDROW_TLS_CA", str(place.ca))
    assert windrow("server", "--address", other).code == 0
    monkeypatch.setenv("WINDROW_ADDRESS", other)
    assert windrow("server").code == 0
    assert windrow("health", other).code in (0, 1)
    assert place.fake.tokens == [f"Bearer {TOKEN}", "", ""]


def test_a_probe_asks_the_address_that_is_given_and_not_the_profiles(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.log_in()
    with reserved_address() as nobody:
        assert windrow("health", "--address", nobody).code == 1
        monkeypatch.setenv("WINDROW_ADDRESS", nobody)
        assert windrow("health").code == 1


def test_a_call_without_a_token_says_that_the_default_profile_is_not_used_for_a_given_address(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.log_in()
    monkeypatch.setenv("WINDROW_TLS_CA", str(place.ca))
    monkeypatch.setenv("WINDROW_TOKEN", "wr_wrong")
    unused = "; the profile 'default' is not used, because --address or WINDROW_ADDRESS is given: name it with "
    refused = windrow("server", "--address", place.address)
    assert refused.code == 5
    assert refused.err.endswith(f"{unused}--profile default, or leave the address out\n")
    assert unused not in windrow("server").err
    windrow("logout")
    assert unused not in windrow("server", "--address", place.address).err


def test_a_named_profile_is_used_by_name_and_the_environment_overrides_its_parts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.log_in("--profile", "prod")
    assert windrow("--profile", "prod", "server").code == 0
    monkeypatch.setenv("WINDROW_PROFILE", "prod")
    assert windrow("server", "--address", place.address.replace("localhost", "127.0.0.1")).code == 0
    assert place.fake.tokens == [f"Bearer {TOKEN}"] * 3
    monkeypatch.setenv("WINDROW_TOKEN", "wr_other")
    assert windrow("server").code == 5
    assert place.fake.tokens[-1] == "Bearer wr_other"


def test_a_refused_token_is_told_with_the_profile_the_variable_or_the_option_that_gave_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.log_in()
    place.log_in("--profile", "prod")
    place.file.write_text(place.file.read_text().replace(TOKEN, "wr_revoked"))

    def told(*arguments: str) -> str:
        refused = windrow(*arguments, "server")
        assert refused.code == 5
        return refused.err.removeprefix("windrow: the token is not one of this cluster; ").rstrip("\n")

    of = f"in {place.file}: replace it with `windrow login"
    assert told() == f"the token came from the profile 'default' {of}`"
    assert told("--profile", "prod") == f"the token came from the profile 'prod' {of} --profile prod`"
    over = "which overrides the token of the profile 'prod'"
    file = place.folder / "token"
    file.write_text("wr_wrong")
    assert told("--profile", "prod", "--token-file", str(file)) == f"the token came from --token-file {file}, {over}"
    monkeypatch.setenv("WINDROW_TOKEN", "wr_wrong")
    assert told("--profile", "prod") == f"the token came from WINDROW_TOKEN, {over}"
    windrow("logout")
    monkeypatch.setenv("WINDROW_TLS_CA", str(place.ca))
    monkeypatch.setenv("WINDROW_ADDRESS", place.address)
    assert told() == "the token came from WINDROW_TOKEN"


def test_a_profile_that_is_not_there_is_refused(place: Place) -> None:
    place.log_in()
    done = windrow("--profile", "prod", "server")
    assert done.code == 2
    assert f"no profile 'prod' in {place.file}; it has only 'default': make one" in done.err


def test_a_second_profile_leaves_the_first_and_a_logout_removes_one(place: Place) -> None:
    place.log_in("--profile", 'a "strange" n\u00e4me')
    place.log_in()
    assert list(place.profiles()) == ['a "strange" n\u00e4me', "default"]
    assert windrow("logout").code == 0
    assert list(place.profiles()) == ['a "strange" n\u00e4me']
    assert windrow("logout").code == 4


def test_a_file_that_others_can_read_or_that_is_broken_is_reported_without_its_tokens(place: Place) -> None:
    place.log_in()
    place.file.chmod(0o644)
    assert f"other users can read the tokens in {place.file}: chmod 600" in windrow("server").err
    place.file.write_text(f'[default]\ntoken = "{TOKEN}\n')
    done = windrow("server")
    assert done.code == 2
    assert "is not TOML" in done.err
    assert TOKEN not in done.err

"""How a client chooses TLS, and files that it cannot use."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import windrow
from proof.certificates import Authority
from windrow import handshake, tls
from windrow.address import address_fault, split_scheme

AUTHORITY = Authority()


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CA", "CERTIFICATE", "KEY", "SERVER_NAME"):
        monkeypatch.delenv(f"WINDROW_TLS_{name}", raising=False)


def test_a_web_address_is_refused_and_grpcs_is_named() -> None:
    fault = address_fault("https://jobs.example.com:7419")
    assert fault is not None
    assert fault.endswith("is a web address: write HOST:PORT, such as 127.0.0.1:7419, or grpcs://HOST:PORT for TLS")


def test_grpcs_before_the_address_turns_tls_on() -> None:
    assert split_scheme("grpcs://jobs.example.com:7419") == ("jobs.example.com:7419", True)
    assert split_scheme("jobs.example.com:7419") == ("jobs.example.com:7419", False)
    assert tls.chosen(None, secure=True) == windrow.Tls()


def test_plain_text_and_grpcs_contradict_each_other() -> None:
    with pytest.raises(windrow.InvalidRequest, match="tls: is False, and the address begins with grpcs://"):
        windrow.Client("grpcs://127.0.0.1:7419", org="acme", tls=False)


def test_without_anything_there_is_no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tls.chosen(None, secure=False) is None
    monkeypatch.setenv("WINDROW_TLS_CA", "")
    assert tls.chosen(None, secure=False) is None


def test_the_environment_turns_tls_on_and_the_program_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDROW_TLS_CA", "ca.crt")
    monkeypatch.setenv("WINDROW_TLS_SERVER_NAME", "jobs")
    found = windrow.Tls(ca="ca.crt", server_name="jobs")
    assert tls.chosen(None, secure=False) == tls.chosen(None, secure=True) == tls.chosen(True, secure=False) == found
    assert tls.chosen(False, secure=False) is None
    assert tls.chosen("own.crt", secure=False) == windrow.Tls(ca="own.crt")
    assert tls.chosen(windrow.Tls(), secure=False) == windrow.Tls()


def test_a_certificate_without_its_key_is_refused() -> None:
    with pytest.raises(windrow.InvalidRequest, match="are given together"):
        windrow.Tls(certificate="client.crt")


def test_files_that_cannot_be_used_are_refused_by_name(tmp_path: Path) -> None:
    ca, certificate, key = (tmp_path / name for name in ("ca.crt", "client.crt", "client.key"))
    with pytest.raises(windrow.InvalidRequest, match=r"tls ca: .*ca\.crt: No such file"):
        tls.read(windrow.Tls(ca=ca))
    ca.write_bytes(b"no")
    with pytest.raises(windrow.InvalidRequest, match=r"tls ca: .*ca\.crt: is not a PEM file"):
        tls.read(windrow.Tls(ca=ca))
    AUTHORITY.sign().save(certificate, key)
    for content in (key.read_bytes(), b"-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n"):
        ca.write_bytes(content)
        with pytest.raises(windrow.InvalidRequest, match=r"tls ca: .*ca\.crt: has no certificate that can be read"):
            tls.read(windrow.Tls(ca=ca))
    AUTHORITY.saved(ca)
    AUTHORITY.sign().save(certificate, key)
    key.write_bytes(AUTHORITY.sign().key)
    with pytest.raises(windrow.InvalidRequest, match=r"client\.key: KEY_VALUES_MISMATCH"):
        tls.read(windrow.Tls(ca=ca, certificate=certificate, key=key))


def test_a_ca_file_with_a_comment_that_is_not_ascii_does_not_hide_what_is_wrong(tmp_path: Path) -> None:
    ca = tmp_path / "ca.crt"
    AUTHORITY.saved(ca)
    ca.write_bytes("# Főtanúsítvány\n".encode() + ca.read_bytes())
    settings = windrow.Tls(ca=ca)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    assert handshake.fault(address, settings, tls.read(settings)) is None

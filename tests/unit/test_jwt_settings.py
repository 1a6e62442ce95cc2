"""The tables [auth.jwt] and [[auth.certificate]]: their defaults, and the messages about invalid ones."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from router.gate.auth.jwt_settings import JwtSettings, jwt_settings
from router.gate.auth.scopes import Scope
from router.gate.auth.settings import AuthSettings, auth_settings
from shard.placement.cluster_file import ClusterFileError
from tests.unit.test_cluster_file import ONE, parse

ROOT = Path(__file__).resolve().parents[2]
TLS = '[tls]\ncertificate = "a"\nkey = "b"\nclient_ca = "c"\n'
GOOD = 'issuer = "https://id.example.com"\naudience = "w"\njwks_url = "https://id.example.com/keys"\n'


def settings_of(text: str) -> AuthSettings:
    found = auth_settings(parse(ONE + text))
    assert found is not None
    return found


def faults_of(text: str) -> str:
    with pytest.raises(ClusterFileError) as refused:
        auth_settings(parse(ONE + text))
    return str(refused.value)


def test_an_issuer_an_audience_and_keys_are_enough() -> None:
    assert settings_of(f"[auth.jwt]\n{GOOD}").jwt == JwtSettings(
        issuer="https://id.example.com", audiences=("w",), jwks_url="https://id.example.com/keys"
    )
    table = 'issuer = "joe"\naudience = ["a", "b"]\njwks_file = "/etc/keys.json"\nall_orgs = true\nleeway_seconds = 0\n'
    assert settings_of(f"[auth]\napi_keys = false\n[auth.jwt]\n{table}").jwt == JwtSettings(
        issuer="joe", audiences=("a", "b"), jwks_file=Path("/etc/keys.json"), all_orgs=True, leeway_seconds=0.0
    )


def test_all_faults_are_told_at_once() -> None:
    said = faults_of('[auth.jwt]\nisuer = "x"\naudience = []\nleeway_seconds = 301\nall_orgs = "yes"\norg_claim = ""\n')
    assert said.splitlines() == [
        "cluster.toml: [auth.jwt]: unknown key 'isuer'; did you mean 'issuer'?",
        "cluster.toml: [auth.jwt] issuer: is missing",
        "cluster.toml: [auth.jwt] audience: must be text, or a list of 1 to 16 texts",
        "cluster.toml: [auth.jwt]: needs exactly one of jwks_file and jwks_url, and has none",
        "cluster.toml: [auth.jwt] org_claim: must be text of 1 to 255 printable characters, not ''",
        "cluster.toml: [auth.jwt] all_orgs: must be true or false, not 'yes'",
        "cluster.toml: [auth.jwt] leeway_seconds: must be a number from 0 to 300, not 301",
    ]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://id.example.com/keys", "must begin with https://; http:// is for a server on this machine's loopback"),
        ("http://127.0.0.1.evil.example/keys", "must begin with https://"),
        ("file:///etc/passwd", "must be an https:// URL"),
        ("https://", "must be an https:// URL"),
        ("https://[::1/keys", "is not a URL"),
        ("https://user:hunter2@id.example.com/keys", "must not hold a user name or a password"),
    ],
)
def test_a_url_that_keys_must_not_come_from_is_refused(url: str, said: str) -> None:
    found = faults_of(f'[auth.jwt]\nissuer = "i"\naudience = "w"\njwks_url = "{url}"\n')
    assert said in found
    assert "hunter2" not in found


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080/keys", "http://[::1]:1/k", "http://localhost/k"])
def test_http_is_for_loopback(url: str) -> None:
    assert settings_of(f'[auth.jwt]\nissuer = "i"\naudience = "w"\njwks_url = "{url}"\n').jwt is not None


def test_an_entry_says_whom_a_certificate_names() -> None:
    first, second = settings_of(
        f"{TLS}[[auth.certificate]]\nuri = 'spiffe://example.com/ns/jobs/*'\norg = 'acme'\nscopes = ['enqueue']\n"
        "[[auth.certificate]]\nsubject = 'CN=ops,O=Acme'\nall_orgs = true\nscopes = ['cluster', 'read']\n"
    ).certificates
    assert (first.org, first.scopes) == ("acme", frozenset({Scope.ENQUEUE}))
    assert (second.org, second.scopes) == (None, frozenset({Scope.CLUSTER, Scope.READ}))


def test_all_faults_of_entries_are_told_at_once() -> None:
    said = faults_of(
        f"{TLS}[[auth.certificate]]\nuri = 'spiffe://example.com/jobs*'\norg = 'acme'\nscopes = ['enqeue']\n"
        "[[auth.certificate]]\nsubject = 'CN=a'\nuri = 'b://c'\nall_orgs = true\norg = 'acme'\nscopes = []\n"
        "[[auth.certificate]]\nsubject = 'CN=a'\norg = 'acme'\nscopes = ['cluster']\n"
    )
    where = "cluster.toml: [[auth.certificate]] number"
    assert said.splitlines() == [
        f"{where} 1 uri: a * may only be at the end, after a /, as in spiffe://example.com/ns/jobs/*, not "
        "'spiffe://example.com/jobs*'",
        f"{where} 1 scopes: unknown scope 'enqeue'; did you mean 'enqueue'?",
        f"{where} 2: needs exactly one of uri and subject, and has uri and subject",
        f"{where} 2: needs exactly one of org and all_orgs = true",
        f"{where} 2 scopes: must be a list of some of enqueue, consume, read, admin, cluster",
        f"{where} 3 scopes: cluster needs all_orgs = true instead of an org",
    ]


def test_certificates_need_an_authority_that_vouches_for_them() -> None:
    entry = "[[auth.certificate]]\nsubject = 'CN=a'\norg = 'acme'\nscopes = ['read']\n"
    assert "needs client_ca in [tls]" in faults_of(entry)


def test_a_cluster_in_which_nobody_could_call_is_refused() -> None:
    assert "nobody could call" in faults_of("[auth]\napi_keys = false\n")


def test_the_example_explains_every_key_and_names_its_default() -> None:
    example = (ROOT / "deploy/cluster.example.toml").read_text()
    found = jwt_settings(tomllib.loads(example)["auth"]["jwt"], where="example")
    assert found.jwks_url is not None
    of_example = {"issuer", "audiences", "jwks_url", "scopes_prefix", "all_orgs"}
    defaults = JwtSettings(issuer=found.issuer, audiences=found.audiences, jwks_url=found.jwks_url)
    for field in fields(JwtSettings):
        name = field.name.replace("audiences", "audience")
        assert re.search(rf"\b{name}\b", example), f"{name} is not explained"
        if field.name not in of_example:
            assert getattr(found, field.name) == getattr(defaults, field.name)
    commented = "".join(line.removeprefix("#") for line in example.splitlines(keepends=True) if line.startswith("#   "))
    entry = commented[commented.index("[[auth.certificate]]") :].partition("scopes = ")
    text = TLS + "".join(entry[:2]) + entry[2].partition("\n")[0]
    assert settings_of(text).certificates[0].org == "shop"

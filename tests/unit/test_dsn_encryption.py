"""DSNs that may send passwords and jobs in plain text to another machine are refused, and the message shows neither the
password nor the host."""

from __future__ import annotations

import pytest

from shard.placement.cluster_file import Cluster, ClusterFileError, parse_cluster

PASSWORD = "hunter2-very-secret"
URI = f"postgresql://windrow:{PASSWORD}@db1.internal/windrow"


def parse(dsn: str, more: str = "", **environ: str) -> Cluster:
    return parse_cluster(f'[[shard]]\nname = "s1"\ndsn = "{dsn}"\n{more}', source="cluster.toml", environ=environ)


@pytest.mark.parametrize(
    ("dsn", "environ", "mode"),
    [
        (URI, {}, "prefer"),
        (f"{URI}?sslmode=disable", {"PGSSLMODE": "verify-full"}, "disable"),
        (f"{URI}?sslmode=allow", {}, "allow"),
        (f"{URI}?sslmode=prefer", {}, "prefer"),
        (URI, {"PGSSLMODE": "prefer"}, "prefer"),
        ("host=10.0.0.7 user=windrow", {}, "prefer"),
        # A DSN is refused if one of several hosts is remote.
        ("host=127.0.0.1,db2", {}, "prefer"),
        # libpq connects to hostaddr, whatever `host` says.
        ("host=localhost hostaddr=10.0.0.7", {}, "prefer"),
        ("dbname=windrow", {"PGHOST": "db1"}, "prefer"),
        ("dbname=windrow", {"PGHOSTADDR": "10.0.0.7"}, "prefer"),
        # Windrow does not read service files, so it does not know their settings.
        ("service=windrow", {"PGSSLMODE": "require"}, "unknown, in a service file"),
        ("dbname=windrow", {"PGSERVICE": "windrow"}, "unknown, in a service file"),
    ],
)
def test_plain_text_beyond_this_machine_is_refused(dsn: str, environ: dict[str, str], mode: str) -> None:
    with pytest.raises(ClusterFileError) as refused:
        parse(dsn, **environ)
    message = str(refused.value)
    leads = "has a service file, which is not read here and may lead" if "service" in mode else "leads"
    assert message.startswith(
        f"cluster.toml: [[shard]] number 1 (s1): the DSN {leads} to another machine, and its sslmode ({mode}) allows "
        "plain text"
    )
    assert "sslmode=verify-full" in message
    assert "insecure = true" in message
    assert PASSWORD not in message
    assert "db1" not in message


@pytest.mark.parametrize(
    ("dsn", "environ"),
    [
        *((f"{URI}?sslmode={mode}", {}) for mode in ("require", "verify-ca", "verify-full")),
        (URI, {"PGSSLMODE": "require"}),
        ("service=windrow sslmode=verify-full", {}),
        # The connections of these DSNs stay on this machine.
        ("dbname=windrow", {}),
        ("host=/run/postgresql", {}),
        ("host=@windrow", {}),
        ("host=localhost", {}),
        ("host=127.0.0.5 sslmode=disable", {}),
        ("host=::1", {}),
        ("host=db1 hostaddr=127.0.0.1", {}),
        ("service=windrow host=127.0.0.1", {}),
    ],
)
def test_what_is_encrypted_or_stays_on_this_machine_is_used(dsn: str, environ: dict[str, str]) -> None:
    assert parse(dsn, **environ).shards[0].dsn == dsn


def test_an_operator_can_allow_it_for_one_database() -> None:
    assert parse(URI, "insecure = true").shards[0].dsn == URI
    with pytest.raises(ClusterFileError, match=r"\[catalog\]: the DSN leads to another machine"):
        parse(URI, f'insecure = true\n[catalog]\ndsn = "{URI}"\n')
    with pytest.raises(ClusterFileError, match=r"\(s1\): insecure must be true or false, not 'yes'"):
        parse(URI, 'insecure = "yes"')

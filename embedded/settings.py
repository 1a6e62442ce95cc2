"""Makes the text of windrow.conf, the settings of a local cluster. No I/O.

Refuses to override settings that this package depends on: the loopback port, the data folder, scram.
"""

import re
from collections.abc import Mapping

# (name, value, why)
_DEFAULTS: tuple[tuple[str, str, str], ...] = (
    ("shared_buffers", "256MB", "the hot tables fit, and several clusters share this machine"),
    ("max_connections", "100", "routers hold few connections each; tests and psql need some as well"),
    ("max_wal_size", "2GB", "a queue writes much WAL: checkpoints should come by time, not by size"),
    ("min_wal_size", "512MB", "segments are recycled rather than created under load"),
    ("checkpoint_timeout", "15min", "fewer checkpoints, so fewer full-page images"),
    ("autovacuum_naptime", "5s", "queue tables turn over within seconds; dead rows must not pile up"),
    ("idle_in_transaction_session_timeout", "5min", "a forgotten transaction keeps vacuum from removing rows"),
    ("jit", "off", "queue statements are short, and compiling one costs more than running it"),
    ("timezone", "UTC", "the same on every machine, whatever initdb detected"),
    ("log_timezone", "UTC", "log lines of several clusters can be compared"),
    ("log_line_prefix", "%m [%p] %q%u@%d ", "who and when, in milliseconds"),
)

# The DSN, the access control or the clean-up depends on these settings.
OWNED = frozenset(
    {
        "port",
        "listen_addresses",
        "unix_socket_directories",
        "data_directory",
        "config_file",
        "hba_file",
        "ident_file",
        "external_pid_file",
        "logging_collector",
        "log_destination",
        "password_encryption",
    }
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def check_overrides(overrides: Mapping[str, str]) -> dict[str, str]:
    """Returns the overrides by lower-case name. Raises ValueError for an override that is not allowed."""
    checked: dict[str, str] = {}
    for name, value in overrides.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"setting {name!r} is not a name that postgresql.conf knows: check its spelling")
        if name.lower() in OWNED:
            raise ValueError(f"setting {name!r} is chosen by the cluster itself: leave it out")
        if any(sign in value for sign in "\n\r\0"):
            raise ValueError(f"setting {name!r} has a line break in its value {value!r}: remove it")
        checked[name.lower()] = value
    return checked


def render(*, name: str, port: int, lz4: bool, statistics: bool, ephemeral: bool, overrides: Mapping[str, str]) -> str:
    """Returns the text of windrow.conf. `overrides` must have passed check_overrides."""
    lines: list[tuple[str, str, str]] = [
        ("port", str(port), "chosen on first start and remembered, so that DSNs stay valid"),
        ("listen_addresses", "127.0.0.1", "this machine only"),
        ("unix_socket_directories", "", "TCP suffices; a socket file would need a place of its own"),
        ("password_encryption", "scram-sha-256", "the only method that pg_hba.conf accepts"),
        ("cluster_name", f"windrow-{name}", "tells clusters apart in a list of processes"),
        *_DEFAULTS,
        (
            "wal_compression",
            "lz4" if lz4 else "off",
            "full-page images shrink for little work; pglz, the other choice, costs more than it saves",
        ),
    ]
    if ephemeral:
        lines.append(("dynamic_shared_memory_type", "mmap", "a killed server leaves nothing outside of its folder"))
    if statistics:
        lines.append(("shared_preload_libraries", "pg_stat_statements", "shows what the time is spent on"))
    ours = {setting for setting, _, _ in lines}
    text = ["# Rewritten at every start; pass `settings` to change a value.", ""]
    for setting, value, why in lines:
        if setting in overrides:
            value, why = overrides[setting], "set by the caller"
        text += [f"# {why}", f"{setting} = {_quoted(value)}"]
    for setting in sorted(overrides.keys() - ours):
        text += ["# set by the caller", f"{setting} = {_quoted(overrides[setting])}"]
    return "\n".join(text) + "\n"


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"

"""The cluster file: which shards there are and how to reach them. Reads TOML; opens no connection.

    [cluster]
    name = "production"

    [[shard]]
    name = "s1"
    dsn = "postgresql://windrow@db1/windrow"      # or dsn_env = "S1_DSN", or dsn_file = "/run/secrets/s1"
    weight = 1                                    # share of the slots; default 1

    [catalog]                                     # optional; default: the first shard's database
    dsn = "..."

    [router]                                      # optional; see router/settings.py

deploy/cluster.example.toml explains every key.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from shard.lease import shard_tag
from shard.vocabulary import ShardName


class ClusterFileError(ValueError):
    """The cluster file cannot be used; the message says where, what and what to do. Nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    name: ShardName
    # Holds a password: never shown.
    dsn: str = field(repr=False)
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    name: str
    shards: tuple[ShardEntry, ...]
    catalog_dsn: str = field(repr=False)
    # The file's other tables, for those who own them.
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    def shard(self, name: str) -> ShardEntry | None:
        return next((entry for entry in self.shards if entry.name == name), None)


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes. Raises ClusterFileError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ClusterFileError(f"{path}: {error.strerror}; name another with --config or WINDROW_CONFIG") from error
    return parse_cluster(text, source=str(path))


def parse_cluster(text: str, *, source: str, environ: Mapping[str, str] = os.environ) -> Cluster:
    """Same, from the file's text. `source` opens every message."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterFileError(f"{source}: not TOML: {error}") from error
    known_keys(document, {"cluster", "shard", "catalog", "router"}, where=source)
    cluster = _table(document, "cluster", source)
    known_keys(cluster, {"name"}, where=f"{source}: [cluster]")
    entries: object = document.get("shard")
    if not isinstance(entries, list) or not entries:
        raise ClusterFileError(f"{source}: no [[shard]]: a cluster needs one or more")
    shards = tuple(_shard(entry, at, source, environ) for at, entry in enumerate(cast("list[object]", entries), 1))
    _refuse_twins(shards, source)
    catalog = _table(document, "catalog", source)
    known_keys(catalog, {"dsn", "dsn_env", "dsn_file"}, where=f"{source}: [catalog]")
    return Cluster(
        name=_text(cluster.get("name", "windrow"), f"{source}: [cluster] name"),
        shards=shards,
        catalog_dsn=_dsn(catalog, f"{source}: [catalog]", environ) if catalog else shards[0].dsn,
        tables={"router": _table(document, "router", source)},
    )


def known_keys(table: Mapping[str, Any], known: set[str], *, where: str) -> None:
    """Refuses a key that nobody reads: it is a typing error, and silence would hide it."""
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise ClusterFileError(f"{where}: unknown key {key!r}; {hint}")


def _table(document: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    table: object = document.get(name, {})
    if not isinstance(table, dict):
        raise ClusterFileError(f"{source}: {name} must be a table, [{name}]")
    return cast("dict[str, Any]", table)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= 63 or not value.isprintable():
        raise ClusterFileError(f"{where}: must be text of 1 to 63 printable characters, not {value!r}")
    return value


def _shard(value: object, at: int, source: str, environ: Mapping[str, str]) -> ShardEntry:
    where = f"{source}: [[shard]] number {at}"
    if not isinstance(value, dict):
        raise ClusterFileError(f"{where}: must be a table")
    entry = cast("dict[str, Any]", value)
    known_keys(entry, {"name", "dsn", "dsn_env", "dsn_file", "weight"}, where=where)
    if "name" not in entry:
        raise ClusterFileError(f"{where}: has no name")
    name = ShardName(_text(entry["name"], f"{where}: name"))
    weight: object = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1_000_000:
        raise ClusterFileError(f"{where} ({name}): weight must be a number from 0 to 1000000, not {weight!r}")
    return ShardEntry(name=name, dsn=_dsn(entry, f"{where} ({name})", environ), weight=float(weight))


def _dsn(table: Mapping[str, Any], where: str, environ: Mapping[str, str]) -> str:
    sources = [key for key in ("dsn", "dsn_env", "dsn_file") if key in table]
    if len(sources) != 1:
        raise ClusterFileError(f"{where}: needs exactly one of dsn, dsn_env and dsn_file, and has {sources or 'none'}")
    key, value = sources[0], table[sources[0]]
    if not isinstance(value, str):
        raise ClusterFileError(f"{where}: {key} must be text")
    match key:
        case "dsn_env":
            dsn = environ.get(value, "")
            if not dsn:
                raise ClusterFileError(f"{where}: the environment variable {value} (dsn_env) is not set")
        case "dsn_file":
            try:
                dsn = Path(value).read_text().strip()
            except OSError as error:
                raise ClusterFileError(f"{where}: dsn_file {value}: {error.strerror}") from error
        case _:
            dsn = value
    try:
        conninfo_to_dict(dsn)
    except ProgrammingError:
        # The parser's own message quotes the DSN, password and all.
        raise ClusterFileError(f"{where}: {key} is not a libpq connection string or postgresql:// URI") from None
    return dsn


def _refuse_twins(shards: tuple[ShardEntry, ...], source: str) -> None:
    tags: dict[int, ShardName] = {}
    for entry in shards:
        twin = tags.setdefault(shard_tag(entry.name), entry.name)
        if twin is not entry.name:
            why = "appears twice" if twin == entry.name else f"collides with {twin!r} in lease tokens; rename one"
            raise ClusterFileError(f"{source}: shard name {entry.name!r} {why}")
    if all(entry.weight == 0 for entry in shards):
        raise ClusterFileError(f"{source}: every shard has weight 0; at least one must take slots")

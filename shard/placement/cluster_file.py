"""Reads the cluster file, a TOML file that says which shards there are and how to reach them. Opens no connection.

    [cluster]
    name = "production"

    [[shard]]
    name = "s1"
    dsn = "postgresql://windrow@db1/windrow"      # or dsn_env = "S1_DSN", or dsn_file = "/run/secrets/s1"
    weight = 1                                    # share of the slots; default 1
    state = "active"                              # what the shard does; default active
    labels = { region = "eu" }                    # for operators and tools; default none
    insecure = false                              # whether the connection may be plain text beyond this machine

    [catalog]                                     # optional; default: the first shard's database
    dsn = "..."

    [router]                                      # optional; see router/settings.py

    [auth]                                        # optional; see router/gate/auth/settings.py

    [audit]                                       # optional; see shard/admin/audit.py

    [balancer]                                    # optional; see balancer/settings.py

    [archiver]                                    # optional; see archiver/settings.py

    [tls]                                         # optional; see router/tls_settings.py

deploy/cluster.example.toml explains every key.
"""

from __future__ import annotations

import difflib
import enum
import hashlib
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from shard.lease_token import shard_tag
from shard.placement.dsn_encryption import may_be_plain_text, names_host
from shard.vocabulary import CATALOG, ShardName

_T = TypeVar("_T")
_LABELS_MAX = 16
# Tables that other packages read.
_TABLES = ("router", "tls", "auth", "audit", "balancer", "archiver")
# The keys that say where a DSN is.
_DSNS = ("dsn", "dsn_env", "dsn_file")
_ESCAPES = "in a URI, write % of the password as %25, a blank as %20, / as %2F, @ as %40"
# The key that allows connections in plain text.
_INSECURE = "insecure"


class ClusterFileError(ValueError):
    """The cluster file cannot be used. The message says where the fault is, what is wrong, and what to do. Nothing was
    changed."""


class ShardState(enum.Enum):
    """What a shard should do, as its operator set it. In every state except `off`, calls may read from the shard."""

    # Per state: takes_enqueues, gives_jobs (claims), takes_changes (settles leases, changes queues).
    ACTIVE = "active", True, True, True
    # The shard's share of the slots is 0, so the balancer moves its slots away.
    DRAINING = "draining", True, True, True
    ENQUEUE_ONLY = "enqueue_only", True, False, True
    DEQUEUE_ONLY = "dequeue_only", False, True, True
    READ_ONLY = "read_only", False, False, False
    # No process connects to the shard.
    OFF = "off", False, False, False

    takes_enqueues: bool
    gives_jobs: bool
    takes_changes: bool

    def __new__(cls, word: str, takes_enqueues: bool, gives_jobs: bool, takes_changes: bool) -> Self:
        state = object.__new__(cls)
        state._value_ = word
        state.takes_enqueues = takes_enqueues
        state.gives_jobs = gives_jobs
        state.takes_changes = takes_changes
        return state

    @property
    def word(self) -> str:
        """The state as the cluster file spells it."""
        return str(self._value_)  # pyrefly: ignore[unknown-argument-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    name: ShardName
    # May hold a password, so it is never shown.
    dsn: str = field(repr=False)
    weight: float = 1.0
    state: ShardState = ShardState.ACTIVE
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def share(self) -> float:
        """The weight with which slots are placed."""
        return 0.0 if self.state is ShardState.DRAINING else self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    name: str
    shards: tuple[ShardEntry, ...]
    catalog_dsn: str = field(repr=False)
    # The shard whose database holds the catalog. None: the file names a database for the catalog.
    catalog_shard: ShardName | None = None
    # The file's tables that configure other packages. Each package parses its own table.
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    # Prefix of error messages about the file, such as its path.
    source: str = "cluster file"
    # The first 12 digits of the SHA-256 of the file's text, as `sha256sum` prints it.
    digest: str = ""
    # The files that are named by the keys `dsn_file`.
    dsn_files: tuple[Path, ...] = ()

    def shard(self, name: str) -> ShardEntry | None:
        return next((entry for entry in self.shards if entry.name == name), None)


def read_cluster(path: Path) -> Cluster:
    """Reads and parses a cluster file. Raises ClusterFileError."""
    return parse_cluster(read_text(path), source=str(path))


def read_text(path: Path) -> str:
    """Returns the text of a cluster file. Raises ClusterFileError."""
    try:
        # Read and decode bytes. Reading the file as text would change its line endings, and so its digest.
        return path.read_bytes().decode()
    except OSError as error:
        raise ClusterFileError(f"{path}: {error.strerror}; name another with --config or WINDROW_CONFIG") from error
    except UnicodeDecodeError as error:
        raise ClusterFileError(f"{path}: not TOML: not UTF-8 at byte {error.start}") from error


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def parse_cluster(text: str, *, source: str, environ: Mapping[str, str] = os.environ) -> Cluster:
    """Parses the text of a cluster file. `source` is the prefix of error messages. Raises ClusterFileError, which says
    everything that is wrong, one fault per line."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterFileError(f"{source}: not TOML: {error}") from error
    faults = Faults()
    faults.of(lambda: known_keys(document, {"cluster", "shard", *_TABLES, "catalog"}, where=source))
    cluster = faults.of(lambda: _table(document, "cluster", source)) or {}
    faults.of(lambda: known_keys(cluster, {"name"}, where=f"{source}: [cluster]"))
    name = faults.of(lambda: _text(cluster.get("name", "windrow"), f"{source}: [cluster] name"))
    present = [table for table in _TABLES if table in document]
    tables = {table: faults.of(partial(_table, document, table, source)) or {} for table in present}
    catalog = faults.of(lambda: _table(document, "catalog", source)) or {}
    catalog_dsn = faults.of(lambda: _only_dsn(catalog, set(), f"{source}: [catalog]", environ)) if catalog else None
    entries: object = document.get("shard")
    if not isinstance(entries, list) or not entries:
        faults.add(f"{source}: no [[shard]]: a cluster needs one or more")
        entries = []
    tried = [_shard(entry, at, source, environ, faults) for at, entry in enumerate(cast("list[object]", entries), 1)]
    shards = tuple(entry for entry in tried if entry is not None)
    faults.of(lambda: _refuse_duplicates(shards, source))
    faults.refuse()
    if all(entry.share == 0 for entry in shards):
        raise ClusterFileError(f"{source}: every shard has weight 0 or is draining; at least one must take slots")
    named = [catalog, *cast("list[dict[str, object]]", entries)]
    return Cluster(
        name=name or "",
        shards=shards,
        catalog_dsn=catalog_dsn or shards[0].dsn,
        catalog_shard=None if catalog else shards[0].name,
        tables=tables,
        source=source,
        digest=digest_of(text),
        dsn_files=tuple(Path(str(table["dsn_file"])) for table in named if "dsn_file" in table),
    )


def known_keys(table: Mapping[str, Any], known: set[str], *, where: str) -> None:
    """Raises ClusterFileError for unknown keys, because such keys are probably typing errors."""
    faults = Faults()
    for key in table:
        if key not in known:
            faults.add(unknown("key", key, sorted(known), where=where))
    faults.refuse()


def unknown(what: str, value: object, known: Sequence[str], *, where: str) -> str:
    """Returns the message about a value that is not among the known values."""
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return f"{where}: unknown {what} {value!r}; {hint}"


def only_key(table: Mapping[str, Any], keys: Sequence[str], *, where: str) -> str:
    """Returns which of these keys the table has. Raises ClusterFileError unless the table has exactly one of them."""
    given = [key for key in keys if key in table]
    if len(given) != 1:
        one_of = f"{', '.join(keys[:-1])} and {keys[-1]}"
        raise ClusterFileError(f"{where}: needs exactly one of {one_of}, and has {' and '.join(given) or 'none'}")
    return given[0]


class Faults:
    """Collects the faults of a file, so that all faults are reported together."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, fault: str) -> None:
        self._found.append(fault)

    def of(self, parse: Callable[[], _T]) -> _T | None:
        """Returns what `parse` returns. If `parse` raises ClusterFileError, adds the error to the faults, and returns
        None."""
        try:
            return parse()
        except ClusterFileError as error:
            self._found.append(str(error))
            return None

    def refuse(self) -> None:
        """Raises ClusterFileError if any fault was added."""
        if self._found:
            raise ClusterFileError("\n".join(self._found)) from None


def _table(document: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    table: object = document.get(name, {})
    if not isinstance(table, dict):
        raise ClusterFileError(f"{source}: {name} must be a table, [{name}]")
    return cast("dict[str, Any]", table)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= 63 or not value.isprintable():
        raise ClusterFileError(f"{where}: must be text of 1 to 63 printable characters, not {value!r}")
    return value


def _shard(value: object, at: int, source: str, environ: Mapping[str, str], faults: Faults) -> ShardEntry | None:
    """Parses one [[shard]] table. If anything is wrong, adds to `faults` and returns None."""
    where = f"{source}: [[shard]] number {at}"
    if not isinstance(value, dict):
        faults.add(f"{where}: must be a table")
        return None
    entry = cast("dict[str, Any]", value)
    name = faults.of(lambda: _name(entry, where))
    named = f"{where} ({name})" if name else where
    dsn = faults.of(lambda: _only_dsn(entry, {"name", "weight", "state", "labels"}, named, environ))
    weight = faults.of(lambda: _weight(entry.get("weight", 1.0), named))
    state = faults.of(lambda: _state(entry.get("state", "active"), named))
    labels = faults.of(lambda: _labels(entry.get("labels", {}), named))
    if name is None or dsn is None or weight is None or state is None or labels is None:
        return None
    return ShardEntry(name=name, dsn=dsn, weight=weight, state=state, labels=labels)


def _name(entry: Mapping[str, Any], where: str) -> ShardName:
    if "name" not in entry:
        raise ClusterFileError(f"{where}: has no name")
    name = ShardName(_text(entry["name"], f"{where}: name"))
    if name == CATALOG:
        # In `unavailable_shards`, `windrow doctor --shard` and error messages this name means the catalog's database.
        raise ClusterFileError(f"{where}: name: {name!r} means the catalog's own database; choose another name")
    return name


def _weight(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1_000_000:
        raise ClusterFileError(f"{where}: weight must be a number from 0 to 1000000, not {value!r}")
    return float(value)


def _state(value: object, where: str) -> ShardState:
    states = {state.word: state for state in ShardState}
    if not isinstance(value, str) or value not in states:
        raise ClusterFileError(unknown("state", value, list(states), where=where))
    return states[value]


def _labels(value: object, where: str) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise ClusterFileError(f'{where}: labels must be a table, such as {{ region = "eu" }}, not {value!r}')
    labels = cast("dict[str, object]", value)
    if len(labels) > _LABELS_MAX:
        raise ClusterFileError(f"{where}: {len(labels)} labels; a shard has {_LABELS_MAX} at most")
    return {_text(key, f"{where}: label"): _text(text, f"{where}: label {key}") for key, text in labels.items()}


def _only_dsn(table: Mapping[str, Any], others: set[str], where: str, environ: Mapping[str, str]) -> str:
    """Returns the table's DSN. Refuses unknown keys first, so that a misspelt `dsn` is one fault and not two."""
    known_keys(table, {*_DSNS, _INSECURE, *others}, where=where)
    dsn = _dsn(table, where, environ)
    insecure: object = table.get(_INSECURE, False)
    if not isinstance(insecure, bool):
        raise ClusterFileError(f"{where}: {_INSECURE} must be true or false, not {insecure!r}")
    parsed = conninfo_to_dict(dsn)
    mode = None if insecure else may_be_plain_text(parsed, environ)
    if mode is not None:
        # Show neither the DSN nor its host, because the host may be a part of a password that was not escaped.
        leads = "leads" if names_host(parsed, environ) else "has a service file, which is not read here and may lead"
        raise ClusterFileError(
            f"{where}: the DSN {leads} to another machine, and its sslmode ({mode}) allows plain text: passwords and "
            "jobs could be read on the way. Add sslmode=verify-full and sslrootcert (require encrypts, too, but trusts "
            "any server), or set insecure = true here if nobody else can reach that network"
        )
    return dsn


def _dsn(table: Mapping[str, Any], where: str, environ: Mapping[str, str]) -> str:
    key = only_key(table, _DSNS, where=where)
    value = table[key]
    if not isinstance(value, str):
        raise ClusterFileError(f"{where}: {key} must be text")
    if key != "dsn" and ("://" in value or "password=" in value):
        # Do not show the value, because it may hold a password.
        raise ClusterFileError(
            f"{where}: {key} names where the DSN is stored, but this is a DSN itself: use the key dsn"
        )
    match key:
        case "dsn_env":
            dsn = environ.get(value, "")
            if not dsn:
                raise ClusterFileError(f"{where}: the environment variable {value} (dsn_env) is not set")
        case "dsn_file":
            try:
                dsn = Path(value).read_bytes().decode().strip()
            except OSError as error:
                raise ClusterFileError(f"{where}: dsn_file {value}: {error.strerror}") from error
            except UnicodeDecodeError:
                # Drop the cause: it shows the bytes that could not be decoded.
                raise ClusterFileError(f"{where}: dsn_file {value}: is not UTF-8") from None
            if not dsn:
                raise ClusterFileError(f"{where}: dsn_file {value}: is empty")
        case _:
            dsn = value
    is_uri = dsn.startswith(("postgresql://", "postgres://"))
    try:
        parts = conninfo_to_dict(dsn)
    except ProgrammingError:
        # Drop the cause: the parser's message quotes the DSN with its password.
        raise ClusterFileError(
            f"{where}: {key} is not a libpq connection string or postgresql:// URI"
            + (f"; {_ESCAPES}" if is_uri else "")
        ) from None
    if any("@" in host[1:] for host in str(parts.get("host", "")).split(",")):
        # An unescaped @ would put the end of the password into the host name, which connection errors show.
        raise ClusterFileError(f"{where}: {key} has a host with an @ in it: in a URI, an @ of the password is %40")
    if is_uri and "user" not in parts and "@" in str(parts.get("dbname", "")):
        # An unescaped / ends the host. Then libpq reads the role as the host, and the password as the port.
        raise ClusterFileError(
            f"{where}: {key} has no role, and a database with an @ in it: in a URI, a / of the password is %2F"
        )
    return dsn


def _refuse_duplicates(shards: tuple[ShardEntry, ...], source: str) -> None:
    tags: dict[int, ShardName] = {}
    for entry in shards:
        other = tags.setdefault(shard_tag(entry.name), entry.name)
        if other is not entry.name:
            why = "appears twice" if other == entry.name else f"collides with {other!r} in lease tokens; rename one"
            raise ClusterFileError(f"{source}: shard name {entry.name!r} {why}")

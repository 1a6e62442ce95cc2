"""The cluster file of a cluster on this machine.

The first start creates it; then operators may edit it. A later start adds new Postgres servers and updates the DSNs of
the servers that it runs. It changes nothing else: remote shards, weights, states and labels stay as they are.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from cli import databases, output
from cli.exits import CommandFailed, ExitCode
from embedded import cluster_names
from embedded.folders import write_file
from shard.placement.cluster_file import read_text

# The cluster file is in the folder of this shard, even after the shard was removed.
FIRST = "s1"
FILE = "cluster.toml"
_SHARDS_DEFAULT = 2
_NAME = re.compile(r"s[1-9]\d*")
# The file with the address at which the routers listen, or at which they listened when the cluster ran last.
_ADDRESS = "address"
# Matches the DSNs that embedded/ makes.
_OUR_DSN = re.compile(r"postgresql://windrow:[^@/]*@127\.0\.0\.1:\d+/windrow")
_BEGINNING = '[cluster]\nname = "local"\n\n[router]\ndrain_seconds = 10\n'


def servers(root: Path | None, wanted: int | None) -> list[str]:
    """Returns the shards whose Postgres to start here: the shards in the cluster file with data below `root`, plus new
    shards up to `wanted`. `root` None: an ephemeral cluster. Raises CommandFailed if `wanted` is too small for the
    data."""
    there: list[str] = []
    named = set[str]()
    if root is not None:
        there = sorted((name for name in cluster_names(root) if _NAME.fullmatch(name)), key=lambda name: int(name[1:]))
        path = root / FIRST / FILE
        if path.exists():
            named = {entry.name for entry in databases.read(path).shards}
            there = [name for name in there if name in named]
    if wanted is None:
        wanted = len(there) or (0 if named else _SHARDS_DEFAULT)
    if wanted < len(there):
        raise CommandFailed(
            f"the data in {root} has {len(there)} shards, more than {wanted}: omit --shards, or name another folder "
            "with --data",
            ExitCode.REFUSED,
        )
    free = (name for number in itertools.count(1) if (name := f"s{number}") not in {*there, *named})
    added = list(itertools.islice(free, wanted - len(there)))
    if there and added:
        output.note(f"added: {', '.join(added)}. Slots now move there while the cluster works: see windrow shards")
    return there + added


def keep_address(root: Path, address: str) -> None:
    write_file(root / _ADDRESS, address + "\n", mode=0o644)


def address(root: Path) -> str:
    """Returns the address of the cluster that runs on this data now, or that used this data last. Empty if no cluster
    has used it yet."""
    try:
        return (root / _ADDRESS).read_text().strip()
    except OSError:
        return ""


def keep(path: Path, dsns: Mapping[str, str], *, secure: bool = False) -> None:
    """Creates the cluster file, or adds missing servers to it and updates their DSNs. `secure`: adds [auth] if that is
    missing. Changes nothing else in the file."""
    before = read_text(path) if path.exists() else ""
    text = before or _BEGINNING
    if secure and "auth" not in tomllib.loads(text):
        text = f"{text.rstrip()}\n\n[auth]\napi_keys = true\n"
    entries = {entry["name"]: entry for entry in tomllib.loads(text).get("shard", ())}
    for name, dsn in dsns.items():
        if name not in entries:
            text = f'{text.rstrip()}\n\n[[shard]]\nname = "{name}"\ndsn = "{dsn}"\n'
        elif _OUR_DSN.fullmatch(old := entries[name].get("dsn", "")):
            text = text.replace(f'"{old}"', f'"{dsn}"')
    if text != before:
        write_file(path, text, mode=0o600)
    # The file holds passwords, and an editor may have written it with another mode.
    path.chmod(0o600)

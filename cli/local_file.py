"""The cluster file of a cluster on this machine: which shards it has, and which of them have their Postgres here.

It is made by the first start, and from then on it belongs to its operators: shards that are elsewhere, weights, states
and labels stay as they are. A start adds the Postgres servers that it is asked for, and writes where they listen now.
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
from shard.cluster import read_text

# Its folder has the file too, also when the shard has gone.
FIRST = "s1"
FILE = "cluster.toml"
_SHARDS_DEFAULT = 2
_NAME = re.compile(r"s[1-9]\d*")
# As embedded/ makes them.
_OUR_DSN = re.compile(r"postgresql://windrow:[^@/]*@127\.0\.0\.1:\d+/windrow")
_BEGINNING = '[cluster]\nname = "local"\n\n[router]\ndrain_seconds = 10\n'


def servers(root: Path | None, wanted: int | None) -> list[str]:
    """The shards whose Postgres is to be started here: those that the file names and `root` has the data of, and more
    up to `wanted`. None: an ephemeral cluster. Raises CommandFailed."""
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
            f"the data in {root} is of {len(there)} shards, and {wanted} would not hold it: leave --shards away, "
            "or name another folder with --data",
            ExitCode.REFUSED,
        )
    free = (name for number in itertools.count(1) if (name := f"s{number}") not in {*there, *named})
    added = list(itertools.islice(free, wanted - len(there)))
    if there and added:
        output.note(f"added: {', '.join(added)}. Slots move there from now on, and work goes on: see windrow shards")
    return there + added


def keep(path: Path, dsns: Mapping[str, str]) -> None:
    """Sees to it that the file names these servers; nothing else of it changes."""
    before = read_text(path) if path.exists() else ""
    text = before or _BEGINNING
    entries = {entry["name"]: entry for entry in tomllib.loads(text).get("shard", ())}
    for name, dsn in dsns.items():
        if name not in entries:
            text = f'{text.rstrip()}\n\n[[shard]]\nname = "{name}"\ndsn = "{dsn}"\n'
        elif _OUR_DSN.fullmatch(old := entries[name].get("dsn", "")):
            text = text.replace(f'"{old}"', f'"{dsn}"')
    if text != before:
        write_file(path, text, mode=0o600)
    # It holds passwords, and may have been written anew by somebody else.
    path.chmod(0o600)

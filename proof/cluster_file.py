"""The cluster file of a run, as operators edit it: its entry for each shard, and texts that must be refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shard.placement.cluster_file import digest_of


@dataclass(slots=True, kw_only=True)
class Entry:
    """The entry of one shard."""

    name: str
    dsn: str
    weight: float = 1.0
    state: str = "active"

    def __str__(self) -> str:
        keys = f"weight = {self.weight:g}\nstate = '{self.state}'\n"
        return f"\n[[shard]]\nname = '{self.name}'\ndsn = '''{self.dsn}'''\n{keys}"


@dataclass(kw_only=True)
class ClusterFile:
    """Call `save` after each edit. While the file is spoiled, edits are kept until it is mended."""

    path: Path
    # The name of the cluster.
    name: str
    entries: list[Entry]
    # Empty: that of the first shard.
    catalog_dsn: str = ""
    # The [router] table, and other tables.
    rest: str = ""
    # Tells the file's readers that it has changed. They also look for changes themselves from time to time.
    hurry: Callable[[], None] = lambda: None
    # The texts that a reader must refuse.
    unusable: set[str] = field(default_factory=set[str])
    _spoiled: str | None = None

    def entry(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def text(self) -> str:
        """The text as it should be."""
        return self.described(self.entries)

    def described(self, entries: Sequence[Entry], *, cluster: str = "", catalog_dsn: str = "") -> str:
        """Returns the text with other shards, another name or another catalog."""
        catalog = catalog_dsn or self.catalog_dsn
        head = f"[cluster]\nname = '{cluster or self.name}'\n"
        head += f"\n[catalog]\ndsn = '''{catalog}'''\n" if catalog else ""
        return f"{head}{''.join(map(str, entries))}\n{self.rest}"

    @property
    def digest(self) -> str:
        return digest_of(self.text)

    def spoil(self, text: str) -> None:
        """Puts this text in its place until it is mended."""
        self._spoiled = text
        self.unusable.add(digest_of(text))
        self.save()

    def mend(self) -> None:
        self._spoiled = None
        self.save()

    def save(self, *, hurry: bool = True) -> None:
        """Replaces the file in one step, as editors do. Does not call `hurry`."""
        other = self.path.with_suffix(".new")
        other.touch(mode=0o600)
        other.write_text(self.text if self._spoiled is None else self._spoiled)
        os.replace(other, self.path)
        if hurry:
            self.hurry()

"""The cluster file of a run, which the run edits as operators do. The run can also replace the file by texts that
readers must refuse."""

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
    """A cluster file. Call `save` after each edit. While the file is spoiled, edits are not written to the file: they
    take effect when the file is mended."""

    path: Path
    name: str
    entries: list[Entry]
    # The DSN of the catalog. Empty: the first shard's database has the catalog.
    catalog_dsn: str = ""
    # The [router] table, and other tables.
    rest: str = ""
    # Tells the readers of the file that the file has changed. The readers also look for changes from time to time.
    hurry: Callable[[], None] = lambda: None
    # The texts that a reader must refuse.
    unusable: set[str] = field(default_factory=set[str])
    _spoiled: str | None = None

    def entry(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def text(self) -> str:
        """The text of the file when the file is not spoiled."""
        return self.described(self.entries)

    def described(self, entries: Sequence[Entry], *, cluster: str = "", catalog_dsn: str = "") -> str:
        """Returns the text with these shards, and optionally with another name or another catalog."""
        catalog = catalog_dsn or self.catalog_dsn
        head = f"[cluster]\nname = '{cluster or self.name}'\n"
        head += f"\n[catalog]\ndsn = '''{catalog}'''\n" if catalog else ""
        return f"{head}{''.join(map(str, entries))}\n{self.rest}"

    @property
    def digest(self) -> str:
        return digest_of(self.text)

    def spoil(self, text: str) -> None:
        """Replaces the file by this text, which readers must refuse, until it is mended."""
        self._spoiled = text
        self.unusable.add(digest_of(text))
        self.save()

    def mend(self) -> None:
        self._spoiled = None
        self.save()

    def save(self, *, hurry: bool = True) -> None:
        """Replaces the file in one step, as editors do. Then tells its readers, unless `hurry` is False."""
        other = self.path.with_suffix(".new")
        other.touch(mode=0o600)
        other.write_text(self.text if self._spoiled is None else self._spoiled)
        os.replace(other, self.path)
        if hurry:
            self.hurry()

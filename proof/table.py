"""A table of a report, as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    # A note for readers, below the table.
    note: str = ""

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return f"### {self.title}\n\n{table}\n" + (f"\n{self.note}\n" if self.note else "")

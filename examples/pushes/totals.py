"""Pushes, and their totals per org, repo and ISO week, computed in memory. Independent of any queue.

The worker does not compute totals with this module: its database computes them in SQL (tables.py). So the two results
can be compared.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

EVENTS = Path(__file__).with_name("pushes.jsonl.gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One push to a branch: the org and the repository, the time in Unix seconds, and the amount of changes."""

    org: str
    repo: str
    sha: str
    at: int
    files: int
    insertions: int
    deletions: int

    @classmethod
    def from_json(cls, text: bytes | str) -> Push:
        """Parses a push. Raises ValueError or TypeError for anything but an object with exactly these fields."""
        return cls(**json.loads(text))

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()


class Key(NamedTuple):
    """The key of a row of totals. `week` is an ISO 8601 week in UTC, such as 2026-W07."""

    org: str
    repo: str
    week: str


class Sums(NamedTuple):
    pushes: int
    files: int
    insertions: int
    deletions: int


class Difference(NamedTuple):
    """A key whose sums are wrong. `expected` or `found` is None if there is no row with this key."""

    key: Key
    expected: Sums | None
    found: Sums | None


def read_pushes(*, most: int | None = None) -> list[Push]:
    """Reads the pushes from the file `EVENTS`, in recorded order. If `most` is given, reads only the first `most`
    pushes."""
    with gzip.open(EVENTS, "rb") as lines:
        return [Push.from_json(line) for line in islice(lines, most)]


def key_of(push: Push) -> Key:
    year, week, _ = datetime.fromtimestamp(push.at, UTC).isocalendar()
    return Key(push.org, push.repo, f"{year}-W{week:02d}")


def total(pushes: Iterable[Push]) -> dict[Key, Sums]:
    totals: dict[Key, Sums] = {}
    for push in pushes:
        key = key_of(push)
        old = totals.get(key, Sums(0, 0, 0, 0))
        totals[key] = Sums(
            old.pushes + 1,
            old.files + push.files,
            old.insertions + push.insertions,
            old.deletions + push.deletions,
        )
    return totals


def differences(expected: Mapping[Key, Sums], found: Mapping[Key, Sums]) -> list[Difference]:
    """Returns every key that is missing, unexpected, or has different sums, sorted. Empty if the totals are equal."""
    return [
        Difference(key, expected.get(key), found.get(key))
        for key in sorted(expected.keys() | found.keys())
        if expected.get(key) != found.get(key)
    ]

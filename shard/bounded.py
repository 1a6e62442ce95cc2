"""Dicts that remember a bounded number of things, and forget the oldest ones."""

from __future__ import annotations

from itertools import islice
from typing import Any


def make_room(remembered: dict[Any, Any], most: int) -> None:
    """Removes the oldest tenth of a dict that has `most` entries, so that it takes a new one.

    A tenth at a time, because a dict keeps the places of removed entries for a while, and a search for its first entry
    goes over them: removing the first of 100,000 entries each time takes some 40 µs, and a tenth at a time less than
    1 µs for each."""
    if len(remembered) >= most:
        for key in list(islice(remembered, max(1, most // 10))):
            del remembered[key]

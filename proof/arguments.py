"""Reads numbers and names from the command lines of bench and chaos. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def number(most: int, least: int = 1) -> Callable[[str], int]:
    """Returns a reader of one whole number from `least` to `most`."""

    def read(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most:,}, not {text!r}")
        return int(text)

    return read


def numbers(most: int) -> Callable[[str], tuple[int, ...]]:
    """Returns a reader of a list of whole numbers from 1 to `most`, with commas between the numbers."""
    one = number(most)
    return lambda text: tuple(map(one, text.split(",")))


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def names(text: str, known: Collection[str], what: str) -> tuple[str, ...]:
    """Returns the names in a text that has commas between them. Raises ArgumentTypeError if a name is not known."""
    found = tuple(text.split(","))
    for name in found:
        if name not in known:
            raise argparse.ArgumentTypeError(f"there is no {what} {name!r}; there are: {', '.join(known)}")
    return found

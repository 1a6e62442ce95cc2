"""What several scenarios read from the command line. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from bench.systems import PEERS


def number(most: int, least: int = 1) -> Callable[[str], int]:
    """A reader of whole numbers in this range."""

    def read(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most:,}, not {text!r}")
        return int(text)

    return read


def numbers(most: int) -> Callable[[str], tuple[int, ...]]:
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


def peers(text: str) -> tuple[str, ...]:
    """`all`, `none`, or names with commas between them."""
    if text in {"all", "none"}:
        return tuple(PEERS) if text == "all" else ()
    names = tuple(text.split(","))
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"there is no peer {name!r}; there are: {', '.join(PEERS)}")
    return names


def add_runs(parser: argparse.ArgumentParser, default: int = 5) -> None:
    parser.add_argument("--runs", type=number(1000), default=default, help=f"after a warm-up; {default}")


def add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", type=peers, default=(), metavar="all|none|NAME,…", help=f"none; there are {', '.join(PEERS)}"
    )


def add_processes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=number(64), default=2, help="client processes; 2")
    parser.add_argument("--routers", type=number(64), default=2, help="router processes; 2")

"""Command-line options that several scenarios share. Pure."""

from __future__ import annotations

import argparse

from bench.systems import PEERS
from proof.arguments import names, number, numbers


def peers(text: str) -> tuple[str, ...]:
    """Parses `all`, `none`, or names with commas between them."""
    if text in {"all", "none"}:
        return tuple(PEERS) if text == "all" else ()
    return names(text, PEERS, "peer")


def add_runs(parser: argparse.ArgumentParser, default: int = 5) -> None:
    parser.add_argument("--runs", type=number(1000), default=default, help=f"after a warm-up; {default}")


def add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", type=peers, default=(), metavar="all|none|NAME,…", help=f"none; there are {', '.join(PEERS)}"
    )


def add_processes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--producers", type=number(64), default=2, help="client processes that enqueue; 2")
    parser.add_argument("--workers", type=number(64), default=2, help="client processes that work; 2")
    parser.add_argument("--routers", type=numbers(64), default=(2,), metavar="N,N", help="router processes; 2")

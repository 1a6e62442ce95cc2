"""River in a Go process, with its own client. Its configuration: bench/peers/README.md."""

from __future__ import annotations

from typing import ClassVar

from bench.peers.child import GoPeer


class River(GoPeer):
    title: ClassVar[str] = "River 0.51 (Go)"

"""awa in a process of its own, through its Python SDK. Its configuration: bench/peers/README.md."""

from __future__ import annotations

from typing import ClassVar

from bench.peers.child import PythonPeer


class Awa(PythonPeer):
    title: ClassVar[str] = "awa 0.6.9 (Python SDK)"
    module: ClassVar[str] = "awa_peer"

"""procrastinate in a process of its own. Its configuration: bench/peers/README.md."""

from __future__ import annotations

from typing import ClassVar

from bench.peers.child import PythonPeer


class Procrastinate(PythonPeer):
    title: ClassVar[str] = "procrastinate 3.10"
    module: ClassVar[str] = "procrastinate_peer"

"""pgqueuer in a process of its own. Its configuration: bench/peers/README.md."""

from __future__ import annotations

from typing import ClassVar

from bench.peers.child import PythonPeer


class PgQueuer(PythonPeer):
    title: ClassVar[str] = "pgqueuer 1.6"
    module: ClassVar[str] = "pgqueuer_peer"

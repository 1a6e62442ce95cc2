"""graphile-worker in a node process, with its local queue. Its configuration: bench/peers/README.md."""

from __future__ import annotations

from typing import ClassVar

from bench.peers.child import NodePeer


class GraphileWorker(NodePeer):
    title: ClassVar[str] = "graphile-worker 0.18 (local queue)"
    script: ClassVar[str] = "graphile_worker.mjs"

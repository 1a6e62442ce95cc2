"""pg-boss in a node process. Its configuration: bench/peers/README.md."""

from __future__ import annotations

from typing import ClassVar

from bench.peers.child import NodePeer


class PgBoss(NodePeer):
    title: ClassVar[str] = "pg-boss 12.35"
    script: ClassVar[str] = "pg_boss.mjs"

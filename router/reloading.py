"""Keeps a fleet to its cluster file while both live. A file that cannot be taken up is refused: the one before stays in
force, the reason is told, and the same file is tried again, for what was in its way may pass."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, fields
from datetime import UTC, datetime

from router.fleet import Fleet
from router.settings import RouterSettings, router_settings
from shard.cluster import Cluster, ClusterFileError
from shard.cluster_change import described
from shard.following import FollowedFile

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The file as it is now is not in force."""

    # Empty: there was nothing to read.
    digest: str
    why: str
    at: datetime


class Reloading:
    """`cluster` is what is in force, since `since`; `refusal`, if any, is about what the file says now."""

    def __init__(self, file: FollowedFile, cluster: Cluster, settings: RouterSettings, fleet: Fleet) -> None:
        self.cluster = cluster
        self.since = datetime.now(UTC)
        self.refusal: Refusal | None = None
        # Keys of [router] that the file in force has otherwise than this process.
        self.needs_restart: list[str] = []
        self._file = file
        self._settings = settings
        self._fleet = fleet

    async def run(self) -> None:
        """Takes up every change, until cancelled."""
        while True:
            await self._file.changed(within_s=None if self.refusal is None else _AGAIN_S)
            try:
                cluster = await asyncio.to_thread(self._file.read)
                needs_restart = self._differing(router_settings(cluster, source=cluster.source))
                if cluster != self.cluster:
                    await self._fleet.change(cluster)
                    self._in_force(cluster, needs_restart)
                self.refusal = None
            except ClusterFileError as error:
                self._refuse(str(error))
            except Exception:  # noqa: BLE001 - whatever the file has met with, the fleet goes on with the one before
                if self._refuse("an unexpected error; the router's log has the details"):
                    _log.exception("could not take up the cluster file")

    def _in_force(self, cluster: Cluster, needs_restart: list[str]) -> None:
        said = described(self.cluster, cluster)
        if needs_restart != self.needs_restart:
            said += [f"{key} takes a restart of this router" for key in needs_restart]
        self.cluster, self.since, self.needs_restart = cluster, datetime.now(UTC), needs_restart
        _log.info("cluster file %s is in force: %s", cluster.digest, "; ".join(said) or "nothing in it is new")

    def _refuse(self, why: str) -> bool:
        """Answers whether that is news. The same file is spoken of once, however often it is tried."""
        news = self.refusal is None or self.refusal.digest != self._file.digest
        if news:
            _log.error("the cluster file is refused, %s stays in force: %s", self.cluster.digest, why)
        self.refusal = Refusal(digest=self._file.digest, why=why, at=datetime.now(UTC))
        return news

    def _differing(self, settings: RouterSettings) -> list[str]:
        keys = [one.name for one in fields(RouterSettings)]
        return [f"[router] {key}" for key in keys if getattr(settings, key) != getattr(self._settings, key)]

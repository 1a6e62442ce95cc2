"""Applies changes of the cluster file to a running fleet. A file that cannot be applied is refused: the previous one
stays in use, the reason is logged, and the file is tried again every second, because the reason may disappear."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime

from router.fleet.fleet import Fleet
from router.settings import RouterSettings, router_settings
from router.tls_settings import TlsSettings, tls_settings
from shard.placement.cluster_diff import described
from shard.placement.cluster_file import Cluster, ClusterFileError
from shard.placement.file_watcher import WatchedFile

_log = logging.getLogger(__name__)

_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why the file in its present form is not in use."""

    # Empty if the file could not be read.
    digest: str
    why: str
    at: datetime


class Reloader:
    """`cluster` is the cluster file in use, and it has been in use since the time `since`. `refusal` is set while the
    file on disk is refused. `check` raises ClusterFileError if the file has an error in a table that takes effect only
    when a router starts."""

    def __init__(
        self,
        file: WatchedFile,
        cluster: Cluster,
        settings: RouterSettings,
        fleet: Fleet,
        check: Callable[[Cluster], object],
    ) -> None:
        self.cluster = cluster
        self.since = datetime.now(UTC)
        self.refusal: Refusal | None = None
        # What differs between the file and this process: keys of [router], and the tables [tls] and [auth] as a whole.
        self.needs_restart: list[str] = []
        self._file = file
        self._settings = settings
        self._auth = cluster.tables.get("auth")
        self._check = check
        self._tls = tls_settings(cluster)
        self._fleet = fleet

    async def run(self) -> None:
        """Applies every change of the file until cancelled."""
        while True:
            await self._file.changed(within_s=None if self.refusal is None else _RETRY_S)
            try:
                cluster = await asyncio.to_thread(self._file.read)
                self._check(cluster)
                needs_restart = self._differing(router_settings(cluster, source=cluster.source), tls_settings(cluster))
                if cluster.tables.get("auth") != self._auth:
                    needs_restart.append("[auth]")
                if cluster != self.cluster:
                    await self._fleet.change(cluster)
                    self._applied(cluster, needs_restart)
                self.refusal = None
            except ClusterFileError as error:
                self._refuse(str(error))
            except Exception:  # noqa: BLE001 - the fleet must go on with the previous file
                if self._refuse("an unexpected error; the router's log has the details"):
                    _log.exception("could not take up the cluster file")

    def _applied(self, cluster: Cluster, needs_restart: list[str]) -> None:
        changes = described(self.cluster, cluster)
        if needs_restart != self.needs_restart:
            changes += [f"{key} takes a restart of this router" for key in needs_restart]
        self.cluster, self.since, self.needs_restart = cluster, datetime.now(UTC), needs_restart
        _log.info("cluster file %s is now in use: %s", cluster.digest, "; ".join(changes) or "no changes")

    def _refuse(self, why: str) -> bool:
        """Records a refusal. Returns whether it is the first refusal of this content of the file; only the first
        refusal is logged."""
        is_first = self.refusal is None or self.refusal.digest != self._file.digest
        if is_first:
            _log.error("the cluster file is refused, and %s stays in use: %s", self.cluster.digest, why)
        self.refusal = Refusal(digest=self._file.digest, why=why, at=datetime.now(UTC))
        return is_first

    def _differing(self, settings: RouterSettings, tls: TlsSettings | None) -> list[str]:
        keys = [field.name for field in fields(RouterSettings)]
        differing = [f"[router] {key}" for key in keys if getattr(settings, key) != getattr(self._settings, key)]
        return [*differing, *(["[tls]"] if tls != self._tls else [])]

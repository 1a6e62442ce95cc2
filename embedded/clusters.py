"""Starts and stops several clusters in parallel. This module has no state of its own.

If one cluster fails to start, all clusters are stopped.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Self

from embedded.cluster import Cluster, StopMode
from embedded.folders import default_root

# The CPU and the disk limit initdb and recovery, so more parallel starts would not be faster.
_PARALLEL_MAX = 8


class Clusters(Mapping[str, Cluster]):
    """Clusters by name, in the given order. The arguments are those of Cluster."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        root: Path | None = None,
        ephemeral: bool = False,
        settings: Mapping[str, str] | None = None,
        binaries: Path | None = None,
    ) -> None:
        self._clusters: dict[str, Cluster] = {}
        for name in names:
            if name in self._clusters:
                raise ValueError(f"cluster name {name!r} is given twice: names must differ")
            self._clusters[name] = Cluster(name, root=root, ephemeral=ephemeral, settings=settings, binaries=binaries)

    def __getitem__(self, name: str) -> Cluster:
        return self._clusters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clusters)

    def __len__(self) -> int:
        return len(self._clusters)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def dsns(self) -> dict[str, str]:
        return {name: cluster.dsn for name, cluster in self._clusters.items()}

    def start(self, timeout_s: float = 60) -> None:
        """Starts all clusters. If a cluster fails to start, stops all clusters and raises its error."""
        try:
            self._each(lambda cluster: cluster.start(timeout_s))
        except BaseException:
            with contextlib.suppress(Exception):  # Raise the first error, not one of the clean-up.
                self.close()
            raise

    def stop(self, mode: StopMode = "fast", timeout_s: float = 30) -> None:
        """Stops all clusters. Tries every cluster, and then raises the first error."""
        self._each(lambda cluster: cluster.stop(mode, timeout_s))

    def close(self) -> None:
        """Stops all clusters, with immediate stops if necessary: see Cluster.close()."""
        self._each(lambda cluster: cluster.close())

    def _each(self, act: Callable[[Cluster], None]) -> None:
        if not self._clusters:
            return
        with ThreadPoolExecutor(min(_PARALLEL_MAX, len(self)), thread_name_prefix="cluster") as threads:
            futures = [threads.submit(act, cluster) for cluster in self._clusters.values()]
            wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and also: {other}")
            raise errors[0]


@contextlib.contextmanager
def open_clusters(
    names: Iterable[str],
    root: Path | None = None,
    ephemeral: bool = False,
    settings: Mapping[str, str] | None = None,
    binaries: Path | None = None,
) -> Generator[Clusters, None, None]:
    """Starts clusters in parallel and stops them when the block ends. The arguments are those of Cluster."""
    with Clusters(names, root=root, ephemeral=ephemeral, settings=settings, binaries=binaries) as clusters:
        yield clusters


def cluster_names(root: Path | None = None) -> tuple[str, ...]:
    """Returns the names of the clusters with a folder below `root` (default: see default_root()), sorted."""
    place = default_root() if root is None else root
    return tuple(sorted(path.parent.name for path in place.glob("*/owner.lock")))


def reset(root: Path | None = None) -> tuple[str, ...]:
    """Deletes the data of all clusters below `root` and returns their names. Keeps the root folder.

    Raises ClusterInUse before it deletes anything if one of the clusters runs.
    """
    names = cluster_names(root)
    clusters = [Cluster(name, root=root) for name in names]
    for cluster in clusters:
        cluster.refuse_while_alive()
    for cluster in clusters:
        cluster.reset()
    return names

"""PostgreSQL on this machine, for tests, trials and small installations: no container, no service.

    with open_clusters(["shard-1", "shard-2"]) as clusters:
        print(clusters["shard-1"].dsn)

Do not use it in production: it makes no backups, uses one machine, and has no automatic failover.
"""

from embedded.binaries import BIN_VARIABLE, Binaries, find_binaries
from embedded.cluster import Cluster, StopMode
from embedded.clusters import Clusters, cluster_names, open_clusters, reset
from embedded.errors import (
    BinariesNotFound,
    ClusterInUse,
    EmbeddedError,
    NotCreated,
    PortTaken,
    StartFailed,
    StopTimedOut,
)
from embedded.folders import default_root

__all__ = [
    "BIN_VARIABLE",
    "Binaries",
    "BinariesNotFound",
    "Cluster",
    "ClusterInUse",
    "Clusters",
    "EmbeddedError",
    "NotCreated",
    "PortTaken",
    "StartFailed",
    "StopMode",
    "StopTimedOut",
    "cluster_names",
    "default_root",
    "find_binaries",
    "open_clusters",
    "reset",
]

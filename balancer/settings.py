"""The [balancer] table of the cluster file. Pure.

[balancer]
jobs_per_second = 5000
"""

from __future__ import annotations

from balancer.move import Pace
from shard.placement.cluster_file import Cluster, ClusterFileError, known_keys


def pace_of(cluster: Cluster) -> Pace:
    """Returns the pace of moves: the rate that the table sets, without rests, or the default pace if the table sets no
    rate. Raises ClusterFileError."""
    table = cluster.tables.get("balancer", {})
    where = f"{cluster.source}: [balancer]"
    known_keys(table, {"jobs_per_second"}, where=where)
    rate: object = table.get("jobs_per_second")
    if rate is None:
        return Pace()
    if isinstance(rate, bool) or not isinstance(rate, int) or not 1 <= rate <= 1_000_000:
        raise ClusterFileError(f"{where} jobs_per_second: must be a whole number from 1 to 1000000, not {rate!r}")
    # A chunk has at most as many jobs as may move in one second. A larger chunk would move as a burst, and a long pause
    # would follow.
    return Pace(rows_max=min(Pace().rows_max, rate), rest=0.0, jobs_per_s_max=rate)

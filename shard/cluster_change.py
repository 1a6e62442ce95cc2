"""What differs between two readings of a cluster file, and what a running process cannot go over to. Pure."""

from __future__ import annotations

from shard.cluster import Cluster, ClusterFileError, ShardEntry


def refuse_change(before: Cluster, after: Cluster) -> None:
    """Raises ClusterFileError for what a running process cannot go over to, whatever the shards hold."""
    if after.name != before.name:
        raise ClusterFileError(
            f"{after.source}: [cluster] name is {after.name!r}, and routers run that know it as {before.name!r}: "
            "it cannot be changed; put it back"
        )
    if before.catalog_shard is not None and after.catalog_shard is not None:
        # Where its database is reached may change: it proves itself as that shard's.
        moved = after.catalog_shard != before.catalog_shard
    else:
        moved = after.catalog_dsn != before.catalog_dsn
    if moved:
        raise ClusterFileError(
            f"{after.source}: the catalog is somewhere else ([catalog], or without it the first [[shard]]), which "
            "needs a restart of every router; put it back, or start them again"
        )


def described(before: Cluster, after: Cluster) -> list[str]:
    """What is new about the shards, a sentence each, without secrets. Empty: nothing."""
    said: list[str] = []
    for entry in after.shards:
        known = before.shard(entry.name)
        said += [f"shard {entry.name!r} is added"] if known is None else _described(known, entry)
    said += [f"shard {entry.name!r} is removed" for entry in before.shards if after.shard(entry.name) is None]
    return said


def _described(before: ShardEntry, after: ShardEntry) -> list[str]:
    said: list[str] = []
    if after.state is not before.state:
        said.append(f"its state is {after.state.word}, and was {before.state.word}")
    if after.weight != before.weight:
        said.append(f"its weight is {after.weight:g}, and was {before.weight:g}")
    if after.labels != before.labels:
        said.append("its labels are others")
    if after.dsn != before.dsn:
        said.append("its DSN is another one")
    return [f"shard {after.name!r}: {one}" for one in said]

"""Compares two readings of a cluster file, and refuses changes that a running process cannot apply. Pure."""

from __future__ import annotations

from shard.placement.cluster_file import Cluster, ClusterFileError, ShardEntry


def refuse_change(before: Cluster, after: Cluster) -> None:
    """Raises ClusterFileError for changes that a running process can never apply. Whether a change is refused does not
    depend on which slots the shards hold."""
    if after.name != before.name:
        raise ClusterFileError(
            f"{after.source}: [cluster] name is {after.name!r}, and routers run that know it as {before.name!r}: "
            "it cannot be changed; put it back"
        )
    if before.catalog_shard is not None and after.catalog_shard is not None:
        # The address of the catalog's shard may change, because each database says itself which shard it is.
        moved = after.catalog_shard != before.catalog_shard
    else:
        moved = after.catalog_dsn != before.catalog_dsn
    if moved:
        raise ClusterFileError(
            f"{after.source}: the catalog is somewhere else ([catalog], or without it the first [[shard]]), which "
            "needs a restart of every router; put it back, or start them again"
        )


def described(before: Cluster, after: Cluster) -> list[str]:
    """Describes each change of the shards in one sentence, without secrets. Returns an empty list if nothing has
    changed."""
    changes: list[str] = []
    for entry in after.shards:
        previous = before.shard(entry.name)
        changes += [f"shard {entry.name!r} is added"] if previous is None else _described(previous, entry)
    changes += [f"shard {entry.name!r} is removed" for entry in before.shards if after.shard(entry.name) is None]
    return changes


def _described(before: ShardEntry, after: ShardEntry) -> list[str]:
    changes: list[str] = []
    if after.state is not before.state:
        changes.append(f"its state is {after.state.word}, and was {before.state.word}")
    if after.weight != before.weight:
        changes.append(f"its weight is {after.weight:g}, and was {before.weight:g}")
    if after.labels != before.labels:
        changes.append("its labels have changed")
    if after.dsn != before.dsn:
        changes.append("its DSN has changed")
    return [f"shard {after.name!r}: {change}" for change in changes]

"""Moves slots between shards until the cluster is as its file wants it (docs/decisions/0017-moving-slots.md,
docs/decisions/0021-the-balancer.md)."""

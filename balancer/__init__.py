"""Moves slots between shards until the cluster is in the state that the cluster file describes
(docs/decisions/0017-moving-slots.md, docs/decisions/0021-the-balancer.md)."""

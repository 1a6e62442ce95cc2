"""Moves slots between shards: the driver of a move, and a model of why it is safe that can be explored
(docs/decisions/0017-moving-slots.md)."""

"""Moves slots between shards. So far a model of how, that can be explored (docs/decisions/0017-moving-slots.md)."""

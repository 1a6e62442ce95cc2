"""Workflows of one shard: stored, looked at, changed and swept."""

"""Schedules of one shard: their instants, their configuration, and how they are fired."""

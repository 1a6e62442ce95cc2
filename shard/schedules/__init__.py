"""Configures the schedules of one shard, computes their instants, and fires them."""

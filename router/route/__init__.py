"""Sends each call to the right shards, and merges their answers."""

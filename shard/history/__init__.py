"""Finished jobs: hot days, cold days, retention, erasure."""

"""Keeps the hot tables small, on a schedule: past days of finished jobs turn cold, and cold days, dedup keys, jobs past
their expires_at and old dead jobs are removed when their time has passed."""

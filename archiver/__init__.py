"""Keeps hot tables small for ever: days of finished jobs that are over turn cold, cold days that have been kept for
their time go, and so do dedup keys, jobs past their expires_at and old dead jobs. On a schedule."""

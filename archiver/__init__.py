"""Keeps the tables of live and finished jobs small. Each pass makes past days of finished jobs cold. It deletes the
cold days and dedup keys whose time is over, and cancels the jobs past their expires_at and the old dead jobs."""

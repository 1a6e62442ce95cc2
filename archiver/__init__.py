"""Keeps the tables of live and finished jobs small. In each pass, past days of finished jobs turn cold, cold days and
dedup keys are deleted after their time, and jobs past their expires_at and old dead jobs are cancelled."""

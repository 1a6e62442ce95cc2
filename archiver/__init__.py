"""Keeps the tables of live and finished jobs small. Each pass makes past days of finished jobs cold, deletes cold days
whose retention is over and dedup keys whose window is over, and cancels old dead jobs and jobs whose `expires_at` has
passed."""

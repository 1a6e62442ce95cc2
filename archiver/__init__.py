"""Finished jobs move to cold tables, on a schedule."""

"""Producers and workers: each a process of its own, which survives what is done to others, and can be struck itself."""

"""Windrow's client: enqueue jobs, and work them."""

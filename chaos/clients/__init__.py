"""Producers and workers. Each is a process of its own: a fault may hit one of them without the others."""

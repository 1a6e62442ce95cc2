"""Producers and workers. Each is a process of its own, so that a fault can hit one of them without the others."""

"""Tests of what clients see when connections, processes and servers fail."""

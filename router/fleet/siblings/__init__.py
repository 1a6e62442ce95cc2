"""The other router processes of the same supervisor. An enqueue of this process may hand jobs over to their
consumers."""

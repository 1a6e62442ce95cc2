"""The other router processes of one supervisor, to whose consumers an enqueue of this process hands jobs over."""

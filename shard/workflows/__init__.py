"""Stores, reads, changes and sweeps the workflows of one shard. Functions of the database fold workflows when nodes end
(docs/internals.md, "Folding workflows")."""

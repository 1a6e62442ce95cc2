"""Workflows of one shard: stored, looked at, changed and swept. Functions of the database fold them when nodes end
(docs/internals.md, "Folding workflows")."""

"""Workflows of one shard: stored, looked at, changed and swept. Functions of the database fold them when nodes end
(CONTRIBUTING.md lists them)."""

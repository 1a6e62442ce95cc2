"""Not in this release: finished jobs stay in the finished table (docs/concepts.md). The name is kept for what will move
them to cold tables, on a schedule."""

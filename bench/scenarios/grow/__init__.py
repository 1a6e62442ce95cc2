"""A third shard under load, and the same shard drained: the scenario, its client processes, its figures."""

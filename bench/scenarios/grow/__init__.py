"""A third shard is added under load, and then drained: the scenario, its client processes, its figures."""

"""The outage of one shard: the scenario and its figures."""

"""Costs that grow with the number of shards and routers: the scenario, its processes, its tables."""

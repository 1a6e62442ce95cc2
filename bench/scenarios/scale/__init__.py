"""What grows with shards and routers: the scenario, its processes, its tables."""

"""Where orgs live: slots, the catalog, pins, moves, and the cluster file."""

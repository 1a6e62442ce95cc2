"""Windrow under faults: a cluster, producers and workers that record everything they see, faults that a seed chooses,
and a checker that reads the records. Run it with `./run chaos`; see docs/chaos.md."""

import os

# This must be set before gRPC is imported. If this process runs as root, it forks to start Postgres, and gRPC's fork
# handlers may crash the child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

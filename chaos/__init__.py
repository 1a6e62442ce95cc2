"""Windrow under faults: a cluster of its own, producers and workers that write down all they see, faults drawn by a
seed, and a checker that reads what was written down. `./run chaos`, docs/chaos.md."""

import os

# Before gRPC is imported: as root, Postgres is started by a fork, and gRPC's fork handlers may crash the child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

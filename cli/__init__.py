"""The `windrow` command."""

import os

# `up` and the demo start Postgres servers from a process that runs gRPC, whose fork handlers can crash the child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

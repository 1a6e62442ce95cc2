"""`python -m router.process.child`: one router process. The supervisor starts it, and its standard input is a
connection to the supervisor. The process prints `ready PORT` when it serves."""

from __future__ import annotations

import gc

# Garbage collections during the imports would find no garbage, and would take an eighth of the start.
gc.disable()

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

# Otherwise gRPC writes an error line, "Closing acceptor", whenever a router stops. Its errors reach us as exceptions.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import uvloop

from router.errors import EXIT_NO_RETRY, CannotListen
from router.process.server import serve
from router.settings import router_settings
from shard.errors import ShardError
from shard.placement.cluster_file import ClusterFileError
from shard.placement.file_watcher import WatchedFile

# Arguments of gc.set_threshold. With Python's defaults, a router with 5,000 streams spends a fifth of its time in
# garbage collections, up to 0.26 s in one of them. They find hardly anything, because calls leave few reference cycles.
_GC_THRESHOLDS = 10_000, 10, 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m router.process.child")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    gc.enable()
    try:
        file = WatchedFile(arguments.config)
        cluster = file.read()
        settings = router_settings(cluster, source=str(arguments.config))
        supervisor = socket.socket(fileno=sys.stdin.fileno())
        supervisor.setblocking(False)
        uvloop.run(serve(file, cluster, settings, supervisor=supervisor, listen=arguments.listen, ready=_say_ready))
    except (ClusterFileError, CannotListen, ShardError) as error:
        print(f"windrow router: {error}", file=sys.stderr)
        return EXIT_NO_RETRY
    return 0


def _say_ready(port: int) -> None:
    print(f"ready {port}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m router.process.child`: one router process. The supervisor starts it, and its standard input is a
connection to the supervisor. The process prints `ready PORT` when it serves."""

from __future__ import annotations

import gc

# Garbage collections during the imports would find no garbage, and would take an eighth of the start-up time.
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

# Arguments of gc.set_threshold. Calls leave few reference cycles, so garbage collections find hardly anything. With
# Python's defaults, a router with 5,000 streams spends a fifth of its time in collections, and a collection that looks
# at all objects takes up to 0.26 s. The third number is large, so that these collections are rare. The second number is
# small, so that the other collections are short: while thousands of streams begin, one takes 4 ms. With 10,000 and 10
# as the first two numbers, such a collection looks at 100,000 objects and takes 60 ms. Python 3.14 looks at old objects
# in steps: at a tenth of them at a time if the second number is 1.
_GC_THRESHOLDS = (5_000, 10, 0) if sys.version_info[:2] == (3, 14) else (5_000, 1, 120)


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

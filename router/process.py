"""`python -m router.process`: one router process, as the supervisor starts it. Says `ready PORT` on its standard
output."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import uvloop

from router.errors import HOPELESS, CannotListen
from router.server import serve
from router.settings import router_settings
from shard.cluster import ClusterFileError
from shard.errors import ShardError
from shard.following import FollowedFile

# As gc.set_threshold takes them. By Python's own defaults a router that holds 5,000 streams spends a fifth of its time
# looking through them, up to 0.26 s at once, and finds hardly anything: little of what a call makes is in cycles.
_COLLECT_AFTER = 10_000, 10, 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m router.process")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    try:
        file = FollowedFile(arguments.config)
        cluster = file.read()
        settings = router_settings(cluster, source=str(arguments.config))
        uvloop.run(serve(file, cluster, settings, listen=arguments.listen, ready=_say_ready))
    except (ClusterFileError, CannotListen, ShardError) as error:
        print(f"windrow router: {error}", file=sys.stderr)
        return HOPELESS
    return 0


def _end_with_supervisor() -> None:
    """The supervisor holds the other end of standard input: when it dies, however it dies, this process drains and
    ends."""
    # Not by sys.stdin: its lock, held at exit, would abort the interpreter.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _say_ready(port: int) -> None:
    print(f"ready {port}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m router --config FILE`: runs this machine's router processes; prints `listening on HOST:PORT` when they
serve."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from router.errors import CannotListen, RouterFailed
from router.gate.auth.settings import auth_settings
from router.process.exposure import exposure
from router.process.supervisor import Supervisor
from router.settings import host_and_port, router_settings
from router.tls_settings import tls_settings
from shard.placement.cluster_file import ClusterFileError, read_cluster


def run(config: Path, *, listen: str | None, processes: int | None, metrics: str | None = None) -> None:
    """Runs the router processes that a cluster file describes until SIGTERM or SIGINT. On SIGHUP they read the file
    again at once. `listen`, `processes` and `metrics` override the file's values. Raises ClusterFileError,
    CannotListen, RouterFailed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    cluster = read_cluster(config)
    settings = router_settings(cluster, source=str(config))
    auth_settings(cluster)
    tls_settings(cluster)
    if listen is not None:
        host_and_port(listen, where="--listen")
    if metrics is not None:
        host_and_port(metrics, where="--metrics")
    supervisor = Supervisor(
        config,
        listen=listen or settings.listen,
        processes=processes or settings.processes,
        drain_seconds=settings.drain_seconds,
        metrics=metrics or settings.metrics,
        exposed=exposure(cluster, listen or settings.listen, insecure=settings.insecure),
    )
    asyncio.run(_until_signalled(supervisor))


async def _until_signalled(supervisor: Supervisor) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, supervisor.reload)
    await supervisor.run(ready=lambda address: print(f"listening on {address}", flush=True), stop=stop)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m router")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--listen", help="HOST:PORT, overrides the file; port 0 chooses a free port")
    parser.add_argument("--processes", type=int, help="number of processes, overrides the file")
    parser.add_argument("--metrics", help="HOST:PORT of the metrics, overrides the file; port 0 chooses a free port")
    arguments = parser.parse_args()
    try:
        run(arguments.config, listen=arguments.listen, processes=arguments.processes, metrics=arguments.metrics)
    except (ClusterFileError, CannotListen, RouterFailed) as error:
        print(f"windrow router: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

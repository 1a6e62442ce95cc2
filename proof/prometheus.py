"""Runs a real Prometheus that scrapes routers, with the configuration and rules in deploy/prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proof.processes import ProcessFailed, free_port

SHIPPED = Path(__file__).resolve().parent.parent / "deploy" / "prometheus"
INSTALL = "apt-get install --no-install-recommends prometheus"
_TARGETS = '["127.0.0.1:9464"]'
_ANSWER_S_MAX = 60.0


class NotInstalled(ProcessFailed):
    def __init__(self) -> None:
        super().__init__(f"prometheus is not installed: {INSTALL}")


class Refused(Exception):
    """Prometheus refused a request, and would refuse it again."""


@contextmanager
def running_prometheus(folder: Path, *arguments: str) -> Generator[str, None, None]:
    """Runs Prometheus in this folder with these arguments. Yields the address of Prometheus, which may not answer yet.
    Raises NotInstalled."""
    program = shutil.which("prometheus")
    if program is None:
        raise NotInstalled
    address = f"127.0.0.1:{free_port()}"
    command = (program, *arguments, f"--web.listen-address={address}", "--log.level=error")
    with subprocess.Popen(command, cwd=folder) as process:
        try:
            yield address
        finally:
            process.terminate()


@contextmanager
def scraping(folder: Path, targets: Sequence[str], *, every_ms: int | None = None) -> Generator[str, None, None]:
    """Runs a Prometheus that scrapes these addresses with the shipped configuration and rules. Yields its address, as
    running_prometheus does. `every_ms`: the interval; None: the shipped interval."""
    text = (SHIPPED / "prometheus.yml").read_text()
    assert _TARGETS in text
    text = text.replace(_TARGETS, json.dumps(list(targets)))
    if every_ms is not None:
        text, changed = re.subn(r"(scrape|evaluation)_interval: .*", rf"\1_interval: {every_ms}ms", text)
        assert changed == 2
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(SHIPPED / "rules.yml", folder)
    with running_prometheus(folder, "--config.file=prometheus.yml", "--storage.tsdb.path=data") as address:
        yield address


def asked(address: str, path: str, **parameters: str) -> Any:
    """Returns the data in an answer of Prometheus's API; None if Prometheus does not answer yet. Raises Refused."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S_MAX) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # It is starting.
            return None
        raise Refused(f"{path} {parameters}: {error.read().decode()}") from error
    except OSError:
        return None

"""A real Prometheus for tests, if it is installed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proof import prometheus
from proof.prometheus import INSTALL, NotInstalled

__all__ = ["INSTALL", "asked", "running_prometheus", "scraping"]


@contextmanager
def running_prometheus(folder: Path, *arguments: str) -> Generator[str, None, None]:
    """See proof.prometheus. Skips the test if Prometheus is not installed."""
    try:
        with prometheus.running_prometheus(folder, *arguments) as address:
            yield address
    except NotInstalled as error:
        pytest.skip(str(error))


@contextmanager
def scraping(folder: Path, *targets: str, every_ms: int | None = None) -> Generator[str, None, None]:
    """See proof.prometheus. Skips the test if Prometheus is not installed."""
    try:
        with prometheus.scraping(folder, targets, every_ms=every_ms) as address:
            yield address
    except NotInstalled as error:
        pytest.skip(str(error))


def asked(address: str, path: str, **parameters: str) -> Any:
    """Returns the data that the API of Prometheus answers, or None if it does not answer yet or has no data yet. A
    refused request fails the test."""
    data = prometheus.asked(address, path, **parameters)
    return data if data and data.get("result", True) else None

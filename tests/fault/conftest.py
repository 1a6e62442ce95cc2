"""Fixtures for all tests with faults."""

import subprocess
from collections.abc import Generator

import pytest

from tests import preloaded


@pytest.fixture(autouse=True, scope="module")
def router_processes() -> Generator[None, None, None]:
    """Starts the routers of a test from a preloaded process. Tests kill and start routers again and again. Without the
    preloaded process, the imports of each start would take a second of CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", preloaded.RouterProcess)
        yield

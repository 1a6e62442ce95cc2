"""Fixtures for all tests with faults."""

import subprocess
from collections.abc import Generator

import pytest

from tests import preloaded


@pytest.fixture(autouse=True, scope="module")
def router_processes() -> Generator[None, None, None]:
    """Starts the routers of a test from a preloaded process. Tests kill routers again and again, and otherwise each
    start would take a second of CPU for its imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", preloaded.RouterProcess)
        yield

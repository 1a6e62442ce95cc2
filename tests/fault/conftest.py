"""Fixtures for all tests with faults."""

import subprocess
from collections.abc import Generator

import pytest

from tests import preloaded


@pytest.fixture(autouse=True, scope="module")
def router_processes() -> Generator[None, None, None]:
    """The routers of a test are killed again and again: each start would take a second of CPU for its imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", preloaded.RouterProcess)
        yield

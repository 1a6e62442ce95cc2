"""What fault tests share: how many times each ambiguous moment is tried."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def trials() -> int:
    """WINDROW_TRIALS=1000 for the full count."""
    return int(os.environ.get("WINDROW_TRIALS", "100"))

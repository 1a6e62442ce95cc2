"""Handlers of a module that imports nothing of Windrow."""

from __future__ import annotations

import sys


def loaded(_job: object) -> bool:
    """Returns whether this process has imported the client. Does not import the client itself."""
    return "windrow.names" in sys.modules

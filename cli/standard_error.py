"""Redirects the standard error of this process and of its child processes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator


@contextlib.contextmanager
def standard_error_to(descriptor: int) -> Generator[None, None, None]:
    """Sends the logs of this process and of its child processes to a file, so that the logs do not fill the screen."""
    sys.stderr.flush()
    saved = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)

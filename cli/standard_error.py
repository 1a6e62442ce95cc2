"""Standard error, of this process and of those that it starts."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator


@contextlib.contextmanager
def standard_error_to(descriptor: int) -> Generator[None, None, None]:
    """What this process and its children log goes to a file: a hundred broken connections are not for the screen."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)

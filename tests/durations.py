"""How long each test file took in its last run in this checkout. The order of the files and `./run test --changed`
depend on these times."""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_FILE = Path(sys.prefix, "cache", "test_seconds.json")


def seconds_of_files() -> dict[str, float]:
    """Returns the seconds of each file that has run here."""
    try:
        return dict(json.loads(_FILE.read_text()))
    except (OSError, ValueError):
        return {}


def remember(seconds: Mapping[str, float]) -> None:
    # A checkout may be read-only.
    with suppress(OSError):
        _FILE.parent.mkdir(parents=True, exist_ok=True)
        _FILE.write_text(json.dumps(seconds_of_files() | dict(seconds)))

"""Makes wall clocks jump, with libfaketime if it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PLACES = ("/usr/lib", "/usr/lib64", "/usr/local/lib")
_LIBRARY = "faketime/libfaketime.so.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTime:
    """The clock of all processes that were started with `environ`."""

    library: Path
    # The library reads the offset of the clock from this file.
    offset: Path

    @classmethod
    def found(cls, scratch: Path) -> Self | None:
        """Finds the library. Returns None if it is not installed."""
        for place in map(Path, _PLACES):
            for library in (*place.glob(_LIBRARY), *place.glob(f"*/{_LIBRARY}")):
                clock = cls(library=library, offset=scratch / "clock")
                clock.jump(0)
                return clock
        return None

    @property
    def environ(self) -> Mapping[str, str]:
        return {
            "LD_PRELOAD": str(self.library),
            "FAKETIME_TIMESTAMP_FILE": str(self.offset),
            "FAKETIME_CACHE_DURATION": "1",
            # Do not change the monotonic clock, because no system sets it back.
            "DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, offset_s: float) -> None:
        """Sets the clock this many seconds ahead of the true time. 0 is the true time."""
        self.offset.write_text(f"{offset_s:+.3f}\n")

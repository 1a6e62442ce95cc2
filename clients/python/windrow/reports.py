"""What a handler reports about its job while it runs. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from windrow.payloads import CHECKPOINT_BYTES_MAX, NOTE_BYTES_MAX, Payload, clipped, encode
from windrow.v1 import job_pb2, queue_pb2

_COUNT_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an attempt has come. This is for people: `windrow jobs get` shows it.

    `done` and `total` count units of work of any kind. If `total` is 0, it is not known. `note` describes what is being
    done. It may have 1 KiB; a longer note is shortened."""

    done: int = 0
    total: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report of a handler. If a field is None, its earlier value stays. An empty checkpoint removes the earlier
    one."""

    progress: Progress | None = None
    checkpoint: bytes | None = None

    def then(self, later: Report) -> Report:
        """Returns this report and the later one as a single report."""
        return Report(
            progress=self.progress if later.progress is None else later.progress,
            checkpoint=self.checkpoint if later.checkpoint is None else later.checkpoint,
        )

    @property
    def size(self) -> int:
        """The largest number of bytes that the report can take in a message."""
        return len(self.checkpoint or b"") + (0 if self.progress is None else NOTE_BYTES_MAX + 32)

    def write(self, extend: queue_pb2.Extend) -> None:
        if self.progress is not None:
            progress = self.progress
            extend.progress.CopyFrom(
                job_pb2.Progress(done=progress.done, total=progress.total, note=clipped(progress.note, NOTE_BYTES_MAX))
            )
        if self.checkpoint is not None:
            extend.checkpoint = self.checkpoint


class Reporter:
    """Takes reports of handlers, and passes each report with the lease token to `take`. Without `take`, drops the
    reports. A copy in another process also drops them. `when_stored`: see the method of this name. None: when_stored()
    returns a completed future."""

    __slots__ = ("_take", "_when_stored")

    def __init__(
        self,
        take: Callable[[bytes, Report], None] | None = None,
        when_stored: Callable[[bytes], Future[None]] | None = None,
    ) -> None:
        self._take = take
        self._when_stored = when_stored

    def __call__(self, lease: bytes, report: Report) -> None:
        if self._take is not None:
            self._take(lease, report)

    def when_stored(self, lease: bytes) -> Future[None]:
        """Returns a future that is completed when two things hold: the lines that the handler has logged are stored,
        and no report about this lease is on its way to the router. Thread-safe."""
        if self._when_stored is not None:
            return self._when_stored(lease)
        stored = Future[None]()
        stored.set_result(None)
        return stored

    async def stored(self, lease: bytes) -> None:
        """Waits for when_stored(). May be called in any event loop."""
        await asyncio.wrap_future(self.when_stored(lease))

    def __reduce__(self) -> tuple[Any, ...]:
        return Reporter, ()

    def __deepcopy__(self, _memo: dict[int, Any]) -> Reporter:
        return self


def report_of(progress: Progress | None, checkpoint: Payload) -> Report:
    """Returns a report. `checkpoint` None: the report has no checkpoint. Raises TypeError or ValueError."""
    if progress is not None:
        _check(progress)
    data = None if checkpoint is None else encode(checkpoint, what="checkpoint")
    if data is not None and len(data) > CHECKPOINT_BYTES_MAX:
        raise ValueError(f"the checkpoint has {len(data):,} bytes; at most {CHECKPOINT_BYTES_MAX:,} are allowed")
    return Report(progress=progress, checkpoint=data)


def _check(progress: object) -> None:
    if not isinstance(progress, Progress):
        raise TypeError(f"progress must be a windrow.Progress, not {progress!r:.100}")
    for name in ("done", "total"):
        value = getattr(progress, name)
        if type(value) is not int:
            raise TypeError(f"{name} must be an int, not {value!r:.100}")
        if not 0 <= value <= _COUNT_MAX:
            raise ValueError(f"{name} must be 0 to {_COUNT_MAX}, not {value}")
    if type(progress.note) is not str:
        raise TypeError(f"note must be a str, not {progress.note!r:.100}")


def read_progress(message: job_pb2.Progress) -> Progress:
    return Progress(done=message.done, total=message.total, note=message.note)

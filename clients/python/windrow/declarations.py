"""The schedules that a worker's program declares in code (Worker.every). This module declares them to the cluster."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field

from windrow.calls import patient_pause_s
from windrow.client import Client
from windrow.errors import TRANSIENT, FailedPrecondition, ResourceExhausted, WindrowError, invalid_argument
from windrow.new_jobs import NewJob
from windrow.schedules import Schedule, check_schedule

_log = logging.getLogger("windrow.worker")
_PAUSE_FIRST_S, _PAUSE_MAX_S = 1.0, 30.0


@dataclass(slots=True, kw_only=True)
class Declarations:
    """The schedules that one worker declares under the name `declared_by`."""

    client: Client
    declared_by: str
    removes: bool
    _declared: dict[str, tuple[Schedule, NewJob]] = field(default_factory=dict[str, tuple[Schedule, NewJob]])

    def add(self, name: str, schedule: Schedule, job: NewJob) -> None:
        """Raises InvalidRequest if the name is declared already, or if the schedule cannot be sent."""
        check_schedule(name, schedule, job)
        if name in self._declared:
            raise invalid_argument("name", f"{name!r} is declared twice")
        self._declared[name] = schedule, job

    async def keep(self) -> None:
        """Declares the schedules to the cluster. After an error that may pass, such as a shard that is away, tries
        again for ever. Raises other errors of the client. Does nothing if no schedule is declared and `removes` is
        false."""
        if not self._declared and not self.removes:
            return
        declared = [(name, schedule, job) for name, (schedule, job) in self._declared.items()]
        stale: list[str] | None = None
        pause_s = _PAUSE_FIRST_S
        while stale is None:
            try:
                stale = await self.client.declare_schedules(declared, declared_by=self.declared_by, remove=self.removes)
            except WindrowError as error:
                if not _may_pass(error):
                    raise
                _log.warning("the schedules of %s are not declared yet: %s", self.declared_by, error)
                await asyncio.sleep(patient_pause_s(error, own_s=pause_s * random.uniform(0.5, 1.0)))
                pause_s = min(pause_s * 2, _PAUSE_MAX_S)
        if stale:
            _log.warning(
                "%s no longer declares these schedules, %s: %s",
                *(self.declared_by, "so they were deleted" if self.removes else "which still fire", ", ".join(stale)),
            )


def _may_pass(error: WindrowError) -> bool:
    match error:
        case ResourceExhausted():
            # Without a time to wait, the error does not pass, because the org already has the highest number of
            # schedules.
            return error.retry_after is not None
        case FailedPrecondition():
            # MISCONFIGURED: a database of the cluster is not what the routers expect. Wait until an operator has
            # corrected this, as the worker's stream does.
            return error.reason == "MISCONFIGURED"
        case _:
            return isinstance(error, TRANSIENT)

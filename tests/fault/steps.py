"""Stops a move inside one of its steps (docs/decisions/0017-moving-slots.md): during the commit, when all statements of
the step have run but nothing is committed yet. Triggers in the tables wait for a lock that the test holds. These
triggers are not part of Windrow."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal

import psycopg

from proof.postgres import Shard, ask
from tests.streams import until

Place = Literal["catalog", "source", "target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step, recognised by a change of a table in the database where the step runs."""

    place: Place
    event: str
    when: str


_SLOT_CHANGES = "INSERT OR UPDATE ON windrow.owned_slot"
STEPS = {
    "begin": Step(
        place="catalog", event="UPDATE ON windrow.placement", when="cardinality(NEW.reads) > cardinality(OLD.reads)"
    ),
    "close": Step(place="source", event=_SLOT_CHANGES, when="NEW.state = 'draining' AND NEW.chunk = 0"),
    "open": Step(place="target", event=_SLOT_CHANGES, when="NEW.state = 'owned' AND NEW.chunk = 0"),
    "switch": Step(place="catalog", event="UPDATE ON windrow.placement", when="NEW.writes <> OLD.writes"),
    "depart": Step(place="source", event=_SLOT_CHANGES, when="NEW.state = 'draining' AND NEW.chunk > 0"),
    "take": Step(place="target", event=_SLOT_CHANGES, when="NEW.state = 'owned' AND NEW.chunk > 0"),
    "forget": Step(place="source", event="DELETE ON windrow.departing", when="true"),
    "leave": Step(
        place="catalog", event="UPDATE ON windrow.placement", when="cardinality(NEW.reads) < cardinality(OLD.reads)"
    ),
}
_KEYS = {name: key for key, name in enumerate(STEPS, 1)}


def make_gates(shard: Shard) -> None:
    """Makes one gate for each step. All gates are open at first."""
    # Without this setting, the step "close" would not wait at the gate for longer than it waits for enqueues.
    ask(
        shard.direct_dsn,
        "CREATE FUNCTION public.wait_at_gate() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS "
        "$$ BEGIN PERFORM pg_advisory_xact_lock_shared(TG_ARGV[0]::bigint); RETURN NULL; END $$",
    )
    for name, step in STEPS.items():
        ask(
            shard.direct_dsn,
            f"CREATE CONSTRAINT TRIGGER gate_{name} AFTER {step.event} DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW WHEN ({step.when}) EXECUTE FUNCTION public.wait_at_gate({_KEYS[name]})",
        )


class Gate:
    """A gate belongs to one step on one shard. While it is shut, it blocks every process that wants to commit this
    step."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], step: str) -> None:
        self._connection = connection
        self._step = step
        # The server process that waits at the gate.
        self._waiting = 0

    async def reached(self) -> None:
        """Waits until a process waits at the gate."""
        blocked = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = %s"

        async def came() -> bool:
            rows = await self._ask(blocked, _KEYS[self._step])
            self._waiting = rows[0][0] if rows else 0
            return bool(rows)

        await until(came, f"somebody comes to {self._step}")

    async def open(self) -> None:
        await self._ask("SELECT pg_advisory_unlock_all()")

    async def refuse(self) -> None:
        """Makes the waiting process fail, so that it never commits. Then opens the gate."""
        await self._ask("SELECT pg_terminate_backend(%s, 10000)", self._waiting)
        await self.open()

    async def pass_through(self) -> None:
        """Opens the gate and waits until the waiting process has committed."""
        await self.open()

        async def passed() -> bool:
            return not await self._ask("SELECT FROM pg_stat_activity WHERE pid = %s AND state <> 'idle'", self._waiting)

        await until(passed, f"{self._step} is committed")

    async def _ask(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        cursor = await self._connection.execute(statement.encode(), parameters)
        return await cursor.fetchall()


@contextlib.asynccontextmanager
async def shut_gate(shard: Shard, step: str) -> AsyncGenerator[Gate, None]:
    """Shuts the gate during the block. A gate also opens when the shard's server is killed."""
    connection = await psycopg.AsyncConnection.connect(shard.direct_dsn, autocommit=True)
    try:
        await connection.execute("SELECT pg_advisory_lock(%s)", [_KEYS[step]])
        yield Gate(connection, step)
    finally:
        await connection.close()

"""Counts how many jobs share one act or one message, and how often processes wake up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from bench import cpu, statements
from bench.clients import Clients
from bench.messages import Messages
from bench.stage import Servers, Stage
from bench.statements import Runs
from bench.systems import PEERS

# The kinds of process whose wake-ups are counted separately.
KINDS = ("producer", "worker", "router", "Postgres")
# The counts that pieces() returns, in this order.
PIECES = (
    *("jobs an enqueue act", "handed over, %", "jobs a claim act", "jobs a message", "acks a message"),
    *("jobs an ack act", "messages/s", "doorbells/s", "probes/s"),
    *(f"{kind} wake-ups/s" for kind in KINDS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The counts of one figure of one run."""

    seconds: float
    # The number of acts of each statement, by the statement's name. Empty for a peer, or if the server does not count
    # statements.
    acts: Mapping[str, Runs] = field(default_factory=dict[str, Runs])
    # How many messages the streams of all workers have received and sent.
    messages: Messages = field(default_factory=Messages)
    # How often the threads of each kind of process have waited for something.
    waits: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """Counts what the processes of one system do between two calls of look()."""

    stage: Stage
    system: str
    # None: the workers also enqueue.
    producers: Clients | None
    workers: Clients
    servers: Servers

    async def look(self) -> Look:
        ours = self.system not in PEERS
        dsns = [server.superuser_dsn for server in self.stage.postgres.values()]
        acts = await asyncio.to_thread(statements.counted, dsns) if ours and self.stage.counts_statements else {}
        messages = [Messages(**answer.found) for answer in await self.workers.all("messages")] if ours else []
        return Look(
            at_s=time.monotonic(), acts=acts, messages=_added(messages), waits=await asyncio.to_thread(self._waits)
        )

    def _waits(self) -> dict[str, dict[int, int]]:
        postgres = [server.pid for server in self.stage.postgres.values() if server.pid]
        producers = self.producers.pids if self.producers is not None else ()
        waits = cpu.waits_of_trees(producers, self.workers.pids, self.servers.pids(), postgres)
        return dict(zip(("producer", "worker", "router", "Postgres"), waits, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    at_s: float
    acts: Mapping[str, Runs]
    messages: Messages
    # How often each thread has waited, by kind of process and then by thread.
    waits: Mapping[str, Mapping[int, int]]

    def since(self, before: Look) -> Counts:
        return Counts(
            seconds=self.at_s - before.at_s,
            acts=statements.since(before.acts, self.acts),
            messages=_added([self.messages], minus=before.messages),
            # The waits of a thread that ended between the looks are not counted.
            waits={
                kind: sum(count - before.waits[kind].get(thread, 0) for thread, count in threads.items())
                for kind, threads in self.waits.items()
            },
        )


def pieces(counts: Counts, jobs: int) -> dict[str, float]:
    """Returns the counts by their names in PIECES. Leaves out what was not counted."""
    enqueue, plain, claim, ack = (
        counts.acts.get(name, Runs()) for name in ("enqueue", "enqueue_plain", "claim", "ack")
    )
    enqueue += plain
    messages = counts.messages
    found = {f"{kind} wake-ups/s": waits / counts.seconds for kind, waits in counts.waits.items()}
    if enqueue.calls:
        found["jobs an enqueue act"] = jobs / enqueue.calls
    if enqueue.calls and ack.calls:
        found["handed over, %"] = 100 * (1 - claim.rows / jobs)
    if claim.calls:
        found["jobs a claim act"] = claim.rows / claim.calls
    if ack.calls:
        found["jobs an ack act"] = jobs / ack.calls
    if messages.with_jobs and messages.with_acks:
        found["jobs a message"] = messages.jobs / messages.with_jobs
        found["acks a message"] = messages.acks / messages.with_acks
        found["messages/s"] = (messages.received + messages.sent) / counts.seconds
    if counts.acts:
        found["doorbells/s"] = counts.acts.get("notify_work", Runs()).calls / counts.seconds
        found["probes/s"] = counts.acts.get("probe", Runs()).calls / counts.seconds
    return found


def _added(found: Sequence[Messages], minus: Messages | None = None) -> Messages:
    less = asdict(minus or Messages())
    return Messages(**{name: sum(getattr(one, name) for one in found) - value for name, value in less.items()})

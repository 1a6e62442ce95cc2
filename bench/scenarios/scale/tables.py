"""The figures of the scenario. Also calculates from them the costs of a cluster of the full size. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from bench.scenarios.scale.crew import Backends, Spent
from bench.spread import percentile
from proof.table import Table

# The default number of connections that a router process has for the queue of each shard (router/settings.py).
_CONNECTIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One read of the catalog."""

    what: str
    bytes: float
    took_ms: float
    router_ms: float
    postgres_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one slot: how many copies of the catalog saw the change, after how many ms they saw it, and what was
    spent in the two seconds after the change."""

    seen: int
    late_ms: Sequence[float]
    spent: Spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Bell:
    """A number of rings, and how many µs each ring took to reach each listener."""

    listeners: int
    rings: float
    late_us: Sequence[int]
    spent: Spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """Jobs that a process without consumers stored, and how many µs each job took to reach a consumer of another
    process."""

    jobs: int
    late_us: Sequence[int]
    spent: Spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One shard with `count` router processes. `connections`: how many each process has for the queue."""

    count: int
    connections: int
    made: Spent
    backends: Sequence[Backends]
    idle: Spent
    # The cost while no jobs come and a consumer waits in every process except one.
    waiting: Spent

    @property
    def connections_each(self) -> float:
        """How many connections one process would have if `connections` were the cluster file's default."""
        held = sum(backends.count for backends in self.backends if backends.application.startswith("windrow"))
        return held / self.count + _CONNECTIONS - self.connections

    @property
    def pss_mib(self) -> float:
        """The memory of a backend whose connection the router has never used."""
        return median(backends.pss_mib for backends in self.backends if backends.application == "windrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """One router process with `shards` shards."""

    shards: int
    made: Spent
    idle: Spent
    files: int
    resident_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """The costs of the catalog with `copies` copies."""

    copies: int
    reads: Sequence[Read]
    made: Spent
    idle: Spent
    changes: Sequence[Change]

    def change_ms(self) -> tuple[float, float]:
        """Returns the CPU ms of Postgres and of each copy for one change, without the reads that idle copies make."""
        postgres, copies = (
            median(
                getattr(change.spent, name) - _rate(self.idle, name) * change.spent.seconds for change in self.changes
            )
            for name in ("postgres_s", "parts_s")
        )
        return postgres * 1000, copies * 1000 / self.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    # The size of the cluster for which the costs are calculated.
    shards: int
    processes: int
    catalog: Catalog
    bells: Sequence[Bell]
    member: Member
    enqueued: Sequence[Enqueued]
    # Ordered by their numbers of shards.
    routers: Sequence[Router]

    def told(self) -> list[dict[str, object]]:
        return [
            {"sample": "catalog", **asdict(self.catalog)},
            *({"sample": "doorbells", **asdict(bell)} for bell in self.bells),
            {"sample": "one shard", **asdict(self.member)},
            *({"sample": "jobs", **asdict(enqueued)} for enqueued in self.enqueued),
            *({"sample": "one router process", **asdict(router)} for router in self.routers),
        ]

    def tables(self) -> list[Table]:
        return [
            _reads(self.catalog),
            _copies(self.catalog),
            _bells(self.bells),
            _member(self.member),
            _enqueued(self.member, self.enqueued),
            _routers(self.routers),
            self._whole(),
        ]

    def _whole(self) -> Table:
        """Returns a table of the costs that are calculated for the whole cluster."""
        few, many = self.routers[0], self.routers[-1]
        each = self.member.connections_each
        backends = each * self.processes
        member = f"{self.member.count} processes, one shard"
        router = f"one process, {few.shards} and {many.shards} shards"

        def of_router(before: float, after: float) -> float:
            """Extrapolates along the line through both measurements."""
            slope = (after - before) / (many.shards - few.shards) if many is not few else after / many.shards
            return after + slope * (self.shards - many.shards)

        share = self.processes / self.member.count
        idle, waiting = self.member.idle, self.member.waiting
        bell = max(self.bells, key=lambda bell: (bell.listeners, bell.rings))
        # A short run may take less CPU time than the kernel's tick, and then the measured time is 0.
        core_rings = f"{bell.rings / bell.spent.postgres_s:,.0f}" if bell.spent.postgres_s else "not measured"
        rows = [
            ("connections to one shard", f"{backends:,.0f}", f"{each:g} of each process were counted"),
            (
                "memory of their backends",
                f"{backends * self.member.pss_mib / 1024:,.1f} GiB and more",
                f"× {self.member.pss_mib:.1f} MiB, the PSS of one that was never used",
            ),
            ("statements/s on an idle shard", f"{_rate(idle, 'statements') * share:,.0f}", member),
            ("Postgres of an idle shard, % of a core", f"{_rate(idle, 'postgres_s') * share * 100:,.1f}", member),
            (
                "the same while consumers wait in every process",
                f"{_rate(waiting, 'statements') * share:,.0f} statements/s, "
                f"{_rate(waiting, 'postgres_s') * share * 100:,.1f} %",
                member,
            ),
            (
                "connections of one router process",
                f"{of_router(few.files, many.files):,.0f} files",
                f"extrapolated: {router}",
            ),
            (
                "one idle router process, statements/s",
                f"{of_router(*(_rate(one.idle, 'statements') * one.shards for one in (few, many))):,.0f}",
                f"extrapolated: {router}, all shards alike",
            ),
            (
                "one idle router process, % of a core",
                f"{of_router(*(_rate(one.idle, 'parts_s') for one in (few, many))) * 100:,.0f}",
                f"extrapolated: {router}",
            ),
            (
                "one router process starts, CPU seconds of its own",
                f"{of_router(few.made.parts_s, many.made.parts_s):,.0f}",
                f"extrapolated: {router}",
            ),
            (
                "resident memory of one router process",
                f"{of_router(few.resident_mib, many.resident_mib):,.0f} MiB",
                f"extrapolated: {router}; without gRPC",
            ),
            (
                "rings/s of one shard that keep one core of Postgres busy",
                core_rings,
                f"{bell.listeners} listeners, {bell.rings / bell.spent.seconds:,.0f} rings/s",
            ),
        ]
        return Table(
            title=f"{self.shards:,} shards, {self.processes:,} router processes",
            head=("what", "figure", "from"),
            rows=rows,
            note="Processes, not hosts: a router has `processes` of them. A figure follows from the measurement in the "
            "last column, by proportion where it does not say otherwise.",
        )


def _rate(spent: Spent, name: str) -> float:
    value: float = getattr(spent, name)
    return value / spent.seconds


def _reads(catalog: Catalog) -> Table:
    return Table(
        title="One read of the catalog",
        head=("what", "bytes", "ms", "router ms", "Postgres ms"),
        rows=[
            (
                read.what,
                f"{read.bytes:,.0f}",
                f"{read.took_ms:.2f}",
                f"{read.router_ms:.2f}",
                f"{read.postgres_ms:.2f}",
            )
            for read in catalog.reads
        ],
        note="Bytes that the router receives, the marks of all shards included. Router and Postgres: CPU.",
    )


def _copies(catalog: Catalog) -> Table:
    postgres_ms, copy_ms = catalog.change_ms()
    late_ms = sorted(late for change in catalog.changes for late in change.late_ms)
    missing = sum(catalog.copies - change.seen for change in catalog.changes)
    made, idle = catalog.made, catalog.idle
    return Table(
        title=f"The catalog with {catalog.copies:,} router processes",
        head=("what", "Postgres", "each process", "took"),
        rows=[
            (
                "all start at once",
                f"{made.postgres_s:,.1f} s",
                f"{made.parts_s / catalog.copies * 1000:,.0f} ms",
                f"{made.seconds:,.1f} s until the last had read it",
            ),
            (
                "idle",
                f"{_rate(idle, 'postgres_s') * 100:.1f} % of a core",
                f"{_rate(idle, 'parts_s') / catalog.copies * 100:.2f} % of a core",
                f"{_rate(idle, 'statements'):,.0f} statements/s",
            ),
            (
                "one slot changes",
                f"{postgres_ms:,.0f} ms",
                f"{copy_ms:,.1f} ms",
                f"{percentile(late_ms, 0.5):,.0f} ms p50, {late_ms[-1]:,.0f} ms the last"
                + (f"; {missing} did not see it" if missing else ""),
            ),
        ],
        note="CPU. A move of slots, however many, is three changes; more if their last jobs leave at different times.",
    )


def _bells(bells: Sequence[Bell]) -> Table:
    return Table(
        title="Doorbells of one shard",
        head=(
            "listeners",
            "rings/s",
            "Postgres, % of a core",
            "Postgres µs a ring",
            "listener µs a ring",
            "p50 ms",
            "p99 ms",
        ),
        rows=[
            (
                f"{bell.listeners:,}",
                f"{bell.rings / bell.spent.seconds:,.0f}",
                f"{_rate(bell.spent, 'postgres_s') * 100:.1f}",
                f"{bell.spent.postgres_s / bell.rings * 1e6:,.0f}",
                f"{bell.spent.parts_s / bell.rings / bell.listeners * 1e6:,.0f}",
                f"{percentile(bell.late_us, 0.5) / 1000:,.1f}",
                f"{percentile(bell.late_us, 0.99) / 1000:,.1f}",
            )
            for bell in bells
        ],
        note="p50 and p99: from the call of ring until a listener knows, over all listeners, with the pause after the "
        "ring before. A listener is one router process, and listens whether or not consumers wait in it.",
    )


def _member(member: Member) -> Table:
    rows = [
        (
            what,
            f"{_rate(spent, 'statements'):,.0f}",
            f"{_rate(spent, 'postgres_s') * 100:.1f}",
            f"{_rate(spent, 'parts_s') / member.count * 100:.2f}",
        )
        for what, spent in (("idle", member.idle), ("a consumer of one queue waits in each", member.waiting))
    ]
    backends = "; ".join(
        f"{one.count:,} × “{one.application}”: {one.private_mib:.1f} MiB private, {one.pss_mib:.1f} MiB PSS"
        for one in member.backends
        if one.application.startswith("windrow")
    )
    return Table(
        title=f"One shard with {member.count:,} router processes",
        head=("what", "statements/s", "Postgres, % of a core", "each process, % of a core"),
        rows=rows,
        note=f"{member.connections} connection(s) of each process for the queue. To make them all took "
        f"{member.made.seconds:.1f} s, {member.made.postgres_s:.1f} s of Postgres, and "
        f"{member.made.parts_s / member.count * 1000:.0f} ms of each process. Backends: {backends}.",
    )


def _enqueued(member: Member, enqueued: Sequence[Enqueued]) -> Table:
    def of_job(one: Enqueued, name: str) -> float:
        """Returns the cost of a job, without what is spent while there are no jobs."""
        spent: float = getattr(one.spent, name)
        return (spent - _rate(member.waiting, name) * one.spent.seconds) / one.jobs

    return Table(
        title=f"Single jobs for consumers in {member.count - 1:,} other router processes",
        head=("jobs/s", "statements a job", "Postgres ms a job", "each process, ms a job", "p50 ms", "p99 ms"),
        rows=[
            (
                f"{one.jobs / one.spent.seconds:,.0f}",
                f"{of_job(one, 'statements'):,.0f}",
                f"{of_job(one, 'postgres_s') * 1000:,.1f}",
                f"{of_job(one, 'parts_s') / member.count * 1000:,.2f}",
                f"{percentile(one.late_us, 0.5) / 1000:,.1f}",
                f"{percentile(one.late_us, 0.99) / 1000:,.1f}",
            )
            for one in enqueued
        ],
        note="All consumers wait for the same queue, and the process that stores the jobs has none: every job rings, "
        "and in each process one consumer looks.",
    )


def _routers(routers: Sequence[Router]) -> Table:
    return Table(
        title="One router process",
        head=("shards", "up after s", "its CPU s until then", "Postgres s", "idle, % of a core", "open files", "MiB"),
        rows=[
            (
                f"{router.shards:,}",
                f"{router.made.seconds:.1f}",
                f"{router.made.parts_s:.2f}",
                f"{router.made.postgres_s:.2f}",
                f"{_rate(router.idle, 'parts_s') * 100:.2f}",
                f"{router.files:,}",
                f"{router.resident_mib:,.0f}",
            )
            for router in routers
        ],
        note="4 connections to each shard for the queue. All shards are databases of one server.",
    )

"""Writes down what operators do through this router: every call of a method whose scope is ADMIN or CLUSTER.

A change begins only when its intent is in the audit log (shard/admin/audit.py); so changes are refused while the
catalog does not answer. Changes are also refused if the callers of an org make too many of them (change_rate.py). The
outcome of a change is added to the log without delaying the answer. Reads of the whole cluster are counted here, and
the counts are added to the log once a second. Calls that the gate refuses change nothing and are not in the log:
otherwise callers without a key could fill it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import code_pb2, error_details_pb2

from router.codec.status import TooManyChanges, status_of
from router.fleet.periodic import every
from router.gate.auth.access import Access
from router.gate.auth.scopes import Scope
from router.gate.call import Call, current_call
from router.gate.change_rate import CHANGES_PER_S, ChangeRate
from shard import telemetry
from shard.admin import audit
from shard.admin.audit import End, Intent, Read
from shard.errors import ShardError, ShardUnavailable
from shard.postgres.pool import Database
from shard.queue.coalescer import Coalescer
from shard.vocabulary import CATALOG
from windrow.v1 import job_pb2

if TYPE_CHECKING:
    from router.gate.audit_export import AuditExport

_log = logging.getLogger(__name__)
_Method = TypeVar("_Method", bound=Callable[..., Any])

ANONYMOUS = "anonymous"
# The fields of requests that the log keeps in addition to org and queue. A test fails if a request has a field that is
# in none of the sets RECORDED, NAMES_ONLY and TEMPLATES: so the author of the field must decide what the log keeps of
# it.
RECORDED = frozenset(
    {"already_redriven", "amount", "begin", "config", "delay", "died_after", "died_before", "end", "id"}
    | {"ids", "include_dead", "interval", "jobs", "kind", "limit", "measure", "name", "new_id", "node"}
    | {"overlap", "paused", "per_second", "priority", "reason", "request_id", "run_at", "spec", "update_mask"}
    | {"weight"}
)
# The methods with the scope CLUSTER that change something.
CLUSTER_CHANGES = frozenset(
    {"windrow.v1.Cluster/SetLimit", "windrow.v1.Cluster/ClearLimit", "windrow.v1.Cluster/SetWeight"}
)
# The log keeps only the names in these maps: the values are data of a job.
NAMES_ONLY = frozenset({"attributes"})
# The log keeps only queue and kind of these job templates.
TEMPLATES = frozenset({"job"})
_ITEMS_MAX = 10
_READS_S = 1.0
_READERS_MAX = 1000
_FINISH_S_MAX = 3.0


class Audit:
    """The audit log as one router process writes it. `catalog`: the catalog's database."""

    def __init__(self, catalog: Database) -> None:
        self._catalog = catalog
        self._intents = _coalescer(self._begin)
        self._ends = _coalescer(self._end)
        self._rate = ChangeRate()
        self._reads = Counter[Read]()
        # The tasks that write outcomes.
        self._ending = set[asyncio.Task[None]]()
        self._export: AuditExport | None = None
        if telemetry.is_on("LOGS"):
            from router.gate.audit_export import AuditExport

            self._export = AuditExport()

    async def run(self) -> None:
        """Writes reads down until cancelled."""
        await every(_READS_S, "write reads to the audit log", self._write_reads)

    async def finish(self) -> None:
        """Writes down the remaining outcomes and reads, for a few seconds at most."""
        try:
            async with asyncio.timeout(_FINISH_S_MAX):
                if self._ending:
                    await asyncio.wait(self._ending)
                await self._write_reads()
        except (TimeoutError, ShardError) as error:
            _log.warning("the audit log lacks outcomes or reads of the last seconds: %s", error)
        if self._export is not None:
            self._export.close()

    def around(self, method: _Method, access: Access) -> _Method:
        """Returns a method that also writes down its calls. Returns the method itself if its calls need no record."""
        if access.scope is Scope.ADMIN or access.method in CLUSTER_CHANGES:
            recorded: Callable[..., Any] = functools.partial(self._change, method, access.method)
        elif access.scope is Scope.CLUSTER and inspect.isasyncgenfunction(method):
            recorded = functools.partial(self._streamed_read, method, access.method)
        elif access.scope is Scope.CLUSTER:
            recorded = functools.partial(self._read, method, access.method)
        else:
            return method
        cast("Any", recorded).options = cast("Any", method).options
        return cast("_Method", recorded)

    async def _change(self, method: Callable[[Any], Awaitable[Message]], name: str, request: Message) -> Message:
        call = current_call()
        self._count_change(call)
        intent = intent_of(call, name, request)
        try:
            await self._intents.submit(intent)
        except ShardUnavailable as error:
            raise ShardUnavailable(
                CATALOG, f"nothing was changed, because the audit log cannot be written: {error.why}"
            ) from error
        try:
            answer = await method(request)
        except BaseException as error:
            self._note(intent, End(intent.id, outcome_of(error), {}))
            raise
        self._note(intent, End(intent.id, "OK", counts_of(answer)))
        return answer

    def _count_change(self, call: Call) -> None:
        """Counts a change for the org of its caller, if the caller may act only for one org. Raises TooManyChanges."""
        org = None if call.principal is None else call.principal.org
        if org is not None and (wait_s := self._rate.wait_s(org, asyncio.get_running_loop().time())):
            raise TooManyChanges(org, CHANGES_PER_S, wait_s)

    async def _read(self, method: Callable[[Any], Awaitable[Message]], name: str, request: Message) -> Message:
        try:
            answer = await method(request)
        except BaseException as error:
            self._count(name, outcome_of(error))
            raise
        self._count(name, "OK")
        return answer

    async def _streamed_read(
        self, method: Callable[[Any], AsyncGenerator[Message, None]], name: str, request: Message
    ) -> AsyncGenerator[Message, None]:
        try:
            async with contextlib.aclosing(method(request)) as answers:
                async for answer in answers:
                    yield answer
        except BaseException as error:
            self._count(name, outcome_of(error))
            raise
        self._count(name, "OK")

    def _note(self, intent: Intent, end: End) -> None:
        """Writes an outcome down, without delaying the answer."""
        if self._export is not None:
            self._export.send(intent, end)
        task = asyncio.create_task(self._write_end(end))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _write_end(self, end: End) -> None:
        try:
            await self._ends.submit(end)
        except Exception as error:  # noqa: BLE001 - the change was made: there is nobody to tell
            _log.warning("the audit log lacks the outcome of %s (%s): %s", end.id, end.outcome, error)

    def _count(self, name: str, outcome: str) -> None:
        call = current_call()
        read = Read(_principal(call), _host(call), name, outcome)
        if read not in self._reads and len(self._reads) >= _READERS_MAX:
            read = read._replace(peer="many")
        self._reads[read] += 1

    async def _write_reads(self) -> None:
        reads, self._reads = self._reads, Counter[Read]()
        if reads:
            try:
                await audit.record_reads(self._catalog, reads)
            except BaseException:
                self._reads.update(reads)
                raise

    async def _begin(self, intents: list[Intent]) -> Sequence[None]:
        await audit.begin(self._catalog, intents)
        return [None] * len(intents)

    async def _end(self, ends: list[End]) -> Sequence[None]:
        await audit.end(self._catalog, ends)
        return [None] * len(ends)


_Item = TypeVar("_Item", Intent, End)


def _coalescer(act: Callable[[list[_Item]], Awaitable[Sequence[None]]]) -> Coalescer[_Item, None]:
    return Coalescer(
        act,
        weight=lambda _: 1,
        key=lambda item: getattr(item, "org", ""),
        on_timeout=lambda: ShardUnavailable(CATALOG, "the audit log did not answer in time"),
        acts_max=1,
    )


def intent_of(call: Call, name: str, request: Message) -> Intent:
    """Returns what the log must say before a call changes anything."""
    return audit.intent(
        principal=_principal(call),
        peer=_host(call),
        method=name,
        org=getattr(request, "org", ""),
        queue=getattr(request, "queue", ""),
        request=recorded_of(request),
    )


def recorded_of(request: Message) -> dict[str, object]:
    """Returns the fields of a request that the log keeps, as JSON."""
    kept: dict[str, object] = {}
    for field, value in request.ListFields():
        if field.name in RECORDED:
            kept[field.name] = _shown(value) if field.enum_type is None else _enum_name(field.enum_type, value)
        elif field.name in NAMES_ONLY:
            # The message Attributes has one map, `values`.
            kept[field.name] = sorted(audit.fit(name) for name in value.values)[:_ITEMS_MAX]
        elif field.name in TEMPLATES:
            kept[field.name] = {"queue": audit.fit(value.queue), "kind": audit.fit(value.kind)}
    return kept


def _enum_name(of: EnumDescriptor, number: int) -> str | int:
    known = of.values_by_number.get(number)
    return number if known is None else known.name


def _shown(value: Any) -> object:
    match value:
        case bool() | int() | float():
            return value
        case str():
            return audit.fit(value)
        case Timestamp() | Duration() | FieldMask():
            return value.ToJsonString()
        case Message():
            return {field.name: _shown(inner) for field, inner in value.ListFields()}
        case _:
            # The log keeps the first items of a repeated field. If there are more, it also keeps how many there are.
            items: list[Any] = list(value)
            shown = [_shown(item) for item in items[:_ITEMS_MAX]]
            return shown if len(items) <= _ITEMS_MAX else [*shown, f"{len(items)} in all"]


def counts_of(answer: Message) -> dict[str, int]:
    """Returns the counts in the answer to a change: all its numbers, and how many jobs got each kind of answer."""
    counts: dict[str, int] = {}
    for field, value in answer.ListFields():
        if field.name == "answers":
            answers: Counter[job_pb2.JobAnswer.ValueType] = Counter(value)
            for number, many in answers.items():
                counts[job_pb2.JobAnswer.Name(number).removeprefix("JOB_ANSWER_").lower()] = many
        elif field.name == "results":
            refused = sum(1 for result in value if result.HasField("refusal"))
            counts |= {"ok": len(value) - refused, "refused": refused}
        elif isinstance(value, int) and not isinstance(value, bool):
            counts[field.name] = value
    return counts


def outcome_of(error: BaseException) -> str:
    """Returns the status code and the reason with which a call ends."""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        # The caller has left, or its deadline is over. The change may have been made.
        return "CANCELLED"
    status = status_of(error)
    info = error_details_pb2.ErrorInfo()
    reasons = [info.reason for detail in status.details if detail.Unpack(info)]
    return " ".join([code_pb2.Code.Name(cast("code_pb2.Code", status.code)), *reasons])


def _principal(call: Call) -> str:
    return ANONYMOUS if call.principal is None else audit.fit(call.principal.name)


def _host(call: Call) -> str:
    """Returns the address of the caller without its port, such as ipv4:10.0.0.7."""
    return audit.fit(call.peer.rpartition(":")[0])

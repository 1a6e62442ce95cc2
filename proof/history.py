"""What clients saw. Each client records its calls and their answers at once, and the checker reads these records after
the run.

There is one file for each client process, with one JSON object per line. A client writes the line of a call before it
makes the call. So the beginning of a call is recorded even if the client is then killed. A SIGKILL damages at most the
last line. Times are of CLOCK_MONOTONIC, which all processes of a machine share. The wall clock is recorded too, to show
whether it jumped.

    {"at": s, "wall": s, "call": 7, "verb": "ack", "org": "o1", "asked": …}     the call begins; "due": s if planned
    {"at": s, "wall": s, "of": 7, "got": [job, …]}                              jobs came; a stream has many such lines
    {"at": s, "wall": s, "of": 7, "outcome": "ok", "code": "", "answered": …}   the call has ended
"""

from __future__ import annotations

import enum
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from shard.lease_token import parse_token

_SUFFIX = ".jsonl"


class Verb(enum.StrEnum):
    ENQUEUE = "enqueue"
    # Starts a workflow, which enqueues all its jobs.
    START = "start"
    # Adds nodes to the workflow of the job that makes the call.
    ADD = "add"
    # Gives a signal to a node of a workflow.
    SIGNAL = "signal"
    DEQUEUE = "dequeue"
    CONSUME = "consume"
    ACK = "ack"
    NACK = "nack"
    KILL = "kill"
    RELEASE = "release"
    EXTEND = "extend"
    CANCEL = "cancel"
    LOOK_UP = "look_up"
    # A try that failed and that the Python client repeats by itself.
    RETRY = "retry"
    # A failure that a worker of the Python client logged.
    WORK = "work"


class Outcome(enum.StrEnum):
    OK = "ok"
    # Refused: nothing was done.
    ERROR = "error"
    # It is unknown whether the call was executed.
    UNKNOWN = "unknown"


class Answer(enum.StrEnum):
    OK = "ok"
    STALE = "stale"
    NOT_FOUND = "not_found"
    CANCELLED = "cancelled"


# The answers for a lease that had ended. With these answers, nothing was changed.
ENDED = frozenset({Answer.STALE, Answer.NOT_FOUND, Answer.CANCELLED})


class LeaseKey(NamedTuple):
    """One lease of one job."""

    job: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one client. The call may have been answered or not."""

    client: str
    verb: Verb
    org: str
    began_s: float
    # None: the client process ended before the call.
    ended_s: float | None = None
    outcome: Outcome = Outcome.UNKNOWN
    # The code of the status; empty for OK.
    code: str = ""
    # The time at which the call was to begin, if that was planned.
    planned_s: float | None = None

    @property
    def due_s(self) -> float:
        return self.began_s if self.planned_s is None else self.planned_s

    @property
    def took_s(self) -> float:
        """Seconds from the time at which the call was due until its end. Infinity: the call was never answered."""
        return math.inf if self.ended_s is None else self.ended_s - self.due_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueue:
    """One job that a call asked to store. The call is an enqueue, a start of a workflow, or an acknowledged addition of
    nodes to a workflow."""

    call: Call
    job: str
    queue: str
    key: str = ""
    # Infinity: the job is due when other jobs have ended.
    delay_s: float = 0.0
    # The workflow of the job, and the jobs that the job waits for. `workflow` is empty if the job is in no workflow.
    workflow: str = ""
    after: Sequence[str] = ()
    # For how long the job's node waits for a signal. None: it does not wait for a signal, and the job runs.
    timeout_s: float | None = None
    # The id in the answer: the id of this job, or of another job with the same dedup key. None: no answer came.
    answered: str | None = None
    duplicate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """One call by which a job adds nodes to its workflow. Clients choose the names of all nodes. The nodes of a
    workflow's start have the ids of their jobs as names."""

    call: Call
    workflow: str
    # The lease of the job that adds the nodes.
    lease: LeaseKey
    # The names of the new nodes, each with the names of its parents.
    nodes: Mapping[str, Sequence[str]]
    # Whether the job is to wait for these nodes.
    wait: bool = False
    # The answer: the id of each node's job, by the node's name, and how many of the nodes were new. Empty: no answer
    # came, or the Python client did not give the answer to its caller.
    jobs: Mapping[str, str] = field(default_factory=dict[str, str])
    stored: int = 0
    # The answer: whether the lease has ended, because the job waits.
    waits: bool = False

    @property
    def may_end_lease(self) -> bool:
        """Returns whether this call has ended the lease, or may have ended the lease although no answer came."""
        return self.waits or (self.wait and self.call.outcome is Outcome.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One try to give a signal to a node of a workflow."""

    call: Call
    workflow: str
    # The name of the node.
    node: str
    payload: str
    # Whether the answer says that this signal is the first one.
    is_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One job that a consumer got, with its lease."""

    # The Dequeue call or the Consume stream by which the job came.
    call: Call
    lease: LeaseKey
    attempt: int
    received_s: float
    window_s: float
    # The org and the job that the payload names.
    payload_org: str
    payload_job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """One lease that a call names. The call is an ack, nack, kill, release or extend."""

    call: Call
    lease: LeaseKey
    # None: no answer came.
    answer: Answer | None
    # For a nack: the delay until the job is due again. For an extend: the window.
    span_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    call: Call
    job: str
    answer: Answer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """One look-up of one job by its id."""

    call: Call
    job: str
    # Whether the job was found, if the call was answered.
    found: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What all clients saw together."""

    calls: Sequence[Call] = ()
    enqueues: Sequence[Enqueue] = ()
    additions: Sequence[Addition] = ()
    signals: Sequence[Signal] = ()
    deliveries: Sequence[Delivery] = ()
    settles: Sequence[Settle] = ()
    cancels: Sequence[Cancel] = ()
    lookups: Sequence[Lookup] = ()
    # The largest difference between the wall clock and the monotonic clock, minus the smallest.
    drift_s: float = 0.0


class Recorder:
    """Writes one client's file. Passes each line to the kernel at once, so that the line survives a SIGKILL of the
    client."""

    def __init__(self, folder: Path, client: str) -> None:
        self._file: IO[str] = (folder / f"{client}{_SUFFIX}").open("a", buffering=1)
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def begin(self, verb: Verb, org: str, asked: object, *, due_s: float | None = None) -> int:
        """Records a call before it is made. Returns the call's number. `due_s`: the time at which the call was to
        begin, if that was planned."""
        number = next(self._numbers)
        due = {} if due_s is None else {"due": due_s}
        self._write(call=number, verb=verb, org=org, asked=asked, **due)
        return number

    def got(self, number: int, jobs: Sequence[Mapping[str, object]]) -> None:
        self._write(of=number, got=jobs)

    def end(self, number: int, outcome: Outcome, *, code: str = "", answered: object = None) -> None:
        self._write(of=number, outcome=outcome, code=code, answered=answered)

    def _write(self, **line: object) -> None:
        stamps = {"at": time.monotonic(), "wall": time.time()}
        self._file.write(json.dumps(stamps | line, separators=(",", ":")) + "\n")


def leased(*, lease: bytes, attempt: int, payload: bytes) -> dict[str, object]:
    """Returns a received job in the form of a history's line."""
    # Record only what identifies the job, because payloads are padded.
    org, _, rest = payload.partition(b" ")
    job, _, _ = rest.partition(b" ")
    return {"lease": lease.hex(), "attempt": attempt, "org": org.decode(), "job": job.decode()}


def asked_to_store(*, job: str, queue: str, key: str = "", delay_s: float = 0.0) -> dict[str, object]:
    """Returns a job to enqueue, in the form of a history's line."""
    return {"job": job, "queue": queue, "key": key, "delay_s": delay_s}


def asked_to_start(
    *, job: str, queue: str, workflow: str, after: Sequence[str], timeout_s: float | None = None
) -> dict[str, object]:
    """Returns a node of a new workflow, in the form of a history's line. `timeout_s`: for how long the node waits for a
    signal. None: it does not wait for one."""
    delay_s = math.inf if after or timeout_s is not None else 0.0
    of_flow = {"workflow": workflow, "after": list(after), "timeout_s": timeout_s}
    return asked_to_store(job=job, queue=queue, delay_s=delay_s) | of_flow


def asked_to_add(
    *, workflow: str, lease: bytes, nodes: Mapping[str, Sequence[str]], wait: bool = False
) -> dict[str, object]:
    """Returns new nodes of a running workflow, in the form of a history's line. `wait`: whether the job is to wait for
    these nodes."""
    return {"workflow": workflow, "lease": lease.hex(), "nodes": nodes, "wait": wait}


def asked_to_signal(*, workflow: str, node: str, payload: str) -> dict[str, object]:
    """Returns a signal, in the form of a history's line."""
    return {"workflow": workflow, "node": node, "payload": payload}


def payload_of(org: str, job: str, padding: int) -> bytes:
    return f"{org} {job} ".encode() + b"." * padding


def read(folder: Path) -> History:
    """Reads all histories of a folder."""
    calls: list[Call] = []
    enqueues: list[Enqueue] = []
    additions: list[Addition] = []
    signals: list[Signal] = []
    deliveries: list[Delivery] = []
    settles: list[Settle] = []
    cancels: list[Cancel] = []
    lookups: list[Lookup] = []
    drifts: list[float] = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        for told in _tales(path, drifts):
            call = told.call(path.stem)
            calls.append(call)
            match call.verb:
                case Verb.ENQUEUE | Verb.START:
                    enqueues += _enqueues(call, told)
                case Verb.ADD:
                    additions.append(added := _addition(call, told))
                    enqueues += _added_jobs(added)
                case Verb.SIGNAL:
                    signals.append(_signal(call, told))
                case Verb.DEQUEUE | Verb.CONSUME:
                    deliveries += _deliveries(call, told)
                case Verb.CANCEL:
                    cancels += _cancels(call, told)
                case Verb.LOOK_UP:
                    lookups += [Lookup(call=call, job=job, found=job in told.answered) for job in told.begun["asked"]]
                case Verb.RETRY | Verb.WORK:
                    pass
                case _:
                    settles += _settles(call, told)
    return History(
        calls=calls,
        enqueues=enqueues,
        additions=additions,
        signals=signals,
        deliveries=deliveries,
        settles=settles,
        cancels=cancels,
        lookups=lookups,
        drift_s=max(drifts) - min(drifts) if drifts else 0.0,
    )


@dataclass(slots=True)
class _Tale:
    """The lines of one call."""

    begun: dict[str, Any]
    got: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ended: dict[str, Any] | None = None

    @property
    def answered(self) -> list[Any]:
        return (self.ended or {}).get("answered") or []

    def call(self, client: str) -> Call:
        ended = self.ended
        return Call(
            client=client,
            verb=Verb(self.begun["verb"]),
            org=self.begun["org"],
            began_s=self.begun["at"],
            ended_s=None if ended is None else ended["at"],
            outcome=Outcome.UNKNOWN if ended is None else Outcome(ended["outcome"]),
            code="" if ended is None else ended["code"],
            planned_s=self.begun.get("due"),
        )


def _tales(path: Path, drifts: list[float]) -> Iterator[_Tale]:
    tales: dict[int, _Tale] = {}
    # Ignore the last line if it has no end: the client may have been killed while it wrote the line.
    whole, _, _ = path.read_text().rpartition("\n")
    for text in whole.splitlines():
        line = json.loads(text)
        drifts.append(line["wall"] - line["at"])
        if "call" in line:
            tales[line["call"]] = _Tale(line)
        elif "got" in line:
            tales[line["of"]].got.append(line)
        else:
            tales[line["of"]].ended = line
    yield from tales.values()


def _enqueues(call: Call, told: _Tale) -> Iterator[Enqueue]:
    for asked, answer in itertools.zip_longest(told.begun["asked"], told.answered):
        yield Enqueue(
            call=call,
            job=asked["job"],
            queue=asked["queue"],
            key=asked["key"],
            delay_s=asked["delay_s"],
            workflow=asked.get("workflow", ""),
            after=asked.get("after", ()),
            timeout_s=asked.get("timeout_s"),
            answered=None if answer is None else answer["job"],
            duplicate=answer is not None and answer["duplicate"],
        )


def _addition(call: Call, told: _Tale) -> Addition:
    asked, answered = told.begun["asked"], (told.ended or {}).get("answered") or {}
    return Addition(
        call=call,
        workflow=asked["workflow"],
        lease=_key(asked["lease"]),
        nodes=asked["nodes"],
        wait=asked["wait"],
        **answered,
    )


def _signal(call: Call, told: _Tale) -> Signal:
    answered = (told.ended or {}).get("answered") or {}
    return Signal(call=call, **told.begun["asked"], **answered)


def _added_jobs(added: Addition) -> Iterator[Enqueue]:
    """Yields an `Enqueue` for each job of an acknowledged addition, no matter which call stored the job."""
    # The answer says how many nodes were new, but not which nodes.
    all_new = added.stored == len(added.nodes)
    for job in added.jobs.values():
        yield Enqueue(call=added.call, job=job, queue="", delay_s=math.inf, answered=job, duplicate=not all_new)


def _deliveries(call: Call, told: _Tale) -> Iterator[Delivery]:
    for line in told.got:
        for job in line["got"]:
            yield Delivery(
                call=call,
                lease=_key(job["lease"]),
                attempt=job["attempt"],
                received_s=line["at"],
                window_s=told.begun["asked"]["window_s"],
                payload_org=job["org"],
                payload_job=job["job"],
            )


def _settles(call: Call, told: _Tale) -> Iterator[Settle]:
    asked = told.begun["asked"]
    for lease, answer in itertools.zip_longest(asked["leases"], told.answered):
        yield Settle(call=call, lease=_key(lease), answer=answer and Answer(answer), span_s=asked.get("span_s", 0.0))


def _cancels(call: Call, told: _Tale) -> Iterator[Cancel]:
    for job, answer in itertools.zip_longest(told.begun["asked"], told.answered):
        yield Cancel(call=call, job=job, answer=answer and Answer(answer))


def _key(lease: str) -> LeaseKey:
    _, parsed = parse_token(bytes.fromhex(lease))
    text = parsed.job_hex
    return LeaseKey("-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])), parsed.number)

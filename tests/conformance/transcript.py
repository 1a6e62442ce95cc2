"""What a client and a server sent to each other, in order. This module has no I/O and makes no verdicts.

The fake server writes a transcript on the server's side, and the reference client on the client's side. The
expectations of a scenario judge the transcripts of both sides. The server records an answer before it sends the answer.
The client records an answer after it has received the answer. So an order that follows from the contract (first the
answer, then the next message) is the same in both transcripts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc import StatusCode

from router.codec.lease_verbs import VERBS, tokens
from windrow.v1 import job_pb2, queue_pb2

Request, Response = queue_pb2.ConsumeRequest, queue_pb2.ConsumeResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One message. Times are seconds of a monotonic clock."""

    at_s: float
    message: queue_pb2.ConsumeRequest | queue_pb2.ConsumeResponse


@dataclass(slots=True, kw_only=True, eq=False)
class Stream:
    """A Consume stream, or a unary call about leases. A unary call is recorded as a stream with one message and one
    answer."""

    opened_s: float
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    events: list[Event] = field(default_factory=list[Event])
    # How many messages there were when the client closed its side; None: the client has not closed it.
    closed_after: int | None = None
    # The status with which the stream ended; None while the stream lasts.
    ended: StatusCode | None = None
    ended_s: float = 0.0
    # The delay that RetryInfo of the status asked for; None: there was no RetryInfo.
    retry_after_s: float | None = None

    @property
    def requests(self) -> list[queue_pb2.ConsumeRequest]:
        return [event.message for event in self.events if isinstance(event.message, Request)]

    @property
    def responses(self) -> list[queue_pb2.ConsumeResponse]:
        return [event.message for event in self.events if isinstance(event.message, Response)]

    @property
    def jobs(self) -> list[job_pb2.LeasedJob]:
        return [job for response in self.responses for job in response.jobs]

    @property
    def drained_after(self) -> int | None:
        """Returns how many messages there were before `draining`. Returns None if there was no `draining`."""
        said = (at for at, event in enumerate(self.events) if isinstance(event.message, Response))
        return next((at for at in said if getattr(self.events[at].message, "draining", False)), None)

    @property
    def unanswered(self) -> list[queue_pb2.ConsumeRequest]:
        """Returns the messages with leases that have no answer."""
        answered = {settled.request_id for response in self.responses for settled in response.settled}
        return [request for request in self.requests if entries(request) and request.request_id not in answered]

    @property
    def credit(self) -> int:
        """Returns how many jobs may still be sent."""
        return credit_after(self.events)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueue:
    """One call of Enqueue, and its answer."""

    at_s: float
    answered_s: float
    metadata: dict[str, str]
    ids: tuple[str, ...]
    code: StatusCode
    retry_after_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saying:
    """One lease in one message, and its answer."""

    lease: bytes
    verb: str
    result: bytes
    at_s: float
    answered_s: float
    # The number of the stream, and the place of the message in the stream. The numbers of unary calls are higher than
    # the numbers of all streams.
    stream: int
    place: int
    # OK, STALE, NOT_FOUND or CANCELLED; or "error" and the name of the error's code; or empty if there was no answer.
    answer: str
    retry_after_s: float | None


@dataclass(slots=True, kw_only=True)
class Transcript:
    org: str
    queue: str
    streams: list[Stream] = field(default_factory=list[Stream])
    # Unary calls about leases, such as Ack.
    calls: list[Stream] = field(default_factory=list[Stream])
    enqueues: list[Enqueue] = field(default_factory=list[Enqueue])
    # The client's exit code; None while the client runs.
    code: int | None = None

    @property
    def jobs(self) -> dict[bytes, job_pb2.LeasedJob]:
        """Returns the leased jobs by their leases."""
        return {job.lease: job for stream in self.streams for job in stream.jobs}

    def sayings(self, lease: bytes | None = None, verb: str = "") -> list[Saying]:
        """Returns the entries about this lease (None: all leases) with this verb (empty: all verbs)."""
        every = [said for at, stream in enumerate([*self.streams, *self.calls]) for said in _sayings(at, stream)]
        return [said for said in every if lease in (None, said.lease) and verb in ("", said.verb)]

    def acked(self, *leases: bytes) -> bool:
        """Returns whether an ack of each of these leases was answered OK."""
        return set(leases) <= {said.lease for said in self.sayings(verb="ack") if said.answer == "OK"}

    def __str__(self) -> str:
        """Describes the streams and the last entries in one line."""
        ends = [stream.ended.name if stream.ended else "open" for stream in self.streams]
        said = [f"{one.verb} {one.lease[-8:].hex()}: {one.answer or 'no answer'}" for one in self.sayings()]
        enqueues = f"; {len(self.enqueues)} Enqueue(s)" if self.enqueues else ""
        code = "" if self.code is None else f"; the client ended with code {self.code}"
        credit = f", credit {self.streams[-1].credit}" if self.streams else ""
        more = ["…"] if len(said) > 6 else []
        last = f"; {', '.join([*more, *said[-6:]])}" if said else ""
        return f"{len(ends)} stream(s) ({', '.join(ends)}{credit}), {len(self.jobs)} job(s){enqueues}{last}{code}"


def entries(request: queue_pb2.ConsumeRequest) -> list[tuple[str, bytes, bytes]]:
    """Returns the verb, the lease and the result of each entry of a message."""
    return [
        (verb.method.lower(), lease, getattr(entry, "result", b""))
        for verb in VERBS
        for entry in getattr(request, verb.stream_field)
        for lease in tokens([entry])
    ]


def credit_after(events: list[Event]) -> int:
    """Returns the credit that is left after these messages. The credit of a message that was too large does not
    count."""
    credit, of_message = 0, dict[int, int]()
    for event in events:
        match event.message:
            case Request() as request:
                credit += request.credit
                of_message[request.request_id] = request.credit
            case Response() as response:
                credit -= len(response.jobs)
                credit -= sum(of_message.get(one.request_id, 0) for one in response.settled if too_large(one))
    return credit


def too_large(settled: queue_pb2.Settled) -> bool:
    return bool(settled.error.code == code_pb2.INVALID_ARGUMENT)


def retry_after_s(status: status_pb2.Status) -> float | None:
    """Returns the delay that RetryInfo asks for. Returns None if there is no RetryInfo."""
    info = error_details_pb2.RetryInfo()
    asked = any(packed.Unpack(info) for packed in status.details)
    return info.retry_delay.ToNanoseconds() / 1e9 if asked else None


def _sayings(number: int, stream: Stream) -> list[Saying]:
    found: list[Saying] = []
    answers = dict[int, tuple[float, queue_pb2.Settled]]()
    # This loop goes backwards, because a `request_id` may be used again after its answer.
    for place, event in reversed([*enumerate(stream.events)]):
        match event.message:
            case Response() as response:
                answers.update({settled.request_id: (event.at_s, settled) for settled in response.settled})
            case Request() as request:
                answered_s, settled = answers.pop(request.request_id, (0.0, None))
                found += [
                    Saying(
                        lease=lease,
                        verb=verb,
                        result=result,
                        at_s=event.at_s,
                        answered_s=answered_s,
                        stream=number,
                        place=place,
                        answer="" if settled is None else _answer(settled, lease),
                        retry_after_s=None if settled is None else retry_after_s(settled.error),
                    )
                    for verb, lease, result in reversed(entries(request))
                ]
    return found[::-1]


def _answer(settled: queue_pb2.Settled, lease: bytes) -> str:
    if settled.HasField("error"):
        return f"error {code_pb2.Code.Name(code_pb2.Code.ValueType(settled.error.code))}"
    not_ok = {one.lease: job_pb2.JobAnswer.Name(one.answer).removeprefix("JOB_ANSWER_") for one in settled.not_ok}
    return not_ok.get(lease, "OK")

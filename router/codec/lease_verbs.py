"""The verbs by which a consumer ends or extends leases, and their entries in requests. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from google.protobuf.message import Message

from router.codec import convert
from shard.queue.settle import Nack, Report, Settlement, Snooze
from shard.vocabulary import Lease, OrgId
from windrow.v1 import job_pb2, queue_pb2


class LeaseVerb(NamedTuple):
    """One verb. Each entry of its requests is about one lease, and is a message with a `lease`, or only the lease's
    token."""

    # The method of the service.
    method: str
    response: Callable[..., Message]
    # The field with the entries, in the method's request and in a ConsumeRequest.
    request_field: str
    stream_field: str
    # Returns the call to a shard, but leaves out the logs, which `settlement` adds. Takes the org, the leases, their
    # entries and the window of an extend (microseconds).
    without_logs: Callable[[OrgId, Sequence[Lease], Sequence[Any], int], Settlement]

    def settlement(self, org: OrgId, leases: Sequence[Lease], entries: Sequence[Any], window_us: int) -> Settlement:
        """Returns the call to a shard. `window_us` is the new window of an extend (microseconds)."""
        call = self.without_logs(org, leases, entries, window_us)
        if isinstance(entries[0], bytes):
            return call
        logs = {at: convert.printable(entry.log) for at, entry in enumerate(entries) if entry.log}
        return call._replace(logs=logs) if logs else call


def _ack(org: OrgId, leases: Sequence[Lease], acks: Sequence[queue_pb2.Ack], _: int) -> Settlement:
    results = [ack.result or None for ack in acks]
    return Settlement.ack(org, leases, results if any(results) else ())


def _nack(org: OrgId, leases: Sequence[Lease], nacks: Sequence[queue_pb2.Nack], _: int) -> Settlement:
    return Settlement.nack(
        org,
        [
            Nack(
                lease=lease,
                failure=convert.failure(nack.failure) if nack.HasField("failure") else None,
                retry_after_us=convert.micros(nack.retry_after) if nack.HasField("retry_after") else None,
            )
            for lease, nack in zip(leases, nacks, strict=True)
        ],
    )


def _extend(org: OrgId, leases: Sequence[Lease], extends: Sequence[queue_pb2.Extend], window_us: int) -> Settlement:
    reports = [
        Report(
            progress=convert.progress(extend.progress) if extend.HasField("progress") else None,
            checkpoint=extend.checkpoint if extend.HasField("checkpoint") else None,
        )
        for extend in extends
    ]
    return Settlement.extend(org, leases, window_us=window_us, reports=reports)


def _release(org: OrgId, leases: Sequence[Lease], _: Sequence[bytes], _window_us: int) -> Settlement:
    return Settlement.release(org, leases)


def _snooze(org: OrgId, leases: Sequence[Lease], snoozes: Sequence[queue_pb2.Snooze], _: int) -> Settlement:
    return Settlement.snooze(
        org,
        [
            Snooze(lease, convert.micros(snooze.after), convert.printable(snooze.reason))
            for lease, snooze in zip(leases, snoozes, strict=True)
        ],
    )


ACK = LeaseVerb("Ack", queue_pb2.AckResponse, "acks", "acks", _ack)
EXTEND = LeaseVerb("Extend", queue_pb2.ExtendResponse, "extends", "extends", _extend)
# In the order of the fields of ConsumeRequest. Acks come first.
VERBS = (
    ACK,
    LeaseVerb("Nack", queue_pb2.NackResponse, "nacks", "nacks", _nack),
    EXTEND,
    LeaseVerb("Release", queue_pb2.ReleaseResponse, "leases", "releases", _release),
    LeaseVerb("Snooze", queue_pb2.SnoozeResponse, "snoozes", "snoozes", _snooze),
)
# Returns the entries of a ConsumeRequest by verb.
entries_of: Callable[[queue_pb2.ConsumeRequest], tuple[Sequence[Any], ...]] = attrgetter(
    *(verb.stream_field for verb in VERBS)
)


def tokens(entries: Sequence[Any]) -> Sequence[bytes]:
    """Returns the lease tokens of one or more entries."""
    return entries if isinstance(entries[0], bytes) else [entry.lease for entry in entries]


def token_path(entries: Sequence[Any], field: str) -> str:
    """Returns the path of a token in a request, with {} for its position."""
    return f"{field}[{{}}]" if isinstance(entries[0], bytes) else f"{field}[{{}}].lease"


def not_ok(
    entries: Iterable[Sequence[Any]], answers: Sequence[job_pb2.JobAnswer.ValueType]
) -> list[queue_pb2.LeaseAnswer]:
    """Returns the leases whose answer is not OK. `answers` has one answer for each entry, in the order of the lists."""
    if answers.count(job_pb2.JOB_ANSWER_OK) == len(answers):
        return []
    leases = chain.from_iterable(tokens(of_verb) for of_verb in entries if of_verb)
    return [
        queue_pb2.LeaseAnswer(lease=lease, answer=answer)
        for lease, answer in zip(leases, answers, strict=True)
        if answer != job_pb2.JOB_ANSWER_OK
    ]


def parse(entries: Sequence[Any], field: str) -> list[tuple[int, Lease]]:
    """Parses the tokens of one or more entries into shard tags and leases. Raises InvalidRequest with their paths."""
    return convert.leases(tokens(entries), field=token_path(entries, field))

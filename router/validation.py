"""Whether a request keeps the contract. The rules stand in proto/windrow/v1; protovalidate applies them.

It costs 3 µs for each job of an Enqueue, which is most of what the router does with one. So the plainest batches
(id, queue, kind, payload, priority) are recognised by a handful of checks on whole columns; these accept less than
the rules do, never more, and what they do not accept the rules decide and explain.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import cast

import protovalidate
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from protovalidate import FieldPathElementPb as FieldPathElement

from router.convert import leases, policy
from router.status import InvalidRequest, Violation
from shard.lease import TOKEN_BYTES, TOKEN_VERSION
from shard.retry import Exponential
from shard.vocabulary import NewJobs, OrgId, QueueName
from windrow.v1 import admin_pb2, job_pb2, queue_pb2

_JOBS_MAX = 1000
_CREDIT_MAX = 10_000
_RESULT_BYTES_MAX = 65_536
# A Dequeue of more bytes is looked into each time.
_KNOWN_BYTES_MAX = 1_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", re.ASCII)
_ORG = re.compile(r"[!-~]{1,128}", re.ASCII)
_UUID7_CHARS = 36
_UUID7S = re.compile(r"(?:[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(?:,|\Z))+")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
_TRACESTATE = re.compile(r"[ -~]{0,512}", re.ASCII)
_TEN_YEARS_S = 3650 * 86400
# The years 1 to 9999, and ±10,000 years: what the two types' own definitions allow.
_TIMESTAMP_S = range(-62_135_596_800, 253_402_300_800)
_DURATION_S_MAX = 315_576_000_000
_KEY_CHARS_MAX = 64
_SHOWN_CHARS_MAX = 128
# What the patterns of the contract mean, by what they have in them.
_PATTERNS = {
    "[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}": "must be 1 to 128 of A–Z a–z 0–9 . _ : / -, the first a letter or digit",
    "-7[0-9a-f]{3}-": "must be a UUID of version 7 in lower case, such as 019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55",
    "[0-9a-f]{2}-[0-9a-f]{32}": "must be a W3C traceparent",
    "[\\x20-\\x7e]": "must have printable ASCII characters only",
    "\\x1f": "must not have control characters",
    "\\x00": "must not have NUL characters",
}
_RANGE = re.compile(r"^must be greater than or equal to (\S+) and less than or equal to (\S+)$")
_SPAN_RANGE = re.compile(r"^must be (\S+)s to (\S+)s$")
_ONE_OF = re.compile(r"^must be in list \[(.*)\]$")
# By rule, where the words of protovalidate say less, with {rule} for the rule's value.
_RULES = {
    "required": "must be set",
    "repeated.min_items": "must have at least {rule:,} items",
    "repeated.max_items": "must have at most {rule:,} items",
    "repeated.unique": "must name each only once",
    "map.max_pairs": "must have at most {rule:,} entries",
}
# By the length of a text, of bytes or of a message: how many bytes the field that holds it takes, tag included. An
# empty one is left out. Longer ones are for the rules.
_FIELD = [0, *(1 + 1 + n for n in range(1, 1 << 7)), *(1 + 2 + n for n in range(1 << 7, 1 << 14))]
_ID_BYTES = _FIELD[_UUID7_CHARS]


def check(request: Message) -> None:
    """Applies the contract's rules. Raises InvalidRequest with every violation."""
    violations = violations_of(request)
    if violations:
        raise InvalidRequest(violations)


def violations_of(request: Message) -> list[Violation]:
    """Every violation of the contract's rules, by field path."""
    violations = [
        Violation(_path(found.proto.field.elements if found.proto.field else ()), _in_words(found))
        for found in protovalidate.collect_violations(request)
    ]
    told = {violation.field for violation in violations}
    violations += [malformed for malformed in _malformed_times(request, "") if malformed.field not in told]
    told = {violation.field for violation in violations}
    violations += _caps_below_the_first_delay(request, told)
    return violations


def enqueue_violations(request: queue_pb2.EnqueueRequest) -> list[Violation]:
    """The violations of an Enqueue: the contract's rules, and what depends on the time.

    Requests that plain_jobs takes have none."""
    violations = violations_of(request)
    now_s = time.time()
    for at, job in enumerate(request.jobs):
        if job.HasField("run_at"):
            violations += _too_far(f"jobs[{at}].run_at", job.run_at, latest_s=now_s + _TEN_YEARS_S)
        if job.HasField("expires_at"):
            violations += _too_far(f"jobs[{at}].expires_at", job.expires_at, latest_s=now_s + 2 * _TEN_YEARS_S)
        if job.HasField("dedup_window") and not job.dedup_key:
            violations.append(Violation(f"jobs[{at}].dedup_window", "is set, but dedup_key is not"))
    return violations


def unfit_new_ids(jobs: Sequence[admin_pb2.RestoreJob]) -> list[Violation]:
    """Ids that jobs to be restored cannot have: their own, and one that another has."""
    taken: set[str] = set()
    violations: list[Violation] = []
    for at, job in enumerate(jobs):
        if job.new_id and job.new_id == job.id:
            violations.append(Violation(f"jobs[{at}].new_id", "must be another one than id"))
        elif job.new_id in taken:
            violations.append(Violation(f"jobs[{at}].new_id", f"is named twice: {job.new_id!r}"))
        if job.new_id:
            taken.add(job.new_id)
    return violations


def check_consume(request: queue_pb2.ConsumeRequest) -> None:
    """Applies the contract's rules, lease tokens included: a message that breaks one has none of its parts done. What
    streams say most, acks and credit, is judged here without the general rules. Raises InvalidRequest."""
    acks, nacks = request.acks, request.nacks
    if (
        nacks
        or request.extends
        or request.releases
        or not 0 <= request.credit <= _CREDIT_MAX
        or (acks and not _fit(acks))
    ):
        check(request)
        leases([nack.lease for nack in nacks], field="nacks[{}].lease")
        leases(request.extends, field="extends[{}]")
        leases(request.releases, field="releases[{}]")
    if any(len(ack.lease) != TOKEN_BYTES or ack.lease[0] != TOKEN_VERSION for ack in acks):
        leases([ack.lease for ack in acks], field="acks[{}].lease")


def check_ack(request: queue_pb2.AckRequest) -> None:
    """Same as `check`, at a tenth of its cost for what is plainly right."""
    acks = request.acks
    if not (_ORG.fullmatch(request.org) and acks and _fit(acks) and {len(ack.lease) for ack in acks} == {TOKEN_BYTES}):
        check(request)


def _fit(acks: Sequence[queue_pb2.Ack]) -> bool:
    """Whether these, of which there is one at least, are not too many, and none has too large a result."""
    return len(acks) <= _JOBS_MAX and max([len(ack.result) for ack in acks]) <= _RESULT_BYTES_MAX


def check_dequeue(request: queue_pb2.DequeueRequest) -> None:
    """Same as `check`. Consumers ask in the same words again and again: those are known to be right."""
    # To ask for its size would serialize it too.
    words = request.SerializeToString()
    if len(words) > _KNOWN_BYTES_MAX:
        check(request)
    else:
        _check_words(words)


@functools.lru_cache(maxsize=5000)
def _check_words(words: bytes) -> None:
    check(queue_pb2.DequeueRequest.FromString(words))


def plain_jobs(request: queue_pb2.EnqueueRequest) -> NewJobs | None:
    """The columns of a request whose jobs have id, queue, kind, payload, priority and trace alone, and keep the rules;
    None for any other."""
    org, jobs = request.org, list(request.jobs)
    count = len(jobs)
    if not _ORG.fullmatch(org) or not 1 <= count <= _JOBS_MAX:
        return None
    ids = [job.id for job in jobs]
    queues = [job.queue for job in jobs]
    kinds = [job.kind for job in jobs]
    payloads = [job.payload for job in jobs]
    priorities = [job.priority for job in jobs]
    joined = ",".join(ids)
    if (
        not all(map(_NAME.fullmatch, {*queues, *kinds}))
        # By the length too: else "a,b" in one job's id would pass for the ids of two.
        or len(joined) != (_UUID7_CHARS + 1) * count - 1
        or _UUID7S.fullmatch(joined) is None
        or min(priorities) < 0
        or max(priorities) > 9
    ):
        return None
    try:
        in_jobs = [_FIELD[len(payload)] for payload in payloads]
        # As long as these fields make it, and so without any other.
        if len(set(queues)) == len(set(kinds)) == 1:
            names = _FIELD[len(queues[0])] + _FIELD[len(kinds[0])] + _ID_BYTES
            in_jobs = [names + size for size in in_jobs]
        else:
            in_jobs = [
                _FIELD[len(queue)] + _FIELD[len(kind)] + _ID_BYTES + size
                for queue, kind, size in zip(queues, kinds, in_jobs, strict=True)
            ]
        if any(priorities):
            in_jobs = [size + 2 if priority else size for size, priority in zip(in_jobs, priorities, strict=True)]
        beside_jobs = _FIELD[len(org)] + (2 if request.independent else 0)
        traces: dict[int, str] = {}
        if beside_jobs + sum([_FIELD[size] for size in in_jobs]) != request.ByteSize():
            for at, job in enumerate(jobs):
                if job.HasField("trace"):
                    trace = job.trace
                    if _TRACEPARENT.fullmatch(trace.traceparent) is None or not _TRACESTATE.fullmatch(trace.tracestate):
                        return None
                    in_jobs[at] += _FIELD[trace.ByteSize()]
                    traces[at] = f"{trace.traceparent} {trace.tracestate}".rstrip()
            if beside_jobs + sum([_FIELD[size] for size in in_jobs]) != request.ByteSize():
                return None
    except IndexError:
        return None
    columns = NewJobs(
        org=OrgId(org),
        ids=ids,
        queues=cast("list[QueueName]", queues),
        kinds=kinds,
        payloads=payloads,
        traces=traces,
    )
    if any(priorities):
        columns.priorities = {at: priority for at, priority in enumerate(priorities) if priority}
    return columns


def _too_far(field: str, stamp: Timestamp, *, latest_s: float) -> Iterable[Violation]:
    if latest_s < stamp.seconds < _TIMESTAMP_S.stop:
        yield Violation(field, "must be at most 3,650 days ahead" if field.endswith("run_at") else "is too far ahead")


def _caps_below_the_first_delay(request: Message, told: set[str]) -> Iterator[Violation]:
    """Retry policies of which no delay would be as they say. Not a rule in the .proto: CEL raises where a duration is
    out of range, and the rules of the fields have `told` of that."""
    policies: Iterable[tuple[str, job_pb2.RetryPolicy]] = ()
    match request:
        case queue_pb2.EnqueueRequest():
            policies = (
                (f"jobs[{at}].retry", job.retry) for at, job in enumerate(request.jobs) if job.HasField("retry")
            )
        case admin_pb2.CreateQueueRequest() | admin_pb2.AlterQueueRequest():
            policies = (("config.retry", request.config.retry),)
        case _:
            pass
    for path, message in policies:
        first, cap = f"{path}.exponential.initial_delay", f"{path}.exponential.max_delay"
        match policy(message):
            case Exponential(initial_us=first_us, max_us=cap_us) if cap_us < first_us and not {first, cap} & told:
                yield Violation(
                    cap, f"must not be below initial_delay, and {cap_us / 1e6:g} s is below {first_us / 1e6:g} s"
                )
            case _:
                pass


def _malformed_times(message: Message, path: str) -> Iterator[Violation]:
    """Timestamps and durations that break their own types' rules: protovalidate takes 2,000,000,000 ns for 2 s, and
    looks at no timestamp that has no rule."""
    for name, is_repeated in _names_of_times(message.DESCRIPTOR):
        if is_repeated:
            for at, one in enumerate(getattr(message, name)):
                yield from _malformed_times(one, f"{path}{name}[{at}].")
        elif message.HasField(name):
            match getattr(message, name):
                case Timestamp() as stamp:
                    if stamp.seconds not in _TIMESTAMP_S or not 0 <= stamp.nanos <= 999_999_999:
                        yield Violation(path + name, "is not a valid timestamp")
                case Duration() as span:
                    if (
                        abs(span.seconds) > _DURATION_S_MAX
                        or abs(span.nanos) > 999_999_999
                        or span.seconds * span.nanos < 0
                    ):
                        yield Violation(path + name, "is not a valid duration")
                case inner:
                    yield from _malformed_times(inner, f"{path}{name}.")


@functools.cache
def _names_of_times(descriptor: Descriptor) -> tuple[tuple[str, bool], ...]:
    """Same, as names; and whether each is repeated. Descriptors make these anew each time that they are asked."""
    return tuple((field.name, field.is_repeated) for field in _leading_to_times(descriptor))


@functools.cache
def _leading_to_times(descriptor: Descriptor) -> tuple[FieldDescriptor, ...]:
    """The fields of a message in which a timestamp or duration may be found. No message of ours is within itself."""
    return tuple(
        field
        for field in descriptor.fields
        if field.message_type is not None
        and (
            field.message_type.full_name in ("google.protobuf.Timestamp", "google.protobuf.Duration")
            or _leading_to_times(field.message_type)
        )
    )


def _in_words(found: protovalidate.Violation) -> str:
    """What is wrong, without regular expressions, and with the value where it is short."""
    message, rule = found.proto.message, found.proto.rule_id
    value: object = found.field_value
    if rule == "string.pattern":
        message = next((words for part, words in _PATTERNS.items() if part in str(found.rule_value)), message)
    elif rule in _RULES:
        message = _RULES[rule].format(rule=found.rule_value)
    message = _ONE_OF.sub(r"must be one of \1", _RANGE.sub(r"must be \1 to \2", message))
    match value:
        case "" | b"":
            return "must not be empty"
        case str() if rule == "string.max_bytes":
            return f"{message}, not {len(value.encode())}"
        case str() if len(value) <= _SHOWN_CHARS_MAX:
            return f"{message}, not {value!r}"
        case str() if "1 to 128" in message:
            return f"{message}, not {len(value):,} characters"
        case int() | float():
            return f"{message}, not {value}"
        case bytes():
            return f"{message}, not {len(value)}"
        case Duration():
            message = _SPAN_RANGE.sub(
                lambda span: f"must be {_span(float(span[1]))} to {_span(float(span[2]))}", message
            )
            return f"{message}, not {_span(value.seconds + value.nanos / 1e9)}"
        case Sized() if rule.startswith(("repeated.", "map.")):
            return _of_items(message, rule, value)
        case _:
            return message


def _of_items(message: str, rule: str, value: Sized) -> str:
    if not value:
        return "must not be empty"
    if rule != "repeated.unique":
        return f"{message}, not {len(value):,}"
    counts = Counter(cast("Iterable[str]", value))
    return f"{message}, and {max(counts, key=lambda one: counts[one])!r} is named twice"


def _span(seconds: float) -> str:
    """In the largest unit that tells it in a whole number; what is below 1 s, in ms."""
    for unit_s, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds and seconds % unit_s == 0:
            return f"{seconds / unit_s:,.0f} {'day' if seconds == 86_400 else unit}"
    return f"{seconds * 1000:.12g} ms" if 0 < abs(seconds) < 1 else f"{seconds:.15g} s"


def _path(elements: Iterable[FieldPathElement]) -> str:
    """A field path in the usual notation: jobs[3].attributes["a"]."""
    path = ""
    for element in elements:
        path += f".{element.field_name}" if path else element.field_name
        subscript = element.subscript
        if subscript is not None:
            key = subscript.value
            if isinstance(key, str) and len(key) > _KEY_CHARS_MAX:
                # A key may be the very thing that is too long.
                key = key[:_KEY_CHARS_MAX] + "…"
            path += f"[{json.dumps(key, ensure_ascii=False)}]"
    return path

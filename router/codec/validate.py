"""Checks requests against the rules in proto/windrow/v1, with protovalidate. The rules also say how large each field
may be.

protovalidate takes 3 µs for each job of an Enqueue, which would be most of the router's work for that call. So a few
checks on whole columns recognise the simplest batches, with only id, queue, kind, payload, priority, group and trace.
These checks accept less than the rules, never more. Every request that they do not accept goes to protovalidate, which
decides and explains.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, cast

import protovalidate
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from protovalidate import FieldPathElementPb as FieldPathElement

from router.codec.convert import ALL_FIELDS, policy
from router.codec.lease_verbs import EXTEND, VERBS, entries_of, parse, token_path, tokens
from router.codec.status import InvalidRequest, Violation
from shard.lease_token import TOKEN_BYTES, TOKEN_VERSION
from shard.retry_policy import Exponential
from shard.vocabulary import NewJobs, OrgId, QueueName
from windrow.rules import Rule, limit
from windrow.v1 import admin_pb2, job_pb2, queue_pb2, schedules_pb2, workflows_pb2

_JOBS_MAX = 1000
_CREDIT_MAX = 10_000
_RESULT_BYTES_MAX = 65_536
# A field mask may have at most this many paths.
_PATHS_MAX = 100
# If a Dequeue is larger than this, the result of its check is not cached.
_CACHED_BYTES_MAX = 1_000
# The names of queues and kinds.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", re.ASCII)
_ORG = re.compile(r"[!-~]{1,128}", re.ASCII)
_UUID7_CHARS = 36
_UUID7S = re.compile(r"(?:[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(?:,|\Z))+")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
_TRACESTATE = re.compile(r"[ -~]{0,512}", re.ASCII)
_DAY_S = 86_400
# How many days ahead a timestamp may be, by its message and field. A timestamp that this table does not name may be any
# number of days ahead.
_DAYS_AHEAD_MAX = {
    (job_pb2.NewJob.DESCRIPTOR.full_name, "run_at"): 3650,
    (job_pb2.NewJob.DESCRIPTOR.full_name, "expires_at"): 7300,
    (queue_pb2.AlterJobsRequest.DESCRIPTOR.full_name, "run_at"): 3650,
}
# The years 1 to 9999, and ±10,000 years: what the definitions of Timestamp and Duration allow.
_TIMESTAMP_S = range(-62_135_596_800, 253_402_300_800)
_DURATION_S_MAX = 315_576_000_000
_KEY_CHARS_MAX = 64
_GROUP_BYTES_MAX = limit(job_pb2.JobTemplate, "group", Rule.STRING_MAX_BYTES)
_SHOWN_CHARS_MAX = 128
# At most this many violations of a request are described with their values. Reading a value takes 0.05 ms, and a
# request may break thousands of rules.
_DESCRIBED_MAX = 100
# If a request has more than _REQUEST_ITEMS_MAX items in all its lists and maps together, the items of its lists are
# checked one by one. If an item itself has more than _ITEM_ITEMS_MAX items, the search in this item ends with the first
# violation: each violation takes 0.02 to 0.1 ms, and the router process serves nobody else meanwhile.
_REQUEST_ITEMS_MAX = 500
_ITEM_ITEMS_MAX = 100
# Descriptions of the contract's patterns. A pattern is described by the first entry whose key it contains.
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
# Descriptions that replace less clear ones of protovalidate, by rule; {rule} stands for the rule's value.
_RULES = {
    "enum.defined_only": "must be a value that the enum has",
    "repeated.min_items": "must have at least {rule:,} items",
    "repeated.max_items": "must have at most {rule:,} items",
    "repeated.unique": "must name each only once",
    "map.max_pairs": "must have at most {rule:,} entries",
}
# The fields in which 0 means the default. The descriptions of their ranges begin with 1.
_DEFAULT_IF_ZERO = {"priority", "max_attempts"}
# _FIELD[n] is the encoded size, with the tag, of a field whose text, bytes or message has n bytes. An empty field takes
# nothing. If n is beyond the list, reading _FIELD[n] raises an IndexError. The caller catches this error, and
# protovalidate checks the request instead.
_FIELD = [0, *(1 + 1 + n for n in range(1, 1 << 7)), *(1 + 2 + n for n in range(1 << 7, 1 << 14))]
_ID_BYTES = _FIELD[_UUID7_CHARS]


def check(request: Message) -> None:
    """Checks a request against the contract's rules. Raises InvalidRequest with every violation."""
    violations = violations_of(request)
    if violations:
        raise InvalidRequest(violations)


def violations_of(request: Message, *, items_max: int = _JOBS_MAX) -> list[Violation]:
    """Returns every violation of the contract's rules. For a large request, returns only some violations, but at least
    one for each message in a list that breaks a rule. If a list has more than `items_max` items, returns only the
    violation that the list is too long: whoever sends such a list must not keep the router busy with its items."""
    too_long = [
        Violation(field.name, _RULES["repeated.max_items"].format(rule=items_max) + f", not {len(value):,}")
        for field, value in request.ListFields()
        if field.is_repeated and len(value) > items_max
    ]
    if too_long:
        return too_long
    violations = [
        Violation(
            (prefix + _path(found.proto.field.elements if found.proto.field else ())).rstrip("."),
            _in_words(found) if number < _DESCRIBED_MAX else found.proto.message,
        )
        for number, (prefix, found) in enumerate(_collected(request))
    ]
    reported = {violation.field for violation in violations}
    violations += [unfit for unfit in _unfit_times(request, "") if unfit.field not in reported]
    reported = {violation.field for violation in violations}
    violations += _caps_below_the_first_delay(request, reported)
    if isinstance(request, queue_pb2.EnqueueRequest):
        violations += [
            Violation(f"jobs[{at}].dedup.window", "must not be set if the key counts while its job is live")
            for at, job in enumerate(request.jobs)
            if job.dedup.while_live and job.dedup.HasField("window")
        ]
    if isinstance(request, queue_pb2.NackRequest | queue_pb2.ConsumeRequest):
        violations += [
            Violation(f"nacks[{at}].retry_after", "must not be set if the failure is permanent")
            for at, nack in enumerate(request.nacks)
            if nack.failure.permanent and nack.HasField("retry_after")
        ]
    return violations


def _collected(request: Message) -> Iterator[tuple[str, protovalidate.Violation]]:
    """Yields violations of the contract's rules, each with the path of the item that was searched."""
    if not (first := protovalidate.collect_violations(request, fail_fast=True)):
        return
    if _count_items(request, _REQUEST_ITEMS_MAX) <= _REQUEST_ITEMS_MAX:
        yield from (("", found) for found in protovalidate.collect_violations(request))
        return
    # The items of the request's lists are checked below, one by one. In `rest`, one empty item stands for all items of
    # a list.
    lists = dict(_lists_of(request))
    rest = type(request)(**{field.name: value for field, value in request.ListFields() if field.name not in lists})
    for name in lists:
        getattr(rest, name).add()
    of_items = tuple(f"{name}[" for name in lists)
    only_first = _count_items(rest, _REQUEST_ITEMS_MAX) > _REQUEST_ITEMS_MAX
    count = 0
    for found in protovalidate.collect_violations(rest, fail_fast=only_first):
        if not (found.proto.field and _path(found.proto.field.elements).startswith(of_items)):
            yield "", found
            count += 1
    for name, items in lists.items():
        for at, item in enumerate(items):
            only_first = count >= _DESCRIBED_MAX or _count_items(item, _ITEM_ITEMS_MAX) > _ITEM_ITEMS_MAX
            for found in protovalidate.collect_violations(item, fail_fast=only_first):
                yield f"{name}[{at}].", found
                count += 1
    if not count:
        yield "", first[0]


def _lists_of(message: Message) -> list[tuple[str, Any]]:
    """Returns the lists of messages that a message has, by name."""
    return [
        (field.name, value)
        for field, value in message.ListFields()
        if field.is_repeated and field.message_type is not None and not isinstance(value, Mapping)
    ]


def _count_items(message: Message, at_most: int) -> int:
    """Counts the items of all lists and maps of a message, at any depth. Stops counting above `at_most`."""
    count = 0
    for field, value in message.ListFields():
        if field.is_repeated:
            count += len(value)
        elif field.message_type is not None:
            count += _count_items(value, at_most)
        if count > at_most:
            return count
    for _, items in _lists_of(message):
        for item in items:
            count += _count_items(item, at_most)
            if count > at_most:
                return count
    return count


def check_alter(request: queue_pb2.AlterJobsRequest) -> None:
    """Checks an AlterJobs as `check` does, and that it changes something. Raises InvalidRequest."""
    violations = violations_of(request)
    if request.WhichOneof("when") is None and not request.priority and not request.HasField("attributes"):
        violations.append(Violation("priority", "must be set, unless run_at, delay or attributes is"))
    if violations:
        raise InvalidRequest(violations)


def check_list_jobs(request: admin_pb2.ListJobsRequest) -> None:
    """Checks a ListJobs as `check` does, and that it names its states in only one of the two fields. Raises
    InvalidRequest."""
    violations = violations_of(request)
    if request.states and request.HasField("state"):
        violations.append(Violation("states", "must be empty if state is set"))
    if violations:
        raise InvalidRequest(violations)


def unfit_new_ids(jobs: Sequence[admin_pb2.RestoreJob]) -> list[Violation]:
    """Returns a violation for each new id that equals the old id of its job, or the new id of another job of the
    request."""
    seen: set[str] = set()
    violations: list[Violation] = []
    for at, job in enumerate(jobs):
        if job.new_id and job.new_id == job.id:
            violations.append(Violation(f"jobs[{at}].new_id", "must be another one than id"))
        elif job.new_id in seen:
            violations.append(Violation(f"jobs[{at}].new_id", f"is named twice: {job.new_id!r}"))
        if job.new_id:
            seen.add(job.new_id)
    return violations


def check_update_queue(request: admin_pb2.UpdateQueueRequest) -> None:
    """Checks an UpdateQueue as `check` does, and the paths of its mask. Raises InvalidRequest."""
    violations = violations_of(request)
    known = [field.name for field in admin_pb2.QueueConfig.DESCRIPTOR.fields]
    for at, path in enumerate(request.update_mask.paths[:_PATHS_MAX]):
        if path not in known and path != ALL_FIELDS:
            names = ", ".join(known)
            violations.append(Violation(f"update_mask.paths[{at}]", f"must be one of {names} or *, not {path!r}"))
    if len(request.update_mask.paths) > _PATHS_MAX:
        violations.append(Violation("update_mask.paths", f"must have at most {_PATHS_MAX} items"))
    if violations:
        raise InvalidRequest(violations)


def check_consume(request: queue_pb2.ConsumeRequest) -> None:
    """Checks a message of a stream, including its lease tokens, before any part of it is carried out. Removes the
    extends of leases that the message also settles. The most frequent messages, with only acks and credit, are checked
    here without protovalidate. Raises InvalidRequest."""
    entries = entries_of(request)
    acks, *others = entries
    if (
        any(others)
        or not 0 <= request.credit <= _CREDIT_MAX
        or (acks and not _fit(acks))
        or request.HasField("visibility_window")
    ):
        check(request)
        for verb, of_verb in zip(VERBS[1:], others, strict=True):
            if of_verb:
                parse(of_verb, verb.stream_field)
    settled = [ack.lease for ack in acks]
    if any(len(lease) != TOKEN_BYTES or lease[0] != TOKEN_VERSION for lease in settled):
        parse(acks, "acks")
    for verb, of_verb in zip(VERBS[1:], others, strict=True):
        if of_verb and verb is not EXTEND:
            settled += tokens(of_verb)
    if not request.request_id and (settled or request.extends):
        raise InvalidRequest([Violation("request_id", "must be set in a message that settles or extends leases")])
    once = set(settled)
    if len(once) < len(settled):
        raise _settled_twice(entries)
    if once and request.extends:
        # A consumer that collects entries for its next message may extend a job, and finish it before the message is
        # sent.
        needed = [extend for extend in request.extends if extend.lease not in once]
        del request.extends[:]
        request.extends.extend(needed)


def _settled_twice(entries: Iterable[Sequence[Any]]) -> InvalidRequest:
    """Returns the error for a message in which two or more entries settle the same lease. `entries`: the entries of
    each verb."""
    seen: dict[bytes, str] = {}
    violations: list[Violation] = []
    for verb, of_verb in zip(VERBS, entries, strict=False):
        for at, lease in enumerate(tokens(of_verb) if of_verb and verb is not EXTEND else ()):
            here = token_path(of_verb, verb.stream_field).format(at)
            first = seen.setdefault(lease, here)
            if first != here:
                violations.append(Violation(here, f"names the same lease as {first}"))
    return InvalidRequest(violations)


def check_ack(request: queue_pb2.AckRequest) -> None:
    """Checks an Ack as `check` does. Recognises most valid requests at a tenth of the cost of `check`."""
    acks = request.acks
    if not (_ORG.fullmatch(request.org) and acks and _fit(acks) and {len(ack.lease) for ack in acks} == {TOKEN_BYTES}):
        check(request)


def _fit(acks: Sequence[queue_pb2.Ack]) -> bool:
    """Returns whether these acks (at least one) need no `check`. They need none if their number and the size of each
    result are allowed, and if no ack has a log. Acks with a log always need `check`, because only `check` knows what
    logs may contain."""
    return (
        len(acks) <= _JOBS_MAX
        and max([len(ack.result) for ack in acks]) <= _RESULT_BYTES_MAX
        and not any(ack.log for ack in acks)
    )


def check_dequeue(request: queue_pb2.DequeueRequest) -> None:
    """Checks a Dequeue as `check` does, and that it names no lease twice. A consumer sends the same request again and
    again, with different acks. So valid requests are cached without their acks."""
    acks = request.acks
    if acks:
        # The tokens need no check here: the router parses the leases of every request.
        if not _fit(acks):
            check(request)
        leases = [ack.lease for ack in acks]
        if len(set(leases)) < len(leases):
            raise _settled_twice([acks])
        without = queue_pb2.DequeueRequest()
        without.CopyFrom(request)
        without.ClearField("acks")
        request = without
    # Encode the request without asking for its size first, because ByteSize() would cost as much as the encoding.
    encoded = request.SerializeToString()
    if len(encoded) > _CACHED_BYTES_MAX:
        check(request)
    else:
        _check_encoded(encoded)


@functools.lru_cache(maxsize=5000)
def _check_encoded(encoded: bytes) -> None:
    check(queue_pb2.DequeueRequest.FromString(encoded))


def plain_jobs(request: queue_pb2.EnqueueRequest) -> NewJobs | None:
    """Returns the columns of a valid request whose jobs have only id, queue, kind, payload, priority, group and trace.
    Returns None for every other request."""
    org, count = request.org, len(request.jobs)
    if not _ORG.fullmatch(org) or not 1 <= count <= _JOBS_MAX:
        return None
    jobs = list(request.jobs)
    ids = [job.id for job in jobs]
    templates = [job.template for job in jobs]
    queues = [template.queue for template in templates]
    kinds = [template.kind for template in templates]
    payloads = [template.payload for template in templates]
    priorities = [template.priority for template in templates]
    joined = ",".join(ids)
    if (
        not all(map(NAME.fullmatch, {*queues, *kinds}))
        # Without the length check, "a,b" in one job's id would look like the ids of two jobs.
        or len(joined) != (_UUID7_CHARS + 1) * count - 1
        or _UUID7S.fullmatch(joined) is None
        or min(priorities) < 0
        or max(priorities) > 9
    ):
        return None
    try:
        in_templates = [_FIELD[len(payload)] for payload in payloads]
        # Add up the encoded sizes of these fields. If the sum is the size of the request, it has no other fields.
        if len(set(queues)) == len(set(kinds)) == 1:
            names = _FIELD[len(queues[0])] + _FIELD[len(kinds[0])]
            in_templates = [names + size for size in in_templates]
        else:
            in_templates = [
                _FIELD[len(queue)] + _FIELD[len(kind)] + size
                for queue, kind, size in zip(queues, kinds, in_templates, strict=True)
            ]
        if any(priorities):
            in_templates = [
                size + 2 if priority else size for size, priority in zip(in_templates, priorities, strict=True)
            ]
        in_jobs = [_ID_BYTES + _FIELD[size] for size in in_templates]
        beside_jobs = _FIELD[len(org)] + (2 if request.independent else 0)
        groups: dict[int, str] = {}
        traces: dict[int, str] = {}
        if beside_jobs + sum([_FIELD[size] for size in in_jobs]) != request.ByteSize():
            for at, template in enumerate(templates):
                if group := template.group:
                    size = len(group.encode())
                    if size > _GROUP_BYTES_MAX or "\0" in group:
                        return None
                    in_jobs[at] = _ID_BYTES + _FIELD[in_templates[at] + _FIELD[size]]
                    groups[at] = group
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
        groups=groups,
        traces=traces,
    )
    if any(priorities):
        columns.priorities = {at: priority for at, priority in enumerate(priorities) if priority}
    return columns


def _caps_below_the_first_delay(request: Message, reported: set[str]) -> Iterator[Violation]:
    """Yields a violation for each retry policy whose max_delay is below its initial_delay. This is not a CEL rule in
    the .proto, because CEL raises an error for a duration out of range. Fields in `reported` have a violation
    already."""
    policies: Iterable[tuple[str, job_pb2.RetryPolicy]] = ()
    match request:
        case queue_pb2.EnqueueRequest():
            policies = (
                (f"jobs[{at}].template.retry", job.template.retry)
                for at, job in enumerate(request.jobs)
                if job.template.HasField("retry")
            )
        case workflows_pb2.StartWorkflowRequest() | workflows_pb2.AddNodesRequest():
            policies = (
                (f"nodes[{at}].job.template.retry", node.job.template.retry)
                for at, node in enumerate(request.nodes)
                if node.job.template.HasField("retry")
            )
        case admin_pb2.CreateQueueRequest() | admin_pb2.UpdateQueueRequest():
            policies = (("config.retry", request.config.retry),)
        case schedules_pb2.CreateScheduleRequest() | schedules_pb2.UpdateScheduleRequest():
            policies = (("job.retry", request.job.retry),) if request.job.HasField("retry") else ()
        case _:
            pass
    for path, message in policies:
        first, cap = f"{path}.exponential.initial_delay", f"{path}.exponential.max_delay"
        match policy(message):
            case Exponential(initial_us=first_us, max_us=cap_us) if cap_us < first_us and not {first, cap} & reported:
                yield Violation(
                    cap, f"must not be below initial_delay, and {cap_us / 1e6:g} s is below {first_us / 1e6:g} s"
                )
            case _:
                pass


def _unfit_times(message: Message, path: str) -> Iterator[Violation]:
    """Yields a violation for each timestamp or duration that breaks its type's definition, and for each timestamp that
    is too far ahead. protovalidate does not find these: it accepts 2,000,000,000 ns as 2 s, and does not look at
    timestamps without a rule."""
    for name, is_repeated, days_max in _names_of_times(message.DESCRIPTOR):
        if is_repeated:
            for at, item in enumerate(getattr(message, name)):
                yield from _unfit_times(item, f"{path}{name}[{at}].")
        elif message.HasField(name):
            match getattr(message, name):
                case Timestamp() as stamp:
                    if stamp.seconds not in _TIMESTAMP_S or not 0 <= stamp.nanos <= 999_999_999:
                        yield Violation(path + name, "is not a valid timestamp")
                    elif days_max is not None and stamp.seconds > time.time() + days_max * _DAY_S:
                        yield Violation(path + name, f"must be at most {days_max:,} days ahead")
                case Duration() as span:
                    if (
                        abs(span.seconds) > _DURATION_S_MAX
                        or abs(span.nanos) > 999_999_999
                        or span.seconds * span.nanos < 0
                    ):
                        yield Violation(path + name, "is not a valid duration")
                case inner:
                    yield from _unfit_times(inner, f"{path}{name}.")


@functools.cache
def _names_of_times(descriptor: Descriptor) -> tuple[tuple[str, bool, int | None], ...]:
    """Returns the names of the fields that may contain times, whether each field is repeated, and how many days ahead
    it may be. The result is cached, because a descriptor makes a new Python object on every access to a name or to
    is_repeated."""
    return tuple(
        (field.name, field.is_repeated, _DAYS_AHEAD_MAX.get((descriptor.full_name, field.name)))
        for field in _leading_to_times(descriptor)
    )


@functools.cache
def _leading_to_times(descriptor: Descriptor) -> tuple[FieldDescriptor, ...]:
    """Returns the fields of a message that may contain a timestamp or duration, at any depth. No message type of the
    contract contains itself."""
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
    """Describes a violation without regular expressions, and with the value if that is short."""
    value: object = found.field_value
    if value in ("", b""):
        return "must not be empty"
    message, rule = found.proto.message, found.proto.rule_id
    if rule == "required" or (rule == "enum.not_in" and value == 0):
        return "must be set"
    if rule == "string.pattern":
        # Look for the pattern in the message, and not in `rule_value`: reading that takes 0.1 ms, and a request may
        # break 2,000 rules.
        message = next((words for pattern, words in _PATTERNS.items() if pattern in message), message)
    elif rule == "enum.not_in":
        return f"must not be {value}"
    elif rule in _RULES:
        message = _RULES[rule].format(rule=found.rule_value)
    message = _ONE_OF.sub(r"must be one of \1", _RANGE.sub(r"must be \1 to \2", message))
    if found.proto.field and found.proto.field.elements[-1].field_name in _DEFAULT_IF_ZERO:
        message = message.replace("must be 0 to", "must be 1 to")
    match value:
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
    return f"{message}, and {max(counts, key=lambda item: counts[item])!r} is named twice"


def _span(seconds: float) -> str:
    """Formats a time span in days, hours or minutes if it is a whole number of them, in ms if it is below 1 s, and
    otherwise in s."""
    for unit_s, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds and seconds % unit_s == 0:
            return f"{seconds / unit_s:,.0f} {'day' if seconds == 86_400 else unit}"
    return f"{seconds * 1000:.12g} ms" if 0 < abs(seconds) < 1 else f"{seconds:.15g} s"


def _path(elements: Iterable[FieldPathElement]) -> str:
    """Formats a field path, such as jobs[3].template.attributes["a"]."""
    path = ""
    for element in elements:
        path += f".{element.field_name}" if path else element.field_name
        subscript = element.subscript
        if subscript is not None:
            key = subscript.value
            if isinstance(key, str) and len(key) > _KEY_CHARS_MAX:
                # Cut the key, because the violation may be that it is too long.
                key = key[:_KEY_CHARS_MAX] + "…"
            path += f"[{json.dumps(key, ensure_ascii=False)}]"
    return path

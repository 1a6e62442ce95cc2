"""The reasons of errors: errors.proto, docs/errors.md and the router agree."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from router.codec import status
from router.codec.status import CODES, DOMAIN, status_of
from router.gate.auth import access, principal, scopes
from shard import errors
from shard.limits import Limit, LimitKey, Measure
from shard.vocabulary import JobId, OrgId, QueueName, ShardName
from windrow.v1 import errors_pb2

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "ERROR_REASON_"
IN_PROTO = {value.name for value in errors_pb2.ErrorReason.DESCRIPTOR.values if value.number}
# In the proto, each value follows a comment that begins with the status code.
IN_COMMENTS = re.findall(
    r"^  // ([A-Z_]+)[. ].*?^  (ERROR_REASON_\w+) = ",
    re.sub(r"(?s)^.*ERROR_REASON_UNSPECIFIED = 0;", "", (ROOT / "proto/windrow/v1/errors.proto").read_text()),
    flags=re.MULTILINE | re.DOTALL,
)
ROWS = re.findall(
    r"^\| `([A-Z_]+)` \| ([A-Z_]+) \| (.+) \| (.+) \| (yes|no|only `Queue`) \|$",
    (ROOT / "docs/errors.md").read_text(),
    flags=re.MULTILINE,
)
S1, ACME, MAIL = ShardName("s1"), OrgId("acme"), QueueName("mail")
ANYBODY = principal.Principal(name="key:wr_aaaabbbbcccc", org=OrgId("other"), scopes=frozenset())
RAISED: dict[str, Callable[[], BaseException]] = {
    "INVALID_REQUEST": lambda: status.InvalidRequest([status.Violation("org", "must not be empty")]),
    "UNDECODABLE_REQUEST": lambda: status.Undecodable(7),
    "MESSAGE_TOO_LARGE": lambda: status.MessageTooLarge(17 << 20, 16 << 20),
    "ORG_MISMATCH": lambda: status.OrgMismatch("org", "acme", "other"),
    "CREDENTIALS_MISSING": lambda: principal.NoCredentials("the call has no token"),
    "CREDENTIALS_INVALID": lambda: principal.Unauthenticated("no such key"),
    "CREDENTIALS_EXPIRED": lambda: principal.Expired("it has expired"),
    "CREDENTIALS_REVOKED": lambda: principal.Revoked("it was revoked"),
    "SCOPE_MISSING": lambda: access.ScopeMissing("windrow.v1.Queue/Ack", scopes.Scope.CONSUME, ANYBODY),
    "ORG_FORBIDDEN": lambda: access.OrgForbidden("acme", ANYBODY),
    "QUEUE_NOT_FOUND": lambda: errors.UnknownQueue(ACME, MAIL),
    "JOB_NOT_FOUND": lambda: errors.UnknownJob(ACME, JobId("019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55")),
    "QUEUE_EXISTS": lambda: errors.QueueExists(ACME, MAIL),
    "QUEUE_NOT_EMPTY": lambda: errors.QueueNotEmpty(ACME, MAIL),
    "TOO_MANY_QUEUES": lambda: errors.TooManyQueues(S1, ACME, [MAIL], queues_max=1),
    "SCHEDULE_NOT_FOUND": lambda: errors.UnknownSchedule(ACME, "daily"),
    "SCHEDULE_EXISTS": lambda: errors.ScheduleExists(ACME, "daily"),
    "TOO_MANY_SCHEDULES": lambda: errors.TooManySchedules(ACME, schedules_max=10_000),
    "WORKFLOW_NOT_FOUND": lambda: errors.UnknownWorkflow(ACME, "019a9f5e"),
    "WORKFLOW_EXISTS": lambda: errors.WorkflowExists(ACME, "019a9f5e"),
    "NODE_NOT_FOUND": lambda: errors.UnknownNode(ACME, "019a9f5e", "load"),
    "WORKFLOW_ENDED": lambda: errors.WorkflowEnded("019a9f5e", "succeeded"),
    "LEASE_ENDED": lambda: errors.LeaseEnded("019a9f5f", "019a9f5e"),
    "NODE_EXISTS": lambda: errors.NodeExists("019a9f5e", "load"),
    "TOO_MANY_NODES": lambda: errors.TooManyNodes("019a9f5e", "nodes", present=9_999, more=2, bound=10_000),
    "NODE_ENDED": lambda: errors.NodeEnded("019a9f5e", "load"),
    "NOT_SIGNALLED": lambda: errors.NotSignalled("019a9f5e", "load", "it was skipped"),
    "NOT_RETRYABLE": lambda: errors.NotRetryable("019a9f5e", "it has succeeded"),
    "LIMIT_REACHED": lambda: errors.LimitReached(
        ACME,
        Limit(LimitKey(ACME, MAIL, Measure.JOBS), 10, 1_000_000, 1),
        asked=1,
        usage=10,
        retry_after_s=0.1,
        positions=[0],
    ),
    "TOO_MANY_RETENTIONS": lambda: errors.TooManyRetentions(S1, 14, present=32),
    "SHARD_NOT_FOUND": lambda: errors.UnknownShard(S1),
    "SHARD_UNAVAILABLE": lambda: errors.ShardUnavailable(S1, "connection refused"),
    "DISK_FULL": lambda: errors.DiskFull(S1, "database", "no space left"),
    "ROW_LOCKED": lambda: errors.RowLocked(S1, "a job"),
    "CLOCK_SET_BACK": lambda: errors.ClockSetBack(S1, "its clock was set back"),
    "PLACEMENT_CHANGING": lambda: errors.PlacementChanging(S1, "slot 1 is draining there"),
    "SHARD_BUSY": lambda: errors.TooManyWaiting(1),
    "MISCONFIGURED": lambda: errors.Misconfigured("another cluster's database"),
    "ROUTER_FULL": lambda: status.RouterFull("calls", 1),
    "TOO_MANY_CHANGES": lambda: status.TooManyChanges("acme", 5, 0.2),
    "TOKEN_KEYS_UNAVAILABLE": lambda: status.KeysUnavailable("no keys"),
    "ROUTER_SHUTTING_DOWN": status.ShuttingDown,
    "STREAM_EXPIRED": status.StreamExpired,
    "REQUEST_LATE": lambda: status.RequestLate(60),
    "CALL_TIMED_OUT": TimeoutError,
    "INTERNAL_ERROR": lambda: ZeroDivisionError("a fault"),
}


def details(sent: status_pb2.Status) -> tuple[str, bool]:
    """Returns the reason of a status, and whether it has RetryInfo."""
    info = error_details_pb2.ErrorInfo()
    assert sent.details[0].Unpack(info)
    assert info.domain == DOMAIN
    return info.reason, any(detail.Unpack(error_details_pb2.RetryInfo()) for detail in sent.details)


def test_every_reason_has_a_code_and_the_form_of_aip_193() -> None:
    assert {errors_pb2.ErrorReason.Name(reason) for reason in CODES} == IN_PROTO
    for name in IN_PROTO:
        assert re.fullmatch(r"[A-Z][A-Z0-9_]+[A-Z0-9]", name.removeprefix(PREFIX))
        assert len(name.removeprefix(PREFIX)) <= 63


def test_the_page_lists_every_reason_with_the_code_that_the_router_sends() -> None:
    codes = {
        errors_pb2.ErrorReason.Name(reason).removeprefix(PREFIX): code_pb2.Code.Name(code)
        for reason, code in CODES.items()
    }
    assert [name for name, *_ in ROWS] == [
        value.name.removeprefix(PREFIX) for value in errors_pb2.ErrorReason.DESCRIPTOR.values if value.number
    ]
    assert {name: code for name, code, *_ in ROWS} == codes
    assert {name.removeprefix(PREFIX): code for code, name in IN_COMMENTS} == codes


def test_the_router_names_every_reason_of_the_proto_and_sends_each_for_an_error() -> None:
    source = (ROOT / "router/codec/status.py").read_text()
    # The errors of router/gate/auth name their reasons in their own package.
    auth = "".join(path.read_text() for path in (ROOT / "router/gate/auth").glob("*.py"))
    named = re.findall(r"(ERROR_REASON_\w+)", source[source.index("_REASONS: ") :] + auth)
    assert set(named) == IN_PROTO
    assert {PREFIX + name for name in RAISED} == IN_PROTO


@pytest.mark.parametrize("reason", RAISED)
def test_an_error_has_its_reason_and_the_page_says_whether_to_retry(reason: str) -> None:
    sent = status_of(RAISED[reason]())
    name, retry_info = details(sent)
    assert name == reason
    assert sent.code == CODES[errors_pb2.ErrorReason.Value(PREFIX + reason)]
    (on_page,) = [retry for row, *_, retry in ROWS if row == reason]
    # If a request comes too slowly, or the router has a fault, the router cannot know when a retry may succeed. After
    # MISCONFIGURED it does not even know whether a retry may succeed.
    assert (on_page == "yes") == (retry_info or reason in {"REQUEST_LATE", "INTERNAL_ERROR"})
    assert (on_page == "only `Queue`") == (reason == "MISCONFIGURED")

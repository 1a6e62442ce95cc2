"""The client has the same rules for new jobs as the router: the client and the router refuse the same fields."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import psycopg
import pytest

from router.codec.status import InvalidRequest as Refused
from router.codec.validate import check, violations_of
from windrow import ExponentialRetry, FixedRetry, InvalidJob, InvalidRequest, NewJob, outbox
from windrow.job_rules import job_faults, org_fault
from windrow.new_jobs import enqueue_request
from windrow.rules import Rule, limit
from windrow.v1 import admin_pb2, job_pb2, queue_pb2

DAY_S = 86_400


def ahead(days: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


# The text fields of a template, except names.
TEXTS = [
    field.name
    for field in job_pb2.JobTemplate.DESCRIPTOR.fields
    if field.type == field.TYPE_STRING and field.name not in ("queue", "kind")
]
# Values of each field at its bound and beyond its bound.
FIELDS: list[dict[str, Any]] = [
    *(
        {name: value}
        for name in ("queue", "kind")
        for value in ("", "a", "-a", "a b", "ä", "a\n", "a" * 128, "a" * 129)
    ),
    *({"id": value} for value in ("x", "019A9F5E-7C1D-7A41-8F0E-3F2B6D1C9A55", "019a9f5e-7c1d-4a41-8f0e-3f2b6d1c9a55")),
    *({"payload": b"x" * size} for size in (0, 1 << 20, (1 << 20) + 1, 3_000_000)),
    *({"attributes": {str(at): "" for at in range(count)}} for count in (32, 33)),
    *({"attributes": {key: "v"}} for key in ("", "k" * 128, "k" * 129, "ä" * 65, "a\0", 'a"b')),
    *({"attributes": {"k": value}} for value in ("", "v" * 1024, "v" * 1025, "a\0")),
    *({"priority": value} for value in (-1, 1, 9, 10)),
    *({"max_attempts": value} for value in (-1, 1, 1000, 1001)),
    *({"delay": value} for value in (-0.001, 0, 3650 * DAY_S, 3650 * DAY_S + 1)),
    *({"run_at": value} for value in (ahead(-9000), ahead(3649), ahead(3651))),
    *({"expires_at": value} for value in (ahead(-9000), ahead(7299), ahead(7301))),
    *({"dedup_key": value} for value in ("k" * 256, "k" * 257, "ä" * 129, "a\0")),
    *({"dedup_key": "k", "dedup_window": value} for value in (0.9, 1, 30 * DAY_S, 30 * DAY_S + 1)),
    {"dedup_window": 60},
    {"dedup_key": "k", "dedup_while_live": True},
    {"dedup_key": "k", "dedup_while_live": True, "dedup_window": 60},
    {"dedup_key": "k", "dedup_while_live": True, "dedup_window": 0},
    *({"max_runtime": value} for value in (0, 0.9, 1, 30 * DAY_S, 30 * DAY_S + 1)),
    *(
        {name: text}
        for name in TEXTS
        for size in (limit(job_pb2.JobTemplate, name, Rule.STRING_MAX_BYTES),)
        for text in ("k" * size, "k" * (size + 1), "ä" * (size // 2 + 1), "a\0")
    ),
    *({"retry": FixedRetry(value)} for value in (-1, 0, 3650 * DAY_S, 3650 * DAY_S + 1)),
    *({"retry": ExponentialRetry(initial_delay=value)} for value in (-1, 0, 3600, 3601, 3650 * DAY_S + 1)),
    *({"retry": ExponentialRetry(max_delay=value)} for value in (-1, 0.9, 1, 3650 * DAY_S, 3650 * DAY_S + 1)),
    *({"retry": ExponentialRetry(multiplier=value)} for value in (0.9, 1, 100, 101)),
    *({"retry": ExponentialRetry(jitter=value)} for value in (-0.1, 0, 1, 1.1)),
]


# The values contain times, which differ between pytest's workers. The ids of the tests must not differ, so each id is
# made of the names of the fields.
@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(fields))
def test_the_client_refuses_the_fields_of_a_job_that_a_router_refuses(fields: dict[str, Any]) -> None:
    given: dict[str, Any] = {"queue": "q", "kind": "k", **fields}
    request = enqueue_request("acme", [NewJob(**given)])
    # The router's violation names a key of the map, so only the map is compared.
    by_router = {found.field.partition('["')[0] for found in violations_of(request)}
    assert {f"jobs[0].{fault.field}" for fault in job_faults(request.jobs[0])} == by_router


@pytest.mark.parametrize(("name", "value", "words"), [("priority", 10, "1 to 9"), ("max_attempts", 1001, "1 to 1000")])
def test_a_zero_that_means_the_default_is_not_offered(name: str, value: int, words: str) -> None:
    fields: dict[str, Any] = {name: value}
    request = enqueue_request("acme", [NewJob("q", "k", **fields)])
    (by_router,), (here,) = violations_of(request), job_faults(request.jobs[0])
    assert by_router.description == f"must be {words}, not {value}"
    assert here.description.replace(",", "") == by_router.description.replace(",", "")


@pytest.mark.parametrize("org", ["", "a", "a b", "a\n", "\x7f", "a" * 128, "a" * 129, "ä" * 64, "ä" * 65])
def test_the_client_refuses_the_orgs_that_a_router_refuses(org: str) -> None:
    request = enqueue_request(org, [NewJob("q", "k")])
    assert bool(org_fault(org)) == bool(violations_of(request))


# This is not a connection. The outbox must not execute anything on it.
NOWHERE = cast("psycopg.Connection[Any]", None)


def test_the_outbox_refuses_bad_jobs_and_names_them_before_it_adds_any() -> None:
    good, bad, large = NewJob("q", "k"), NewJob("no spaces", "k"), NewJob("q", "k", b"x" * 3_000_000)
    old = NewJob("q", "k", id="01900000-0000-7000-8000-000000000000")
    with pytest.raises(InvalidJob) as refused:
        outbox.add(NOWHERE, "acme", good, bad, large, old)
    assert [found.field for found in refused.value.violations] == [
        "jobs[1].template.queue",
        "jobs[2].template.payload",
        "jobs[3].id",
    ]
    told = str(refused.value).split("; job ")
    assert told[0].startswith(f"job {bad.id}: template.queue: must be 1 to 128 of ")
    assert told[1] == f"{large.id}: template.payload: must be at most 1,048,576 bytes, not 3,000,000"
    assert told[2].startswith(f"{old.id}: id: was made ")
    with pytest.raises(InvalidRequest, match=r"^org: must be 1 to 128 bytes, not 0$"):
        outbox.add(NOWHERE, "", good)


def with_wrong_attributes(jobs: int, each: int) -> queue_pb2.EnqueueRequest:
    """Returns a request of which every job but the last has this many wrong attributes."""
    wrong = {f"a\0{at}": "v\0" for at in range(each)}
    attributes = [wrong] * (jobs - 1) + [{}]
    templates = [job_pb2.JobTemplate(queue="mail", kind="send", attributes=some) for some in attributes]
    return queue_pb2.EnqueueRequest(org="acme", jobs=[job_pb2.NewJob(template=template) for template in templates])


def test_of_a_large_request_no_more_violations_are_looked_for_than_tell_its_items_apart() -> None:
    request = with_wrong_attributes(1000, 32)
    found = violations_of(request)
    assert found[0].field.startswith("jobs[0].template.attributes[")
    assert found[0].description.startswith("must not have NUL characters")
    # If the router process looked for all 64,000 violations, it could not serve any other call for seconds.
    assert 1000 < len(found) < 1300
    one_job = with_wrong_attributes(2, 50_000)
    assert len(violations_of(one_job)) < 3
    no_list = admin_pb2.ListJobsRequest(org="acme", attributes=one_job.jobs[0].template.attributes)
    assert len(violations_of(no_list)) == 1


def test_each_wrong_job_of_a_large_independent_enqueue_has_a_violation_and_no_other_job_has_one() -> None:
    request = with_wrong_attributes(1000, 32)
    request.independent = True
    found = violations_of(request)
    assert {violation.field.split(".")[0] for violation in found} == {f"jobs[{at}]" for at in range(999)}
    assert len(found) < 1300


def test_what_is_wrong_beside_the_jobs_of_a_large_request_is_found_too() -> None:
    request = with_wrong_attributes(1000, 1)
    request.org = ""
    found = violations_of(request)
    assert found[0].field == "org"
    assert found[1].field.startswith("jobs[0].")


def test_the_only_violation_of_a_large_request_is_found_wherever_it_is() -> None:
    for at in (0, 500, 999):
        request = with_wrong_attributes(1000, 0)
        request.jobs[at].template.queue = "not a name"
        assert [violation.field for violation in violations_of(request)] == [f"jobs[{at}].template.queue"]


@pytest.mark.parametrize("request_type", [admin_pb2.ListJobsRequest, admin_pb2.CountJobsRequest])
def test_jobs_may_be_asked_for_in_every_state_at_once(
    request_type: type[admin_pb2.ListJobsRequest | admin_pb2.CountJobsRequest],
) -> None:
    every = [value.number for value in job_pb2.JobState.DESCRIPTOR.values if value.number]
    check(request_type(org="acme", states=cast("list[job_pb2.JobState.ValueType]", every)))
    with pytest.raises(Refused, match=r"^states: "):
        check(request_type(org="acme", states=cast("list[job_pb2.JobState.ValueType]", [*every, every[0]])))

"""Reads the metadata of a ScaledObject, which KEDA sends with its requests (docs/keda.md). Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from router.codec.status import InvalidRequest, Violation
from router.codec.validate import NAME
from router.keda import externalscaler_pb2 as keda
from shard.vocabulary import OrgId, QueueName

# The name of the only metric.
METRIC = "windrow-jobs"
JOBS_PER_WORKER_MAX = 100_000
# Upper bounds for what KEDA sends: metadata has KEDA's own keys too, and perhaps certificates.
_REQUEST_BYTES_MAX = 64 * 1024
_KEYS_MAX = 100
_SHOWN_CHARS_MAX = 128
_METADATA = "scalerMetadata"
_ORG = re.compile(r"[!-~]{1,128}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,6}", re.ASCII)


class Target(NamedTuple):
    """The work whose amount decides how many workers a ScaledObject gets. `org` None: the work of all orgs."""

    org: OrgId | None
    queue: QueueName
    jobs_per_worker: int


def org_named(request: keda.ScaledObjectRef | keda.GetMetricsRequest) -> str | None:
    """Returns the org that a request names. None: the request names no org, because it is about all orgs or is not
    valid."""
    return _reference(request)[0].scalerMetadata.get("org")


def target_of(request: keda.ScaledObjectRef | keda.GetMetricsRequest) -> Target:
    """Returns what the metadata asks for. Ignores keys that are not Windrow's: KEDA sends its own keys too. Raises
    InvalidRequest with everything that is wrong."""
    reference, path = _reference(request)
    metadata = reference.scalerMetadata
    wrong: list[Violation] = []

    def refuse(key: str, why: str) -> None:
        wrong.append(Violation(f"{path}{_METADATA}.{key}", why))

    if len(metadata) > _KEYS_MAX:
        raise InvalidRequest(
            [Violation(path + _METADATA, f"has {len(metadata):,} keys; at most {_KEYS_MAX} may be set")]
        )
    if (count := request.ByteSize()) > _REQUEST_BYTES_MAX:
        why = f"has {count:,} bytes; at most {_REQUEST_BYTES_MAX:,} may be sent: shorten those of the ScaledObject"
        raise InvalidRequest([Violation(path + _METADATA, why)])
    org, all_orgs, queue, number = (metadata.get(key) for key in ("org", "allOrgs", "queue", "jobsPerWorker"))
    if all_orgs not in (None, "true", "false"):
        refuse("allOrgs", f'must be "true" or "false", not {_shown(all_orgs)}')
    elif all_orgs == "true" and org is not None:
        refuse("org", f'is {_shown(org)}, and allOrgs is "true": remove one of them')
    elif all_orgs != "true" and org is None:
        refuse("org", 'is missing: name the org, or set allOrgs to "true" to count the jobs of all orgs')
    if org is not None and not _ORG.fullmatch(org):
        refuse("org", f"must be 1 to 128 visible ASCII characters, not {_shown(org)}")
    if queue is None:
        refuse("queue", "is missing: name the queue that the workers consume")
    elif not NAME.fullmatch(queue):
        refuse("queue", f"must be 1 to 128 of A–Z a–z 0–9 . _ : / -, the first a letter or digit, not {_shown(queue)}")
    if number is None:
        refuse("jobsPerWorker", 'is missing: say how many jobs one worker is for, such as "10"')
    elif not _NUMBER.fullmatch(number) or not 1 <= int(number) <= JOBS_PER_WORKER_MAX:
        refuse("jobsPerWorker", f"must be a whole number from 1 to {JOBS_PER_WORKER_MAX:,}, not {_shown(number)}")
    if isinstance(request, keda.GetMetricsRequest) and request.metricName != METRIC:
        wrong.append(
            Violation("metricName", f"must be {METRIC!r}, as GetMetricSpec says, not {_shown(request.metricName)}")
        )
    if wrong or queue is None or number is None:
        raise InvalidRequest(wrong)
    return Target(None if org is None else OrgId(org), QueueName(queue), int(number))


def check(request: keda.ScaledObjectRef | keda.GetMetricsRequest) -> None:
    """Raises InvalidRequest."""
    target_of(request)


def _reference(request: keda.ScaledObjectRef | keda.GetMetricsRequest) -> tuple[keda.ScaledObjectRef, str]:
    """Returns the reference to the ScaledObject that a request has, and the path of that reference in the request."""
    if isinstance(request, keda.GetMetricsRequest):
        return request.scaledObjectRef, "scaledObjectRef."
    return request, ""


def _shown(value: str) -> str:
    return repr(value[:_SHOWN_CHARS_MAX])

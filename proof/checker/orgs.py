"""Checks I4 (no org saw another org's job) and I5 (the books balance, and agree with the tables)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from proof.checker.backup import Backup
from proof.checker.evidence import Evidence, Violation
from proof.checker.workflows import added_names


def check(evidence: Evidence) -> Iterator[Violation]:
    owner = {enqueue.job: enqueue.call.org for enqueue in evidence.history.enqueues}
    backup = Backup(evidence)
    # The payload of a job that a schedule stored names the schedule. The payload of an added node's job names the node.
    named = {row.job: {row.run.schedule} for row in evidence.rows if row.run is not None} | added_names(evidence)
    for delivery in evidence.history.deliveries:
        job, asker = delivery.lease.job, delivery.call.org
        if owner.get(job, asker) != asker or delivery.payload_org != asker:
            yield Violation(invariant="I4", what=f"job {job} of {delivery.payload_org} came to a consumer of {asker}")
        elif delivery.payload_job not in named.get(job, {job}):
            what = f"job {job} came with the payload of {delivery.payload_job}"
            # If the backup lacks an added node, the node that is added next gets the same number, so its job gets the
            # same id.
            yield Violation(invariant="I4", what=what, excused=backup.lacks(job))
    for row in evidence.rows:
        if owner.get(row.job, row.org) != row.org:
            yield Violation(invariant="I4", what=f"job {row.job} of {owner[row.job]} is stored as {row.org}'s")
    yield from _books(evidence)


def _books(evidence: Evidence) -> Iterator[Violation]:
    rows = Counter((row.shard, row.org) for row in evidence.rows)
    booked = {(books.shard, books.org): books for books in evidence.books}
    for place in sorted(rows.keys() | booked.keys()):
        shard, org = place
        books = booked.get(place)
        if books is None:
            yield Violation(invariant="I5", what=f"the books of {shard} do not know {org}, whose jobs it has")
        elif not books.balanced:
            yield Violation(invariant="I5", what=f"the books of {org} on {shard} do not balance")
        elif books.accepted != rows[place]:
            what = f"{shard} accepted {books.accepted} jobs of {org}, and has {rows[place]}"
            yield Violation(invariant="I5", what=what)

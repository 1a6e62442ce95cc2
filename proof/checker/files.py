"""Checks that routers never use an invalid cluster file, and that they soon use a new file that is valid."""

from __future__ import annotations

from collections.abc import Iterator

from proof.checker.evidence import Evidence, Violation


def check(evidence: Evidence) -> Iterator[Violation]:
    files = evidence.files
    for digest in sorted({one.digest for one in files.in_force} & files.unusable):
        yield _violation(f"a router went by the cluster file {digest}, which was to be refused")
    if evidence.calm_s is None:
        return
    late = {one.digest for one in files.in_force if one.at_s > evidence.calm_s} - {files.last}
    for digest in sorted(late):
        yield _violation(f"a router went by the cluster file {digest} long after {files.last} had taken its place")


def _violation(what: str) -> Violation:
    return Violation(invariant="file", what=what)

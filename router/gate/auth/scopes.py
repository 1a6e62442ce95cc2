"""What a caller may do. Pure, and light: commands and the supervisor import it."""

from __future__ import annotations

import enum


class Scope(enum.StrEnum):
    """A scope of proto/windrow/v1/access.proto. No scope includes another one."""

    ENQUEUE = "enqueue"
    CONSUME = "consume"
    READ = "read"
    ADMIN = "admin"
    # Only a principal of all orgs can have this scope.
    CLUSTER = "cluster"

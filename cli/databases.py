"""How a command talks to the databases of a cluster file, and what it says when that fails."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cli.exits import CommandFailed, ExitCode

if TYPE_CHECKING:
    from shard.cluster import Cluster
    from shard.errors import ShardUnavailable

_T = TypeVar("_T")


def read(config: Path) -> Cluster:
    """The cluster of a file. Raises CommandFailed."""
    from archiver.settings import settings_of
    from balancer.settings import pace_of
    from shard.cluster import ClusterFileError, read_cluster

    try:
        cluster = read_cluster(config)
        pace_of(cluster)
        settings_of(cluster)
    except ClusterFileError as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error
    return cluster


def asked(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs it. Raises CommandFailed for what databases, or who leads, keep it from."""
    from archiver.errors import ExportFailed, FilesFailed
    from archiver.passing import AnotherArchives
    from balancer.service import AnotherLeads
    from shard.cluster import ClusterFileError
    from shard.errors import NotHeld, ShardError, ShardUnavailable

    quiet()
    try:
        return asyncio.run(work)
    except ClusterFileError as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error
    except AnotherLeads as error:
        raise CommandFailed(f"another balancer leads: {error}", ExitCode.REFUSED) from error
    except ShardUnavailable as error:
        raise unavailable(error) from error
    except NotHeld as error:
        raise CommandFailed(str(error), ExitCode.NOT_FOUND) from error
    except FilesFailed as error:
        raise CommandFailed(str(error), ExitCode.UNAVAILABLE) from error
    except (AnotherArchives, ExportFailed, ShardError) as error:
        raise CommandFailed(str(error), ExitCode.REFUSED) from error


def unavailable(error: ShardUnavailable) -> CommandFailed:
    """Says where the catalog is, which the cluster file need not name."""
    from shard.vocabulary import CATALOG

    where = ["it is in the database of the file's first [[shard]], or of its [catalog]"]
    return CommandFailed(str(error), ExitCode.UNAVAILABLE, particulars=where if error.shard == CATALOG else [])


def quiet() -> None:
    """A command that keeps no log says once what a database refuses: in the end, and not at each try."""
    if not logging.getLogger().handlers:
        logging.getLogger("shard.breaker").setLevel(logging.ERROR)


def stop_on_signals() -> asyncio.Event:
    """What SIGTERM and Ctrl-C set from now on, instead of ending this process. Asked for in an event loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop

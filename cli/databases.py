"""How a command connects to the databases of a cluster file, and how it reports failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cli.exits import CommandFailed, ExitCode

if TYPE_CHECKING:
    from shard.errors import ShardUnavailable
    from shard.placement.cluster_file import Cluster
    from shard.postgres.pool import Database

_T = TypeVar("_T")


def read(config: Path) -> Cluster:
    """Reads a cluster file. Raises CommandFailed."""
    from archiver.settings import settings_of
    from balancer.settings import pace_of
    from shard.placement.cluster_file import ClusterFileError, read_cluster

    try:
        cluster = read_cluster(config)
        pace_of(cluster)
        settings_of(cluster)
    except ClusterFileError as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error
    return cluster


def asked(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine that uses databases. Raises CommandFailed if the coroutine fails, for example because another
    balancer leads."""
    from archiver.errors import ExportFailed, FilesFailed
    from archiver.run import AnotherArchives
    from balancer.service import AnotherLeads
    from shard.errors import NotHeld, ShardError, ShardUnavailable
    from shard.placement.cluster_file import ClusterFileError

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


@contextlib.asynccontextmanager
async def catalog_of(cluster: Cluster) -> AsyncGenerator[Database]:
    """Yields the catalog's database, after checking that it belongs to this cluster. Errors of the databases become
    CommandFailed."""
    from shard.errors import NotPinned, ShardError, ShardUnavailable, UnknownApiKey
    from shard.placement import catalog
    from shard.postgres.pool import Database
    from shard.vocabulary import CATALOG

    quiet()
    database = Database(CATALOG, cluster.catalog_dsn, connections=1, may_scan=True)
    try:
        await database.open()
        await catalog.find(database, cluster=cluster.name, shards=[entry.name for entry in cluster.shards])
        yield database
    except ShardUnavailable as error:
        raise unavailable(error) from error
    except (NotPinned, UnknownApiKey) as error:
        raise CommandFailed(str(error), ExitCode.NOT_FOUND) from error
    except ShardError as error:
        raise CommandFailed(str(error), ExitCode.REFUSED) from error
    finally:
        await database.close()


def unavailable(error: ShardUnavailable) -> CommandFailed:
    """Returns the error for a database that cannot be reached. For the catalog, the error explains where the catalog
    is, because some cluster files do not name the catalog."""
    from shard.vocabulary import CATALOG

    where = ["it is in the database of the file's first [[shard]], or of its [catalog]"]
    return CommandFailed(str(error), ExitCode.UNAVAILABLE, particulars=where if error.shard == CATALOG else [])


def quiet() -> None:
    """Turns off the log of failed tries if the command writes no log. Such a command reports the last failure
    itself."""
    if not logging.getLogger().handlers:
        logging.getLogger("shard.postgres.breaker").setLevel(logging.ERROR)


def stop_on_signals() -> asyncio.Event:
    """Returns an event. From now on, SIGTERM and Ctrl-C set this event instead of ending the process. Needs a running
    event loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop

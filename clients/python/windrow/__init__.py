"""Windrow's client: enqueues jobs and runs them.

    async with windrow.Client(org="acme") as client:
        await client.enqueue("emails", "send_email", {"to": "ada@example.com"})

`Client` is for asyncio, `SyncClient` has the same methods for synchronous code, `Worker` runs handlers, and
`windrow.outbox` (install `windrow[outbox]`) enqueues jobs inside your own Postgres transactions.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windrow.names import *  # noqa: F403 - __all__ lists the names
else:

    def __getattr__(name: str) -> object:
        """Imports a module of this package by its name. For any other name, such as Client, imports the whole client.
        Routers and the command `windrow` need only a few modules. If they imported the whole client, their start would
        take about 14 % longer."""
        # `from windrow import x` in a module of this package calls this function, too. In this case, import only x. The
        # whole client may need the module that contains this statement, and the import of that module has not ended
        # yet.
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        names = import_module("windrow.names")
        globals().update({each: getattr(names, each) for each in names.__all__}, __all__=names.__all__)
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        __getattr__("__all__")
        return sorted(globals())

"""Makes the methods of SyncClient from those of Client."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from windrow.client import Client
    from windrow.sync_client import SyncClient

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def blocking(
    method: Callable[Concatenate[Client, _Parameters], Coroutine[Any, Any, _Result]],
) -> Callable[Concatenate[SyncClient, _Parameters], _Result]:
    """Makes a method of SyncClient from a method of Client, with the same signature and docstring."""

    @functools.wraps(method)
    def act(self: SyncClient, /, *arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        # This function is a method of SyncClient, so it may use what is private there.
        return self._run(method(self._client, *arguments, **options))

    return act

"""Processes that a server of multiprocessing forks. The server is ours: what it imports, and which signals it ignores,
does not concern the processes that the program starts itself. Windows has no such server.

A server with one thread forks the processes. The worker's own process never does: another of its threads may run an
event loop or hold locks, and the fork could hang.
"""

from __future__ import annotations

from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from types import FunctionType, SimpleNamespace

_server = forkserver.ForkServer()
_server.set_forkserver_preload(["windrow.handler_server"])
# A copy of the module `forkserver` in which new processes come from our server.
_with_our_server = SimpleNamespace(**{**vars(forkserver), "connect_to_new_process": _server.connect_to_new_process})
_start: FunctionType = vars(popen_forkserver.Popen)["_launch"]


class _Popen(popen_forkserver.Popen):
    # The method knows only the server that its module `forkserver` has, so let it see another module.
    _launch = FunctionType(_start.__code__, {**vars(popen_forkserver), "forkserver": _with_our_server})


class ForkedProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:  # noqa: N802 - multiprocessing calls it so
        return _Popen(process_obj)

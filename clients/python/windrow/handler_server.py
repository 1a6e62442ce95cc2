"""The module that the server imports before it forks the processes of handlers (fork_server.py). Nothing else imports
this module.

The server has imported the whole client, which a handler's module imports too (`from windrow import Job`). So a process
starts with a twentieth of the CPU time that it would need to import the client itself, and shares the memory of the
imported modules with the other processes. It is safe to fork the server, because it has one thread and has made no gRPC
channel.
"""

from __future__ import annotations

import signal

from windrow import names, processes

# A supervisor's SIGTERM may reach every process of the worker. This server must survive the signal: without the server,
# a worker could not tell whether the processes of its handlers still run.
signal.signal(signal.SIGTERM, signal.SIG_IGN)

__all__ = ["names", "processes"]

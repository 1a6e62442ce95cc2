"""The errors of a local cluster. Each message names the value, the place and the remedy.

EmbeddedError
├── BinariesNotFound   no usable PostgreSQL: install one or name its bin folder
├── ClusterInUse       another live process owns the cluster: use its DSN, or stop it there
├── NotCreated         the cluster has no data yet: start it first
├── PortTaken          another program listens on the cluster's port: stop it, or change the port
├── StartFailed        the server did not start: the message ends with the end of its log
└── StopTimedOut       the server did not stop in time: stop it with mode="immediate"
"""


class EmbeddedError(Exception):
    """Base of all errors of this package."""


class BinariesNotFound(EmbeddedError):
    """No usable PostgreSQL was found. The message lists every place that was checked, and why it was refused."""


class ClusterInUse(EmbeddedError):
    """Another live process owns this cluster, or the cluster runs although it must not."""


class NotCreated(EmbeddedError):
    """The cluster has never been started, or its data was deleted."""


class PortTaken(EmbeddedError):
    """Another program listens on the port in this cluster's DSNs."""


class StartFailed(EmbeddedError):
    """The server did not start."""


class StopTimedOut(EmbeddedError):
    """The server was asked to stop, and still runs."""

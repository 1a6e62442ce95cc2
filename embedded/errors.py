"""What can go wrong with a local cluster. Owns the tree of errors; a message names value, place and remedy.

EmbeddedError
├── BinariesNotFound   no usable PostgreSQL: install one or name its bin folder
├── ClusterInUse       another live process holds the cluster: use its DSN, or stop it there
├── NotCreated         the cluster has no data yet: start it first
├── PortTaken          someone else listens on the remembered port: stop them, or change the port
├── StartFailed        the server did not come up: the message ends with the end of its log
└── StopTimedOut       the server did not stop in time: stop it with mode="immediate"
"""


class EmbeddedError(Exception):
    """Base of all errors of this package."""


class BinariesNotFound(EmbeddedError):
    """No usable PostgreSQL was found; the message lists every place looked at, and why it was refused."""


class ClusterInUse(EmbeddedError):
    """Another live process holds this cluster, or it runs while it must not."""


class NotCreated(EmbeddedError):
    """The cluster has never been started, or its data was deleted."""


class PortTaken(EmbeddedError):
    """Someone else listens on the port that this cluster's DSNs name."""


class StartFailed(EmbeddedError):
    """The server did not come up."""


class StopTimedOut(EmbeddedError):
    """The server was asked to stop, and still runs."""

"""What can keep a day from being exported, or an exported one from being read.

ExportFailed
├── FilesFailed      the place did not do what it was asked for: try again, later
│   └── NoSuchFile   it is not there
├── Damaged          a file is not what its manifest says: an operator must look
└── NotInstalled     the libraries for it are not here
"""

from __future__ import annotations


class ExportFailed(Exception):
    """Root of the tree. The message names the file."""


class FilesFailed(ExportFailed): ...


class NoSuchFile(FilesFailed): ...


class Damaged(ExportFailed): ...


class NotInstalled(ExportFailed):
    def __init__(self, module: str | None) -> None:
        super().__init__(f"{module} is not installed, which exports need: pip install 'windrow-server[export]'")

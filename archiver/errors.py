"""Errors that say why a day could not be exported, or why an exported day could not be read.

ExportFailed
├── FilesFailed      a read or write in the directory or bucket failed; try again later
│   └── NoSuchFile   the file does not exist
├── Damaged          a file differs from its manifest; an operator must look at it
└── NotInstalled     the libraries for exports are not installed
"""

from __future__ import annotations


class ExportFailed(Exception):
    """Root of the tree. The message of each error names the file."""


class FilesFailed(ExportFailed): ...


class NoSuchFile(FilesFailed): ...


class Damaged(ExportFailed): ...


class NotInstalled(ExportFailed):
    def __init__(self, module: str | None) -> None:
        super().__init__(f"{module} is not installed, which exports need: pip install 'windrow-server[export]'")

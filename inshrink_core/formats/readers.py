"""Readers for the checkpoint layouts on disk, one per layout, found by entry point.

A run is the set of checkpoints below a path. A reader detects the files or directories of its layout, and
locates their tensors. Everything else (steps, links, half-written files, values, checksums, exact restore) is
the same for all layouts.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Final

from inshrink_core.formats.assembly import ParsedCheckpoint, assemble
from inshrink_core.formats.content import FileContent
from inshrink_core.formats.disk import Access, ReadableFile
from inshrink_core.formats.state_tree import Placed, StateTree
from inshrink_core.plugins import plugins

__all__ = [
    "Access",
    "FileContent",
    "ParsedCheckpoint",
    "Placed",
    "ReadableFile",
    "Reader",
    "StateTree",
    "assemble",
    "reader_of",
    "readers",
]

_GROUP: Final = "inshrink.readers"


class Reader(ABC):
    """One layout of a checkpoint on disk; registered under the entry point group ``inshrink.readers``."""

    name: ClassVar[str]
    """Name of the layout."""

    @abstractmethod
    def detect(self, path: Path, access: Access) -> bool:
        """Return whether a file or directory is one checkpoint of this layout.

        Called for every path below a run, before the built-in readers: inspect only names or a few bytes.
        Raise nothing for other layouts.
        """

    @abstractmethod
    def open(self, path: Path, access: Access) -> ParsedCheckpoint:
        """Return the places of a checkpoint's tensors, from its headers (`assemble`).

        Parameters
        ----------
        path
            A path for which `detect` is true.
        access
            Opens every file: it checks links and counts bytes.

        Raises
        ------
        InshrinkError
            The checkpoint cannot be read. A run of several lists it with this reason (`Run.unreadable`),
            unless the error is a NotCheckpointError.
        """


@functools.cache
def readers() -> tuple[Reader, ...]:
    """Return the readers of all layouts in the order of detection, built-in ones last."""
    points = plugins(_GROUP).values()
    found = sorted(points, key=lambda point: (point.module.startswith("inshrink_core."), point.name))
    return tuple(point.load()() for point in found)


def reader_of(path: Path, access: Access) -> Reader | None:
    """Return the reader of a checkpoint; None if the path is no checkpoint."""
    return next((reader for reader in readers() if reader.detect(path, access)), None)

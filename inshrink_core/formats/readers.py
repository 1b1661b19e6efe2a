"""The layouts that checkpoints have on disk: one reader each, found by entry point.

A run is the checkpoints below a path, and a reader says which files or directories are one of its layout,
and where their tensors lie. All else (steps, links, half-written files, values, checksums, writing the
files back byte for byte) is the same for every layout.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Final

from inshrink_core.formats.assembly import ParsedCheckpoint, Recall, assemble
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
    "Recall",
    "StateTree",
    "assemble",
    "reader_of",
    "readers",
]

_GROUP: Final = "inshrink.readers"


class Reader(ABC):
    """One layout of a checkpoint on disk; registered under the entry point group ``inshrink.readers``."""

    name: ClassVar[str]
    """What checkpoints of the layout are called."""

    @abstractmethod
    def detect(self, path: Path, access: Access) -> bool:
        """Tell whether a file or directory is one checkpoint of this layout.

        Asked of every path below a run, before the built-in readers are: look at names only, or at a few
        bytes. Nothing is raised for what is of another layout.
        """

    @abstractmethod
    def open(self, path: Path, access: Access, recall: Recall) -> ParsedCheckpoint:
        """Return where the tensors of a checkpoint lie, from its headers (`assemble`).

        Parameters
        ----------
        path
            For which `detect` is true.
        access
            By which every file is opened: it says where links may lead, and counts the bytes.
        recall
            For `assemble`, which is faster where checkpoints are alike.

        Raises
        ------
        InshrinkError
            The checkpoint cannot be read. In a run of several it is named with this reason
            (`Run.unreadable`); where the error is a NotCheckpointError, it is no loss.
        """


@functools.cache
def readers() -> tuple[Reader, ...]:
    """Return the readers of all layouts in the order in which they are asked, built-in ones last."""
    found = sorted(
        plugins(_GROUP).values(), key=lambda point: (point.module.startswith("inshrink_core."), point.name)
    )
    return tuple(point.load()() for point in found)


def reader_of(path: Path, access: Access) -> Reader | None:
    """Return the reader of a checkpoint; None where a path is none."""
    return next((reader for reader in readers() if reader.detect(path, access)), None)

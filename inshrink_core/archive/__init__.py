"""The archive: immutable, checksummed frame files and a manifest, in a folder or packed in one file.

This package handles bytes, not tensors. ``docs/format.md`` is the specification.
"""

from inshrink_core.archive.check import Problem, check_archive
from inshrink_core.archive.frame_reader import FrameReader
from inshrink_core.archive.frame_writer import FrameWriter
from inshrink_core.archive.layout import FORMAT_VERSION
from inshrink_core.archive.maintenance import (
    Rewrite,
    pack_archive,
    remove_frames,
    unpack_archive,
)
from inshrink_core.archive.parts import Committed, PartWriter, commit_parts
from inshrink_core.archive.reader import ArchiveReader, is_archive, open_storage
from inshrink_core.archive.segment import MAX_SMALL_FILES
from inshrink_core.archive.storage import LocalStorage, Storage
from inshrink_core.archive.writer import ArchiveWriter

__all__ = [
    "FORMAT_VERSION",
    "MAX_SMALL_FILES",
    "ArchiveReader",
    "ArchiveWriter",
    "Committed",
    "FrameReader",
    "FrameWriter",
    "LocalStorage",
    "PartWriter",
    "Problem",
    "Rewrite",
    "Storage",
    "check_archive",
    "commit_parts",
    "is_archive",
    "open_storage",
    "pack_archive",
    "remove_frames",
    "unpack_archive",
]

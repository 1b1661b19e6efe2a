"""The archive: immutable, checksummed frame files and a manifest, in a folder or packed in one file.

This package handles bytes, not tensors. ``docs/format.md`` is the specification.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_core.archive.check import Problem as Problem
    from inshrink_core.archive.check import check_archive as check_archive
    from inshrink_core.archive.frame_reader import FrameReader as FrameReader
    from inshrink_core.archive.frame_writer import FrameWriter as FrameWriter
    from inshrink_core.archive.parts import PartWriter as PartWriter
    from inshrink_core.archive.parts import commit_parts as commit_parts
    from inshrink_core.archive.reader import ArchiveReader as ArchiveReader
    from inshrink_core.archive.reader import is_archive as is_archive
    from inshrink_core.archive.storage.local import LocalStorage as LocalStorage
    from inshrink_core.archive.writer import ArchiveWriter as ArchiveWriter

__all__ = index(__name__)

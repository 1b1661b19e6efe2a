"""Frames in order: append, decode, measure, verify; owns the reference between frames."""

from inshrink_core.chain.append import OPTIMIZER_CHOICES, Appended, ChainConfig, ChainWriter
from inshrink_core.chain.archive import Archive
from inshrink_core.chain.content import content_digest, stored_view
from inshrink_core.chain.sizes import ArchiveSize, FrameSize, TensorSize, archive_size, frame_size
from inshrink_core.chain.verify import StepError, Verification, verify_archive

__all__ = [
    "OPTIMIZER_CHOICES",
    "Appended",
    "Archive",
    "ArchiveSize",
    "ChainConfig",
    "ChainWriter",
    "FrameSize",
    "StepError",
    "TensorSize",
    "Verification",
    "archive_size",
    "content_digest",
    "frame_size",
    "stored_view",
    "verify_archive",
]

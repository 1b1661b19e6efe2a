"""Frames in order: append, decode, measure, verify; owns the reference between frames."""

from inshrink_core.chain.append import Appended, ChainWriter
from inshrink_core.chain.archive import Archive, open_base
from inshrink_core.chain.attachments import content_digest, holds_content, stored_view, tensor_digest, view_of
from inshrink_core.chain.base import BaseFinder, BaseLike, BaseModel, BaseRecord
from inshrink_core.chain.budget import Budget, changed_nbytes
from inshrink_core.chain.config import (
    OPTIMIZER_CHOICES,
    ChainConfig,
    Override,
    default_optimizer,
    is_exact,
    optimizer_of,
    parse_overrides,
)
from inshrink_core.chain.encoder import ChainState, FrameEncoder, PreparedFrame
from inshrink_core.chain.gain import StepGain, TensorGain, pool, step_gain
from inshrink_core.chain.meta import QUALITY, WRITTEN
from inshrink_core.chain.report import (
    ChainFrame,
    ChainReport,
    DamagedOriginal,
    OriginalChecks,
    chain_report,
    original_checks,
)
from inshrink_core.chain.sizes import (
    ArchiveSize,
    Exactness,
    FrameSize,
    StepNeeds,
    TensorSize,
    archive_size,
    exactness_of,
    frame_size,
    sequential_within,
    step_needs,
)

__all__ = [
    "OPTIMIZER_CHOICES",
    "QUALITY",
    "WRITTEN",
    "Appended",
    "Archive",
    "ArchiveSize",
    "BaseFinder",
    "BaseLike",
    "BaseModel",
    "BaseRecord",
    "Budget",
    "ChainConfig",
    "ChainFrame",
    "ChainReport",
    "ChainState",
    "ChainWriter",
    "DamagedOriginal",
    "Exactness",
    "FrameEncoder",
    "FrameSize",
    "OriginalChecks",
    "Override",
    "PreparedFrame",
    "StepGain",
    "StepNeeds",
    "TensorGain",
    "TensorSize",
    "archive_size",
    "chain_report",
    "changed_nbytes",
    "content_digest",
    "default_optimizer",
    "exactness_of",
    "frame_size",
    "holds_content",
    "is_exact",
    "open_base",
    "optimizer_of",
    "original_checks",
    "parse_overrides",
    "pool",
    "sequential_within",
    "step_gain",
    "step_needs",
    "stored_view",
    "tensor_digest",
    "view_of",
]

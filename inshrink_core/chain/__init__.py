"""Chains of frames: append, decode and verify; the state between frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_core.chain.append import Appended as Appended
    from inshrink_core.chain.append import ChainWriter as ChainWriter
    from inshrink_core.chain.archive import Archive as Archive
    from inshrink_core.chain.archive import open_base as open_base
    from inshrink_core.chain.attachments import holds_content as holds_content
    from inshrink_core.chain.attachments import stored_view as stored_view
    from inshrink_core.chain.attachments import tensor_digest as tensor_digest
    from inshrink_core.chain.attachments import view_of as view_of
    from inshrink_core.chain.base import BaseFinder as BaseFinder
    from inshrink_core.chain.base import BaseLike as BaseLike
    from inshrink_core.chain.base import BaseModel as BaseModel
    from inshrink_core.chain.budget import Budget as Budget
    from inshrink_core.chain.budget import changed_nbytes as changed_nbytes
    from inshrink_core.chain.config import OPTIMIZER_CHOICES as OPTIMIZER_CHOICES
    from inshrink_core.chain.config import ChainConfig as ChainConfig
    from inshrink_core.chain.config import Override as Override
    from inshrink_core.chain.config import default_optimizer as default_optimizer
    from inshrink_core.chain.config import is_exact as is_exact
    from inshrink_core.chain.config import optimizer_of as optimizer_of
    from inshrink_core.chain.config import parse_overrides as parse_overrides
    from inshrink_core.chain.encoder import ChainState as ChainState
    from inshrink_core.chain.encoder import FramePlan as FramePlan
    from inshrink_core.chain.encoder import PreparedFrame as PreparedFrame
    from inshrink_core.chain.encoder import look_ahead as look_ahead
    from inshrink_core.chain.meta import QUALITY as QUALITY
    from inshrink_core.chain.meta import WRITTEN as WRITTEN
    from inshrink_core.chain.report import ChainFrame as ChainFrame
    from inshrink_core.chain.report import ChainReport as ChainReport
    from inshrink_core.chain.report import OriginalChecks as OriginalChecks
    from inshrink_core.chain.report import chain_report as chain_report
    from inshrink_core.chain.report import original_checks as original_checks
    from inshrink_core.chain.sizes import ArchiveSize as ArchiveSize
    from inshrink_core.chain.sizes import Exactness as Exactness
    from inshrink_core.chain.sizes import FrameSize as FrameSize
    from inshrink_core.chain.sizes import archive_size as archive_size
    from inshrink_core.chain.sizes import exactness_of as exactness_of
    from inshrink_core.chain.sizes import frame_size as frame_size
    from inshrink_core.chain.sizes import step_needs as step_needs

__all__ = index(__name__)

"""Chains of frames: append, decode and verify; the state between frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_core.chain.append import ChainWriter as ChainWriter
    from inshrink_core.chain.archive import Archive as Archive
    from inshrink_core.chain.archive import open_base as open_base
    from inshrink_core.chain.attachments import holds_content as holds_content
    from inshrink_core.chain.attachments import stored_view as stored_view
    from inshrink_core.chain.attachments import tensor_digest as tensor_digest
    from inshrink_core.chain.config import ChainConfig as ChainConfig
    from inshrink_core.chain.encoder import ChainState as ChainState
    from inshrink_core.chain.encoder import FramePlan as FramePlan
    from inshrink_core.chain.encoder import PreparedFrame as PreparedFrame
    from inshrink_core.chain.encoder import look_ahead as look_ahead
    from inshrink_core.chain.meta import WRITTEN as WRITTEN
    from inshrink_core.chain.report import OriginalChecks as OriginalChecks
    from inshrink_core.chain.report import original_checks as original_checks

__all__ = index(__name__)

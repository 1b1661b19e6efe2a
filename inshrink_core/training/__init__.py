"""Training with an archive: the savers of a training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_core.retention import Retention as Retention
    from inshrink_core.training.saver import Saver as Saver

__all__ = index(__name__)

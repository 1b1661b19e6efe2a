"""Analysis of the tensors of a run and its archive: sensitivity, movement, anatomy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_core.analysis.anatomy import anatomy as anatomy
    from inshrink_core.analysis.findings import findings as findings
    from inshrink_core.analysis.movement import Moved as Moved
    from inshrink_core.analysis.movement import moved_between as moved_between
    from inshrink_core.analysis.profile import Profile as Profile
    from inshrink_core.analysis.profile import sensitivity as sensitivity

__all__ = index(__name__)

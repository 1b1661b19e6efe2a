"""How a step of a chain is written: a strategy that `compress`, the saver and the rehearsal share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from inshrink_core.chain import Appended, ChainWriter
    from inshrink_core.chain.append import TensorDone
    from inshrink_core.checkpoint import Checkpoint

__all__ = ["AsConfigured", "StepWriter"]


class StepWriter(Protocol):
    """Writes the next step of a chain."""

    def append(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None = None) -> Appended:
        """Append a step; may set the chain's config first."""
        ...


class AsConfigured:
    """Writes every step as the chain's config says."""

    def append(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None = None) -> Appended:
        """Append a step."""
        return chain.append(checkpoint, done=done)

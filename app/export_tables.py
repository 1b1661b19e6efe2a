"""What is asked of an export, and what is told of it before: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["ExportRequest", "Plan", "PlannedFrame"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """What to write.

    Parameters
    ----------
    kind
        ``chain``, ``step`` or ``pack``.
    steps
        The steps of a chain; the one step of ``step``; ignored for ``pack``.
    codec, config, optimizer, keyframe_every
        How a chain is written; ``drop`` leaves optimizer state out, None is the engine's default.
    packed
        One file instead of a folder.
    weights_only, exact, ratio
        Of ``step``: leave training state out; keep every bit; or how many times smaller than float32.
    replace
        Whether a file at the target may be replaced.
    """

    kind: str
    steps: tuple[int, ...] = ()
    codec: str = "lattice"
    config: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | None = None
    keyframe_every: int = 32
    packed: bool = False
    weights_only: bool = False
    exact: bool = False
    ratio: float = 8.0
    replace: bool = False


class PlannedFrame(NamedTuple):
    """One frame that would be written; `nbytes` is an estimate, None where nothing tells."""

    step: int
    kind: str
    raw_bytes: int
    nbytes: int | None


class Plan(NamedTuple):
    """The chain as it would be written; `basis` says what the estimates rest on, empty without any."""

    frames: tuple[PlannedFrame, ...]
    basis: str

    @property
    def raw_bytes(self) -> int:
        """Raw bytes of all frames."""
        return sum(frame.raw_bytes for frame in self.frames)

    @property
    def nbytes(self) -> int | None:
        """Estimated bytes of all frames; None where one has none."""
        sizes = [frame.nbytes for frame in self.frames]
        return None if None in sizes else sum(size for size in sizes if size is not None)

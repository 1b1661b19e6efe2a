"""What happened while a run was watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inshrink_core.chain import ArchiveSize
from inshrink_core.errors import DamagedError
from inshrink_core.session.compress import CompressReport

__all__ = ["OnEvent", "WatchEvent", "WatchReport"]


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """Something that happened while watching.

    Parameters
    ----------
    kind
        ``archived``, ``skipped`` (in the archive already, or older than its last step), ``vanished``
        (gone or changed while it was read), ``damaged`` (finished, and not what its checksums say) or
        ``ended``.
    step
        The step; None for ``ended``, and for a file so damaged that its step is not known.
    detail
        Why, or how: for people.
    """

    kind: str
    step: int | None
    detail: str = ""


OnEvent = Callable[[WatchEvent], None]
"""Called as things happen."""


@dataclass(slots=True, kw_only=True)
class WatchReport:
    """What `watch` did.

    Parameters
    ----------
    archive
        The archive.
    ended
        Why it ended: ``until``, ``idle`` or ``interrupted``.
    events
        What happened, in order.
    size
        Sizes of the archive's newest branch; None where nothing was ever archived.
    reports
        The report of each writing.
    seconds
        Wall time.
    """

    archive: str
    ended: str = ""
    events: list[WatchEvent] = field(default_factory=list)
    size: ArchiveSize | None = None
    reports: list[CompressReport] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def damaged(self) -> tuple[WatchEvent, ...]:
        """Checkpoints that were not archived because they do not match their own checksums."""
        return tuple(event for event in self.events if event.kind == "damaged")

    @property
    def failure(self) -> DamagedError | None:
        """Why a watch that ended well is no success: a checkpoint was damaged."""
        if not self.damaged:
            return None
        return DamagedError(f"not archived: {self.damaged[0].detail}", where=self.archive)

    def steps(self, kind: str) -> tuple[int, ...]:
        """Return the steps of the events of a kind."""
        return tuple(event.step for event in self.events if event.kind == kind and event.step is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink compress --watch --json``."""
        size, last = self.size, self.reports[-1] if self.reports else None
        return {
            "archive": self.archive,
            "ended": self.ended,
            "codec": last.codec if last else None,
            "config": dict(last.config) if last else None,
            "optimizer": last.optimizer if last else None,
            "ratio_total": size.ratio_total if size else None,
            "ratio_weights": size.ratio_weights if size else None,
            "bits_per_weight": size.bits_per_weight if size else None,
            "raw_bytes": size.raw_total if size else 0,
            "archive_bytes": size.nbytes if size else 0,
            "appended": list(self.steps("archived")),
            "skipped": list(self.steps("skipped")),
            "vanished": list(self.steps("vanished")),
            "damaged": [event.detail for event in self.damaged],
            "seconds": self.seconds,
        }

"""What `compress` did, and what the archive holds now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_core.chain import ArchiveSize, OriginalChecks

if TYPE_CHECKING:
    from inshrink_core.errors import CheckFailedError
    from inshrink_core.formats import Skipped
    from inshrink_core.session.promise import Promise

__all__ = ["CompressReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressReport:
    """What `compress` did, and what the archive holds now.

    Parameters
    ----------
    path
        The archive.
    size
        Sizes over the head's history, steps archived earlier included.
    appended, skipped
        Steps written now, and steps that were there already.
    seconds
        Wall time.
    raw_bytes_read
        Raw bytes of the steps written now.
    relative_error
        Root of squared error over squared norm of the weights written now; None if none were.
    codec, config
        What the weights were written with; under bounds, where the search began.
    optimizer
        How optimizer state was stored (`inshrink_core.chain.ChainConfig`).
    promise
        What was promised of every restored step, and how each keeps it; None where nothing was.
    left_out
        What of the run was not read, and why.
    originals
        What vouched for the files of the steps in the archive.
    """

    path: Path
    size: ArchiveSize
    appended: tuple[int, ...]
    skipped: tuple[int, ...]
    seconds: float
    raw_bytes_read: int
    relative_error: float | None
    codec: str
    config: Mapping[str, Any]
    optimizer: str
    promise: Promise | None = None
    left_out: tuple[Skipped, ...] = ()
    originals: OriginalChecks = field(default_factory=OriginalChecks)

    @property
    def failure(self) -> CheckFailedError | None:
        """Why the chain does not keep what was promised; None where it does, or nothing was."""
        return None if self.promise is None else self.promise.failure(self.path)

    @property
    def mb_per_s(self) -> float | None:
        """Raw megabytes (10^6 bytes) written per second; None where nothing was."""
        return self.raw_bytes_read / 1e6 / self.seconds if self.appended and self.seconds else None

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink compress --json``."""
        promised = {} if self.promise is None else self.promise.to_json()
        return promised | {
            "archive": str(self.path),
            "codec": self.codec,
            "config": dict(self.config),
            "optimizer": self.optimizer,
            "roles": sorted({row.spec.role.value for frame in self.size.frames for row in frame.tensors}),
            "ratio_total": self.size.ratio_total,
            "ratio_weights": self.size.ratio_weights,
            "bits_per_weight": self.size.bits_per_weight,
            "raw_bytes": self.size.raw_total,
            "archive_bytes": self.size.nbytes,
            "relative_error": self.relative_error,
            "seconds": self.seconds,
            "mb_per_s": self.mb_per_s,
            "appended": list(self.appended),
            "skipped": list(self.skipped),
            "left_out": [f"{row.path}: {row.reason}" for row in self.left_out],
            "originals": self.originals.to_json(),
            "frames": [
                {
                    "step": frame.info.step,
                    "kind": frame.info.kind.value,
                    "bytes": frame.info.nbytes,
                    "ratio_total": frame.ratio_total,
                    "ratio_weights": frame.ratio_weights,
                    **({} if self.promise is None else self.promise.step_json(frame.info.step)),
                }
                for frame in self.size.frames
            ],
        }

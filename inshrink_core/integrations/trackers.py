"""Experiment trackers: figures of each save, and a reference to the archive.

Trackers never get bytes of checkpoints. `inshrink_core.integrations.wandb` and ``mlflow`` implement the two
calls.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inshrink_core.archive import is_archive
from inshrink_core.archive.storage.registry import place_of
from inshrink_core.chain import Archive
from inshrink_core.chain.meta import QUALITY
from inshrink_core.chain.sizes import archive_size, frame_size
from inshrink_core.execution.files import Closing
from inshrink_core.frame import FrameInfo
from inshrink_core.text import is_url

__all__ = ["ArchiveTracker"]

PREFIX = "inshrink"
"""Prefix of the names of figures."""


class ArchiveTracker(Closing, ABC):
    """Logs the figures of an archive's frames to an experiment tracker, while the archive grows.

    Parameters
    ----------
    archive
        The archive, which need not exist yet. It is only read, and never locked.

    Notes
    -----
    By step, each under ``inshrink/``: ``ratio`` of everything stored, ``ratio_weights``, ``bits_per_weight``,
    ``bytes``, ``restore_cost`` and ``divergence`` if measured, and ``save_seconds``, the time that training
    waited for a save (`saving`). At the end the tracker gets a reference to the archive, with its steps,
    sizes and ratios. An update reads the index of each new frame.
    """

    def __init__(self, archive: str | os.PathLike[str]) -> None:
        self.archive = place_of(archive)
        self._logged: set[bytes] = set()

    @abstractmethod
    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""

    @abstractmethod
    def _refer(self, about: Mapping[str, Any]) -> None:
        """Log a reference to the archive."""

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Log how long training waits for the save inside the ``with`` statement, then new frames.

        Parameters
        ----------
        step
            The step being saved.
        """
        begun = time.perf_counter()
        yield
        self._log(step, {f"{PREFIX}/save_seconds": time.perf_counter() - begun})
        self.update()

    def update(self) -> tuple[int, ...]:
        """Log new frames.

        Returns
        -------
        tuple of int
            Their steps, in the order they were committed.

        Raises
        ------
        DamagedError
            The archive cannot be read.
        """
        if not is_archive(self.archive):
            return ()
        archive = Archive.open(self.archive)
        new = [info for info in archive.reader.frames if info.frame_id not in self._logged]
        for info in new:
            self._log(info.step, _figures(archive, info))
            self._logged.add(info.frame_id)
        return tuple(info.step for info in new)

    def close(self) -> None:
        """Log new frames and a reference to the archive."""
        self.update()
        if is_archive(self.archive):
            self._refer(_about(Archive.open(self.archive)))


def _figures(archive: Archive, info: FrameInfo) -> dict[str, float]:
    """Return the known figures of a frame."""
    size = frame_size(archive, info)
    known = archive.frame(info).meta.get(QUALITY, {})
    found = {
        "ratio": size.ratio_total,
        "ratio_weights": size.ratio_weights,
        "bits_per_weight": size.bits_per_weight,
        "bytes": info.nbytes,
        "restore_cost": known.get("restore_cost"),
        "divergence": known.get("divergence"),
    }
    return {f"{PREFIX}/{name}": float(value) for name, value in found.items() if value is not None}


def _about(archive: Archive) -> dict[str, Any]:
    """Return the metadata of a reference to an archive."""
    size = archive_size(archive)
    return {
        "uri": archive.path if is_url(archive.path) else Path(archive.path).absolute().as_uri(),
        "name": Path(archive.path).name,
        "archive_id": archive.reader.archive_id.hex(),
        "steps": list(archive.steps),
        "bytes": size.nbytes,
        "raw_bytes": size.raw_total,
        "ratio": size.ratio_total,
        "ratio_weights": size.ratio_weights,
    }

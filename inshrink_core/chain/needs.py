"""What restoring takes, in memory and on disk, told from headers before anything is decoded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from inshrink_core.chain.archive import Archive
from inshrink_core.chain.attachments import LAYOUT_KEY, LAYOUT_MEMORY
from inshrink_core.chain.meta import decoding_nbytes
from inshrink_core.checkpoint import Checkpoint, FileLayout
from inshrink_core.errors import TooLargeError
from inshrink_core.formats.write import restorable_layout, written_nbytes
from inshrink_core.frame import FrameInfo

__all__ = ["StepNeeds", "sequential_within", "step_needs"]


class StepNeeds(NamedTuple):
    """About how many bytes a step takes.

    `decoding` is the most that one tensor takes on its way, `held` what stays besides until the step is
    done, `state` what a walk over several steps keeps of it for the next, and `disk` its files.
    """

    decoding: int
    held: int
    state: int
    disk: int

    def memory(self, threads: int = 1) -> int:
        """Return what restoring the step alone takes, with tensors decoded on some threads."""
        return self.held + self.decoding * (1 if threads <= 1 else threads + 1)

    @property
    def memory_in_turn(self) -> int:
        """What restoring it as one of several takes, so that each frame is decoded once."""
        return self.memory() + self.state


def step_needs(
    archive: Archive, info: FrameInfo, checkpoint: Checkpoint | None = None, layout: str | None = None
) -> StepNeeds:
    """Return what a step takes; reads its index and its layout.

    Parameters
    ----------
    archive, info
        The step.
    checkpoint
        The same, where it is open already.
    layout
        As what it is written (`inshrink_core.formats.write_checkpoint`); by default as it was, where it can
        be.

    Raises
    ------
    DamagedError, MissingFrameError
        They cannot be read.
    """
    if checkpoint is None:
        checkpoint = archive.checkpoint(info)
    entries = [entry for entry in archive.frame(info).entries if not entry.attachment]
    skeletons = sum(_skeleton_nbytes(checkpoint, file) for file in checkpoint.files)
    regions = (region for file in checkpoint.files for region in file.regions)
    mixed = [
        2 * r.nbytes + max((checkpoint.spec(m.key).nbytes for m in r.members if m.box is not None), default=0)
        for r in regions
        if len(r.members) != 1 or r.members[0].stride is not None or r.members[0].box is not None
    ]
    described = LAYOUT_MEMORY * len(archive.attachment(info, LAYOUT_KEY))
    written_as = layout or restorable_layout(checkpoint)
    # PyTorch's writer wants all tensors at once.
    whole = checkpoint.raw_bytes() if written_as == "torch" else 0
    return StepNeeds(
        decoding=max(map(decoding_nbytes, checkpoint.specs, entries), default=0),
        held=skeletons + described + whole + max(mixed, default=0),
        state=2 * checkpoint.raw_bytes(),
        disk=written_nbytes(checkpoint, written_as),
    )


def _skeleton_nbytes(checkpoint: Checkpoint, file: FileLayout) -> int:
    """Return the most bytes that the skeleton of a file can have: all that no tensor fills."""
    filled = sum(
        min(region.nbytes, sum(m.nbytes_in(checkpoint.spec(m.key)) for m in region.members))
        for region in file.regions
    )
    return file.nbytes - filled


def sequential_within(archive: Archive, needs: Iterable[StepNeeds]) -> Archive:
    """Return a view that decodes each frame once, if what it keeps between steps fits the limits.

    Raises
    ------
    TooLargeError
        Not even a single step fits.
    """
    rows = tuple(needs)
    where = archive.reader.path
    try:
        most = max((row.memory_in_turn for row in rows), default=0)
        archive.limits.require_memory(most, "decoding each frame once", where)
    except TooLargeError:
        most = max((row.memory() for row in rows), default=0)
        archive.limits.require_memory(most, "decoding a step", where)
        return archive
    return archive.sequential()

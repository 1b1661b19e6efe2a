"""Size budgets for frames: a delta frame stores the tensors that changed most and leaves the others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inshrink_core.chain.archive import Archive
from inshrink_core.chain.encoder import squared_error
from inshrink_core.chain.meta import WRITTEN
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorRole, TensorSpec
from inshrink_core.codec import TensorReference
from inshrink_core.errors import InputError
from inshrink_core.formats.source import peek
from inshrink_core.frame import FrameInfo, FrameKind

_MOVED = MODEL_ROLES | {TensorRole.MASTER}


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on a frame's size and on the age of its tensors.

    Parameters
    ----------
    nbytes
        Bytes for the tensors that the frame stores anew, estimated from their last changes.
    max_age
        Each tensor is stored anew at least once in this many frames.

    Raises
    ------
    InputError
        A value is not an integer of at least 1.
    """

    nbytes: int
    max_age: int

    def __post_init__(self) -> None:
        for name, value in (("budget", self.nbytes), ("max_age", self.max_age)):
            if type(value) is not int or value < 1:
                unit = "bytes" if name == "budget" else "saves"
                raise InputError(f"{name} is a number of {unit}", expected="≥ 1", found=repr(value))


def unchanged_keys(
    archive: Archive,
    parent: FrameInfo,
    checkpoint: Checkpoint,
    references: Mapping[str, TensorReference],
    budget: Budget,
) -> frozenset[str]:
    """Return the tensors that a delta frame leaves unchanged from its parent.

    Parameters
    ----------
    archive, parent
        The archive and its previous frame.
    checkpoint
        The checkpoint to store. Every tensor of the model is read.
    references
        States after the parent, by key.
    budget
        The frame's limits.

    Notes
    -----
    A weight and its optimizer state form a group and are stored together. First come groups that reach the
    age limit, and those whose change in bytes is not known from any frame. Then groups are added while the
    budget permits, in descending order of squared distance per byte between the training state and a restore
    of the parent. This minimizes the squared distance between restored and trained weights. At least one
    group is stored anew.

    References
    ----------
    Qiao et al., "Fault Tolerance in Iterative-Convergent Machine Learning" (SCAR), ICML 2019, section 4.
    """
    before, written = archive.checkpoint(parent), archive.frame(parent).meta.get(WRITTEN, {})
    steps = sorted(info.step for info in archive.reader.history(parent.frame_id))
    nbytes = changed_nbytes(archive, parent)
    groups = _named(checkpoint.specs)
    left, waiting = budget.nbytes, {}
    for name, specs in groups.items():
        age = 1 + len(steps) - bisect_right(steps, written.get(name, parent.step))
        known = name in nbytes and all(
            spec.key in references and spec.key in before and before.spec(spec.key) == spec for spec in specs
        )
        if known and age < budget.max_age:
            # The distance of optimizer tensors is not counted.
            moving = [spec for spec in specs if spec.role in _MOVED]
            distances = (squared_error(peek(checkpoint.source, s), references[s.key])[0] for s in moving)
            waiting[name] = sum(distances, 0.0) / max(1, nbytes[name])
        else:
            left -= nbytes.get(name, 0)
    unchanged: set[str] = set()
    for name in sorted(waiting, key=waiting.__getitem__, reverse=True):
        is_first = len(waiting) == len(groups) and not unchanged and left == budget.nbytes
        if nbytes[name] <= left or is_first:
            left -= nbytes[name]
        else:
            unchanged.add(name)
    return frozenset(spec.key for specs in map(groups.__getitem__, unchanged) for spec in specs)


def changed_nbytes(archive: Archive, last: FrameInfo) -> dict[str, int]:
    """Return the size of each group's last change in bytes, by name; a group is a weight and its state.

    The size is taken from the newest delta frame that stores the group anew. If two keyframes store it
    without such a delta frame after them, it is taken from the newer keyframe. Other names are omitted.
    Indexes are read from the newest, as many as needed.
    """
    wanted = set(_named(archive.checkpoint(last).specs))
    found: dict[str, int] = {}
    alone: dict[str, int] = {}
    for info in reversed(archive.reader.history(last.frame_id)):
        frame = archive.frame(info)
        fresh = wanted - found.keys() - frame.meta.get(WRITTEN, {}).keys()
        for name, specs in _named(archive.checkpoint(info).specs).items():
            nbytes = sum(block.nbytes for spec in specs for block in archive.blocks(info, spec.key))
            if name in fresh and info.kind is FrameKind.DELTA:
                found[name] = nbytes
            elif name in fresh and name in alone:
                found[name] = alone[name]
            elif name in fresh:
                alone[name] = nbytes
        if len(found) == len(wanted):
            break
    return found


def _named(specs: Sequence[TensorSpec]) -> dict[str, list[TensorSpec]]:
    """Return the tensors of each group by name, without extra tensors, which are always stored."""
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        if spec.role is not TensorRole.EXTRA:
            groups.setdefault(spec.parameter, []).append(spec)
    return groups

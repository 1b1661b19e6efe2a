"""Saves under a budget: a delta frame holds what changed most, and leaves the other tensors as they were."""

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
    """What a frame may take, and how old its tensors may be.

    Parameters
    ----------
    nbytes
        Bytes of the tensors that it holds anew, as far as their last changes tell.
    max_age
        Each tensor is held anew by one of so many frames in a row.

    Raises
    ------
    InputError
        One of them is no whole number from 1.
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
    """Return the tensors that a delta frame leaves as they were in its parent.

    Parameters
    ----------
    archive, parent
        The frame before, and the archive it is in.
    checkpoint
        What is stored. Every tensor of the model is read.
    references
        States after the parent, by key.
    budget
        What the frame may take.

    Notes
    -----
    What has a name goes together: a weight and the optimizer's state of it. First come tensors whose age
    asks for it, and those of which no frame says yet what a change takes; then as many as the budget has room
    for, those first that changed most, squared, a byte, against what a restore of the parent gives. That
    leaves the least squared distance between what is restored and what is trained. One at least is held anew.

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
            # Of the optimizer's tensors nothing counts.
            moving = [spec for spec in specs if spec.role in _MOVED]
            distances = (squared_error(peek(checkpoint.source, s), references[s.key])[0] for s in moving)
            moved = sum(distances, 0.0)
            waiting[name] = moved / max(1, nbytes[name])
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
    """Return the bytes that the last change of each tensor took, with the optimizer's state of it, by name.

    In the last delta frame that holds it anew; where two keyframes in a row do, for want of small changes, in
    the last of these. Other names are left out. Reads as many indexes as that takes, newest first.
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
    """Return what belongs together, by name; what was saved beside model and optimizer is always whole."""
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        if spec.role is not TensorRole.EXTRA:
            groups.setdefault(spec.parameter, []).append(spec)
    return groups

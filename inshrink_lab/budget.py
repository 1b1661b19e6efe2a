"""Saves under a budget: a delta frame stores the tensors that changed most and leaves the others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inshrink_core.chain import WRITTEN, stored_view
from inshrink_core.chain.encoder import squared_error
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorRole, TensorSpec
from inshrink_core.formats.source import peek
from inshrink_core.frame import FrameInfo, FrameKind

if TYPE_CHECKING:
    from inshrink_core.chain import Archive, ChainWriter
    from inshrink_core.chain.append import Appended, TensorDone

_MOVED = MODEL_ROLES | {TensorRole.MASTER}


@dataclass(frozen=True, slots=True)
class BudgetWriter:
    """A `inshrink_core.search.bounded.StepWriter` whose delta frames take a share of a complete one's bytes.

    Parameters
    ----------
    share
        Share of the bytes of all tensors at their last changes, but at least the largest tensor. Each tensor
        is stored anew at least once in twice the inverse number of frames.

    Notes
    -----
    The first two frames and all keyframes are complete. Then a frame stores the tensors that changed most,
    with their optimizer state, and its record has the steps of the others (`WRITTEN`).

    References
    ----------
    Qiao et al., "Fault Tolerance in Iterative-Convergent Machine Learning" (SCAR), ICML 2019, section 4.
    """

    share: float

    def append(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None = None) -> Appended:
        """Append a step."""
        nbytes = {} if chain.parent is None else changed_nbytes(chain.archive, chain.parent)
        if chain.parent is not None and nbytes:
            chain.unchanged = self._unchanged_keys(chain, chain.parent, checkpoint, nbytes)
        return chain.append(checkpoint, done=done)

    def _unchanged_keys(
        self, chain: ChainWriter, parent: FrameInfo, checkpoint: Checkpoint, nbytes: Mapping[str, int]
    ) -> frozenset[str]:
        """Return the tensors that a delta frame leaves unchanged from its parent.

        A weight and its optimizer state form a group and are stored together. First come groups that reach
        the age limit, and those whose change in bytes is not known from any frame. Then groups are added
        while the budget permits, in descending order of squared distance per byte between the training state
        and a restore of the parent. This minimizes the squared distance between restored and trained weights.
        """
        archive, references = chain.archive, chain.state(keyframe=False).references
        before, written = archive.checkpoint(parent), archive.frame(parent).meta.get(WRITTEN, {})
        steps = sorted(info.step for info in archive.reader.history(parent.frame_id))
        groups = _named(stored_view(checkpoint, chain.config.optimizer).specs)
        left, waiting = max(int(self.share * sum(nbytes.values())), *nbytes.values()), dict[str, float]()
        for name, specs in groups.items():
            age = 1 + len(steps) - bisect_right(steps, written.get(name, parent.step))
            known = name in nbytes and all(
                spec.key in references and spec.key in before and before.spec(spec.key) == spec
                for spec in specs
            )
            if known and age < 2 * round(1 / self.share):
                # The distance of optimizer tensors is not counted.
                moving = [spec for spec in specs if spec.role in _MOVED]
                distances = (squared_error(peek(checkpoint.source, s), references[s.key])[0] for s in moving)
                waiting[name] = sum(distances, 0.0) / max(1, nbytes[name])
            else:
                left -= nbytes.get(name, 0)
        unchanged: set[str] = set()
        for name in sorted(waiting, key=waiting.__getitem__, reverse=True):
            if nbytes[name] <= left:
                left -= nbytes[name]
            else:
                unchanged.add(name)
        return frozenset(spec.key for name in unchanged for spec in groups[name])


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

"""What pruning keeps, removes and writes anew: decided before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from inshrink_core.archive import ArchiveReader
from inshrink_core.chain import Archive
from inshrink_core.errors import InputError, MissingFrameError, NotFoundError
from inshrink_core.frame import FrameInfo, FrameKind

__all__ = ["KeepRules", "PrunePlan", "make_plan"]

KeySize = Callable[[FrameInfo], int]
"""Returns about how many bytes a frame would take as a keyframe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRules:
    """Which frames stay; the last of each branch always does.

    Parameters
    ----------
    every
        Steps that are multiples of it.
    last
        That many at the end of each branch's history.
    steps
        These steps.
    drop_branches
        Keep nothing outside the history of the newest branch.
    smallest
        Keep further frames where re-keying what needs them would take more space.
    """

    every: int | None = None
    last: int | None = None
    steps: tuple[int, ...] = ()
    drop_branches: bool = False
    smallest: bool = False

    def __post_init__(self) -> None:
        if self.every is None and self.last is None and not self.steps:
            raise InputError("nothing says what to keep", remedy="give --keep-every, --keep-last or --keep")
        for name, value in (("--keep-every", self.every), ("--keep-last", self.last)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1", expected="≥ 1", found=str(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What becomes of every frame.

    Parameters
    ----------
    kept
        Frames the rules keep.
    references
        Frames that stay besides: training was restored from them, or re-keying would cost more.
    removed
        Frames that go.
    rekeyed
        Frames that stay and lose their reference: they become keyframes of the same bits.
    copied
        Frames that stay and are written again as they are: under another parent, upon a re-keyed
        frame, or to stay the last of their branch.
    parents
        New parent of each frame that is written again, by id.
    lost_origins
        Frames that stay and say that training was restored from a frame that is gone.
    """

    kept: tuple[FrameInfo, ...]
    references: tuple[FrameInfo, ...]
    removed: tuple[FrameInfo, ...]
    rekeyed: tuple[FrameInfo, ...]
    copied: tuple[FrameInfo, ...]
    parents: Mapping[bytes, bytes | None]
    lost_origins: tuple[FrameInfo, ...]

    def children_of(self, info: FrameInfo) -> tuple[FrameInfo, ...]:
        """Return the delta frames that stay upon a re-keyed frame."""
        return tuple(
            frame
            for frame in self.copied
            if frame.kind is FrameKind.DELTA and frame.parent_id == info.frame_id
        )


class _Tree(NamedTuple):
    """Live frames, parents before children."""

    order: tuple[FrameInfo, ...]
    children: Mapping[bytes, tuple[FrameInfo, ...]]


def make_plan(archive: Archive, rules: KeepRules, key_size: KeySize) -> PrunePlan:
    """Decide what becomes of every frame; reads indexes alone, but for what `key_size` reads.

    Raises
    ------
    NotFoundError
        A step to keep is not there, or the archive holds none.
    MissingFrameError
        The file of a frame is gone: what hangs on it cannot be told.
    """
    reader = archive.reader
    _require_whole(reader)
    tree = _tree_of(reader.frames)
    kept = _kept(reader, rules)
    origins = {frame.frame_id: archive.frame(frame).meta.get("restored") for frame in reader.frames}
    needed = _origins_of_tips(reader, rules, origins) - kept
    staying = kept | needed
    if rules.smallest:
        staying = _cheapest(tree, staying, key_size)
    gone = {frame.frame_id for frame in tree.order} - staying
    parents = {
        frame.frame_id: _staying_ancestor(reader, frame, gone)
        for frame in tree.order
        if frame.frame_id in staying and frame.parent_id in gone
    }
    in_order = sorted(tree.order, key=lambda frame: frame.generation)
    rekeyed = [f for f in in_order if f.frame_id in parents and f.kind is FrameKind.DELTA]
    copied = _copied(in_order, staying, parents, {frame.frame_id for frame in rekeyed})
    return PrunePlan(
        kept=tuple(f for f in in_order if f.frame_id in kept),
        references=tuple(f for f in in_order if f.frame_id in staying - kept),
        removed=tuple(f for f in in_order if f.frame_id in gone),
        rekeyed=tuple(rekeyed),
        copied=copied,
        parents=parents | {f.frame_id: f.parent_id for f in copied if f.frame_id not in parents},
        lost_origins=tuple(f for f in in_order if f.frame_id in staying and origins[f.frame_id] in gone),
    )


def _require_whole(reader: ArchiveReader) -> None:
    """Refuse an archive of which something is missing."""
    for lost in reader.missing:
        raise MissingFrameError(
            f"the frame of step {lost.step} is missing: what it leaves cannot be pruned safely",
            where=f"{reader.path}, {lost.path}",
            remedy="fetch the file from where the archive came from, or give it up with --forget-missing",
        )
    if not reader.frames:
        raise NotFoundError("the archive holds no steps yet", where=reader.path)


def _tree_of(frames: Iterable[FrameInfo]) -> _Tree:
    """Order frames along their parents: after pruning, generations alone do not say."""
    live = {frame.frame_id: frame for frame in frames}
    children: dict[bytes, list[FrameInfo]] = {}
    for frame in live.values():
        children.setdefault(frame.parent_id or b"", []).append(frame)
    pending = [frame for frame in live.values() if frame.parent_id not in live]
    order: list[FrameInfo] = []
    while pending:
        frame = pending.pop()
        order.append(frame)
        pending += children.get(frame.frame_id, ())
    return _Tree(tuple(order), {key: tuple(found) for key, found in children.items()})


def _tips(reader: ArchiveReader, rules: KeepRules) -> list[FrameInfo]:
    """Return the last frame of each branch that counts."""
    last = {frame.branch: frame for frame in reader.frames}  # by ascending generation
    head = reader.head
    return [head] if rules.drop_branches and head is not None else list(last.values())


def _kept(reader: ArchiveReader, rules: KeepRules) -> set[bytes]:
    """Return the ids of the frames that the rules keep."""
    kept: set[bytes] = set()
    found: set[int] = set()
    for tip in _tips(reader, rules):
        line = reader.history(tip.frame_id)
        last = line[-max(rules.last or 1, 1) :]
        kept |= {frame.frame_id for frame in last}
        kept |= {f.frame_id for f in line if rules.every is not None and f.step % rules.every == 0}
        kept |= {f.frame_id for f in line if f.step in rules.steps}
        found |= {frame.step for frame in line}
    for step in rules.steps:
        if step not in found:
            raise NotFoundError(
                f"there is no frame of step {step} to keep",
                where=reader.path,
                remedy="`inshrink inspect` lists the steps",
            )
    return kept


def _origins_of_tips(reader: ArchiveReader, rules: KeepRules, origins: Mapping[bytes, object]) -> set[bytes]:
    """Return what training on each branch was last restored from: the next frame is coded against it."""
    live = {frame.frame_id for frame in reader.frames}
    named = {origins[tip.frame_id] for tip in _tips(reader, rules)}
    return {frame_id for frame_id in named if isinstance(frame_id, bytes) and frame_id in live}


def _cheapest(tree: _Tree, staying: set[bytes], key_size: KeySize) -> set[bytes]:
    """Add the frames that cost less than re-keying what needs them; exact, by dynamic programming.

    The cost of a frame and all below it is worked out for either fate of its parent, from the leaves
    up. A frame that need not stay may go, or stay if it is a keyframe or its parent stays.
    """
    with_parent: dict[bytes, int] = {}
    without: dict[bytes, int] = {}
    stays: dict[tuple[bytes, bool], bool] = {}
    for frame in reversed(tree.order):
        below = tree.children.get(frame.frame_id, ())
        if_stays = sum(with_parent[child.frame_id] for child in below)
        if_goes = sum(without[child.frame_id] for child in below)
        for parent_stays, costs in ((True, with_parent), (False, without)):
            needs_key = frame.kind is FrameKind.DELTA and not parent_stays
            if frame.frame_id in staying:
                reachable = needs_key and frame.parent_id not in staying
                own = key_size(frame) if reachable else frame.nbytes
                costs[frame.frame_id], choice = own + if_stays, True
            else:
                choice = not needs_key and frame.nbytes + if_stays < if_goes
                costs[frame.frame_id] = frame.nbytes + if_stays if choice else if_goes
            stays[frame.frame_id, parent_stays] = choice
    chosen: set[bytes] = set()
    for frame in tree.order:
        if stays[frame.frame_id, frame.parent_id in chosen]:
            chosen.add(frame.frame_id)
    return chosen


def _staying_ancestor(reader: ArchiveReader, frame: FrameInfo, gone: set[bytes]) -> bytes | None:
    """Return the nearest ancestor that stays."""
    for ancestor in reversed(reader.history(frame.frame_id)[:-1]):
        if ancestor.frame_id not in gone:
            return ancestor.frame_id
    return None


def _copied(
    in_order: list[FrameInfo],
    staying: set[bytes],
    parents: Mapping[bytes, bytes | None],
    rekeyed: set[bytes],
) -> tuple[FrameInfo, ...]:
    """Return the frames to write again as they are."""
    again = {f.frame_id for f in in_order if f.frame_id in parents}
    # What a delta frame's index leaves out is its parent's, and a re-keyed parent's is another.
    again |= {
        f.frame_id
        for f in in_order
        if f.frame_id in staying and f.kind is FrameKind.DELTA and f.parent_id in rekeyed
    }
    last = {f.branch: f for f in in_order if f.frame_id in staying}
    rewritten_branches = {f.branch for f in in_order if f.frame_id in again}
    again |= {last[branch].frame_id for branch in rewritten_branches}
    return tuple(f for f in in_order if f.frame_id in again - rekeyed)

"""Pruning an archive: steps that are not needed any more go, and those that stay keep every bit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from inshrink_core.archive import ArchiveReader, ArchiveWriter, Rewrite, remove_frames
from inshrink_core.chain import Archive, BaseLike, frame_size
from inshrink_core.chain.needs import spec_of
from inshrink_core.chain.rekey import copy_frame, rekey_frame
from inshrink_core.checkpoint import TensorSpec
from inshrink_core.codec import codec_for_block
from inshrink_core.errors import InputError, MissingFrameError, NotFoundError
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.frame import FrameInfo, FrameKind
from inshrink_core.report import Report

__all__ = [
    "ForgetReport",
    "KeepRules",
    "KeySizes",
    "PrunePlan",
    "PruneReport",
    "forget_missing",
    "make_plan",
    "prune",
]


_SAMPLE_SHARE: Final = 1 / 8
"""Of the raw bytes of each role, what is re-keyed to tell how large a keyframe would be."""

KeySize = Callable[[FrameInfo], int]
"""Returns about how many bytes a frame would take as a keyframe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport(Report):
    """What `prune` did, or would do.

    Parameters
    ----------
    archive
        The archive.
    applied
        True where it was done; False for a plan.
    plan
        What becomes of every frame.
    before, after
        Bytes of the archive; `after` is an estimate where nothing was done and frames are re-keyed.
    seconds
        Wall time.
    device
        Where tensors were decoded.
    """

    archive: str
    applied: bool
    plan: PrunePlan
    before: int
    after: int
    seconds: float
    device: str = "cpu"

    DOCUMENT: ClassVar = (
        "archive applied kept=plan.kept.step references=plan.references.step removed=plan.removed.step "
        "rekeyed=plan.rekeyed.step rewritten=plan.copied.step lost_origins=plan.lost_origins.step frames "
        "bytes_before=before bytes_after=after bytes_freed=freed seconds device"
    )

    @property
    def freed(self) -> int:
        """Bytes that pruning frees; negative where re-keyed frames take more than what goes."""
        return self.before - self.after

    @property
    def frames(self) -> list[dict[str, Any]]:
        """What becomes of every frame, in the order of writing."""
        plan = self.plan
        fates = {"kept": plan.kept, "reference": plan.references, "removed": plan.removed}
        written = {f.frame_id: "rekeyed" for f in plan.rekeyed}
        written |= {f.frame_id: "rewritten" for f in plan.copied}
        rows = [(frame, fate) for fate, frames in fates.items() for frame in frames]
        return [
            {"step": f.step, "branch": f.branch, "fate": fate, "written": written.get(f.frame_id)}
            for f, fate in sorted(rows, key=lambda row: row[0].generation)
        ]


def prune(
    archive: str | os.PathLike[str],
    *,
    keep_every: int | None = None,
    keep_last: int | None = None,
    keep: Iterable[int] = (),
    drop_branches: bool = False,
    smallest: bool = False,
    stand_alone: bool = False,
    base: BaseLike | None = None,
    apply: bool = False,
    device: str = "auto",
    progress: OnProgress | None = None,
) -> PruneReport:
    """Remove archived steps; those that stay decode to the same bits as before.

    Parameters
    ----------
    archive
        The archive's path: a folder.
    keep_every
        Keep steps that are multiples of this.
    keep_last
        Keep that many steps at the end of each branch.
    keep
        Keep these steps.
    drop_branches
        Keep only what belongs to the newest branch's history.
    smallest
        Keep further steps where re-keying those that need them would take more space.
    stand_alone
        Re-key the frames that are told against a base model, so that nothing needs it any more. Without
        another rule every step stays.
    base
        The base model, where one is needed to re-key (`Archive.open`).
    apply
        Do it. Otherwise nothing is changed, and the report says what would be done.
    device
        Where tensors are decoded: ``auto``, ``cpu`` or ``cuda``. The archive does not depend on it.
    progress
        Called after each tensor and frame; raising cancels and leaves the archive as it was.

    Returns
    -------
    PruneReport
        What goes, what stays, what is written anew.

    Raises
    ------
    InputError
        No rule says what to keep, or the archive is packed or behind a URL.
    NotFoundError
        A step of `keep` is not there.
    MissingFrameError, DamagedError
        A frame that stays cannot be decoded; nothing is changed.
    BaseModelError
        A base model is needed, and it is not there or is another one; nothing is changed.
    LockedError, StorageError
        As for any writer; nothing is changed.

    Notes
    -----
    The last step of each branch stays, and so does the step that its training was last restored from.
    A step whose reference goes becomes a keyframe. Everything new is written, synced, decoded and
    compared before one replacement of the manifest makes it live and buries what goes; files are
    deleted last. Killed at any moment, the archive is either as before or pruned.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = inshrink_core.compress(run, target, steps=run.steps[:4])
    >>> report = inshrink_core.verbs.prune(target, keep_last=2, apply=True)
    >>> inshrink_core.open(target).steps == run.steps[2:4]
    True
    """
    begun = time.perf_counter()
    rules = KeepRules(
        every=keep_every,
        last=keep_last,
        steps=tuple(dict.fromkeys(keep)),
        drop_branches=drop_branches,
        smallest=smallest,
        stand_alone=stand_alone,
    )
    opened = Archive.open(archive, base=base).on(device)
    _require_folder(opened.reader, archive)
    estimate = KeySizes(opened, progress)
    before = opened.reader.nbytes
    plan = make_plan(opened, rules, estimate.key_size)
    if not apply or not (plan.removed or plan.rekeyed):
        after = before - sum(f.nbytes for f in (*plan.removed, *plan.rekeyed))
        after += sum(estimate.key_size(frame) for frame in plan.rekeyed)
        if apply:
            # Opening repairs: what a prune that was cut off had still to delete goes now.
            ArchiveWriter(archive).close()
    else:
        plan, after = _apply(opened, rules, progress)
    return PruneReport(
        archive=str(archive),
        applied=apply,
        plan=plan,
        before=before,
        after=after,
        seconds=time.perf_counter() - begun,
        device=opened.device,
    )


def _require_folder(reader: ArchiveReader, archive: str | os.PathLike[str]) -> None:
    """Refuse what cannot be written."""
    if not (Path(archive).is_dir()):
        raise InputError(
            "a packed or remote archive cannot be pruned",
            where=reader.path,
            remedy="make a folder of it: inshrink export PACKED --unpack FOLDER",
        )


def _apply(opened: Archive, rules: KeepRules, progress: OnProgress | None) -> tuple[PrunePlan, int]:
    """Plan again under the lock, write what is new, switch, delete."""
    with ArchiveWriter(opened.path) as writer:
        archive = Archive(writer.reader, device=opened.device, bases=opened.bases)
        plan = make_plan(archive, rules, KeySizes(archive, None).key_size)
        gone = (*plan.removed, *writer.reader.catalog.superseded)
        again = (*plan.copied, *plan.rekeyed)
        count = _Counter(archive, again, progress)
        with Rewrite(writer, again) as rewrite:
            # Copies first: they inherit nothing, so each is whole beside either version of its parent.
            for info in plan.copied:
                with rewrite.begin(
                    info.frame_id,
                    kind=info.kind,
                    parent_id=plan.parents[info.frame_id],
                    external=archive.base_of(info) is not None,
                ) as frame:
                    copy_frame(archive, info, frame)
                count.frame(info)
            view = archive.sequential()
            for info in plan.rekeyed:
                with rewrite.begin(
                    info.frame_id, kind=FrameKind.KEYFRAME, parent_id=plan.parents[info.frame_id]
                ) as frame:
                    rekey_frame(
                        view, info, frame, children=plan.children_of(info), done=count.tensors_of(info)
                    )
            rewrite.switch(gone)
        return plan, writer.reader.nbytes


class _Counter:
    """Counts raw bytes of frames that are written again."""

    def __init__(self, archive: Archive, frames: Iterable[FrameInfo], progress: OnProgress | None) -> None:
        self._progress, self._done = progress, 0
        self._sizes = {f.frame_id: frame_size(archive, f).raw_total for f in frames} if progress else {}
        self._total = sum(self._sizes.values())

    def frame(self, info: FrameInfo) -> None:
        """Count a whole frame."""
        self._add(self._sizes.get(info.frame_id, 0), info.step, "")

    def tensors_of(self, info: FrameInfo) -> Any:
        """Return what is called after each tensor of a frame."""
        return lambda spec: self._add(spec.nbytes, info.step, spec.key)

    def _add(self, nbytes: int, step: int, detail: str) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(Progress("prune", self._done, self._total, step, detail))


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
    stand_alone
        Re-key what needs a base model; without another rule, keep everything.
    """

    every: int | None = None
    last: int | None = None
    steps: tuple[int, ...] = ()
    drop_branches: bool = False
    smallest: bool = False
    stand_alone: bool = False

    def __post_init__(self) -> None:
        if not (self.stand_alone or self.thins):
            raise InputError("nothing says what to keep", remedy="give --keep-every, --keep-last or --keep")
        for name, value in (("--keep-every", self.every), ("--keep-last", self.last)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1", expected="≥ 1", found=str(value))

    @property
    def thins(self) -> bool:
        """Whether a rule says which steps to keep."""
        return self.every is not None or self.last is not None or bool(self.steps)


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
        Frames that stay and lose their reference, or shall do without a base model: they become keyframes
        of the same bits.
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
    rekeyed = [
        f
        for f in in_order
        if (f.frame_id in parents and f.kind is FrameKind.DELTA)
        or (rules.stand_alone and f.frame_id in staying and archive.base_of(f) is not None)
    ]
    copied = _copied(in_order, staying, parents, {frame.frame_id for frame in rekeyed})
    return PrunePlan(
        kept=tuple(f for f in in_order if f.frame_id in kept),
        references=tuple(f for f in in_order if f.frame_id in staying - kept),
        removed=tuple(f for f in in_order if f.frame_id in gone),
        rekeyed=tuple(rekeyed),
        copied=copied,
        parents={f.frame_id: f.parent_id for f in (*copied, *rekeyed)} | parents,
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
        if not rules.thins:
            kept |= {frame.frame_id for frame in line}
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
    again = {f.frame_id for f in in_order if f.frame_id in parents} | rekeyed
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


class KeySizes:
    """How large a frame would be as a keyframe, from re-keying some of its tensors."""

    def __init__(self, archive: Archive, progress: OnProgress | None) -> None:
        self._archive, self._progress = archive.sequential(), progress
        self._sizes: dict[bytes, int] = {}

    def key_size(self, info: FrameInfo) -> int:
        """Return the estimate; decodes about an eighth of the frame the first time it is asked."""
        if info.frame_id not in self._sizes:
            self._sizes[info.frame_id] = self._measure(info)
            if self._progress is not None:
                self._progress(Progress("plan", len(self._sizes), len(self._sizes), info.step))
        return self._sizes[info.frame_id]

    def _measure(self, info: FrameInfo) -> int:
        size = frame_size(self._archive, info)
        total = float(size.parts_nbytes + size.overhead_nbytes)
        by_role: dict[str, list[TensorSpec]] = {}
        for tensor in size.tensors:
            by_role.setdefault(tensor.spec.role.value, []).append(tensor.spec)
        for specs in by_role.values():
            raw = sum(spec.nbytes for spec in specs)
            seen = rekeyed = 0
            for spec in sorted(specs, key=lambda spec: (-spec.nbytes, spec.key)):
                if seen >= _SAMPLE_SHARE * raw and seen:
                    break
                seen += spec.nbytes
                rekeyed += self._rekeyed_nbytes(info, spec)
            total += rekeyed * raw / seen if seen else rekeyed
        return round(total)

    def _rekeyed_nbytes(self, info: FrameInfo, spec: TensorSpec) -> int:
        where = self._archive.where(info)
        entry = self._archive.frame(info).entry(spec.key)
        _, reference = self._archive.decode(info, spec.key)
        return len(codec_for_block(entry.codec, where).rekey(spec_of(entry, where), reference).payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReport(Report):
    """What `forget_missing` gave up, or would.

    Parameters
    ----------
    archive
        The archive.
    applied
        True where it was done; False for a plan.
    missing
        Frames whose files are gone.
    useless
        Frames that are there and cannot be decoded without one of those.
    head
        The frame that is the last one then; None where none is left.
    """

    archive: str
    applied: bool
    missing: tuple[FrameInfo, ...]
    useless: tuple[FrameInfo, ...]
    head: FrameInfo | None

    DOCUMENT: ClassVar = "archive applied missing=missing.place useless=useless.place last=head.place"


def forget_missing(archive: str | os.PathLike[str], *, apply: bool = False) -> ForgetReport:
    """Give up the frames whose files are lost, and those that cannot be decoded without them.

    Parameters
    ----------
    archive
        The archive's path: a folder.
    apply
        Do it. Otherwise nothing is changed, and the report says what would be done.

    Returns
    -------
    ForgetReport
        What goes, and which frame is the last one then.

    Raises
    ------
    NotFoundError, LockedError, StorageError
        As for any writer; nothing is changed.

    Notes
    -----
    This cannot be undone: a file that is found later is no part of the archive any more. The steps go on
    from what is the last frame then, perhaps that of a branch which training had left.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> from inshrink_core.verbs.prune import forget_missing
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = inshrink_core.compress(run, target, steps=run.steps[:2])
    >>> (target / inshrink_core.open(target).last.path).unlink()
    >>> [frame.step for frame in forget_missing(target, apply=True).missing] == [run.steps[1]]
    True
    >>> inshrink_core.open(target).last.step == run.steps[0]
    True
    """
    with ArchiveWriter(archive) if apply else nullcontext() as writer:
        reader = ArchiveReader.open(archive) if writer is None else writer.reader
        missing, useless = _lost(reader)
        gone = {frame.frame_id for frame in (*missing, *useless)}
        left = [frame for frame in reader.frames if frame.frame_id not in gone]
        if writer is not None and missing:
            remove_frames(writer, list(gone))
        return ForgetReport(
            archive=os.fspath(archive),
            applied=apply,
            missing=missing,
            useless=useless,
            head=max(left, key=lambda frame: (frame.branch, frame.generation), default=None),
        )


def _lost(reader: ArchiveReader) -> tuple[tuple[FrameInfo, ...], tuple[FrameInfo, ...]]:
    """Return the missing frames, and those whose chains lead through one."""
    useless = []
    for frame in reader.frames:
        try:
            reader.chain(frame.frame_id)
        except MissingFrameError:
            useless.append(frame)
    return reader.missing, tuple(useless)

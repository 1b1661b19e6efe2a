"""Pruning an archive: steps that are not needed any more go, and those that stay keep every bit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inshrink_core.archive import ArchiveReader, ArchiveWriter, Rewrite
from inshrink_core.chain import Archive, frame_size
from inshrink_core.chain.rekey import copy_frame, rekey_frame
from inshrink_core.errors import InputError
from inshrink_core.frame import FrameInfo, FrameKind
from inshrink_core.session.progress import OnProgress, Progress
from inshrink_core.session.prune_plan import KeepRules, PrunePlan, make_plan
from inshrink_core.session.prune_size import KeySizes

__all__ = ["PruneReport", "prune"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
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
    """

    archive: str
    applied: bool
    plan: PrunePlan
    before: int
    after: int
    seconds: float

    @property
    def freed(self) -> int:
        """Bytes that pruning frees; negative where re-keyed frames take more than what goes."""
        return self.before - self.after

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink prune --json``."""
        plan = self.plan
        return {
            "archive": self.archive,
            "applied": self.applied,
            "kept": _steps(plan.kept),
            "references": _steps(plan.references),
            "removed": _steps(plan.removed),
            "rekeyed": _steps(plan.rekeyed),
            "rewritten": _steps(plan.copied),
            "lost_origins": _steps(plan.lost_origins),
            "frames": _rows(plan),
            "bytes_before": self.before,
            "bytes_after": self.after,
            "bytes_freed": self.freed,
            "seconds": self.seconds,
        }


def _steps(frames: Iterable[FrameInfo]) -> list[int]:
    return [frame.step for frame in frames]


def _rows(plan: PrunePlan) -> list[dict[str, Any]]:
    """Return what becomes of every frame, in the order of writing."""
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
    apply: bool = False,
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
    apply
        Do it. Otherwise nothing is changed, and the report says what would be done.
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
    >>> report = inshrink_core.prune(target, keep_last=2, apply=True)
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
    )
    opened = Archive.open(archive)
    _require_folder(opened.reader, archive)
    estimate = KeySizes(opened, progress)
    before = opened.reader.nbytes
    plan = make_plan(opened, rules, estimate.key_size)
    if not apply or not plan.removed:
        after = before - sum(f.nbytes for f in (*plan.removed, *plan.rekeyed))
        after += sum(estimate.key_size(frame) for frame in plan.rekeyed)
        if apply:
            # Opening repairs: what a prune that was cut off had still to delete goes now.
            ArchiveWriter(archive).close()
    else:
        plan, after = _apply(Path(archive), rules, progress)
    return PruneReport(
        archive=str(archive),
        applied=apply,
        plan=plan,
        before=before,
        after=after,
        seconds=time.perf_counter() - begun,
    )


def _require_folder(reader: ArchiveReader, archive: str | os.PathLike[str]) -> None:
    """Refuse what cannot be written."""
    if not (Path(archive).is_dir()):
        raise InputError(
            "a packed or remote archive cannot be pruned",
            where=reader.path,
            remedy="make a folder of it: inshrink export PACKED --unpack FOLDER",
        )


def _apply(path: Path, rules: KeepRules, progress: OnProgress | None) -> tuple[PrunePlan, int]:
    """Plan again under the lock, write what is new, switch, delete."""
    with ArchiveWriter(path) as writer:
        archive = Archive(writer.reader)
        plan = make_plan(archive, rules, KeySizes(archive, None).key_size)
        gone = (*plan.removed, *writer.reader.catalog.superseded)
        again = (*plan.copied, *plan.rekeyed)
        count = _Counter(archive, again, progress)
        with Rewrite(writer, again) as rewrite:
            # Copies first: they inherit nothing, so each is whole beside either version of its parent.
            for info in plan.copied:
                with rewrite.begin(
                    info.frame_id, kind=info.kind, parent_id=plan.parents[info.frame_id]
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

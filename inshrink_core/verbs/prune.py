"""Prune an archive: remove steps, and keep every bit of the remaining ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from inshrink_core.checkpoint import Checkpoint
from inshrink_core.errors import InputError, MissingFrameError
from inshrink_core.frame import FrameInfo, FrameKind
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.retention import Retention
from inshrink_core.verbs.shared.groups import AnyLog, Decoding, PathLike
from inshrink_core.verbs.shared.values import chosen_steps

if TYPE_CHECKING:
    from inshrink_core.archive import ArchiveReader
    from inshrink_core.chain import Archive
    from inshrink_core.chain.prune import PrunePlan, PruneRules


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport(Report):
    """Result or plan of `prune`.

    Parameters
    ----------
    archive
        Path of the archive.
    applied
        Whether it was done; False for a plan.
    plan
        The fate of every frame.
    before
        Bytes of the archive before.
    after
        Bytes of the archive afterwards; an estimate in a plan that re-keys frames.
    seconds
        Wall time.
    device
        Device that encoded or decoded tensors: ``cpu`` or ``cuda``.
    """

    archive: str
    applied: bool
    plan: PrunePlan
    before: int
    after: int
    seconds: float
    device: str = "cpu"

    KEYS: ClassVar = (
        "archive applied kept=plan.kept.step references=plan.references.step removed=plan.removed.step "
        "rekeyed=plan.rekeyed.step rewritten=plan.copied.step stripped=plan.stripped.step "
        "lost_origins=plan.lost_origins.step frames bytes_before=before bytes_after=after "
        "bytes_freed=freed seconds device"
    )

    @property
    def freed(self) -> int:
        """Bytes freed, or to be freed; negative if re-keyed frames outgrow the removed ones."""
        return self.before - self.after

    @property
    def frames(self) -> list[dict[str, Any]]:
        """The fate of every frame, in the order of writing.

        Returns
        -------
        step : int
            Training step.
        branch : int
            Number of the branch, from 0.
        fate : str
            ``kept``, ``reference`` or ``removed``.
        why : [str]
            Rules that keep it.
        written : str?
            ``rekeyed``, ``rewritten`` or None.
        state_dropped : bool
            Whether its optimizer state is removed.
        """
        plan = self.plan
        fates = {"kept": plan.kept, "reference": plan.references, "removed": plan.removed}
        written = {f.frame_id: "rekeyed" for f in plan.rekeyed}
        written |= {f.frame_id: "rewritten" for f in plan.copied}
        rows = [(frame, fate) for fate, frames in fates.items() for frame in frames]
        return [
            {
                "step": f.step,
                "branch": f.branch,
                "fate": fate,
                "why": plan.why.get(f.frame_id, ()),
                "written": written.get(f.frame_id),
                "state_dropped": f.frame_id in plan.reduced,
            }
            for f, fate in sorted(rows, key=lambda row: row[0].generation)
        ]

    def remarks(self) -> Iterator[str]:
        """Yield the next command."""
        if not self.plan.changes:
            yield "nothing to remove"
        elif not self.applied:
            yield "nothing was changed: add --apply to do it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReport(Report):
    """Result or plan of `prune` with `forget_missing`.

    Parameters
    ----------
    archive
        Path of the archive.
    applied
        Whether it was done; False for a plan.
    manifest
        Why the manifest is unusable and rebuilt from the existing frames; empty if it is usable. Without one,
        lost frames that no other frame refers to are unknown.
    missing
        Frames whose files are lost.
    useless
        Existing frames that need a lost one to be decoded.
    head
        The last frame afterwards; None if no frame is left.
    """

    archive: str
    applied: bool
    manifest: str
    missing: tuple[FrameInfo, ...]
    useless: tuple[FrameInfo, ...]
    head: FrameInfo | None

    KEYS: ClassVar = "archive applied manifest missing=missing.place useless=useless.place last=head.place"

    def remarks(self) -> Iterator[str]:
        """Yield the next command."""
        if not (self.missing or self.useless or self.manifest):
            yield "no frame is missing"
        elif not self.applied:
            yield "nothing was changed: --apply gives these frames up, which cannot be undone"


@dataclass(frozen=True)
class Prune(Retention, Decoding, Request[PruneReport | ForgetReport]):
    """Remove archived steps, or their optimizer state; the rest keeps every bit.

    Only shows a plan without `apply`.

    Parameters
    ----------
    archive
        The archive: a folder, or a URL.
    log
        The training log for --keep-best (CSV, JSON lines, an event file, or the run); by default the archived
        metrics.
    keep
        Keep these steps, given as for --steps.
    drop_branches
        Keep nothing outside the history of the newest branch.
    stand_alone
        Re-key the frames that need a base model, so that the archive does without it.
    forget_missing
        Instead give up lost frames and those that need them, and rebuild an unusable manifest.
    apply
        Change the archive. Otherwise only a plan is shown.

    Raises
    ------
    InputError
        No rule is given, a rule is combined with `forget_missing`, no step has a value of the metric, or the
        archive is packed or behind a URL.
    NotFoundError
        A step of `keep` does not exist.
    MissingFrameError, DamagedError
        A frame to keep cannot be decoded; nothing is changed.
    BaseModelError
        A required base model is missing, or is another one; nothing is changed.
    LockedError, StorageError
        Another process writes the archive, or the storage refused; nothing is changed.

    Notes
    -----
    The last step of each branch is kept, and so is the step that its training was last restored from. A step
    whose reference is removed becomes a keyframe. If a step keeps its optimizer state and its reference does
    not, that state is encoded anew without the reference. New frames are written, synced, decoded and
    compared first; then one replacement of the manifest makes them live and records the removals; files are
    deleted last. After an interruption at any moment, the archive is either unchanged or pruned.

    Giving frames up cannot be undone: a file found later is no longer part of the archive. New steps then
    continue from the last remaining frame, which may be on a branch that training had left.

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

    archive: Annotated[PathLike, Option(metavar="ARCHIVE")]
    _: KW_ONLY
    log: Annotated[AnyLog | None, Option(metavar="FILE|RUN")] = None
    keep: Annotated[Sequence[int | str], Option(metavar="STEPS", many=True)] = ()
    drop_branches: bool = False
    stand_alone: bool = False
    forget_missing: bool = False
    apply: bool = False

    INTERRUPTED: ClassVar = "the archive is unchanged or pruned; the same command shows which"
    STAGE: ClassVar = "prune"
    EXAMPLES: ClassVar = (
        "inshrink prune digits.inshrink --keep-every 1000 --keep-last 5",
        "inshrink prune digits.inshrink --keep-every 1000 --keep-last 5 --apply",
        "inshrink prune digits.inshrink --optimizer-last 2 --apply",
        "inshrink prune digits.inshrink --forget-missing",
    )

    def perform(self) -> PruneReport | ForgetReport:
        """Plan, and prune if `apply` is set."""
        from inshrink_core.archive import ArchiveWriter
        from inshrink_core.chain.prune import carry_out, make_plan

        if self.forget_missing:
            return self._forget()
        if not (self.thins or self.keep or self.stand_alone) and self.optimizer_last is None:
            raise InputError(
                "no rule says what to keep",
                remedy="give --keep-every, --keep-last, --keep-best, --keep or --optimizer-last",
            )
        begun = time.perf_counter()
        opened = self.opened_archive(self.archive)
        if not opened.reader.storage.writable:
            raise InputError(
                "a packed or remote archive cannot be pruned",
                where=opened.reader.path,
                remedy="unpack it to a folder: inshrink export PACKED --unpack FOLDER",
            )
        rules = self._rules(opened.reader)
        before = opened.reader.nbytes
        plan = make_plan(opened, rules)
        if not (self.apply and plan.changes):
            after = before + _growth(opened, plan)
            if self.apply:
                # Opening for writing repairs: it deletes files that an interrupted prune left.
                ArchiveWriter(self.archive).close()
        else:
            with ArchiveWriter(opened.reader.path) as writer:
                plan = carry_out(writer, rules, opened.device, opened.bases, progress=self.progress)
                after = writer.reader.nbytes
        return PruneReport(
            archive=str(self.archive),
            applied=self.apply,
            plan=plan,
            before=before,
            after=after,
            seconds=time.perf_counter() - begun,
            device=opened.device,
        )

    def _forget(self) -> ForgetReport:
        """Find the frames to give up, and remove them if `apply` is set."""
        from inshrink_core.archive import ArchiveReader, ArchiveWriter
        from inshrink_core.archive.maintenance import remove_frames

        self.exclude("--forget-missing", self.given().keys() - {"archive", "forget_missing", "apply"})
        problem = ArchiveReader.open(self.archive).catalog.manifest_problem
        with ArchiveWriter(self.archive, rebuild=True) if self.apply else nullcontext() as writer:
            reader = ArchiveReader.open(self.archive) if writer is None else writer.reader
            missing, useless = _lost(reader)
            gone = {frame.frame_id for frame in (*missing, *useless)}
            left = [frame for frame in reader.frames if frame.frame_id not in gone]
            if writer is not None and gone:
                remove_frames(writer, list(gone))
            return ForgetReport(
                archive=os.fspath(self.archive),
                applied=self.apply,
                manifest=problem.what if problem else "",
                missing=missing,
                useless=useless,
                head=max(left, key=lambda frame: (frame.branch, frame.generation), default=None),
            )

    def _rules(self, reader: ArchiveReader) -> PruneRules:
        """Return the rules, with the steps to keep as numbers."""
        from inshrink_core.chain.prune import PruneRules

        steps = chosen_steps(
            self.keep, lambda: sorted({frame.step for frame in reader.frames}), os.fspath(self.archive)
        )
        given = {field.name: getattr(self, field.name) for field in fields(PruneRules)}
        return PruneRules(**given | {"keep": steps or ()})


prune = python_call(Prune)


def _growth(archive: Archive, plan: PrunePlan) -> int:
    """Return the approximate growth of an archive in bytes; negative if it shrinks.

    A re-keyed tensor is assumed to need as many bytes as in the last keyframe before it.
    """
    from inshrink_core.chain.meta import spec_of

    rekeyed, removed = ({frame.frame_id for frame in frames} for frames in (plan.rekeyed, plan.removed))
    grown, alone = 0, dict[str, int]()
    for info in archive.reader.frames:
        entries, rest = archive.frame(info).entries, plan.reduced.get(info.frame_id)
        if info.kind is FrameKind.KEYFRAME:
            alone |= {entry.key: entry.stored_nbytes for entry in entries if not entry.attachment}
        if info.frame_id in removed:
            grown -= info.nbytes
            continue
        for entry in entries:
            key = entry.key if entry.attachment else spec_of(entry).full_spec.key
            if rest is not None and not _stays(key, entry.attachment, rest.view):
                grown -= entry.stored_nbytes
            elif not entry.attachment and (
                info.frame_id in rekeyed or entry.key in plan.rekeyed_tensors.get(info.frame_id, ())
            ):
                grown += alone.get(entry.key, entry.stored_nbytes) - entry.stored_nbytes
    return grown


def _stays(key: str, is_attachment: bool, view: Checkpoint) -> bool:
    """Return whether a frame keeps a block when its optimizer state is removed."""
    from inshrink_core.chain.attachments import LAYOUT_KEY

    return key == LAYOUT_KEY or any(file.path == key for file in view.files) if is_attachment else key in view


def _lost(reader: ArchiveReader) -> tuple[tuple[FrameInfo, ...], tuple[FrameInfo, ...]]:
    """Return the missing frames, and the frames that need one of them."""
    useless = []
    for frame in reader.frames:
        try:
            reader.chain(frame.frame_id)
        except MissingFrameError:
            useless.append(frame)
    return reader.missing, tuple(useless)

"""Pruning an archive: steps that are not needed any more go, and those that stay keep every bit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

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
    from inshrink_core.checkpoint import Checkpoint


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

    KEYS: ClassVar = (
        "archive applied kept=plan.kept.step references=plan.references.step removed=plan.removed.step "
        "rekeyed=plan.rekeyed.step rewritten=plan.copied.step stripped=plan.stripped.step "
        "lost_origins=plan.lost_origins.step frames bytes_before=before bytes_after=after "
        "bytes_freed=freed seconds device"
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
            {
                "step": f.step,
                "branch": f.branch,
                "fate": fate,
                "why": plan.why.get(f.frame_id, ()),
                "written": written.get(f.frame_id),
                "state_dropped": f.frame_id in plan.rests,
            }
            for f, fate in sorted(rows, key=lambda row: row[0].generation)
        ]

    def remarks(self) -> Iterator[str]:
        """Yield what is to do."""
        if not self.plan.changes:
            yield "nothing to remove"
        elif not self.applied:
            yield "nothing was changed: add --apply to do it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReport(Report):
    """What `prune` with `forget_missing` gave up, or would.

    Parameters
    ----------
    archive
        The archive.
    applied
        True where it was done; False for a plan.
    manifest
        Why the manifest cannot be used, and is rebuilt from the frames that are there; empty where it can.
        Nothing then says which frames are gone without a trace: they are not among the missing.
    missing
        Frames whose files are gone.
    useless
        Frames that are there and cannot be decoded without one of those.
    head
        The frame that is the last one then; None where none is left.
    """

    archive: str
    applied: bool
    manifest: str
    missing: tuple[FrameInfo, ...]
    useless: tuple[FrameInfo, ...]
    head: FrameInfo | None

    KEYS: ClassVar = "archive applied manifest missing=missing.place useless=useless.place last=head.place"

    def remarks(self) -> Iterator[str]:
        """Yield what is to do."""
        if not (self.missing or self.useless or self.manifest):
            yield "no frame is missing"
        elif not self.applied:
            yield "nothing was changed: add --apply to give these frames up; it cannot be undone"


@dataclass(frozen=True)
class Prune(Retention, Decoding, Request[PruneReport | ForgetReport]):
    """Remove archived steps, or their optimizer state; what stays keeps every bit.

    Shows a plan unless told to apply it.

    Parameters
    ----------
    archive
        The archive: a folder, or a URL.
    log
        What the training logged, as CSV, JSON lines or an event file, or its run: for --keep-best. By default
        what the archived steps carry.
    keep
        Keep these steps. A step, a list 100,200, or a range FIRST:LAST[:EVERY], both ends included; may be
        repeated.
    drop_branches
        Keep nothing outside the history of the newest branch.
    stand_alone
        Re-key the frames that are encoded relative to a base model, so that nothing needs it any more.
        Without another rule every step stays.
    forget_missing
        Instead give up frames whose files are lost, and those that need them; rebuild a manifest that is of
        no use from the frames that are there, which are taken for all.
    apply
        Do it. Otherwise nothing is changed, and the report says what would be done.

    Raises
    ------
    InputError
        No rule says what to keep, a rule stands beside `forget_missing`, no step has a metric's value, or the
        archive is packed or behind a URL.
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
    A step whose reference goes becomes a keyframe; of a step that keeps its optimizer's state upon one that
    does not, that state is stored anew to stand alone. Everything new is written, synced, decoded and
    compared before one replacement of the manifest makes it live and buries what goes; files are
    deleted last. Killed at any moment, the archive is either as before or pruned.

    Giving frames up cannot be undone: a file that is found later is no part of the archive any more. The
    steps go on from what is the last frame then, perhaps that of a branch which training had left.

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

    INTERRUPTED: ClassVar = "the archive is as before, or pruned; the same command tells"
    STAGE: ClassVar = "prune"
    EXAMPLES: ClassVar = (
        "inshrink prune digits.inshrink --keep-every 1000 --keep-last 5",
        "inshrink prune digits.inshrink --keep-every 1000 --keep-last 5 --apply",
        "inshrink prune digits.inshrink --optimizer-last 2 --apply",
        "inshrink prune digits.inshrink --forget-missing",
    )

    def perform(self) -> PruneReport | ForgetReport:
        """Plan, and do it where that is said."""
        from inshrink_core.archive import ArchiveWriter
        from inshrink_core.chain.prune import carry_out, make_plan

        if self.forget_missing:
            return self._forget()
        if self.says_nothing and not (self.keep or self.stand_alone):
            raise InputError(
                "nothing says what to keep",
                remedy="give --keep-every, --keep-last, --keep-best, --keep or --optimizer-last",
            )
        begun = time.perf_counter()
        opened = self.opened_archive(self.archive)
        if not opened.reader.storage.writable:
            raise InputError(
                "a packed or remote archive cannot be pruned",
                where=opened.reader.path,
                remedy="make a folder of it: inshrink export PACKED --unpack FOLDER",
            )
        rules = self._rules(opened.reader)
        before = opened.reader.nbytes
        plan = make_plan(opened, rules)
        if not (self.apply and plan.changes):
            after = before + _growth(opened, plan)
            if self.apply:
                # Opening repairs: what a prune that was cut off had still to delete goes now.
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
        """Tell which frames are given up, and remove them where that is said."""
        from inshrink_core.archive import ArchiveReader, ArchiveWriter, remove_frames

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
        """Return the rules, the steps to keep as numbers."""
        from inshrink_core.chain.prune import PruneRules

        steps = chosen_steps(
            self.keep, lambda: sorted({frame.step for frame in reader.frames}), os.fspath(self.archive)
        )
        given = {field.name: getattr(self, field.name) for field in fields(PruneRules)}
        return PruneRules(**given | {"keep": steps or ()})


prune = python_call(Prune)


def _growth(archive: Archive, plan: PrunePlan) -> int:
    """Return by about how many bytes an archive grows; negative where it shrinks.

    A tensor that is re-keyed is taken to need as much as in the last keyframe before it.
    """
    from inshrink_core.chain.meta import spec_of

    rekeyed, removed = ({frame.frame_id for frame in frames} for frames in (plan.rekeyed, plan.removed))
    grown, alone = 0, dict[str, int]()
    for info in archive.reader.frames:
        entries, rest = archive.frame(info).entries, plan.rests.get(info.frame_id)
        if info.kind is FrameKind.KEYFRAME:
            alone |= {entry.key: entry.stored_nbytes for entry in entries if not entry.attachment}
        if info.frame_id in removed:
            grown -= info.nbytes
            continue
        for entry in entries:
            key = entry.key if entry.attachment else spec_of(entry).whole.key
            if rest is not None and not _stays(key, entry.attachment, rest.view):
                grown -= entry.stored_nbytes
            elif not entry.attachment and (info.frame_id in rekeyed or entry.key in plan.standing_of(info)):
                grown += alone.get(entry.key, entry.stored_nbytes) - entry.stored_nbytes
    return grown


def _stays(key: str, is_attachment: bool, view: Checkpoint) -> bool:
    """Return whether a block stays of a frame whose optimizer state goes."""
    from inshrink_core.chain.attachments import LAYOUT_KEY

    return key == LAYOUT_KEY or any(file.path == key for file in view.files) if is_attachment else key in view


def _lost(reader: ArchiveReader) -> tuple[tuple[FrameInfo, ...], tuple[FrameInfo, ...]]:
    """Return the missing frames, and those whose chains lead through one."""
    useless = []
    for frame in reader.frames:
        try:
            reader.chain(frame.frame_id)
        except MissingFrameError:
            useless.append(frame)
    return reader.missing, tuple(useless)

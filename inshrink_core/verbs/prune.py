"""Pruning an archive: steps that are not needed any more go, and those that stay keep every bit."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from inshrink_core.errors import InputError, MissingFrameError, NotFoundError
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.frame import FrameInfo
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, Shown, fields_of, python_call
from inshrink_core.text import duration, size, steps_in_short
from inshrink_core.verbs.history.retention import Retention
from inshrink_core.verbs.shared.groups import AnyLog, Based, OnDevice, PathLike, chosen_steps
from inshrink_core.verbs.shared.showing import show_facts

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.archive import ArchiveReader, ArchiveWriter
    from inshrink_core.chain import Archive
    from inshrink_core.chain.base import BaseFinder
    from inshrink_core.chain.rekey import Rest
    from inshrink_core.checkpoint import TensorSpec

__all__ = [
    "ForgetReport",
    "KeySizes",
    "Prune",
    "PrunePlan",
    "PruneReport",
    "make_plan",
    "prune",
]


_SAMPLE_SHARE: Final = 1 / 8
"""Of the raw bytes of each role, what is re-keyed to estimate how large a keyframe would be."""


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

    def _document(self) -> dict[str, Any]:
        return {
            "archive": self.archive,
            "applied": self.applied,
            "kept": [frame.step for frame in self.plan.kept],
            "references": [frame.step for frame in self.plan.references],
            "removed": [frame.step for frame in self.plan.removed],
            "rekeyed": [frame.step for frame in self.plan.rekeyed],
            "rewritten": [frame.step for frame in self.plan.copied],
            "stripped": [frame.step for frame in self.plan.stripped],
            "lost_origins": [frame.step for frame in self.plan.lost_origins],
            "frames": self.frames,
            "bytes_before": self.before,
            "bytes_after": self.after,
            "bytes_freed": self.freed,
            "seconds": self.seconds,
            "device": self.device,
        }

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

    def show(self, console: Console) -> None:
        """Print what goes and what stays, and what that frees."""
        plan = self.plan
        done = self.applied and plan.changes
        verbs = ("removed", "re-keyed", "dropped") if done else ("would remove", "would re-key", "would drop")
        about = "" if done or not (plan.rekeyed or plan.standing) else "about "
        by_rule: dict[str, list[FrameInfo]] = {}
        for frame in plan.staying:
            for rule in plan.why[frame.frame_id]:
                by_rule.setdefault(rule, []).append(frame)
        state = [frame for frame in plan.staying if frame.frame_id in plan.standing]
        facts = [
            *((f"kept: {rule}", _steps(frames)) for rule, frames in by_rule.items()),
            (verbs[0], _steps(plan.removed)),
            (verbs[1], _steps(plan.rekeyed)),
            (f"{verbs[2]} the optimizer's state of", _steps(plan.stripped)),
            (f"{verbs[1]} that state in", _steps(state)),
            ("archive", f"{size(self.before)} before, {about}{size(self.after)} after"),
            ("freed", f"{about}{size(self.freed)}" if self.freed > 0 else ""),
            ("time", duration(self.seconds)),
        ]
        show_facts(console, facts)
        if plan.lost_origins:
            steps = _steps(plan.lost_origins)
            console.print(f"note: what step {steps} was restored from goes; its record of it stays")
        if self.freed < 0:
            console.print(f"note: re-keyed steps take {size(-self.freed)} more than what goes")
        if not plan.changes:
            console.print("nothing to remove")
        elif not self.applied:
            console.print("nothing was changed: add --apply to do it")


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

    def _document(self) -> dict[str, Any]:
        return {
            "archive": self.archive,
            "applied": self.applied,
            "manifest": self.manifest,
            "missing": [frame.place for frame in self.missing],
            "useless": [frame.place for frame in self.useless],
            "last": None if self.head is None else self.head.place,
        }

    def show(self, console: Console) -> None:
        """Print what is given up, or would be."""
        if not (self.missing or self.useless or self.manifest):
            console.print("no frame is missing")
            return
        verb = "given up" if self.applied else "would give up"
        rebuilt = "rebuilt from the frames" if self.applied else "would be rebuilt from the frames"
        facts = [
            *([("the manifest", f"{rebuilt} that are there: {self.manifest}")] if self.manifest else ()),
            (f"{verb}, missing", _steps(self.missing)),
            (f"{verb}, useless without", _steps(self.useless)),
            ("the last step then", "none is left" if self.head is None else _steps([self.head])),
        ]
        show_facts(console, facts)
        if not self.applied:
            console.print("nothing was changed: add --apply to do it; it cannot be undone")


def _steps(frames: Sequence[FrameInfo]) -> str:
    """Return the steps of some frames, with the branch where there is more than one."""
    by_branch: dict[int, list[int]] = {}
    for frame in frames:
        by_branch.setdefault(frame.branch, []).append(frame.step)
    parts = [
        steps_in_short(sorted(steps)) + (f" on branch {branch}" if branch else "")
        for branch, steps in sorted(by_branch.items())
    ]
    return "; ".join(parts)


@dataclass(frozen=True)
class Prune(Retention, OnDevice, Based, Request[PruneReport | ForgetReport]):
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
    SHOWN: ClassVar = Shown(stage="prune")
    EXAMPLES: ClassVar = (
        "inshrink prune digits.inshrink --keep-every 1000 --keep-last 5",
        "inshrink prune digits.inshrink --keep-every 1000 --keep-last 5 --apply",
        "inshrink prune digits.inshrink --optimizer-last 2 --apply",
        "inshrink prune digits.inshrink --forget-missing",
    )

    @property
    def thins(self) -> bool:
        """Whether a rule says which steps to keep."""
        return super().thins or bool(self.keep)

    def perform(self) -> PruneReport | ForgetReport:
        """Plan, and do it where that is said."""
        from inshrink_core.archive import ArchiveWriter

        if self.forget_missing:
            return self._forget()
        if self.says_nothing and not self.stand_alone:
            raise InputError(
                "nothing says what to keep",
                remedy="give --keep-every, --keep-last, --keep-best, --keep or --optimizer-last",
            )
        begun = time.perf_counter()
        opened = self.opened_archive(self.archive).on(self.device)
        _require_writable(opened.reader)
        rules = self._read(opened.reader)
        estimate = KeySizes(opened, self.progress)
        before = opened.reader.nbytes
        plan = make_plan(opened, rules)
        if not (self.apply and plan.changes):
            after = before + estimate.growth(plan)
            if self.apply:
                # Opening repairs: what a prune that was cut off had still to delete goes now.
                ArchiveWriter(self.archive).close()
        else:
            with ArchiveWriter(opened.reader.path) as writer:
                plan = carry_out(writer, rules, opened.device, opened.bases)
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

        given = self.given().keys() - {"archive", "forget_missing", "apply"}
        for field in fields_of(type(self)):
            if field.name in given:
                raise InputError(f"--forget-missing and {field.names[0]} exclude each other")
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

    def _read(self, reader: ArchiveReader) -> Prune:
        """Return the same, the steps to keep as numbers."""
        steps = chosen_steps(
            self.keep, lambda: sorted({frame.step for frame in reader.frames}), os.fspath(self.archive)
        )
        return replace(self, keep=steps or ())


prune = python_call(Prune)


def _require_writable(reader: ArchiveReader) -> None:
    """Refuse what cannot be written."""
    if not reader.storage.writable:
        raise InputError(
            "a packed or remote archive cannot be pruned",
            where=reader.path,
            remedy="make a folder of it: inshrink export PACKED --unpack FOLDER",
        )


def carry_out(
    writer: ArchiveWriter,
    rules: Prune,
    device: str = "cpu",
    bases: BaseFinder | None = None,
    needed: Collection[bytes | None] = (),
) -> PrunePlan:
    """Plan under the writer's lock, write what is new, switch, delete; `needed` frames stay, by id.

    Raises
    ------
    InputError, NotFoundError, MissingFrameError, DamagedError, BaseModelError, StorageError
        As `Prune`; nothing is changed.
    """
    from inshrink_core.archive import Rewrite
    from inshrink_core.chain import Archive
    from inshrink_core.chain.rekey import REKEYED, attachments_held, copy_frame, rekey_frame, rewrite_frame
    from inshrink_core.frame import FrameKind

    archive = Archive(writer.reader, device=device, bases=bases)
    plan = make_plan(archive, rules, needed)
    if not plan.changes:
        return plan
    gone = (*plan.removed, *writer.reader.catalog.superseded)
    again = (*plan.copied, *plan.rekeyed)
    count = _Counter(archive, again, rules.progress)
    with Rewrite(writer, again) as rewrite:
        view = archive.sequential()
        # Copies first: they inherit nothing, so each is whole beside either version of its parent.
        for info in plan.copied:
            parent_id = plan.parents[info.frame_id]
            with rewrite.begin(
                info.frame_id,
                kind=info.kind,
                parent_id=parent_id,
                external=archive.base_of(info) is not None,
            ) as frame:
                if plan.rests:
                    previous = None
                    if info.kind is FrameKind.DELTA and parent_id is not None:
                        parent = writer.reader.info(parent_id)
                        previous = attachments_held(archive, parent, plan.rests.get(parent_id))
                    rewrite_frame(
                        view,
                        info,
                        frame,
                        previous,
                        rest=plan.rests.get(info.frame_id),
                        standing=plan.standing_of(info),
                        children=plan.children_of(info),
                    )
                else:
                    copy_frame(archive, info, frame)
            count.frame(info)
        view = archive.sequential()
        for info in plan.rekeyed:
            rest = plan.rests.get(info.frame_id)
            with rewrite.begin(
                info.frame_id, kind=FrameKind.KEYFRAME, parent_id=plan.parents[info.frame_id]
            ) as frame:
                rekey_frame(
                    view,
                    info,
                    frame,
                    view=None if rest is None else rest.view,
                    meta=None if rest is None else {**rest.meta, REKEYED: info.frame_id},
                    children=plan.children_of(info),
                    done=count.tensors_of(info),
                )
        rewrite.switch(gone)
    return plan


class _Counter:
    """Counts raw bytes of frames that are written again."""

    def __init__(self, archive: Archive, frames: Iterable[FrameInfo], progress: OnProgress | None) -> None:
        from inshrink_core.chain import frame_size

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
class PrunePlan:
    """What becomes of every frame.

    Parameters
    ----------
    kept
        Frames the rules keep.
    references
        Frames that stay besides, for training was restored from them.
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
    why
        By what rules each frame stays, by id.
    rests
        What stays of frames whose optimizer state goes, by id.
    standing
        Keys of the optimizer's tensors that are re-keyed within a delta frame, since its reference does
        without them, by id.
    """

    kept: tuple[FrameInfo, ...]
    references: tuple[FrameInfo, ...]
    removed: tuple[FrameInfo, ...]
    rekeyed: tuple[FrameInfo, ...]
    copied: tuple[FrameInfo, ...]
    parents: Mapping[bytes, bytes | None]
    lost_origins: tuple[FrameInfo, ...]
    why: Mapping[bytes, tuple[str, ...]]
    rests: Mapping[bytes, Rest]
    standing: Mapping[bytes, frozenset[str]]

    @property
    def changes(self) -> bool:
        """Whether anything goes or is written again."""
        return bool(self.removed or self.rekeyed or self.rests)

    @property
    def staying(self) -> tuple[FrameInfo, ...]:
        """The frames that stay, in the order of writing."""
        return tuple(sorted((*self.kept, *self.references), key=lambda frame: frame.generation))

    @property
    def stripped(self) -> tuple[FrameInfo, ...]:
        """The frames that stay and whose optimizer state goes."""
        return tuple(frame for frame in self.staying if frame.frame_id in self.rests)

    def standing_of(self, info: FrameInfo) -> frozenset[str]:
        """Return the keys of the tensors that are re-keyed within a delta frame."""
        return self.standing.get(info.frame_id, frozenset())

    def children_of(self, info: FrameInfo) -> tuple[FrameInfo, ...]:
        """Return the delta frames that stay upon a re-keyed frame."""
        from inshrink_core.frame import FrameKind

        return tuple(
            frame
            for frame in self.copied
            if frame.kind is FrameKind.DELTA and frame.parent_id == info.frame_id
        )


_ORIGIN: Final = "training was restored from it"


def make_plan(archive: Archive, rules: Prune, needed: Collection[bytes | None] = ()) -> PrunePlan:
    """Decide what becomes of every frame; reads indexes alone.

    Frames that are needed by id stay like those that training was restored from.

    Raises
    ------
    NotFoundError
        A step to keep is not there, or the archive holds none.
    MissingFrameError
        The file of a frame is gone: what depends on it is unknown.
    """
    from inshrink_core.frame import FrameKind

    reader = archive.reader
    _require_whole(reader)
    why = _kept(archive, rules)
    kept = why.keys()
    origins = {frame.frame_id: archive.frame(frame).meta.get("restored") for frame in reader.frames}
    needed = (_origins_of_tips(reader, rules, origins) | (origins.keys() & needed)) - kept
    staying = kept | needed
    in_order = sorted(reader.frames, key=lambda frame: frame.generation)
    gone = {frame.frame_id for frame in in_order} - staying
    parents = {
        frame.frame_id: _staying_ancestor(reader, frame, gone)
        for frame in in_order
        if frame.frame_id in staying and frame.parent_id in gone
    }
    rekeyed = [
        f
        for f in in_order
        if (f.frame_id in parents and f.kind is FrameKind.DELTA)
        or (rules.stand_alone and f.frame_id in staying and archive.base_of(f) is not None)
    ]
    rests = _rests(archive, rules, staying)
    deltas = [f for f in in_order if f.frame_id in staying and f.kind is FrameKind.DELTA and f not in rekeyed]
    standing = {
        f.frame_id: rests[f.parent_id].dropped.intersection(entry.key for entry in archive.frame(f).entries)
        for f in deltas
        if f.parent_id in rests and f.frame_id not in rests
    }
    other = {frame.frame_id for frame in rekeyed} | rests.keys() | standing.keys()
    copied = _copied(in_order, staying, parents, {frame.frame_id for frame in rekeyed}, other)
    reasons = {frame_id: (_ORIGIN,) for frame_id in needed} | why
    return PrunePlan(
        kept=tuple(f for f in in_order if f.frame_id in kept),
        references=tuple(f for f in in_order if f.frame_id in staying - kept),
        removed=tuple(f for f in in_order if f.frame_id in gone),
        rekeyed=tuple(rekeyed),
        copied=copied,
        parents={f.frame_id: f.parent_id for f in (*copied, *rekeyed)} | parents,
        lost_origins=tuple(f for f in in_order if f.frame_id in staying and origins[f.frame_id] in gone),
        why={frame_id: reasons[frame_id] for frame_id in staying},
        rests=rests,
        standing=standing,
    )


def _rests(archive: Archive, rules: Prune, staying: set[bytes]) -> dict[bytes, Rest]:
    """Return what stays of the frames whose optimizer state goes, by id."""
    from inshrink_core.chain.rekey import without_state

    if rules.optimizer_last is None:
        return {}
    reader = archive.reader
    whole: set[bytes] = set()
    for tip in _tips(reader, rules):
        line = [f.frame_id for f in reader.history(tip.frame_id) if f.frame_id in staying]
        whole |= set(line[-rules.optimizer_last :])
    found = {f.frame_id: without_state(archive, f) for f in reader.frames if f.frame_id in staying - whole}
    return {frame_id: rest for frame_id, rest in found.items() if rest is not None}


def _require_whole(reader: ArchiveReader) -> None:
    """Refuse an archive of which something is missing."""
    reader.catalog.require_complete(reader.path)
    for lost in reader.missing:
        raise MissingFrameError(
            f"the frame of step {lost.step} is missing: what it leaves cannot be pruned safely",
            where=f"{reader.path}, {lost.path}",
            remedy="fetch the file from where the archive came from, or give it up with --forget-missing",
        )
    if not reader.frames:
        raise NotFoundError("the archive holds no steps yet", where=reader.path)


def _tips(reader: ArchiveReader, rules: Prune) -> list[FrameInfo]:
    """Return the last frame of each branch that counts."""
    last = {frame.branch: frame for frame in reader.frames}  # by ascending generation
    head = reader.head
    return [head] if rules.drop_branches and head is not None else list(last.values())


def _kept(archive: Archive, rules: Prune) -> dict[bytes, tuple[str, ...]]:
    """Return why frames are kept that the rules keep, by id."""
    reader = archive.reader
    kept: dict[bytes, list[str]] = {}
    found: set[int] = set()
    for tip in _tips(reader, rules):
        line = (tip,) if tip.is_named else reader.history(tip.frame_id)
        chosen = _chosen(archive, rules, line)
        for reason, frames in chosen:
            for frame in frames:
                if reason not in kept.setdefault(frame.frame_id, []):
                    kept[frame.frame_id].append(reason)
        found |= {frame.step for frame in line}
    for step in rules.keep:
        if step not in found:
            raise NotFoundError(
                f"there is no frame of step {step} to keep",
                where=reader.path,
                remedy="`inshrink inspect` lists the steps",
            )
    return {frame_id: tuple(reasons) for frame_id, reasons in kept.items()}


def _chosen(
    archive: Archive, rules: Prune, line: tuple[FrameInfo, ...]
) -> Iterator[tuple[str, Iterable[FrameInfo]]]:
    """Yield what each rule keeps of a line of training, and its name."""
    from inshrink_core.verbs.history.retention import measured

    if not rules.thins:
        yield "no rule removes it", line
    if rules.keep_last is not None:
        yield f"the last {rules.keep_last}", sorted(line, key=lambda f: f.step)[-rules.keep_last :]
    if rules.keep_every is not None:
        yield f"every {rules.keep_every}", [f for f in line if f.step % rules.keep_every == 0]
    yield "named", [f for f in line if f.step in rules.keep]
    values = measured(archive, line, [one.metric for one in rules.best], rules.log) if rules.best else {}
    for one in rules.best:
        there = [frame for frame in line if frame.frame_id in values[one.metric]]
        # Of equal values the later step, which has seen more.
        there.sort(key=lambda f: (one.direction.cost(values[one.metric][f.frame_id]), -f.step))
        yield f"the best {one.n} of {one.metric}", there[: one.n]
    yield "training goes on there", line[-1:]


def _origins_of_tips(reader: ArchiveReader, rules: Prune, origins: Mapping[bytes, object]) -> set[bytes]:
    """Return what training on each branch was last restored from: the next frame is coded against it."""
    live = {frame.frame_id for frame in reader.frames}
    named = {origins[tip.frame_id] for tip in _tips(reader, rules)}
    return {frame_id for frame_id in named if isinstance(frame_id, bytes) and frame_id in live}


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
    other: set[bytes],
) -> tuple[FrameInfo, ...]:
    """Return the frames to write again that are not re-keyed; `other` are those that become different."""
    from inshrink_core.frame import FrameKind

    again = {f.frame_id for f in in_order if f.frame_id in parents} | other
    # What a delta frame's index leaves out is its parent's, and that of a different parent is another.
    again |= {
        f.frame_id
        for f in in_order
        if f.frame_id in staying and f.kind is FrameKind.DELTA and f.parent_id in other
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

    def growth(self, plan: PrunePlan) -> int:
        """Return by about how many bytes an archive grows; negative where it shrinks."""
        from inshrink_core.chain import frame_size
        from inshrink_core.chain.attachments import LAYOUT_KEY
        from inshrink_core.chain.meta import spec_of

        grown = -sum(frame.nbytes for frame in plan.removed)
        rekeyed = {frame.frame_id for frame in plan.rekeyed}
        for info in plan.staying:
            rest, standing = plan.rests.get(info.frame_id), plan.standing_of(info)
            size = frame_size(self._archive, info)
            again = {
                spec_of(entry).whole.key
                for entry in self._archive.frame(info).entries
                if not entry.attachment and entry.key in standing
            }
            if rest is not None:
                kept = set(rest.view)
                files = {LAYOUT_KEY, *(file.path for file in rest.view.files)}
                grown -= sum(
                    entry.stored_nbytes
                    for entry in self._archive.frame(info).entries
                    if (entry.key not in files if entry.attachment else spec_of(entry).whole.key not in kept)
                )
                again = kept if info.frame_id in rekeyed else again
            elif info.frame_id in rekeyed:
                grown += self.key_size(info) - info.nbytes
            rows = [row for row in size.tensors if row.spec.key in again]
            grown += self._measure_blocks(info, [row.spec for row in rows]) - sum(row.nbytes for row in rows)
        return grown

    def _measure(self, info: FrameInfo) -> int:
        from inshrink_core.chain import frame_size

        size = frame_size(self._archive, info)
        blocks = self._measure_blocks(info, [row.spec for row in size.tensors])
        return size.attachments_nbytes + size.overhead_nbytes + blocks

    def _measure_blocks(self, info: FrameInfo, tensors: Iterable[TensorSpec]) -> int:
        """Return about how many bytes tensors would take on their own."""
        total = 0.0
        by_role: dict[str, list[TensorSpec]] = {}
        for one in tensors:
            by_role.setdefault(one.role.value, []).append(one)
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
        from inshrink_core.chain.meta import spec_of
        from inshrink_core.codec import codec_for_block

        where, nbytes = self._archive.where(info), 0
        for entry in self._archive.blocks(info, spec.key):
            _, reference = self._archive.decode(info, entry.key)
            nbytes += len(codec_for_block(entry.codec, where).rekey(spec_of(entry, where), reference).payload)
        return nbytes


def _lost(reader: ArchiveReader) -> tuple[tuple[FrameInfo, ...], tuple[FrameInfo, ...]]:
    """Return the missing frames, and those whose chains lead through one."""
    useless = []
    for frame in reader.frames:
        try:
            reader.chain(frame.frame_id)
        except MissingFrameError:
            useless.append(frame)
    return reader.missing, tuple(useless)

"""Proving an archive: structure and checksums, every frame decoded, and errors against the originals."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

from inshrink_core.errors import CheckFailedError, DamagedError, InshrinkError, TooLargeError, spoken
from inshrink_core.execution.progress import Progress
from inshrink_core.execution.together import gathered, part_ways
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.text import count, counted, error_size, printable, steps_in_short
from inshrink_core.verbs.shared.groups import (
    AnyArchive,
    AnyRun,
    ArchiveLike,
    Decoding,
    InParts,
    Sparing,
)
from inshrink_core.verbs.shared.measured import Measurements
from inshrink_core.verbs.shared.showing import (
    large_errors_text,
    show_originals,
    show_table,
    show_unreadable,
    stored_text,
)

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from inshrink_core.archive import Problem
    from inshrink_core.chain.archive import Archive
    from inshrink_core.chain.config import LargeError
    from inshrink_core.chain.report import OriginalChecks
    from inshrink_core.chain.sizes import Exactness, StepNeeds
    from inshrink_core.checkpoint import Checkpoint, FileLayout, TensorSource, TensorSpec
    from inshrink_core.formats import Run, Skipped
    from inshrink_core.frame import FrameInfo
    from inshrink_core.metrics import TensorError

__all__ = ["StepError", "Verification", "Verify", "verified_step", "verify"]

_LOST = {"unreadable": "cannot be read", "left out": "is left out"}
_MOST_WORST = 10
_MOST_PROBLEMS = 50

_Read = TypeVar("_Read")


class _Recording:
    """A `TensorSource` that goes on after a tensor that cannot be decoded, with zeros in its place."""

    def __init__(self, source: TensorSource) -> None:
        self.errors: list[InshrinkError] = []
        self._source = source

    def read(self, spec: TensorSpec) -> Tensor:
        """Return a tensor."""
        import torch

        from inshrink_core.formats.source import tensor_bytes

        try:
            tensor = self._source.read(spec)
            tensor_bytes(tensor, spec)
        except TooLargeError:
            raise
        except InshrinkError as error:
            self.errors.append(error)
            return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        return tensor

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the bytes of a file outside its tensors."""
        return self._source.skeleton(layout)


@dataclass(frozen=True, slots=True)
class StepError(Report):
    """The error of one tensor at one step, against the original; `large` where nobody asked for that much."""

    step: int
    key: str
    codec: str
    error: TensorError
    large: tuple[LargeError, ...] = ()

    SAYS: ClassVar = (
        "step tensor=key codec max_abs=error.max_abs relative_rms=error.relative_rms "
        "bit_exact=error.bit_exact"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Report):
    """What a verification found.

    Parameters
    ----------
    path
        The archive.
    problems
        Everything wrong, worst first; empty where the archive is sound.
    notes
        What a writer that was cut off left behind; nothing committed is lost by it.
    n_frames
        Frames checked.
    deep
        True if every frame was decoded.
    errors
        Per step and tensor, the error against the originals, where they were given.
    missing_steps
        Steps of the originals that the archive does not hold.
    unreadable
        What looks like a checkpoint of the original run and cannot be read.
    stored
        Which roles are stored bit for bit, over the newest line of training; neither where nothing tells.
    originals
        What vouched for the originals when they were archived: what is sound may be a sound copy of
        damaged files.
    device
        Where frames were decoded.
    """

    path: str
    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...] = ()
    n_frames: int
    deep: bool
    errors: tuple[StepError, ...] = ()
    missing_steps: tuple[int, ...] = ()
    unreadable: tuple[Skipped, ...] = ()
    stored: Exactness
    originals: OriginalChecks
    device: str = "cpu"

    SAYS: ClassVar = (
        "ok problems notes frames=n_frames deep device missing_steps unreadable exact_roles=stored.exact "
        "lossy_roles=stored.lossy originals large_errors errors"
    )

    @property
    def large_errors(self) -> list[LargeError]:
        """Tensors of the model whose relative error is above .25 though no setting asks for it."""
        return [one for row in self.errors for one in row.large]

    @property
    def ok(self) -> bool:
        """True where nothing is wrong."""
        return not self.problems

    @property
    def failure(self) -> CheckFailedError | None:
        """Why the command ends with 1; None where nothing is wrong."""
        n = len(self.problems)
        what = "a problem was found" if n == 1 else f"{n} problems were found"
        return None if self.ok else CheckFailedError(what, where=self.path)

    def show(self, console: Console) -> None:
        """Print the problems, then the worst tensors, then the verdict."""
        for problem in self.problems[:_MOST_PROBLEMS]:
            remedy = f"; {problem.remedy}" if problem.remedy else ""
            console.print(printable(f"{problem.where}: {problem.what}{remedy}"), soft_wrap=True)
        if self.ok:
            show_unreadable(console, self.unreadable)
        for note in self.notes[:_MOST_PROBLEMS]:
            console.print(printable(f"note: {note.where}: {note.what}; {note.remedy}"), soft_wrap=True)
        if len(self.problems) > _MOST_PROBLEMS:
            console.print(f"… and {count(len(self.problems) - _MOST_PROBLEMS)} more")
        if self.errors:
            _show_errors(console, self.errors)
        if self.large_errors:
            text = large_errors_text(self.large_errors)
            console.print(printable(f"relative error above .25: {text}"), soft_wrap=True)
        if any(self.stored) and self.ok:
            console.print(stored_text(self.stored), soft_wrap=True)
        if self.missing_steps and self.ok:
            console.print(f"pruned: step {steps_in_short(self.missing_steps)}")
        show_originals(console, self.originals.text)
        if self.ok:
            looked = "checked and restored" if self.deep else "checked"
            rest = ", but for what cannot be read" if self.unreadable else ""
            console.print(f"sound{rest}: {counted(self.n_frames, 'frame')} {looked}")


def _show_errors(console: Console, errors: tuple[StepError, ...]) -> None:
    """Print how many tensors are bit-exact, and the others by falling error."""
    lossy = [row for row in errors if not row.error.bit_exact]
    console.print(f"bit-exact: {count(len(errors) - len(lossy))} of {count(len(errors))} tensors, all steps")
    if not lossy:
        return
    _show_roles(console, errors)
    # Moments have a relative error of about one by design: they would fill the list.
    lossy = [row for row in lossy if "@" not in row.key] or lossy
    lossy.sort(key=_badness, reverse=True)
    cells = (
        (
            printable(row.key),
            str(row.step),
            printable(row.codec),
            error_size(row.error.relative_rms),
            error_size(row.error.max_abs),
        )
        for row in lossy[:_MOST_WORST]
    )
    console.print()
    headings = ("worst tensors", "step", "codec", "relative error", "largest error")
    show_table(console, headings, cells, left=(0, 2))
    console.print()


def _show_roles(console: Console, errors: tuple[StepError, ...]) -> None:
    """Print a row a role: how many of its tensors are bit-exact, and the largest error of the others."""
    groups: dict[str, list[StepError]] = {}
    for row in errors:
        groups.setdefault(row.key.partition("@")[2] or "weights, buffers", []).append(row)
    cells = []
    for role, rows in groups.items():
        worst = max(rows, key=_badness).error
        exact = count(sum(row.error.bit_exact for row in rows))
        error = "none" if worst.bit_exact else error_size(worst.relative_rms)
        cells.append((role, count(len(rows)), exact, error))
    console.print()
    show_table(console, ("role", "tensors", "bit-exact", "largest relative error"), cells)


def _badness(row: StepError) -> tuple[float, float]:
    """Order by relative error; where the original is all zero, any error counts as the worst."""
    relative = row.error.relative_rms
    return (math.inf if relative is None else relative, row.error.max_abs)


@dataclass(frozen=True)
class Verify(Sparing, InParts, Decoding, Request[Verification]):
    """Check an archive; ends with 1 if anything is wrong.

    Parameters
    ----------
    archive
        The archive to check.
    deep
        Restore every frame too, those of older branches included, without writing a file: what passes,
        restores.
    against
        The original run, to measure the error of every tensor against: tensors that are stored losslessly
        must be bit-exact, and all that the run holds must be in the archive, but for steps that were pruned.


    Raises
    ------
    InputError
        The device is not available.
    TooLargeError
        Decoding would take more than that; of disk, a restored step, as nothing is written.

    Notes
    -----
    Frames that cannot be decoded without their base model are problems. The bytes are read every time: what
    was found before, which is kept and which reports and the explorer show, says nothing of a disk today.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn") / "step_000400.pt")
    >>> report = inshrink_core.compress(run, target)
    >>> inshrink_core.verify(target, deep=True, against=run).ok
    True
    """

    archive: ArchiveLike
    _: KW_ONLY
    deep: bool = False
    against: Annotated[AnyRun | AnyArchive | None, Option(metavar="RUN")] = None

    UNIT: ClassVar = "steps"
    EXAMPLES: ClassVar = (
        "inshrink verify digits.inshrink",
        "inshrink verify digits.inshrink --deep --against runs/digits",
    )

    def perform(self) -> Verification:
        """Check it."""
        if self.is_shared_out:
            from inshrink_core.verbs.shared.sharing import shared_out

            return _together(shared_out(self))
        from inshrink_core.archive import Problem, check_archive
        from inshrink_core.chain.archive import Archive, open_base
        from inshrink_core.chain.report import OriginalChecks, original_checks
        from inshrink_core.chain.sizes import Exactness, exactness_of, sequential_within
        from inshrink_core.execution import Limits

        against = self.against
        if against is not None and not isinstance(against, Archive):
            against = self.opened_run(against)
        path = str(self.archive.path) if isinstance(self.archive, Archive) else os.fspath(self.archive)
        base = None if self.base is None else open_base(self.base)
        found = check_archive(path, self._own)
        notes = tuple(problem for problem in found if problem.leftover)
        problems = [problem for problem in found if not problem.leftover]
        try:
            opened = self.archive if isinstance(self.archive, Archive) else Archive.open(path, base=base)
            archive = opened if self.limits() == Limits() else opened.limited(self.limits())
        except DamagedError:
            return Verification(
                path=path,
                problems=tuple(problems),
                notes=notes,
                n_frames=0,
                deep=self.deep,
                stored=Exactness((), ()),
                originals=OriginalChecks(),
            )
        frames = self._own(archive.reader.frames)
        if self.deep or against is not None:
            archive = archive.on(self.device)
            archive = sequential_within(archive, _needs(archive, frames))
        if self.deep:
            for position, info in enumerate(frames):
                problems += _rehearse(archive, info)
                self._tell(position + 1, len(frames), info.step)
        line = _unless_damaged(lambda: archive.frames, frames)
        errors: list[StepError] = []
        missing: tuple[int, ...] = ()
        unreadable: tuple[Skipped, ...] = ()
        if against is not None:
            missing = tuple(step for step in against.steps if step not in {info.step for info in line})
            wrong, errors, unreadable = self._compared(archive, line, against, missing)
            problems += wrong
        if not self.skip_damaged:
            problems += [
                Problem(
                    row.path,
                    f"the original {_LOST.get(row.fate or '', '')}: {row.reason}",
                    "--skip-damaged goes without",
                )
                for row in unreadable
            ]
        report = Verification(
            path=path,
            problems=tuple(dict.fromkeys(problems)),
            notes=notes,
            n_frames=len(frames),
            deep=self.deep,
            errors=tuple(errors),
            missing_steps=missing,
            unreadable=unreadable,
            # An index that is damaged is a problem of its own.
            stored=_unless_damaged(lambda: exactness_of(archive, line), Exactness((), ())),
            originals=_unless_damaged(lambda: original_checks(archive), OriginalChecks()),
            device=archive.device,
        )
        if self.part is not None:
            return _together(gathered(report))
        self._keep(opened, against, report)
        return report

    def _keep(self, archive: Archive, against: Run | Archive | None, report: Verification) -> None:
        """Keep what was found; the errors of all tensors are as much as an archive, and only counted."""
        from inshrink_core.formats import Run

        directory = against.directory if isinstance(against, Run) else None
        document = report.to_json()
        errors = document.pop("errors")
        document["tensors"] = {"all": len(errors), "exact": sum(row["bit_exact"] for row in errors)}
        question = {"deep": self.deep, "against": against is not None}
        Measurements.of_archive(archive, directory, make=True).add("verify", question, document)

    def _compared(
        self, archive: Archive, line: Sequence[FrameInfo], against: Run | Archive, missing: Sequence[int]
    ) -> tuple[list[Problem], list[StepError], tuple[Skipped, ...]]:
        """Compare every step in both; return problems, errors, and originals that cannot be read."""
        from inshrink_core.formats import Run

        unreadable = against.unreadable if isinstance(against, Run) else ()
        lost = _not_pruned(archive, [info.step for info in line], missing)
        if lost and isinstance(against, Run):
            unreadable = against.readable(lost).unreadable
            lost = [step for step in lost if step not in {row.step for row in unreadable}]
        problems, errors = _not_held(against, lost), list[StepError]()
        if isinstance(against, Run):
            problems += _branches(archive, against, errors)
        common = self._own([info for info in line if info.step in against.steps])
        for position, info in enumerate(common):
            originals = _accepting(against, archive, info)
            wrong, rows = _compare(archive, info, _as_archived(originals, archive, info))
            if wrong and isinstance(originals, Run):
                rotten = set(originals.readable([info.step]).unreadable) - set(originals.unreadable)
                wrong = [row for row in wrong if not any(row.where.startswith(one.path) for one in rotten)]
                unreadable += tuple(rotten)
            problems += wrong
            errors += rows
            self._tell(position + 1, len(common), info.step)
        return problems, errors, unreadable

    def _own(self, infos: Sequence[FrameInfo]) -> Sequence[FrameInfo]:
        """Return the frames of this part."""
        from inshrink_core.chain.parts import share_of

        share = share_of(self.part)
        return infos if share is None else [infos[at] for at in share.of(info.nbytes for info in infos)]

    def _tell(self, done: int, total: int, step: int) -> None:
        if self.progress is not None:
            self.progress(Progress("verify", done, total, step))


verify = python_call(Verify)


def _together(reports: Sequence[Verification]) -> Verification:
    """Return what the processes of one command found, as one."""
    part_ways()
    if len(reports) == 1:
        return reports[0]
    return replace(
        reports[0],
        problems=tuple(dict.fromkeys(row for report in reports for row in report.problems)),
        n_frames=sum(report.n_frames for report in reports),
        errors=tuple(row for report in reports for row in report.errors),
        unreadable=tuple(dict.fromkeys(row for report in reports for row in report.unreadable)),
    )


def _not_pruned(archive: Archive, held: Sequence[int], missing: Sequence[int]) -> list[int]:
    """Return the steps that an archive lacks and never held, as far as can be told."""
    before = max(held, default=0) if archive.reader.catalog.manifest.tombstones else 0
    return [step for step in missing if step >= before]


def _not_held(against: Run | Archive, lost: Sequence[int]) -> list[Problem]:
    """Return what is wrong where the archive lacks steps of the originals."""
    from inshrink_core.archive import Problem

    if not lost:
        return []
    return [
        Problem(
            spoken(str(against.path)),
            f"not in the archive: {'step' if len(lost) == 1 else 'steps'} {steps_in_short(lost)}",
            "archive the rest with `inshrink compress`, or name with a glob what should be there",
        )
    ]


def _branches(archive: Archive, against: Run, errors: list[StepError]) -> list[Problem]:
    """Compare the checkpoints with names of their own; add the errors of their tensors."""
    from inshrink_core.archive import Problem

    problems, held = [], archive.branches
    for name, original in against.branches.items():
        if name in held:
            wrong, rows = _compare(archive, held[name], original)
            problems += wrong
            errors += rows
        else:
            remedy = "archive it with `inshrink compress`"
            problems.append(Problem(original.origin, f"not in the archive: branch '{name}'", remedy))
    return problems


def _unless_damaged(read: Callable[[], _Read], instead: _Read) -> _Read:
    try:
        return read()
    except InshrinkError:
        return instead


def verified_step(
    archive: Archive, info: FrameInfo, originals: Run | Archive
) -> tuple[list[Problem], list[StepError]]:
    """Restore a frame without writing a file, and measure it against its original; return what is wrong."""
    wrong, rows = _compare(archive, info, _as_archived(_accepting(originals, archive, info), archive, info))
    return [*_rehearse(archive, info), *wrong], rows


def _needs(archive: Archive, frames: Iterable[FrameInfo]) -> Iterator[StepNeeds]:
    """Yield what each frame takes; one that cannot be read is a problem of its own."""
    from inshrink_core.chain.sizes import step_needs

    for info in frames:
        with contextlib.suppress(DamagedError):
            yield step_needs(archive, info)


def _rehearse(archive: Archive, info: FrameInfo) -> list[Problem]:
    """Restore a frame and store nothing; what fails becomes a problem."""
    from inshrink_core.formats.write import rehearse_writing, restorable_layout

    problems: list[Problem] = []
    try:
        checkpoint = archive.checkpoint(info)
        source = _Recording(checkpoint.source)
        recorded = dataclasses.replace(checkpoint, source=source)
        try:
            rehearse_writing(recorded, restorable_layout(checkpoint), archive.limits)
        finally:
            problems += [_problem(archive, info, error) for error in source.errors]
    except TooLargeError:
        raise
    except InshrinkError as error:
        problems.append(_problem(archive, info, error))
    return problems


def _compare(
    archive: Archive, info: FrameInfo, original: Checkpoint
) -> tuple[list[Problem], list[StepError]]:
    """Measure a frame against its original; problems are tensors that cannot be what was archived."""
    from inshrink_core.archive import Problem
    from inshrink_core.chain.attachments import holds_content, stored_view
    from inshrink_core.chain.config import large_errors, optimizer_of
    from inshrink_core.chain.meta import WRITTEN
    from inshrink_core.chain.sizes import is_rekeyed
    from inshrink_core.codec import FALLBACK_CODEC, get_codec
    from inshrink_core.metrics import tensor_error

    problems: list[Problem] = []
    rows: list[StepError] = []
    where = archive.where(info)
    try:
        meta, frame = archive.frame(info).meta, archive.frame(info)
        stored = stored_view(original, optimizer_of(meta))
        # A frame exported without its training's files has no digest of what it came from.
        known = all("content" in frame.meta_of(part.number) for part in info.files)
        if known and not holds_content(frame, stored):
            problems.append(
                Problem(
                    where,
                    f"'{original.origin}' is not the checkpoint that was archived",
                    "compare with the original run, or archive this one as another branch",
                )
            )
        restored = archive.checkpoint(info)
    except InshrinkError as error:
        return [*problems, _problem(archive, info, error)], rows
    for spec in restored.specs:
        if spec.key not in original or original.spec(spec.key).shape != spec.shape:
            problems.append(Problem(where, f"the original has no tensor '{spec.key}' of that shape", ""))
            continue
        try:
            measured = tensor_error(original[spec.key], archive.decode(info, spec.key)[0])
        except InshrinkError as error:
            problems.append(_problem(archive, info, error))
            continue
        codecs = {entry.codec for entry in archive.blocks(info, spec.key)}
        codec = " ".join(sorted(codecs))
        faithful = spec.exact or meta.get("codec") == FALLBACK_CODEC or not is_rekeyed(meta, info)
        large = large_errors(meta, spec, info.step, measured.relative_rms)
        rows.append(StepError(info.step, spec.key, codec, measured, large))
        faithful = faithful and spec.parameter not in meta.get(WRITTEN, {})
        exact = faithful and codecs <= get_codec(FALLBACK_CODEC).reads
        if exact and not measured.bit_exact and not problems:
            problems.append(
                Problem(where, f"tensor '{spec.key}' was stored losslessly and differs", "restore a backup")
            )
    return problems, rows


def _accepting(against: Run | Archive, archive: Archive, info: FrameInfo) -> Run | Archive:
    """Return the originals as a frame took its own: as it was, where the user accepted damage."""
    from inshrink_core.chain.report import original_checks
    from inshrink_core.formats import Run

    accepted = _unless_damaged(lambda: bool(original_checks(archive, [info]).damaged), False)
    return against.allowing_damage() if accepted and isinstance(against, Run) else against


def _as_archived(originals: Run | Archive, archive: Archive, info: FrameInfo) -> Checkpoint:
    """Return an original with its state attributed as its frame attributes it."""
    from inshrink_core.chain.archive import Archive

    if isinstance(originals, Archive):
        return originals[info.step]
    return _unless_damaged(
        lambda: originals.as_archived(info.step, archive.attributing(info)), originals[info.step]
    )


def _problem(archive: Archive, info: FrameInfo, error: InshrinkError) -> Problem:
    """Turn an error into a row of the report."""
    from inshrink_core.archive import Problem

    return Problem(error.where or archive.where(info), error.what, error.remedy)

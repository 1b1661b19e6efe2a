"""Verify an archive: structure and checksums, decoding of every frame, errors against the originals."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

from inshrink_core.checkpoint import Checkpoint
from inshrink_core.codec import FALLBACK_CODEC, get_codec
from inshrink_core.errors import CheckFailedError, DamagedError, InshrinkError, TooLargeError, spoken
from inshrink_core.execution.progress import Counter
from inshrink_core.execution.together import gathered, leave_group
from inshrink_core.frame import FrameInfo
from inshrink_core.metrics import TensorError, tensor_error
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.text import counted, steps_in_short
from inshrink_core.verbs.shared.groups import AnyRun, ArchiveLike, Decoding, InParts, Sparing
from inshrink_core.verbs.shared.measured import Measurements

if TYPE_CHECKING:
    from inshrink_core.archive import Problem
    from inshrink_core.chain import Archive, OriginalChecks
    from inshrink_core.chain.config import LargeError
    from inshrink_core.chain.sizes import Exactness, StepNeeds
    from inshrink_core.formats import Run, Skipped


_LOST = {"unreadable": "cannot be read", "left out": "is left out"}
_MAX_WORST = 10

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class StepError(Report):
    """Error of one tensor at one step against the original.

    Parameters
    ----------
    step
        Training step.
    key
        Key of the tensor.
    codec
        Bitstream.
    error
        Error norms.
    large
        Unexpectedly large errors.
    """

    step: int
    key: str
    codec: str
    error: TensorError
    large: tuple[LargeError, ...] = ()

    KEYS: ClassVar = (
        "step tensor=key codec max_abs=error.max_abs relative_rms=error.relative_rms "
        "bit_exact=error.bit_exact"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Report):
    """Result of a verification.

    Parameters
    ----------
    path
        The archive.
    problems
        All problems, worst first; empty if the archive is sound.
    notes
        Leftovers of an interrupted writer; no committed data is lost.
    n_frames
        Number of frames checked.
    deep
        Whether every frame was decoded.
    errors
        Error of each tensor at each step against the originals (``--against``).
    missing_steps
        Steps of the originals that the archive lacks (``--against``).
    unreadable
        Checkpoints of the run that cannot be read.
    stored
        The roles that are stored bit for bit, and the others, over the newest branch; both empty if unknown.
    originals
        Result of checking the original files when they were archived (docs/runs.md#checksums).
    device
        Device that encoded or decoded tensors: ``cpu`` or ``cuda``.
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

    KEYS: ClassVar = (
        "ok problems notes frames=n_frames deep device missing_steps unreadable exact_roles=stored.exact "
        "lossy_roles=stored.lossy originals large_errors errors"
    )
    SHOWS: ClassVar = (
        "problems notes unreadable worst_tensors=worst_tensors large_errors stored_bit_for_bit=stored.exact "
        "compressed_with_an_error=stored.lossy missing_steps originals"
    )

    @property
    def large_errors(self) -> list[LargeError]:
        """Tensors with a relative error above 0.25 that no setting asks for."""
        return [error for row in self.errors for error in row.large]

    @property
    def ok(self) -> bool:
        """True if the archive has no problem."""
        return not self.problems

    @property
    def failure(self) -> CheckFailedError | None:
        """The error of the exit code 1; None without problems."""
        n = len(self.problems)
        what = "a problem was found" if n == 1 else f"{n} problems were found"
        return None if self.ok else CheckFailedError(what, where=self.path)

    @property
    def worst_tensors(self) -> list[StepError]:
        """The largest errors. Moments have a relative error of about 1 by design, and come last."""

        def severity(row: StepError) -> tuple[bool, float, float]:
            # Where the original is all zero, any error counts as the largest.
            relative = math.inf if row.error.relative_rms is None else row.error.relative_rms
            return "@" in row.key, -relative, -row.error.max_abs

        return sorted((row for row in self.errors if not row.error.bit_exact), key=severity)[:_MAX_WORST]

    def remarks(self) -> Iterator[str]:
        """Yield a summary."""
        if self.errors:
            exact = sum(row.error.bit_exact for row in self.errors)
            yield f"bit-exact: {exact:,} of {len(self.errors):,} tensors, all steps"
        if self.ok:
            looked = "checked and restored" if self.deep else "checked"
            rest = ", but for what cannot be read" if self.unreadable else ""
            yield f"sound{rest}: {counted(self.n_frames, 'frame')} {looked}"


@dataclass(frozen=True)
class Verify(Sparing, InParts, Decoding, Request[Verification]):
    """Check an archive; the exit code is 1 if it has problems.

    Parameters
    ----------
    archive
        The archive to check.
    deep
        Also restore every frame of every branch, without writing files.
    against
        The original run.

    Raises
    ------
    InputError
        The device is not available.
    TooLargeError
        Decoding needs more memory than the limit, or a restored step more disk, although nothing is written.

    Notes
    -----
    With `against` the error of every tensor is measured: tensors that are stored losslessly must be
    bit-exact, and the archive must hold everything in the run except pruned steps.

    Frames that cannot be decoded without their base model are problems. Every call reads all bytes again: the
    stored result, which reports and the explorer show, does not prove the present state of the disk.

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
    against: Annotated[AnyRun | None, Option(metavar="RUN")] = None

    UNIT: ClassVar = "steps"
    EXAMPLES: ClassVar = (
        "inshrink verify digits.inshrink",
        "inshrink verify digits.inshrink --deep --against runs/digits",
    )

    def perform(self) -> Verification:
        """Check the archive."""
        if self.is_shared_out:
            from inshrink_core.verbs.shared.sharing import shared_out

            return _together(shared_out(self))
        from inshrink_core.archive import Problem, check_archive
        from inshrink_core.chain import Archive, OriginalChecks, original_checks
        from inshrink_core.chain.parts import frames_of
        from inshrink_core.chain.sizes import Exactness, exactness_of, sequential_within

        against = None if self.against is None else self.opened_run(self.against)
        path = str(self.archive.path) if isinstance(self.archive, Archive) else os.fspath(self.archive)
        found = check_archive(path, partial(frames_of, self.part))
        report = Verification(
            path=path,
            problems=tuple(problem for problem in found if not problem.leftover),
            notes=tuple(problem for problem in found if problem.leftover),
            n_frames=0,
            deep=self.deep,
            stored=Exactness((), ()),
            originals=OriginalChecks(),
        )
        try:
            decodes = self.deep or against is not None
            opened = archive = self.opened_archive(self.archive, decodes=decodes)
        except DamagedError:
            return report
        frames = frames_of(self.part, archive.reader.frames)
        if decodes:
            archive = sequential_within(archive, _needs(archive, frames))
        problems = list(report.problems)
        if self.deep:
            count = Counter(self.progress, "verify", len(frames))
            for info in frames:
                problems += _rehearse(archive, info)
                count.add(1, info.step)
        line = _unless_damaged(lambda: archive.frames, frames)
        if against is not None:
            report = self._compared(archive, line, against, problems, report)
        if not self.skip_damaged:
            for row in report.unreadable:
                what = f"the original {_LOST.get(row.fate or '', '')}: {row.reason}"
                problems.append(Problem(row.path, what, "--skip-damaged goes without"))
        report = replace(
            report,
            problems=tuple(dict.fromkeys(problems)),
            n_frames=len(frames),
            # A damaged index is reported as a problem already.
            stored=_unless_damaged(lambda: exactness_of(archive, line), report.stored),
            originals=_unless_damaged(lambda: original_checks(archive), report.originals),
            device=archive.device,
        )
        if self.part is not None:
            return _together(gathered(report))
        self._store(opened, against, report)
        return report

    def _store(self, archive: Archive, against: Run | None, report: Verification) -> None:
        """Store the report; the errors of all tensors would be large, so store only their numbers."""
        document = report.to_json()
        errors = document.pop("errors")
        document["tensors"] = {"all": len(errors), "exact": sum(row["bit_exact"] for row in errors)}
        question = {"deep": self.deep, "against": against is not None}
        Measurements.of_archive(archive).add("verify", question, document)

    def _compared(
        self,
        archive: Archive,
        line: Sequence[FrameInfo],
        against: Run,
        problems: list[Problem],
        report: Verification,
    ) -> Verification:
        """Compare every common step; append to `problems`, and return the report with the other results."""
        from inshrink_core.archive import Problem
        from inshrink_core.chain.parts import frames_of

        archived = {info.step for info in line}
        missing = tuple(step for step in against.steps if step not in archived)
        # Steps before the last frame of a pruned archive may have been removed.
        first = max(archived, default=0) if archive.reader.catalog.manifest.tombstones else 0
        lost = [step for step in missing if step >= first]
        unreadable = against.readable(lost).unreadable
        lost = [step for step in lost if step not in {row.step for row in unreadable}]
        errors: list[StepError] = []
        if lost:
            what = f"not in the archive: {'step' if len(lost) == 1 else 'steps'} {steps_in_short(lost)}"
            remedy = "archive the rest with `inshrink compress`, or select the steps to compare with a glob"
            problems.append(Problem(spoken(str(against.path)), what, remedy))
        branches = archive.branches
        for name, original in against.branches.items():
            if name in branches:
                wrong, rows = _compare(archive, branches[name], original)
                problems += wrong
                errors += rows
            else:
                remedy = "archive it with `inshrink compress`"
                problems.append(Problem(original.origin, f"not in the archive: branch '{name}'", remedy))
        common = frames_of(self.part, [info for info in line if info.step in against.steps])
        count = Counter(self.progress, "verify", len(common))
        for info in common:
            originals = _accepting(against, archive, info)
            wrong, rows = _compare(archive, info, _as_archived(originals, archive, info))
            if wrong:
                corrupt = set(originals.readable([info.step]).unreadable) - set(originals.unreadable)
                wrong = [
                    row for row in wrong if not any(row.where.startswith(entry.path) for entry in corrupt)
                ]
                unreadable += tuple(corrupt)
            problems += wrong
            errors += rows
            count.add(1, info.step)
        return replace(report, errors=tuple(errors), missing_steps=missing, unreadable=unreadable)


verify = python_call(Verify)


def _together(reports: Sequence[Verification]) -> Verification:
    """Merge the reports of all processes of one command."""
    leave_group()
    if len(reports) == 1:
        return reports[0]
    return replace(
        reports[0],
        problems=tuple(dict.fromkeys(row for report in reports for row in report.problems)),
        n_frames=sum(report.n_frames for report in reports),
        errors=tuple(row for report in reports for row in report.errors),
        unreadable=tuple(dict.fromkeys(row for report in reports for row in report.unreadable)),
    )


def _unless_damaged(read: Callable[[], _Read], instead: _Read) -> _Read:
    try:
        return read()
    except InshrinkError:
        return instead


def verified_step(archive: Archive, info: FrameInfo, originals: Run) -> tuple[list[Problem], list[StepError]]:
    """Restore a frame without writing files, and measure it against its original; return both results."""
    wrong, rows = _compare(archive, info, _as_archived(_accepting(originals, archive, info), archive, info))
    return [*_rehearse(archive, info), *wrong], rows


def _needs(archive: Archive, frames: Iterable[FrameInfo]) -> Iterator[StepNeeds]:
    """Yield the needs of each frame; skip unreadable frames, which are reported as problems."""
    from inshrink_core.chain.sizes import step_needs

    for info in frames:
        with contextlib.suppress(DamagedError):
            yield step_needs(archive, info)


def _rehearse(archive: Archive, info: FrameInfo) -> list[Problem]:
    """Restore a frame without writing; return a failure as a problem."""
    from inshrink_core.formats.write import rehearse_writing

    try:
        rehearse_writing(archive.checkpoint(info), archive.limits)
    except TooLargeError:
        raise
    except InshrinkError as error:
        return [_problem(archive, info, error)]
    return []


def _compare(
    archive: Archive, info: FrameInfo, original: Checkpoint
) -> tuple[list[Problem], list[StepError]]:
    """Measure a frame against its original; report tensors that contradict the archived ones."""
    from inshrink_core.archive import Problem
    from inshrink_core.chain import WRITTEN, holds_content, stored_view
    from inshrink_core.chain.config import large_errors, optimizer_of
    from inshrink_core.chain.sizes import is_rekeyed

    problems: list[Problem] = []
    rows: list[StepError] = []
    where = archive.where(info)
    try:
        frame = archive.frame(info)
        meta = frame.meta
        # A frame that was exported without training files has no digest of its source.
        known = all("content" in frame.meta_of(part.number) for part in info.files)
        if known and not holds_content(frame, stored_view(original, optimizer_of(meta))):
            remedy = "compare with the original run, or archive this one as another branch"
            what = f"'{original.origin}' is not the checkpoint that was archived"
            problems.append(Problem(where, what, remedy))
        restored = archive.checkpoint(info)
    except InshrinkError as error:
        return [*problems, _problem(archive, info, error)], rows
    lossless = get_codec(FALLBACK_CODEC).bitstream
    rounded = meta.get("codec") != FALLBACK_CODEC and is_rekeyed(meta, info)
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
        large = large_errors(meta, spec, info.step, measured.relative_rms)
        rows.append(StepError(info.step, spec.key, " ".join(sorted(codecs)), measured, large))
        faithful = (spec.exact or not rounded) and spec.parameter not in meta.get(WRITTEN, {})
        if faithful and codecs == {lossless} and not measured.bit_exact and not problems:
            what = f"tensor '{spec.key}' was stored losslessly and differs"
            problems.append(Problem(where, what, "restore a backup"))
    return problems, rows


def _accepting(against: Run, archive: Archive, info: FrameInfo) -> Run:
    """Return the originals, with damage allowed if the user allowed it when the frame was archived."""
    from inshrink_core.chain import original_checks

    accepted = _unless_damaged(lambda: bool(original_checks(archive, [info]).damaged), False)
    return against.allowing_damage() if accepted else against


def _as_archived(originals: Run, archive: Archive, info: FrameInfo) -> Checkpoint:
    """Return an original, with optimizer state matched as in its frame."""
    return _unless_damaged(
        lambda: originals.as_archived(info.step, archive.attributing(info)), originals[info.step]
    )


def _problem(archive: Archive, info: FrameInfo, error: InshrinkError) -> Problem:
    from inshrink_core.archive import Problem

    return Problem(error.where or archive.where(info), error.what, error.remedy)

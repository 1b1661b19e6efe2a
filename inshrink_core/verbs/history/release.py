"""Releasing originals: checkpoints that an archive is proven to hold give their disk back."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, NamedTuple

from inshrink_core.errors import CheckFailedError, InputError, InshrinkError, StorageError, named
from inshrink_core.execution.progress import Progress
from inshrink_core.report import Part, Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.text import counted, duration, error_size, size, steps_in_short, url_of
from inshrink_core.verbs.shared.groups import (
    AnyRun,
    ArchiveLike,
    Decoding,
    Reading,
    Stepping,
    chosen_steps,
)
from inshrink_core.verbs.shared.showing import unreadable_lines

if TYPE_CHECKING:
    from inshrink_core.archive import Problem
    from inshrink_core.chain.archive import Archive
    from inshrink_core.checkpoint import Checkpoint
    from inshrink_core.formats import Run, Skipped
    from inshrink_core.frame import FrameInfo

_UNPROVEN: Final = ".inshrink-releasing"
"""Suffix of a checkpoint's hidden name until its files are compared once more."""

_RELEASED: Final = re.compile(r"\.(?P<name>.+)\.(?P<frame>[0-9a-f]{32})\.inshrink-released", re.DOTALL)
"""Hidden name of a checkpoint whose deletion has begun: its name, and the id of the frame that holds it."""


class _Stamp(NamedTuple):
    """By what a file is known to be the very same, links not followed."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> _Stamp:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalStep(Report):
    """What becomes of one checkpoint of a run.

    Parameters
    ----------
    step, path
        Which, and where it lies.
    nbytes
        What deleting it frees.
    released
        Whether it is deleted, or would be.
    exact
        Whether the archive gives every bit of it back.
    errors
        Where it does not, the largest relative error of a tensor by role: root mean square.
    why
        Why it stays; empty where it goes.
    """

    step: int
    path: Path
    nbytes: int = 0
    released: bool = False
    exact: bool = False
    errors: Mapping[str, float | None]
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseReport(Report):
    """What `release` did, or would do.

    Parameters
    ----------
    run, archive
        Of which run, and what holds it.
    applied
        True where it was done; False for a plan.
    steps
        What becomes of each checkpoint of the run.
    finished
        Steps whose deletion had been cut off, and was finished.
    problems
        What is wrong with the archive, or with a step of it: nothing of that is released.
    left_out
        Checkpoints of the run that are archived nowhere: they cannot be read, or are left out.
    seconds
        Wall time.
    """

    run: str
    archive: str
    applied: bool
    steps: tuple[OriginalStep, ...]
    finished: tuple[int, ...] = ()
    problems: tuple[Problem, ...] = ()
    left_out: tuple[Skipped, ...] = ()
    seconds: float

    @property
    def freed(self) -> int:
        """Bytes that are freed, or would be."""
        return sum(row.nbytes for row in self.steps if row.released)

    @property
    def released(self) -> tuple[int, ...]:
        """The steps that are deleted, or would be."""
        return tuple(row.step for row in self.steps if row.released)

    SAYS: ClassVar = "run archive applied released bytes_freed=freed steps finished problems left_out seconds"

    @property
    def failure(self) -> CheckFailedError | None:
        """Why the command ends with 1; None where nothing is wrong."""
        what = f"{counted(len(self.problems), 'problem')} found: of that nothing is released"
        return CheckFailedError(what, where=self.archive) if self.problems else None

    def shown(self) -> Iterator[Part]:
        """Yield what goes, what of it comes back with which error, and what stays and why."""
        yield from (f"{problem.where}: {problem.what}" for problem in self.problems)
        yield from unreadable_lines(self.left_out)
        verb = "released" if self.applied else "would release"
        exact = [row.step for row in self.steps if row.released and row.exact]
        lossy = [row for row in self.steps if row.released and not row.exact]
        kept: dict[str, list[int]] = {}
        for row in self.steps:
            if row.why:
                kept.setdefault(row.why, []).append(row.step)
        yield "finished what was cut off", steps_in_short(self.finished) if self.finished else ""
        yield f"{verb}, every bit is archived", steps_in_short(exact)
        yield f"{verb}, archived with an error", steps_in_short([row.step for row in lossy])
        yield "the largest relative errors", _errors_text(self.steps)
        yield from ((f"stays: {why}", steps_in_short(steps)) for why, steps in kept.items())
        yield "freed" if self.applied else "would free", size(self.freed)
        yield "time", duration(self.seconds)
        if lossy and not self.applied:
            yield "note: what is archived with an error does not come back bit for bit, once it is released"
        if not self.applied:
            yield "nothing was changed: add --apply to do it"


def _errors_text(rows: Sequence[OriginalStep]) -> str:
    """Return the largest error of each role over all steps."""
    worst: dict[str, float | None] = {}
    for row in rows:
        for role, error in row.errors.items():
            known = worst.get(role, 0.0)
            worst[role] = None if known is None or error is None else max(known, error)
    return ", ".join(f"{role} {error_size(error)}" for role, error in worst.items())


def refuse_elsewhere(run: str) -> None:
    """Refuse a run that lies behind a URL: what is deleted there, others may have made anew meanwhile.

    Raises
    ------
    InputError
        It does.
    """
    if url_of(run) is not None:
        raise InputError(
            "originals are released from file systems only",
            where=run,
            remedy="delete them with the bucket's own tools, once `inshrink verify --deep --against` passed",
        )


@dataclass(frozen=True)
class Release(Stepping, Reading, Decoding, Request[ReleaseReport]):
    """Delete original checkpoints that an archive holds. Shows a plan unless told to apply it.

    Parameters
    ----------
    run
        The run whose checkpoints are released.
    archive
        The archive that holds them.
    keep_newest
        Of the run, checkpoints that stay whatever is archived.
    lossy
        Release those too that the archive gives back with an error, as the default codec does. They are gone
        then but for that.
    apply
        Do it. Otherwise nothing is changed, and the report says what would be done.

    Raises
    ------
    InputError
        The run is one checkpoint, or a step is not there.
    LockedError
        Another process is writing the archive.
    StorageError
        The system refused; what was not deleted yet is whole.

    Notes
    -----
    A checkpoint goes if its frame restores (as of `verify --deep`), is of this very original, has all of its
    tensors, and every byte outside of tensors (as of `verify --against`); and if all files in its folder are
    in the archive, none is a link, and none changed since before it was compared. One that cannot be read,
    or lacks anything in the archive, its optimizer's state say, stays whole.

    A checkpoint is renamed first, so that no reader ever sees half of one: killed at any moment, each
    original is whole, or archived and verified, and the same command finishes what was begun.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib, shutil
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> run = shutil.copytree(inshrink_core.sample("digits-cnn"), folder / "run")
    >>> report = inshrink_core.compress(run, folder / "a.inshrink", codec="lossless")
    >>> report = inshrink_core.verbs.release(run, folder / "a.inshrink", apply=True)
    >>> len(report.released) == len(inshrink_core.open(folder / "a.inshrink").steps) - 2
    True
    """

    run: Annotated[AnyRun, Option(metavar="RUN")]
    archive: ArchiveLike
    _: KW_ONLY
    keep_newest: Annotated[int, Option(metavar="K", least=1)] = 2
    lossy: bool = False
    apply: bool = False

    INTERRUPTED: ClassVar = "each checkpoint is whole, or archived; the same command goes on"
    UNIT: ClassVar = "steps"
    EXAMPLES: ClassVar = (
        "inshrink release runs/digits digits.inshrink",
        "inshrink release runs/digits digits.inshrink --lossy --apply",
    )

    def perform(self) -> ReleaseReport:
        """Finish what was cut off, prove each step, and delete it where that is said."""
        import time

        begun = time.perf_counter()
        archive = self.opened_archive(self.archive)
        with self._held(archive):
            archive.reader.refresh()
            folder = self._folder()
            finished = _finish(folder, archive) if self.apply else ()
            run = self.opened_run(self.run)
            rows, problems = self._steps(run, archive)
        return ReleaseReport(
            run=run.address,
            archive=archive.reader.path,
            applied=self.apply,
            steps=tuple(rows),
            finished=finished,
            problems=tuple(problems),
            left_out=run.unreadable,
            seconds=time.perf_counter() - begun,
        )

    @contextlib.contextmanager
    def _held(self, archive: Archive) -> Iterator[None]:
        """Hold the archive's lock, so that nobody prunes what is about to be the only copy."""
        from inshrink_core.archive import ArchiveWriter

        if self.apply and archive.reader.storage.writable:
            with ArchiveWriter(archive.reader.path):
                yield
        else:
            yield

    def _folder(self) -> Path:
        """Return the run's folder, also where no checkpoint is left in it."""
        from inshrink_core import formats

        if isinstance(self.run, formats.Run):
            refuse_elsewhere(self.run.address)
            return self.run.directory
        refuse_elsewhere(os.fspath(self.run))
        path = formats.split_step_pattern(os.fspath(self.run))[0]
        while not path.is_dir() and path != path.parent:
            path = path.parent
        return path

    def _steps(self, run: Run, archive: Archive) -> tuple[list[OriginalStep], list[Problem]]:
        """Return what becomes of every step, and do it where that is said."""
        from inshrink_core.archive import Problem, check_archive
        from inshrink_core.chain.sizes import sequential_within, step_needs

        asked = chosen_steps(self.steps, lambda: run.steps, run.address)
        for step in asked or ():
            run.path_of(step)  # the error names the steps near it
        rows: dict[int, OriginalStep] = {}
        candidates: list[tuple[FrameInfo, _Files]] = []
        frames = {frame.step: frame for frame in archive.frames}
        lost: list[Problem] = []
        for step in run.steps:
            files = None
            try:
                why = self._stays(run, step, archive, frames)
            except InshrinkError as error:
                why = "its frame cannot be read"
                lost.append(Problem(error.where or archive.reader.path, error.what, error.remedy))
            if not why and asked is not None and step not in asked:
                why = "it was not asked for"
            if not why:
                files, why = _files_of(run, step)
            if files is None:
                rows[step] = OriginalStep(step=step, path=run.path_of(step), errors={}, why=why)
            else:
                candidates.append((frames[step], files))
        needed = {link.frame_id for info, _ in candidates for link in archive.reader.chain(info.frame_id)}
        found = check_archive(
            archive.reader.path, lambda every: [frame for frame in every if frame.frame_id in needed]
        )
        problems = [*lost, *(problem for problem in found if not problem.leftover)]
        is_sound = not problems
        view = self.opened_archive(archive)
        if is_sound:
            view = sequential_within(view, [step_needs(view, info) for info, _ in candidates])
        for position, (info, files) in enumerate(candidates):
            row = OriginalStep(step=info.step, path=files.path, errors={}, why="the archive is not sound")
            if is_sound:
                row, wrong = self._proven(run, view, info, files)
                problems += wrong
            if row.released and self.apply:
                row = _delete(row, files, info)
            rows[info.step] = row
            if self.progress is not None:
                self.progress(Progress("release", position + 1, len(candidates), info.step))
        return [rows[step] for step in run.steps], problems

    def _stays(self, run: Run, step: int, archive: Archive, frames: Mapping[int, FrameInfo]) -> str:
        """Return why a step stays that need not be compared; empty where it may go."""
        from inshrink_core.chain.attachments import dropped_of

        if step in run.steps[-self.keep_newest :]:
            return f"one of the newest {self.keep_newest}"
        if step not in frames:
            return "it is not in the archive"
        if dropped_of(archive.frame(frames[step])):
            return "the archive has no optimizer state of it any more"
        base = archive.base_of(archive.reader.chain(frames[step].frame_id)[0])
        if base is not None and base.path is not None:
            lies = os.path.realpath(archive.path.absolute().parent / base.path)
            own = os.path.realpath(run.path_of(step))
            if own in (lies, os.path.commonpath([own, lies])) or base.step == step:
                return "the archive has it as its base model"
        return ""

    def _proven(
        self, run: Run, archive: Archive, info: FrameInfo, files: _Files
    ) -> tuple[OriginalStep, list[Problem]]:
        """Compare an original with its frame, and tell whether it may go."""
        from inshrink_core.verbs.verify import verified_step

        row = OriginalStep(step=info.step, path=files.path, errors={})
        try:
            problems, measured = verified_step(archive, info, run)
            if problems:
                return replace(row, why="it did not pass the check"), problems
            original = run.as_archived(info.step, archive.attributing(info))
            why = _lacking(original, archive.checkpoint(info))
        except InshrinkError as error:
            return replace(row, why=f"it cannot be read: {error.what}"), []
        if why:
            return replace(row, why=why), []
        errors: dict[str, float | None] = {}
        for one in measured:
            if not one.error.bit_exact:
                role, now = one.key.partition("@")[2] or "weights", one.error.relative_rms
                known = errors.get(role, 0.0)
                errors[role] = None if known is None or now is None else max(known, now)
        row = replace(row, nbytes=files.nbytes, exact=not errors, errors=errors)
        if errors and not self.lossy:
            return replace(row, why="archived with an error (--lossy releases it)"), []
        return replace(row, released=True), []


release = python_call(Release)


class _Files(NamedTuple):
    """The files of one checkpoint, as they are before they are compared.

    Parameters
    ----------
    path
        The file, or the folder.
    stamps
        By relative path.
    nbytes
        What deleting them frees.
    """

    path: Path
    stamps: Mapping[str, _Stamp]
    nbytes: int


def _files_of(run: Run, step: int) -> tuple[_Files | None, str]:
    """Return the files of a checkpoint; or none, and why it stays."""
    path, checkpoint = run.path_of(step), run[step]
    own = {file.path for file in checkpoint.files}
    inside = os.path.realpath(run.directory)
    parent = os.path.realpath(path.parent)
    if path.is_symlink() or os.path.commonpath([inside, parent]) != inside:
        return None, "a link leads to it"
    if path.is_dir() and os.path.realpath(path) == inside:
        return None, "it is the whole run"
    try:
        found = dict(_walk(path)) if path.is_dir() else {path.name: path.lstat()}
    except OSError as error:
        return None, f"it cannot be read: {error.strerror}"
    if not path.is_dir() and len(checkpoint.files) > 1:
        return None, "it lies in several files beside those of other steps"
    if any(not stat.S_ISREG(one.st_mode) for one in found.values()):
        return None, "it has links, or what is no file"
    if foreign := sorted(found.keys() - own):
        return None, f"not all of its files are read: {named(foreign)}"
    if own - found.keys():
        return None, "its files lie elsewhere"
    stamps = {name: _Stamp.of(one) for name, one in found.items()}
    nbytes = sum(one.st_size for one in found.values() if one.st_nlink == 1)
    return _Files(path, stamps, nbytes), ""


def _walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every file and link below a folder by its relative path; follows none."""
    for root, folders, names in os.walk(folder, onerror=_raise):
        links = [name for name in folders if Path(root, name).is_symlink()]
        for name in (*names, *links):
            path = Path(root, name)
            yield path.relative_to(folder).as_posix(), path.lstat()


def _raise(error: OSError) -> None:
    raise error


def _lacking(original: Checkpoint, restored: Checkpoint) -> str:
    """Return what the archive lacks of an original; empty where it has all, skeletons bit for bit."""
    if lost := [spec.key for spec in original.specs if spec.key not in restored]:
        state = all("@" in key for key in lost)
        return "the archive lacks its optimizer's state" if state else f"the archive lacks {named(lost)}"
    layouts = {file.path: file for file in restored.files}
    for file in original.files:
        if file.path not in layouts:
            return f"the archive lacks its file '{file.path}'"
        if original.source.skeleton(file) != restored.source.skeleton(layouts[file.path]):
            return f"the archive has its file '{file.path}' otherwise"
    return ""


def _delete(row: OriginalStep, files: _Files, info: FrameInfo) -> OriginalStep:
    """Delete a checkpoint that is proven, if it is still what was compared."""
    from inshrink_core.archive.storage import storage_errors
    from inshrink_core.execution import sync_path

    path = files.path
    hidden = path.with_name(f".{path.name}{_UNPROVEN}")
    with storage_errors("the checkpoint cannot be released", str(path)):
        path.rename(hidden)
        if _stamps(hidden, path.name) != files.stamps:
            _put_back(hidden, path)
            return replace(row, released=False, why="it changed while it was compared")
        doomed = hidden.rename(path.with_name(f".{path.name}.{info.frame_id.hex()}.inshrink-released"))
        sync_path(path.parent)
        _remove(doomed)
    return row


def _stamps(path: Path, name: str) -> dict[str, _Stamp]:
    """Return the stamps of a checkpoint's files, by relative path; of a single file, by its name."""
    found = _walk(path) if path.is_dir() else [(name, path.lstat())]
    return {name: _Stamp.of(one) for name, one in found}


def _put_back(hidden: Path, path: Path) -> None:
    if path.exists():
        raise StorageError(
            "a checkpoint was hidden to be released, and its place is taken",
            where=str(hidden),
            remedy=f"compare it with '{path.name}', and keep the right one",
        )
    hidden.rename(path)


def _remove(path: Path) -> None:
    from inshrink_core.execution import sync_path

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    sync_path(path.parent)


def _finish(folder: Path, archive: Archive) -> tuple[int, ...]:
    """Finish deletions that were cut off, below a run's folder; return their steps.

    Raises
    ------
    InputError
        This archive does not hold a step whose deletion was begun.
    """
    from inshrink_core.archive.storage import storage_errors

    finished: list[int] = []
    for root, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(root, name)
            with storage_errors("the release that was cut off cannot be finished", str(path)):
                if found := _RELEASED.fullmatch(name):
                    finished.append(_require_held(bytes.fromhex(found["frame"]), archive, str(path)))
                    _remove(path)
                elif name.startswith(".") and name.endswith(_UNPROVEN):
                    _put_back(path, path.with_name(name.removesuffix(_UNPROVEN)[1:]))
        folders[:] = [name for name in folders if not name.startswith(".") and not name.endswith(".inshrink")]
    return tuple(sorted(finished))


def _require_held(frame_id: bytes, archive: Archive, where: str) -> int:
    """Return the step of a frame; refuse to finish a deletion unless the archive restores it."""
    from inshrink_core.formats.write import rehearse_writing, restorable_layout

    info = next((frame for frame in archive.reader.frames if frame.frame_id == frame_id), None)
    if info is None:
        raise InputError(
            "a release was cut off, and this archive does not hold the checkpoint",
            where=where,
            remedy="give the archive that it was released into",
        )
    checkpoint = archive.checkpoint(info)
    rehearse_writing(checkpoint, restorable_layout(checkpoint), archive.limits)
    return info.step

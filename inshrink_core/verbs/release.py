"""Release originals: delete checkpoints that an archive provably holds."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from inshrink_core.checkpoint import Checkpoint
from inshrink_core.errors import CheckFailedError, InputError, InshrinkError, StorageError, named
from inshrink_core.execution.files import sync_path
from inshrink_core.execution.progress import Counter
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.text import counted, url_of
from inshrink_core.verbs.shared.groups import AnyRun, ArchiveLike, Decoding, Reading, Stepping
from inshrink_core.verbs.shared.values import chosen_steps

if TYPE_CHECKING:
    from inshrink_core.archive import Problem
    from inshrink_core.chain.archive import Archive
    from inshrink_core.formats import Run, Skipped
    from inshrink_core.frame import FrameInfo

_UNPROVEN: Final = ".inshrink-releasing"
"""Suffix of a checkpoint's hidden name until its files are compared again."""

_RELEASED: Final = re.compile(r"\.(?P<name>.+)\.(?P<frame>[0-9a-f]{32})\.inshrink-released", re.DOTALL)
"""Hidden name of a checkpoint whose deletion has begun: its name, and the id of its frame."""


class _Stays(Exception):  # noqa: N818 - not an error: the reason why a checkpoint is not released
    """Reason why a checkpoint is not released."""


def _stays_if(condition: object, why: str) -> None:
    if condition:
        raise _Stays(why)


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalStep(Report):
    """Plan or result for one checkpoint of a run.

    Parameters
    ----------
    step
        Training step.
    path
        Path of the checkpoint.
    nbytes
        Bytes that its deletion frees.
    exact
        Whether the archive restores every bit of it.
    errors
        If not, the largest relative error of a tensor (root mean square), by role.
    why
        Why it is not deleted; empty if it is, or would be.
    """

    step: int
    path: Path
    nbytes: int = 0
    exact: bool = False
    errors: Mapping[str, float | None] = field(default_factory=dict)
    why: str = ""

    KEYS: ClassVar = "step path nbytes released exact errors why"

    @property
    def released(self) -> bool:
        """Whether the checkpoint is deleted, or would be."""
        return not self.why


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseReport(Report):
    """Result or plan of `release`.

    Parameters
    ----------
    run
        Path of the run.
    archive
        Path of the archive.
    applied
        Whether it was done; False for a plan.
    steps
        The plan or result for each checkpoint of the run.
    finished
        Steps whose interrupted deletion was finished.
    problems
        Problems of the archive, or of single steps; affected checkpoints are not released.
    left_out
        Checkpoints of the run that are in no archive: they are unreadable, or were left out.
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
        """Bytes freed, or to be freed."""
        return sum(row.nbytes for row in self.steps if row.released)

    @property
    def released(self) -> tuple[int, ...]:
        """Steps deleted, or to be deleted."""
        return tuple(row.step for row in self.steps if row.released)

    KEYS: ClassVar = "run archive applied released bytes_freed=freed steps finished problems left_out seconds"
    SHOWS: ClassVar = "problems left_out steps applied finished released bytes_freed seconds"

    @property
    def failure(self) -> CheckFailedError | None:
        """The error of the exit code 1; None without problems."""
        what = f"{counted(len(self.problems), 'problem')} found: of that nothing is released"
        return CheckFailedError(what, where=self.archive) if self.problems else None

    def remarks(self) -> Iterator[str]:
        """Yield notes and the next command."""
        if not self.applied:
            if any(row.released and not row.exact for row in self.steps):
                yield "note: checkpoints archived with an error cannot be restored bit for bit"
            yield "nothing was changed: add --apply to do it"


def _larger(error: float | None, other: float | None) -> float | None:
    """Return the larger of two relative errors; None, for an original that is all zero, is the largest."""
    return None if error is None or other is None else max(error, other)


def refuse_elsewhere(run: str) -> None:
    """Refuse a run behind a URL: others may have rewritten a checkpoint before it is deleted there.

    Raises
    ------
    InputError
        The run has a URL.
    """
    if url_of(run) is not None:
        raise InputError(
            "originals are released from file systems only",
            where=run,
            remedy="delete them with the bucket's own tools, once `inshrink verify --deep --against` passed",
        )


@dataclass(frozen=True)
class Release(Stepping, Reading, Decoding, Request[ReleaseReport]):
    """Delete original checkpoints that an archive holds. Only shows a plan without `apply`.

    Parameters
    ----------
    run
        The run whose checkpoints are released.
    archive
        The archive that holds them.
    keep_newest
        Number of newest checkpoints that are never released.
    lossy
        Also release originals of which only a lossy copy remains, as with the default codec.
    apply
        Delete the checkpoints. Otherwise only a plan is shown.

    Raises
    ------
    InputError
        The run is a single checkpoint, or a step does not exist.
    LockedError
        Another process is writing the archive.
    StorageError
        The file system refused; checkpoints not deleted yet are complete.

    Notes
    -----
    A checkpoint is released if its frame restores (as `verify --deep` checks), was made from this original,
    and holds all of its tensors and every byte outside of tensors (as `verify --against` checks); and if all
    files in its folder are in the archive, none is a link, and none changed since before the comparison. A
    checkpoint that cannot be read, or that the archive holds in part, for example without optimizer state, is
    not touched.

    A checkpoint is renamed first, so that no reader sees a part of it. After an interruption at any moment,
    each original is complete, or archived and verified; the same command finishes the deletion.

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

    INTERRUPTED: ClassVar = "each checkpoint is complete or archived; the same command continues"
    UNIT: ClassVar = "steps"
    EXAMPLES: ClassVar = (
        "inshrink release runs/digits digits.inshrink",
        "inshrink release runs/digits digits.inshrink --lossy --apply",
    )

    def perform(self) -> ReleaseReport:
        """Finish interrupted deletions, prove each step, and delete it if `apply` is set."""
        from inshrink_core.archive import ArchiveWriter

        begun = time.perf_counter()
        archive = self.opened_archive(self.archive)
        is_locked = self.apply and archive.reader.storage.writable
        # The lock prevents a prune of frames that are about to be the only copy.
        with ArchiveWriter(archive.reader.path) if is_locked else contextlib.nullcontext():
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

    def _folder(self) -> Path:
        """Return the run's folder, even if it contains no checkpoint."""
        from inshrink_core import formats

        run = self.run
        refuse_elsewhere(run.address if isinstance(run, formats.Run) else os.fspath(run))
        if isinstance(run, formats.Run):
            return run.directory
        path = formats.split_step_pattern(os.fspath(run))[0]
        while not path.is_dir() and path != path.parent:
            path = path.parent
        return path

    def _steps(self, run: Run, archive: Archive) -> tuple[list[OriginalStep], list[Problem]]:
        """Return the plan or result for every step; delete the proven ones if `apply` is set."""
        from inshrink_core.archive import Problem, check_archive
        from inshrink_core.chain.sizes import sequential_within, step_needs

        asked = chosen_steps(self.steps, lambda: run.steps, run.address)
        for step in asked or ():
            run.path_of(step)  # the error names the steps near it
        rows = {step: OriginalStep(step=step, path=run.path_of(step)) for step in run.steps}
        candidates: list[tuple[FrameInfo, _Files]] = []
        frames = {frame.step: frame for frame in archive.frames}
        problems: list[Problem] = []
        for step, row in rows.items():
            try:
                self._refuse(run, step, archive, frames)
                _stays_if(asked is not None and step not in asked, "it was not asked for")
                candidates.append((frames[step], _files_of(run, step)))
            except _Stays as reason:
                rows[step] = replace(row, why=str(reason))
            except InshrinkError as error:
                problems.append(Problem(error.where or archive.reader.path, error.what, error.remedy))
                rows[step] = replace(row, why="its frame cannot be read")
        needed = {link.frame_id for info, _ in candidates for link in archive.reader.chain(info.frame_id)}
        found = check_archive(
            archive.reader.path, lambda every: [frame for frame in every if frame.frame_id in needed]
        )
        problems += [problem for problem in found if not problem.leftover]
        is_intact, view = not problems, self.opened_archive(archive)
        if is_intact:
            view = sequential_within(view, [step_needs(view, info) for info, _ in candidates])
        count = Counter(self.progress, "release", len(candidates))
        for info, files in candidates:
            row = rows[info.step]
            try:
                _stays_if(not is_intact, "the archive is not sound")
                row = self._proven(row, run, view, info, problems)
                nbytes = sum(file.st_size for file in files.values() if file.st_nlink == 1)
                row = replace(row, nbytes=nbytes)
                if row.released and self.apply:
                    _delete(row.path, files, info)
            except _Stays as reason:
                row = replace(row, why=str(reason))
            rows[info.step] = row
            count.add(1, info.step)
        return list(rows.values()), problems

    def _refuse(self, run: Run, step: int, archive: Archive, frames: Mapping[int, FrameInfo]) -> None:
        """Raise `_Stays` for a step that is not released and needs no comparison."""
        from inshrink_core.chain.attachments import dropped_of

        _stays_if(step in run.steps[-self.keep_newest :], f"one of the newest {self.keep_newest}")
        _stays_if(step not in frames, "it is not in the archive")
        dropped = dropped_of(archive.frame(frames[step]))
        _stays_if(dropped, "its optimizer state is no longer in the archive")
        base = archive.base_of(archive.reader.chain(frames[step].frame_id)[0])
        if base is not None and base.path is not None:
            base_path = os.path.realpath(archive.path.absolute().parent / base.path)
            path = os.path.realpath(run.path_of(step))
            is_base = path in (base_path, os.path.commonpath([path, base_path])) or base.step == step
            _stays_if(is_base, "the archive has it as its base model")

    def _proven(
        self, row: OriginalStep, run: Run, archive: Archive, info: FrameInfo, problems: list[Problem]
    ) -> OriginalStep:
        """Compare an original with its frame; add what is wrong to `problems`."""
        from inshrink_core.verbs.verify import verified_step

        try:
            wrong, measured = verified_step(archive, info, run)
            problems += wrong
            _stays_if(wrong, "it did not pass the check")
            original = run.as_archived(info.step, archive.attributing(info))
            _refuse_lacking(original, archive.checkpoint(info))
        except InshrinkError as error:
            raise _Stays(f"it cannot be read: {error.what}") from error
        errors: dict[str, float | None] = {}
        for entry in measured:
            if not entry.error.bit_exact:
                role = entry.key.partition("@")[2] or "weights"
                errors[role] = _larger(errors.get(role, 0.0), entry.error.relative_rms)
        why = "archived with an error (--lossy releases it)" if errors and not self.lossy else ""
        return replace(row, exact=not errors, errors=errors, why=why)


release = python_call(Release)


_Files = Mapping[str, os.stat_result]
"""Files of a checkpoint by relative path, with their status before the comparison."""


def _files_of(run: Run, step: int) -> _Files:
    """Return the files of a checkpoint; raise `_Stays` if they cannot be deleted safely."""
    path, checkpoint = run.path_of(step), run[step]
    known = {file.path for file in checkpoint.files}
    inside = os.path.realpath(run.directory)
    parent = os.path.realpath(path.parent)
    _stays_if(path.is_symlink() or os.path.commonpath([inside, parent]) != inside, "a link leads to it")
    _stays_if(path.is_dir() and os.path.realpath(path) == inside, "it is the whole run")
    try:
        found = _walk(path, path.name)
    except OSError as error:
        raise _Stays(f"it cannot be read: {error.strerror}") from error
    several = not path.is_dir() and len(checkpoint.files) > 1
    _stays_if(several, "its files are beside those of other steps")
    special = any(not stat.S_ISREG(row.st_mode) for row in found.values())
    _stays_if(special, "it has links, or what is no file")
    _stays_if(foreign := sorted(found.keys() - known), f"not all of its files are read: {named(foreign)}")
    _stays_if(known - found.keys(), "its files are elsewhere")
    return found


def _walk(path: Path, name: str) -> _Files:
    """Return all files and links below a folder by relative path, or one file by `name`; follow no link."""
    if not path.is_dir():
        return {name: path.lstat()}
    found = {}
    for root, folders, names in os.walk(path, onerror=_raise):
        links = [name for name in folders if Path(root, name).is_symlink()]
        for item in (Path(root, name) for name in (*names, *links)):
            found[item.relative_to(path).as_posix()] = item.lstat()
    return found


def _stamps(found: _Files) -> dict[str, tuple[int, ...]]:
    """Return the device, inode, size and time of each file, which identify an unchanged file."""
    return {name: (row.st_dev, row.st_ino, row.st_size, row.st_mtime_ns) for name, row in found.items()}


def _raise(error: OSError) -> None:
    raise error


def _refuse_lacking(original: Checkpoint, restored: Checkpoint) -> None:
    """Raise `_Stays` if the archive lacks a part of an original; compare skeletons bit for bit."""
    if lost := [spec.key for spec in original.specs if spec.key not in restored]:
        state = all("@" in key for key in lost)
        raise _Stays("the archive lacks " + ("its optimizer's state" if state else named(lost)))
    layouts = {file.path: file for file in restored.files}
    for file in original.files:
        _stays_if(file.path not in layouts, f"the archive lacks its file '{file.path}'")
        differs = original.source.skeleton(file) != restored.source.skeleton(layouts[file.path])
        _stays_if(differs, f"the archive has its file '{file.path}' otherwise")


def _delete(path: Path, files: _Files, info: FrameInfo) -> None:
    """Delete a proven checkpoint, if its files are unchanged since the comparison."""
    from inshrink_core.archive.storage.contract import storage_errors

    hidden = path.with_name(f".{path.name}{_UNPROVEN}")
    with storage_errors("the checkpoint cannot be released", str(path)):
        path.rename(hidden)
        if _stamps(_walk(hidden, path.name)) != _stamps(files):
            _put_back(hidden, path)
            raise _Stays("it changed while it was compared")
        doomed = hidden.rename(path.with_name(f".{path.name}.{info.frame_id.hex()}.inshrink-released"))
        sync_path(path.parent)
        _remove(doomed)


def _put_back(hidden: Path, path: Path) -> None:
    if path.exists():
        raise StorageError(
            "a checkpoint was renamed for its release, and a new file has its name",
            where=str(hidden),
            remedy=f"compare it with '{path.name}', and keep the right one",
        )
    hidden.rename(path)


def _remove(path: Path) -> None:

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    sync_path(path.parent)


def _finish(folder: Path, archive: Archive) -> tuple[int, ...]:
    """Finish interrupted deletions below a run's folder; return their steps.

    Raises
    ------
    InputError
        This archive does not hold a step whose deletion was begun.
    """
    from inshrink_core.archive.storage.contract import storage_errors

    finished: list[int] = []
    for root, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(root, name)
            with storage_errors("the interrupted release cannot be finished", str(path)):
                if found := _RELEASED.fullmatch(name):
                    finished.append(_require_archived(bytes.fromhex(found["frame"]), archive, str(path)))
                    _remove(path)
                elif name.startswith(".") and name.endswith(_UNPROVEN):
                    _put_back(path, path.with_name(name.removesuffix(_UNPROVEN)[1:]))
        folders[:] = [name for name in folders if not name.startswith(".") and not name.endswith(".inshrink")]
    return tuple(sorted(finished))


def _require_archived(frame_id: bytes, archive: Archive, where: str) -> int:
    """Return the step of a frame; raise InputError unless the archive restores it."""
    from inshrink_core.formats.write import rehearse_writing

    info = next((frame for frame in archive.reader.frames if frame.frame_id == frame_id), None)
    if info is None:
        raise InputError(
            "a release was interrupted, and this archive does not hold the checkpoint",
            where=where,
            remedy="give the archive that it was released into",
        )
    rehearse_writing(archive.checkpoint(info), archive.limits)
    return info.step

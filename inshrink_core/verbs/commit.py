"""Commit frames that several processes wrote in parts."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, NamedTuple

from inshrink_core.errors import CheckFailedError
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.verbs.shared.groups import PathLike


class WaitingStep(NamedTuple):
    """A step with missing parts.

    Parameters
    ----------
    step
        Training step.
    parts
        Missing parts, as ``2/8``.
    """

    step: int
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReport(Report):
    """Result of `commit`.

    Parameters
    ----------
    archive
        Path of the archive.
    committed
        Steps that were committed now.
    waiting
        Steps that wait for parts.
    discarded
        Steps whose parts were discarded.
    """

    archive: str
    committed: tuple[int, ...]
    waiting: tuple[WaitingStep, ...] = ()
    discarded: tuple[int, ...] = ()

    @property
    def failure(self) -> CheckFailedError | None:
        """An error that names missing parts; None if no step waits."""
        if not self.waiting:
            return None
        step, parts = self.waiting[0]
        return CheckFailedError(
            f"step {step} waits for part{'s' if len(parts) > 1 else ''} {', '.join(parts)}",
            where=self.archive,
            remedy="run the missing parts, or discard the others with --discard",
        )


@dataclass(frozen=True)
class Commit(Request["CommitReport"]):
    """Commit steps that were compressed in parts.

    Parameters
    ----------
    archive
        The archive that the parts were written to.
    discard
        Discard steps with missing parts, and steps whose parts contradict each other.

    Raises
    ------
    ConflictError
        Parts were written with different settings or tensors.
    LockedError
        A part is still being written.

    Notes
    -----
    Parts on a shared file system commit themselves when the last one ends. Use this verb for parts that do
    not see each other, and after an interruption. Every part is read and compared with the other parts of its
    step before the step is committed. If steps wait for parts, the report names them, and the exit code is 1.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> report = inshrink_core.compress(run, target, steps=[400], part="1/2")
    >>> inshrink_core.verbs.commit(target).waiting
    (WaitingStep(step=400, parts=('2/2',)),)
    >>> report = inshrink_core.compress(run, target, steps=[400], part="2/2")
    >>> inshrink_core.Archive.open(target).steps
    (400,)
    """

    archive: Annotated[PathLike, Option(metavar="ARCHIVE")]
    _: KW_ONLY
    discard: bool = False

    EXAMPLES: ClassVar = ("inshrink commit run.inshrink", "inshrink commit run.inshrink --discard")
    INTERRUPTED: ClassVar = "what was committed is kept, and the same command continues"

    def perform(self) -> CommitReport:
        """Commit the complete steps."""
        from inshrink_core.archive import commit_parts

        done = commit_parts(self.archive, discard=self.discard)
        waiting = []
        for frame in done.waiting:
            lost = sorted(set(range(frame.n_parts)) - {file.number for file in frame.files})
            parts = tuple(f"{number + 1}/{frame.n_parts}" for number in lost)
            waiting.append(WaitingStep(frame.step, parts))
        return CommitReport(
            archive=os.fspath(self.archive),
            committed=tuple(frame.step for frame in done.listed),
            waiting=tuple(waiting),
            discarded=tuple(frame.step for frame in done.discarded),
        )


commit = python_call(Commit)

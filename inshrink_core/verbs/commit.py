"""Committing frames that several processes wrote in parts."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

from inshrink_core.errors import CheckFailedError
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.verbs.shared.groups import PathLike


class WaitingStep(NamedTuple):
    """A step, and the parts that it waits for."""

    step: int
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReport(Report):
    """What `commit` did.

    Parameters
    ----------
    archive
        The archive.
    committed
        Steps that were listed now.
    waiting
        Steps that wait for parts, and for which, as ``2/8``.
    discarded
        Steps whose parts were given up.
    """

    archive: str
    committed: tuple[int, ...]
    waiting: tuple[WaitingStep, ...] = ()
    discarded: tuple[int, ...] = ()

    @property
    def failure(self) -> CheckFailedError | None:
        """Which parts are missing; None where no step waits."""
        if not self.waiting:
            return None
        step, parts = self.waiting[0]
        return CheckFailedError(
            f"step {step} waits for {_named(parts)}",
            where=self.archive,
            remedy="run the parts that are missing, or give up the others with --discard",
        )


def _named(parts: Any) -> str:
    return f"part{'s' if len(parts) > 1 else ''} {', '.join(parts)}"


@dataclass(frozen=True)
class Commit(Request["CommitReport"]):
    """Make steps live that were compressed in parts.

    Parameters
    ----------
    archive
        The archive that the parts were written to.
    discard
        Give up steps that wait for parts, and those whose parts contradict each other.

    Raises
    ------
    ConflictError
        Parts were written with different settings or tensors.
    LockedError
        A part is still being written.

    Notes
    -----
    Parts that see each other commit by themselves when the last one ends; this is for those that do not, and
    for what was cut off. Every part is read, and compared with the others of its step, before it is listed.
    Where steps wait for parts the report names them, and the command ends with 1.

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
        """List what is whole."""
        import os

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

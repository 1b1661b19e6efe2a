"""Proving an archive: structure and checksums, every frame decoded, and errors against the originals."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeVar

from inshrink_core.archive import Problem, check_archive
from inshrink_core.chain.archive import Archive
from inshrink_core.chain.base import open_base
from inshrink_core.chain.config import optimizer_of
from inshrink_core.chain.meta import TAKEN, OriginalChecks, original_checks
from inshrink_core.chain.needs import StepNeeds, sequential_within, step_needs
from inshrink_core.chain.parts import content_digest, stored_view
from inshrink_core.chain.sizes import Exactness, exactness_of, is_rekeyed
from inshrink_core.checkpoint import Checkpoint, FileLayout, TensorSource, TensorSpec
from inshrink_core.codec import FALLBACK_CODEC, get_codec
from inshrink_core.errors import DamagedError, InshrinkError, TooLargeError
from inshrink_core.execution import Limits
from inshrink_core.formats import Run
from inshrink_core.formats.source import tensor_bytes
from inshrink_core.formats.write import rehearse_writing, restorable_layout
from inshrink_core.frame import FrameInfo
from inshrink_core.metrics import TensorError, tensor_error
from inshrink_core.report import Report

if TYPE_CHECKING:
    import os

    from torch import Tensor

    from inshrink_core.chain.base import BaseLike

__all__ = ["StepError", "Verification", "verify_archive"]

StepDone = Callable[[int, int, int], None]
"""Called with (steps done, steps in all, step)."""

_Read = TypeVar("_Read")


class _Recording:
    """A `TensorSource` that goes on after a tensor that cannot be decoded, with zeros in its place."""

    def __init__(self, source: TensorSource) -> None:
        self.errors: list[InshrinkError] = []
        self._source = source

    def read(self, spec: TensorSpec) -> Tensor:
        """Return a tensor."""
        import torch

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
    """The error of one tensor at one step, against the original."""

    step: int
    key: str
    codec: str
    error: TensorError

    DOCUMENT: ClassVar = (
        "step tensor=key codec max_abs=error.max_abs relative_rms=error.relative_rms "
        "bit_exact=error.bit_exact"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Report):
    """What a verification found.

    Parameters
    ----------
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
    stored
        Which roles are stored bit for bit, over the newest line of training; neither where nothing tells.
    originals
        What vouched for the originals when they were archived: what is sound may be a sound copy of
        damaged files.
    device
        Where frames were decoded.
    """

    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...] = ()
    n_frames: int
    deep: bool
    errors: tuple[StepError, ...] = ()
    missing_steps: tuple[int, ...] = ()
    stored: Exactness = field(default_factory=lambda: Exactness((), ()))
    originals: OriginalChecks = field(default_factory=OriginalChecks)
    device: str = "cpu"

    DOCUMENT: ClassVar = (
        "ok problems notes frames=n_frames deep device missing_steps exact_roles=stored.exact "
        "lossy_roles=stored.lossy originals errors"
    )

    @property
    def ok(self) -> bool:
        """True where nothing is wrong."""
        return not self.problems


def verify_archive(
    path: str | os.PathLike[str],
    *,
    deep: bool = False,
    against: Run | Archive | None = None,
    done: StepDone | None = None,
    max_memory: int | None = None,
    max_disk: int | None = None,
    device: str = "auto",
    base: BaseLike | None = None,
) -> Verification:
    """Check an archive.

    Parameters
    ----------
    path
        The archive.
    deep
        Restore every frame, those of older branches included, but store nothing: what passes, restores.
    against
        The original run: every step in both is decoded and compared; tensors stored losslessly must
        be bit-exact, and the originals must be those that were archived.
    done
        Called after each step.
    max_memory
        Bytes that decoding may take; by default what is available.
    max_disk
        Bytes that a restored step may take; by default any number, for nothing is written.
    device
        Where frames are decoded: ``auto``, ``cpu`` or ``cuda``. What is found does not depend on it.
    base
        The base model that the archive's first frame is told against (`Archive.open`). Frames that
        cannot be decoded without it are problems.

    Raises
    ------
    InputError
        The device is not available.
    TooLargeError
        Decoding would take more than that.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = inshrink_core.compress(run, target, steps=[400])
    >>> inshrink_core.verify(target, deep=True, against=run).ok
    True
    """
    model = None if base is None else open_base(base)
    found = check_archive(path)
    notes = tuple(problem for problem in found if problem.leftover)
    problems = [problem for problem in found if not problem.leftover]
    try:
        archive = Archive.open(path, base=model).limited(Limits(max_memory=max_memory, max_disk=max_disk))
    except DamagedError:
        return Verification(problems=tuple(problems), notes=notes, n_frames=0, deep=deep)
    frames = archive.reader.frames
    if deep or against is not None:
        archive = archive.on(device)
        archive = sequential_within(archive, _needs(archive, frames))
    if deep:
        for position, info in enumerate(frames):
            problems += _rehearse(archive, info)
            if done is not None:
                done(position + 1, len(frames), info.step)
    errors: list[StepError] = []
    missing: tuple[int, ...] = ()
    if against is not None:
        missing = tuple(step for step in against.steps if step not in archive)
        common = [info for info in archive.frames if info.step in against.steps]
        for position, info in enumerate(common):
            wrong, rows = _compare(archive, info, _as_archived(against, archive, info)[info.step])
            problems += wrong
            errors += rows
            if done is not None:
                done(position + 1, len(common), info.step)
    return Verification(
        problems=tuple(dict.fromkeys(problems)),
        notes=notes,
        n_frames=len(frames),
        deep=deep,
        errors=tuple(errors),
        missing_steps=missing,
        # An index that is damaged is a problem of its own.
        stored=_unless_damaged(lambda: exactness_of(archive, archive.frames), Exactness((), ())),
        originals=_unless_damaged(lambda: original_checks(archive), OriginalChecks()),
        device=archive.device,
    )


def _unless_damaged(read: Callable[[], _Read], instead: _Read) -> _Read:
    try:
        return read()
    except InshrinkError:
        return instead


def _needs(archive: Archive, frames: Iterable[FrameInfo]) -> Iterator[StepNeeds]:
    """Yield what each frame takes; one that cannot be read is a problem of its own."""
    for info in frames:
        with contextlib.suppress(DamagedError):
            yield step_needs(archive, info)


def _rehearse(archive: Archive, info: FrameInfo) -> list[Problem]:
    """Restore a frame and store nothing; what fails becomes a problem."""
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
    problems: list[Problem] = []
    rows: list[StepError] = []
    where = archive.where(info)
    try:
        meta, frame = archive.frame(info).meta, archive.frame(info)
        stored = stored_view(original, optimizer_of(meta))
        # A frame exported without its training's files has no digest of what it came from.
        if "content" in meta and content_digest(stored) != meta["content"]:
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
        codec = frame.entry(spec.key).codec
        faithful = spec.exact or meta.get("codec") == FALLBACK_CODEC or not is_rekeyed(meta, info)
        rows.append(StepError(info.step, spec.key, codec, measured))
        faithful = faithful and spec.parameter not in meta.get(TAKEN, {})
        exact = faithful and codec in get_codec(FALLBACK_CODEC).reads
        if exact and not measured.bit_exact and not problems:
            problems.append(
                Problem(where, f"tensor '{spec.key}' was stored losslessly and differs", "restore a backup")
            )
    return problems, rows


def _as_archived(against: Run | Archive, archive: Archive, info: FrameInfo) -> Run | Archive:
    """Return the originals as this frame took them: as they were, where the user accepted damage."""
    accepted = _unless_damaged(lambda: bool(original_checks(archive, [info]).damaged), False)
    return against.allowing_damage() if accepted and isinstance(against, Run) else against


def _problem(archive: Archive, info: FrameInfo, error: InshrinkError) -> Problem:
    """Turn an error into a row of the report."""
    return Problem(error.where or archive.where(info), error.what, error.remedy)

"""One step as one file: to begin another training from, or to hand on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inshrink_core.archive import ArchiveReader, ArchiveWriter, pack_archive
from inshrink_core.archive.durable import require_free
from inshrink_core.archive.storage import storage_error
from inshrink_core.chain import Archive, ArchiveSize, archive_size, step_needs, stored_view
from inshrink_core.chain.base import BASE
from inshrink_core.chain.meta import ORIGINALS
from inshrink_core.chain.needs import pack_attributes
from inshrink_core.chain.parts import add_parts, parts_of
from inshrink_core.chain.rekey import rekey_frame
from inshrink_core.checkpoint import Checkpoint
from inshrink_core.errors import InputError
from inshrink_core.execution import Limits, make_folders, working_folder
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.frame import FrameKind
from inshrink_core.report import Report
from inshrink_core.search.coarsen import FLOAT32_NBYTES, coarsen

if TYPE_CHECKING:
    from inshrink_core.archive import FrameWriter
    from inshrink_core.checkpoint import TensorSpec
    from inshrink_core.frame import FrameInfo

__all__ = ["DEFAULT_RATIO", "ExportReport", "export"]

DEFAULT_RATIO: Final = 8.0
"""Float32 bytes over exported bytes of the weights, where they may be coarsened."""

_PACKING_NBYTES: Final = 256
"""More than packing one frame adds: header, padding, directory and trailer of the file."""

_TRAINING_STATE: Final = re.compile(
    r"^(training_args|trainer_state|scheduler|lr_scheduler|scaler|sampler|dl_state_dict|random_states|"
    r"rng_state|custom_checkpoint|optimizer)([._-].*)?$",
    re.IGNORECASE,
)
"""Files of a checkpoint that a training goes on from, and that a model is loaded without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport(Report):
    """What `export` wrote.

    Parameters
    ----------
    archive, output
        What was exported, and the file that was made.
    size
        Sizes of what it holds.
    nbytes
        Size of the file.
    weights_only
        Whether optimizer and training state were left out.
    exact
        Whether every tensor written decodes to the same bits as in the archive.
    relative_error
        Root of squared error over squared norm of coarsened weights, against the archive's; 0 if exact.
    left_out
        Files of the checkpoint that were left out.
    seconds
        Wall time.
    device
        Where tensors were decoded and coarsened.
    """

    archive: str
    output: Path
    size: ArchiveSize
    nbytes: int
    weights_only: bool
    exact: bool
    relative_error: float
    left_out: tuple[str, ...]
    seconds: float
    device: str = "cpu"

    DOCUMENT: ClassVar = (
        "archive output steps weights_only exact relative_error ratio_float32 "
        "ratio_weights=size.ratio_weights ratio_total=size.ratio_total raw_bytes=size.raw_total "
        "bytes=nbytes left_out seconds device"
    )

    @property
    def ratio_float32(self) -> float | None:
        """Bytes of the weights as float32 over the bytes that hold them, all overhead included."""
        held = self.size.weights_nbytes
        return FLOAT32_NBYTES * _n_weights(self.size) / held if held else None

    @property
    def steps(self) -> tuple[int, ...]:
        """The step, as every report has it."""
        return tuple(frame.info.step for frame in self.size.frames)


def export(
    archive: Archive | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    step: int | None = None,
    weights_only: bool = False,
    ratio: float = DEFAULT_RATIO,
    exact: bool = False,
    force: bool = False,
    device: str = "auto",
    progress: OnProgress | None = None,
    max_memory: int | None = None,
    max_disk: int | None = None,
) -> ExportReport:
    """Write one step as a packed archive of one keyframe, which needs nothing else.

    Parameters
    ----------
    archive
        The archive, or its path.
    output
        The file to make.
    step
        The step; by default the last.
    weights_only
        Leave out the optimizer's state and the files that training goes on from; config and
        tokenizer files stay. For transfer learning: weights are coarsened to reach `ratio`.
    ratio
        With `weights_only`, how many times smaller than float32 the weights should become at least.
    exact
        With `weights_only`, keep every bit of the archived weights, whatever that takes. Without
        `weights_only` every bit is kept anyway.
    force
        Replace the file if it exists.
    device
        Where tensors are decoded and coarsened: ``auto``, ``cpu`` or ``cuda``; it does not change the file.
    progress
        Called after each tensor; raising cancels and leaves nothing behind.
    max_memory, max_disk
        Bytes that may be taken; by default what is available. The file takes no more disk than the step.

    Raises
    ------
    NotFoundError
        The archive has no such step.
    ExistsError
        The file exists and `force` is not set.
    InputError
        `ratio` is not a number of at least 1.
    TooLargeError
        It would take more memory or disk than that.
    DamagedError, MissingFrameError
        The step cannot be decoded.

    Notes
    -----
    Weights that reach `ratio` as they are stay exact. The paper's transfer learning does the same with
    its own quantizer: no delta, one checkpoint (Inshrinkerator, section on transfer learning).

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = inshrink_core.compress(run, folder / "digits.inshrink", steps=[200, 400])
    >>> report = inshrink_core.verbs.export(
    ...     folder / "digits.inshrink", folder / "model.inshrink", step=400, weights_only=True
    ... )
    >>> report.ratio_float32 > 8
    True
    >>> inshrink_core.open(folder / "model.inshrink").steps
    (400,)
    """
    begun = time.perf_counter()
    if not ratio >= 1:
        raise InputError(f"a ratio of {ratio:g} makes nothing smaller", remedy="give a number of at least 1")
    source = archive if isinstance(archive, Archive) else Archive.open(archive)
    target = Path(output)
    require_free(target, force)
    info = source.last if step is None else source.reader.find(step)
    source = source.limited(Limits(max_memory=max_memory, max_disk=max_disk)).on(device)
    needs = step_needs(source, info)
    where = source.where(info)
    source.limits.require_memory(needs.memory_in_turn, "exporting the step", where)
    source.limits.require_disk(needs.disk, target.parent, "exporting the step", where)
    job = _Export(source, info, weights_only, progress)
    with _beside(target) as folder:
        chosen = folder / "exact"
        error, size = 0.0, job.write_exact(chosen)
        if weights_only and not exact and not _reaches(size, ratio):
            chosen = folder / "coarse"
            error = job.write_coarse(chosen, ratio, size)
        nbytes = pack_archive(ArchiveReader.open(chosen), target, force=force)
    return ExportReport(
        archive=str(source.reader.path),
        output=target,
        size=archive_size(Archive.open(target)),
        nbytes=nbytes,
        weights_only=weights_only,
        exact=error == 0.0,
        relative_error=error,
        left_out=job.left_out,
        seconds=time.perf_counter() - begun,
        device=source.device,
    )


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a folder to make the archive in that will be packed, on the file system of the file."""
    parent = target.absolute().parent
    try:
        make_folders(parent)
        with working_folder(parent) as folder:
            yield folder
    except OSError as error:
        raise storage_error(error, "the step cannot be exported", str(target)) from error


class _Export:
    """One step on its way into an archive of its own."""

    def __init__(
        self, archive: Archive, info: FrameInfo, weights_only: bool, progress: OnProgress | None
    ) -> None:
        self._archive, self._info, self._progress = archive.sequential(), info, progress
        self._whole = self._archive.checkpoint(info)
        self._meta = self._archive.frame(info).meta
        self._view = _weights_of(self._whole) if weights_only else self._whole
        self.left_out = _left_out(self._whole, self._view)
        self._source = [archive.reader.archive_id, info.frame_id]

    def write_exact(self, folder: Path) -> ArchiveSize:
        """Write the step with the bits it has; return its sizes."""
        # The frame that training was restored from stays behind, and so does what the digest is of.
        meta = {key: value for key, value in self._meta.items() if key not in ("restored", BASE)}
        if self._view is not self._whole:
            meta = {key: value for key, value in meta.items() if key != "content"} | {"optimizer": "drop"}
        total, done = self._view.raw_bytes(), 0

        def advance(spec: TensorSpec) -> None:
            nonlocal done
            done += spec.nbytes
            self._report("export", done, total, spec.key)

        with _one_frame(folder, self._identity("exact"), self._info.step) as frame:
            rekey_frame(
                self._archive, self._info, frame, view=self._view, meta=self._with_source(meta), done=advance
            )
        return archive_size(Archive.open(folder))

    def write_coarse(self, folder: Path, ratio: float, exact: ArchiveSize) -> float:
        """Write the weights on a lattice that reaches the ratio; return their relative error."""
        overhead = exact.manifest_nbytes + sum(frame.overhead_nbytes for frame in exact.frames)
        allowed = FLOAT32_NBYTES * _n_weights(exact) / ratio - overhead - _PACKING_NBYTES

        def tried(trial: int) -> None:
            self._report("coarsen", trial, trial + 1, "")

        coarse = coarsen(self._view, self._whole, allowed, tried, self._archive.device)
        with _one_frame(folder, self._identity(f"coarse {ratio:g}"), self._info.step) as frame:
            for spec, block in coarse.blocks:
                frame.add(spec.key, block.codec, block.payload, attributes=pack_attributes(spec))
            add_parts(frame, dict(parts_of(self._view)))
            kept = {key: value for key, value in self._meta.items() if key == ORIGINALS}
            frame.commit(self._with_source(coarse.config.record() | kept))
        return coarse.relative_error

    def _with_source(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Add where the step comes from: the id of its archive, and that of its frame."""
        return {**meta, "source": self._source}

    def _identity(self, form: str) -> bytes:
        """Return the id of the archive to make: the same export has the same bytes."""
        keys = "\0".join(spec.key for spec in self._view.specs)
        text = b"".join(self._source) + f"{form}\0{keys}".encode()
        return hashlib.sha256(text).digest()[: len(self._source[0])]

    def _report(self, stage: str, done: int, total: int, detail: str) -> None:
        if self._progress is not None:
            self._progress(Progress(stage, done, total, self._info.step, detail))


def _n_weights(size: ArchiveSize) -> int:
    return sum(frame.n_weights for frame in size.frames)


def _reaches(size: ArchiveSize, ratio: float) -> bool:
    """Whether an archive that will be packed is so many times smaller than its weights as float32."""
    return FLOAT32_NBYTES * _n_weights(size) >= ratio * (size.weights_nbytes + _PACKING_NBYTES)


@contextlib.contextmanager
def _one_frame(folder: Path, archive_id: bytes, step: int) -> Iterator[FrameWriter]:
    """Make an archive of one keyframe."""
    with (
        ArchiveWriter(folder, create=True, archive_id=archive_id) as writer,
        writer.begin(step=step, kind=FrameKind.KEYFRAME, parent_id=None) as frame,
    ):
        yield frame


def _weights_of(whole: Checkpoint) -> Checkpoint:
    """Return weights, buffers and the files that belong to the model, not to its training."""
    model = stored_view(whole, "drop")
    files = tuple(
        file
        for file in model.files
        if file.kind != "opaque" or not _TRAINING_STATE.match(file.path.rpartition("/")[2])
    )
    return dataclasses.replace(model, files=files)


def _left_out(whole: Checkpoint, view: Checkpoint) -> tuple[str, ...]:
    """Return the files of which nothing is kept: a file of both sorts lives on in its weights."""
    files = {file.path for file in view.files}
    keys = {spec.key for spec in view.specs}
    return tuple(
        file.path
        for file in whole.files
        if file.path not in files
        and not any(member.key in keys for region in file.regions for member in region.members)
    )

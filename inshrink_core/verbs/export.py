"""One step as one file: to begin another training from, or to hand on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inshrink_core.archive import ArchiveWriter, pack_archive
from inshrink_core.archive.durable import require_free
from inshrink_core.archive.storage import storage_error
from inshrink_core.chain import Archive, ArchiveSize, archive_size, step_needs, view_of
from inshrink_core.chain.base import BASE
from inshrink_core.chain.meta import ORIGINALS
from inshrink_core.chain.needs import pack_attributes
from inshrink_core.chain.parts import add_parts, parts_of
from inshrink_core.chain.rekey import rekey_frame
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.errors import InputError, NotFoundError, StorageError
from inshrink_core.execution import Limits, make_folders, working_folder
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.formats.write import write_safetensors, written_nbytes
from inshrink_core.frame import FrameKind
from inshrink_core.report import Report
from inshrink_core.search.coarsen import FLOAT32_NBYTES, coarsen

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.archive import FrameWriter
    from inshrink_core.checkpoint import FileLayout, TensorSpec
    from inshrink_core.frame import FrameInfo

__all__ = ["CASTABLE", "DEFAULT_RATIO", "DTYPES", "LAYOUTS", "ExportReport", "chosen_names", "export"]

DEFAULT_RATIO: Final = 8.0
"""Float32 bytes over exported bytes of the weights, where they may be coarsened."""

LAYOUTS: Final = ("packed", "safetensors")

DTYPES: Final = {"same": "", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What weights may become in a plain file, by the word for it."""

CASTABLE: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Dtypes that may: integers, flags and eight-bit floats mean what they are."""

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
    step, layout
        Of what, and as what: ``packed`` or ``safetensors``.
    size
        Sizes of what a packed file holds; None of a plain one.
    nbytes
        Size of the file.
    n_tensors, n_weights
        Tensors in it, and elements of weights and buffers.
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
    step: int
    layout: str
    size: ArchiveSize | None
    nbytes: int
    n_tensors: int
    n_weights: int
    weights_only: bool
    exact: bool
    relative_error: float
    left_out: tuple[str, ...]
    seconds: float
    device: str = "cpu"

    DOCUMENT: ClassVar = (
        "archive output steps weights_only exact relative_error "
        "ratio_float32 ratio_weights=size.ratio_weights ratio_total=size.ratio_total "
        "raw_bytes=size.raw_total bytes=nbytes left_out seconds device"
    )

    def to_json(self) -> dict[str, Any]:
        """Return the document; of a plain file with what it is and how many tensors are in it."""
        told = Report.to_json(self)
        return told if self.size is not None else told | {"format": self.layout, "tensors": self.n_tensors}

    @property
    def ratio_float32(self) -> float | None:
        """Bytes of the weights as float32 over the bytes that hold them, all overhead included."""
        held = self.nbytes if self.size is None else self.size.weights_nbytes
        return FLOAT32_NBYTES * self.n_weights / held if held else None

    @property
    def steps(self) -> tuple[int, ...]:
        """The step, as every report has it."""
        return (self.step,)


def export(
    archive: Archive | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    step: int | None = None,
    weights_only: bool = False,
    tensors: str | Iterable[str] = (),
    without: str | Iterable[str] = (),
    ratio: float = DEFAULT_RATIO,
    size: int | None = None,
    exact: bool = False,
    layout: str = "packed",
    dtype: str = "same",
    force: bool = False,
    device: str = "auto",
    progress: OnProgress | None = None,
    max_memory: int | None = None,
    max_disk: int | None = None,
) -> ExportReport:
    """Write one step as one file that needs nothing else: a packed archive, or plain weights.

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
    tensors, without
        With `weights_only`, globs of names of tensors to keep and to leave out, as `chosen_names` reads
        them; by default all are kept.
    ratio
        With `weights_only`, how many times smaller than float32 the weights should become at least.
    size
        Bytes that a packed file may take at most, in the place of `ratio`.
    exact
        With `weights_only`, keep every bit of the archived weights, whatever that takes. Without
        `weights_only` every bit is kept anyway.
    layout
        ``packed``; or, with `weights_only`, ``safetensors``: one plain file that loads without Inshrink, of
        the values that the packed one would restore.
    dtype
        Of a plain file, what its floats become: ``same``, ``fp32``, ``bf16`` or ``fp16``.
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
        The archive has no such step, or no tensor is left.
    ExistsError
        The file exists and `force` is not set.
    InputError
        `ratio` is not a number of at least 1, options exclude each other, or a value does not fit `dtype`.
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
    tensors, without = _listed(tensors), _listed(without)
    plain = layout == "safetensors"
    _check_request(ratio, layout, dtype, size, weights_only, is_chosen=bool(tensors or without))
    source = archive if isinstance(archive, Archive) else Archive.open(archive)
    target = Path(output)
    require_free(target, force)
    info = source.last if step is None else source.reader.find(step)
    source = source.limited(Limits(max_memory=max_memory, max_disk=max_disk)).on(device)
    needs = step_needs(source, info)
    where = source.where(info)
    source.limits.require_memory(needs.memory_in_turn, "exporting the step", where)
    source.limits.require_disk(needs.disk, target.parent, "exporting the step", where)
    job = _Export(source, info, weights_only, (tensors, without), progress)
    with _beside(target) as folder:
        chosen = folder / "exact"
        error, packed = 0.0, job.write_exact(chosen)
        if size is not None:
            ratio = _ratio_for(size, packed, str(target))
        if weights_only and not exact and not _reaches(packed, ratio):
            chosen = folder / "coarse"
            error = job.write_coarse(chosen, ratio, packed)
        made = Archive.open(chosen)
        if plain:
            error = job.write_plain(made, target, DTYPES[dtype], force=force)
            nbytes = target.stat().st_size
        else:
            nbytes = pack_archive(made.reader, target, force=force)
    return ExportReport(
        archive=str(source.reader.path),
        output=target,
        step=info.step,
        layout=layout,
        size=None if plain else archive_size(Archive.open(target)),
        nbytes=nbytes,
        n_tensors=job.n_tensors,
        n_weights=_n_weights(packed),
        weights_only=weights_only,
        exact=error == 0.0,
        relative_error=error,
        left_out=job.left_out,
        seconds=time.perf_counter() - begun,
        device=source.device,
    )


def chosen_names(
    names: Iterable[str], tensors: Sequence[str] = (), without: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the names that patterns choose.

    Parameters
    ----------
    names
        Names of tensors.
    tensors
        Globs of what is kept; without any, everything. The name of a module stands for all that is in it.
    without
        Globs of what is left out all the same.

    Examples
    --------
    >>> chosen_names(["encoder.0.weight", "encoder.0.bias", "head.weight"], ["encoder"], ["*.bias"])
    ('encoder.0.weight',)
    """

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, one) or fnmatchcase(name, f"{one}.*") for one in patterns)

    return tuple(
        name for name in names if (not tensors or matches(name, tensors)) and not matches(name, without)
    )


def _listed(patterns: str | Iterable[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _check_request(
    ratio: float, layout: str, dtype: str, size: int | None, weights_only: bool, *, is_chosen: bool
) -> None:
    """Refuse what makes no sense together."""
    if not ratio >= 1:
        raise InputError(f"a ratio of {ratio:g} makes nothing smaller", remedy="give a number of at least 1")
    if layout not in LAYOUTS:
        raise InputError("an unknown layout", expected=", ".join(LAYOUTS), found=layout[:40])
    if dtype not in DTYPES:
        raise InputError("an unknown dtype", expected=", ".join(DTYPES), found=dtype[:40])
    if not weights_only and (is_chosen or layout != "packed" or size is not None):
        raise InputError(
            "layers are chosen, made small or written as a plain file of weights alone",
            remedy="ask for weights only as well; a training resumes from whole steps",
        )
    if layout == "packed" and dtype != "same":
        raise InputError(
            "a packed file keeps the dtype of each tensor", remedy="choose safetensors for another one"
        )
    if layout == "safetensors" and size is not None:
        raise InputError(
            "a plain file is as large as its dtype makes it",
            remedy="give a ratio, which says how coarse its values are, or a dtype",
        )


def _ratio_for(size: int, packed: ArchiveSize, where: str) -> float:
    """Return the ratio at which a packed file has some bytes: what is no weight takes its own."""
    rest = packed.nbytes - packed.weights_nbytes
    room = size - rest - _PACKING_NBYTES
    if room <= 0:
        raise InputError(
            f"{size} bytes are too few: what goes with the weights takes {rest + _PACKING_NBYTES}",
            where=where,
            remedy="give more, or leave files out of the run",
        )
    return max(1.0, FLOAT32_NBYTES * _n_weights(packed) / room)


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a folder to make the archive in that will be packed, on the file system of the file."""
    parent = target.absolute().parent
    folder = None
    try:
        make_folders(parent)
        with working_folder(parent) as folder:
            yield folder
    except StorageError as error:
        if folder is None or not error.where.startswith(str(folder)):
            raise
        # That folder is gone by now.
        raise StorageError(error.what, where=str(target), remedy=error.remedy) from error
    except OSError as error:
        raise storage_error(error, "the step cannot be exported", str(target)) from error


class _Export:
    """One step on its way into an archive of its own."""

    def __init__(
        self,
        archive: Archive,
        info: FrameInfo,
        weights_only: bool,
        patterns: tuple[Sequence[str], Sequence[str]],
        progress: OnProgress | None,
    ) -> None:
        self._archive, self._info, self._progress = archive.sequential(), info, progress
        self._whole = self._archive.checkpoint(info)
        self._meta = self._archive.frame(info).meta
        self._view = _weights_of(self._whole, *patterns) if weights_only else self._whole
        self.n_tensors = len(self._view)
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

    def write_plain(self, made: Archive, target: Path, dtype: str, *, force: bool) -> float:
        """Write the weights that an archive restores as one plain file; return their relative error."""
        restored = made.checkpoint(made.last)
        cast = _Cast(restored, self._whole, dtype)
        view = dataclasses.replace(restored, specs=tuple(map(cast.spec, restored.specs)), source=cast)
        self._archive.limits.require_disk(
            written_nbytes(dataclasses.replace(view, files=()), "safetensors"),
            target.parent,
            "exporting the step",
            self._archive.where(self._info),
        )
        total, done = view.raw_bytes(), 0

        def advance(key: str) -> None:
            nonlocal done
            done += view.spec(key).nbytes
            self._report("write", done, total, key)

        write_safetensors(view, target, force=force, progress=advance)
        return cast.relative_error

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


class _Cast:
    """Gives tensors in another dtype, and knows how far all that were read are from their originals."""

    def __init__(self, checkpoint: Checkpoint, original: Checkpoint, dtype: str) -> None:
        self._checkpoint, self._original, self._dtype = checkpoint, original, dtype
        self._error = self._norm = 0.0

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of a tensor as it is given."""
        is_cast = self._dtype and spec.dtype in CASTABLE
        return dataclasses.replace(spec, dtype=self._dtype) if is_cast else spec

    def read(self, spec: TensorSpec) -> Tensor:
        """Return a tensor in its new dtype."""
        import torch

        tensor = self._checkpoint[spec.key]
        if self._checkpoint.spec(spec.key).dtype not in CASTABLE:
            return tensor
        made = tensor.to(getattr(torch, spec.dtype))
        if bool((tensor.isfinite() & ~made.isfinite()).any()):
            raise InputError(
                f"a value is too large for {spec.dtype}",
                where=f"{self._original.origin}, tensor '{spec.key}'",
                remedy="choose bf16 or fp32",
            )
        known = self._original[spec.key].double()
        finite = known.isfinite()
        self._error += float((made.double() - known)[finite].square().sum())
        self._norm += float(known[finite].square().sum())
        return made

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the bytes of a file outside its tensors."""
        return self._checkpoint.source.skeleton(layout)

    @property
    def relative_error(self) -> float:
        """Root of squared error over squared norm of all floats read so far."""
        return math.sqrt(self._error / self._norm) if self._norm > 0 else 0.0


def _weights_of(whole: Checkpoint, tensors: Sequence[str], without: Sequence[str]) -> Checkpoint:
    """Return chosen weights and buffers, and the files that belong to the model, not to its training.

    Raises
    ------
    NotFoundError
        Nothing is chosen.
    """
    keys = [spec.key for spec in whole.specs if spec.role in MODEL_ROLES]
    names = [*keys, *(alias for alias, key in whole.aliases.items() if key in set(keys))]
    chosen = set(chosen_names(names, tensors, without))
    if not chosen:
        raise NotFoundError(
            "no tensor is left", where=whole.origin, remedy="`inshrink inspect --tensors` lists them"
        )
    kept = {whole.aliases.get(name, name) for name in chosen}
    model = view_of(whole, kept)
    files = tuple(
        file
        for file in model.files
        if file.kind != "opaque"
        or not (
            _TRAINING_STATE.match(file.path.rpartition("/")[2])
            # The index of shards that are not all there leads to nothing.
            or (len(kept) < len(keys) and file.path.endswith(".index.json"))
        )
    )
    aliases = {alias: key for alias, key in model.aliases.items() if alias in chosen}
    return dataclasses.replace(model, files=files, aliases=aliases)


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

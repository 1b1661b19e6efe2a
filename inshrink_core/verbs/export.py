"""Export one step as one file, for transfer learning or for distribution."""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from inshrink_core.analysis.movement import Movement, movement
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, FileLayout, TensorSpec
from inshrink_core.errors import InputError, NotFoundError, StorageError
from inshrink_core.execution.files import make_folders, require_free, working_folder
from inshrink_core.execution.progress import Counter, OnProgress, Progress
from inshrink_core.frame import FrameInfo, FrameKind
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.verbs.shared.groups import ArchiveLike, Decoding, PathLike, local_target
from inshrink_core.verbs.shared.values import matching_names

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.archive import FrameWriter
    from inshrink_core.chain import Archive
    from inshrink_core.chain.sizes import ArchiveSize
    from inshrink_core.formats.carried import CarriedTensor


DEFAULT_RATIO: Final = 8.0
"""Default ratio of coarsened weights: float32 bytes over exported bytes."""

LAYOUTS: Final = ("packed", "safetensors")

DTYPES: Final = {"same": "", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Dtypes of weights in a plain file, by the word of the option."""

CASTABLE: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Dtypes that can be cast: integers, flags and eight-bit floats cannot."""

_PACKING_NBYTES: Final = 256
"""Upper bound on what packing adds to one frame: header, padding, directory and trailer of the file."""

_TRAINING_STATE: Final = re.compile(
    r"^(training_args|trainer_state|scheduler|lr_scheduler|scaler|sampler|dl_state_dict|random_states|"
    r"rng_state|custom_checkpoint|optimizer)([._-].*)?$",
    re.IGNORECASE,
)
"""Checkpoint files that resuming a training needs and loading a model does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport(Report):
    """Result of exporting one step.

    Parameters
    ----------
    archive
        Path of the archive.
    output : str
        Path written.
    steps
        The exported step.
    layout
        Format of the file: ``packed`` or ``safetensors``.
    ratio_float32
        ``ratio_weights`` with weights counted as float32, including all overhead.
    size
        Sizes of a packed file; None for a plain one.
    nbytes
        Size of the file.
    n_tensors
        Number of tensors in the file.
    weights_only
        Whether optimizer and training state were left out.
    exact
        Whether every written tensor has the same bits as in the archive.
    relative_error
        Root of squared error over squared norm of coarsened weights, against the archive's; 0 if exact.
    left_out
        Checkpoint files that were left out, and tensors that cannot be separated from their file.
    layers_left_out
        Outermost modules and tensors of the model that were left out.
    seconds
        Wall time.
    device
        Device that encoded or decoded tensors: ``cpu`` or ``cuda``.
    """

    archive: str
    output: Path
    steps: tuple[int, ...]
    layout: str
    ratio_float32: float | None
    size: ArchiveSize | None
    nbytes: int
    n_tensors: int
    weights_only: bool
    exact: bool
    relative_error: float
    left_out: tuple[str, ...]
    layers_left_out: tuple[str, ...]
    seconds: float
    device: str = "cpu"

    KEYS: ClassVar = (
        "archive output steps weights_only exact relative_error ratio_float32 "
        "ratio_weights=size.ratio_weights ratio_total=size.ratio_total raw_bytes=size.raw_total bytes=nbytes "
        "left_out layers_left_out seconds device"
    )

    def to_json(self) -> dict[str, Any]:
        """Return the document; for a plain file with its format and number of tensors.

        Returns
        -------
        format : str
            ``safetensors``; only of a plain file, whose size and ratios are None.
        tensors : int
            Number of tensors; only of a plain file.
        """
        plain = {} if self.layout == "packed" else {"format": self.layout, "tensors": self.n_tensors}
        return Report.to_json(self) | plain


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport(Report):
    """Result of copying a whole archive.

    Parameters
    ----------
    archive
        Path of the archive.
    output
        Path written.
    steps
        Steps of its newest branch.
    n_frames
        Number of frames of all branches.
    nbytes
        Bytes written: of the file, or of the frames and the manifest.
    seconds
        Wall time.
    """

    archive: str
    output: Path
    steps: tuple[int, ...]
    n_frames: int
    nbytes: int
    seconds: float

    KEYS: ClassVar = "archive output steps frames=n_frames bytes=nbytes seconds"


_LAYERS: Final = Option(metavar="GLOB", many=True, needs="weights_only")


@dataclass(frozen=True)
class Export(Decoding, Request[ExportReport | PackReport]):
    """Write one step, or a whole archive, as one self-contained file.

    Parameters
    ----------
    archive
        The archive: a folder, a packed file or a URL.
    output
        The file to write one step to.
    step
        The step; by default the last.
    weights_only
        For transfer learning: leave out what only a resumed training needs, and coarsen weights to reach
        `ratio`.
    ratio
        The least ratio of float32 weights to the exported ones; by default 8.
    exact
        Keep every bit of the archived weights.
    tensors
        Export only these layers: a tensor or module, else a glob, a /regular expression/ or a part of names;
        may be repeated.
    without
        Leave these layers out, named the same way; may be repeated.
    layout
        packed; or safetensors: one plain file with the same values, which loads without Inshrink.
    dtype
        With --format safetensors, the dtype of floats.
    pack
        Copy the whole archive into one file instead.
    unpack
        Copy the whole archive into a folder instead.
    force
        Overwrite existing files.

    Raises
    ------
    NotFoundError
        The archive lacks the step, or no tensor is left.
    ExistsError
        The file exists and `force` is not set.
    InputError
        `ratio` is not a number of at least 1, options exclude each other, or a value does not fit `dtype`.
    TooLargeError
        The export needs more memory or disk than the limits allow.
    DamagedError, MissingFrameError
        The step cannot be decoded.

    Notes
    -----
    Weights that already reach `ratio` stay exact. The paper's transfer learning also encodes one checkpoint
    without a delta, with its own quantizer (Inshrinkerator, section on transfer learning).

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
    >>> report = inshrink_core.verbs.export(folder / "digits.inshrink", pack=folder / "packed.inshrink")
    >>> inshrink_core.open(folder / "packed.inshrink").steps
    (200, 400)
    """

    archive: ArchiveLike
    output: Annotated[PathLike | None, Option(("--output", "-o"), metavar="FILE")] = None
    _: KW_ONLY
    step: Annotated[int | None, Option(metavar="STEP")] = None
    weights_only: bool = False
    ratio: Annotated[float | None, Option(metavar="RATIO", least=1, needs="weights_only")] = None
    exact: Annotated[bool, Option(needs="weights_only")] = False
    tensors: Annotated[str | Sequence[str], _LAYERS] = ()
    without: Annotated[str | Sequence[str], _LAYERS] = ()
    layout: Annotated[str, Option(("--format",), "packed|safetensors", needs="weights_only")] = "packed"
    dtype: Annotated[str, Option(metavar="same|fp32|bf16|fp16", needs="weights_only")] = "same"
    pack: Annotated[PathLike | None, Option(metavar="FILE")] = None
    unpack: Annotated[PathLike | None, Option(metavar="DIR")] = None
    force: bool = False

    EXAMPLES: ClassVar = (
        "inshrink export digits.inshrink --step 400 --weights-only -o model.inshrink",
        "inshrink export digits.inshrink --weights-only --without fc2 --format safetensors -o m.safetensors",
        "inshrink export digits.inshrink --pack run.inshrink",
        "inshrink export run.inshrink --unpack again.inshrink",
    )

    def perform(self) -> ExportReport | PackReport:
        """Write the file."""
        from inshrink_core.archive.maintenance import pack_archive
        from inshrink_core.chain import Archive
        from inshrink_core.chain.sizes import archive_size, step_needs

        patterns = self.tensors, self.without
        self._check()
        if self.output is None:
            return self._copied(self.pack or self.unpack or "")
        begun = time.perf_counter()
        target = local_target(self.output or "")
        require_free(target, self.force)
        source = self.opened_archive(self.archive)
        info = source.last if self.step is None else source.reader.find(self.step)
        needs, where = step_needs(source, info), source.where(info)
        source.limits.require_memory(needs.memory_in_turn, "exporting the step", where)
        source.limits.require_disk(needs.disk, target.parent, "exporting the step", where)
        plain = self.layout == "safetensors"
        step = _Step(source, info, patterns if self.weights_only else None, self.progress, plain=plain)
        with _beside(target) as folder:
            chosen, error = folder / "exact", 0.0
            packed = step.write_exact(chosen)
            wanted = DEFAULT_RATIO if self.ratio is None else self.ratio
            reached = _float32_nbytes(packed) >= wanted * (packed.weights_nbytes + _PACKING_NBYTES)
            if self.weights_only and not self.exact and not reached:
                chosen = folder / "coarse"
                error = step.write_coarse(chosen, wanted, packed)
            made = Archive.open(chosen)
            if plain:
                error = step.write_plain(made, target, DTYPES[self.dtype], force=self.force)
                nbytes = target.stat().st_size
                stored_nbytes, sizes = nbytes, None
            else:
                nbytes = pack_archive(made.reader, target, force=self.force)
                sizes = archive_size(Archive.open(target))
                stored_nbytes = sizes.weights_nbytes
        return ExportReport(
            archive=str(source.reader.path),
            output=target,
            steps=(info.step,),
            layout=self.layout,
            ratio_float32=_float32_nbytes(packed) / stored_nbytes if stored_nbytes else None,
            size=sizes,
            nbytes=nbytes,
            n_tensors=step.n_tensors,
            weights_only=self.weights_only,
            exact=error == 0.0,
            relative_error=error,
            left_out=step.left_out,
            layers_left_out=step.layers_left_out,
            seconds=time.perf_counter() - begun,
            device=source.device,
        )

    def _copied(self, output: PathLike) -> PackReport:
        """Copy the whole archive into one file or into a folder."""
        from inshrink_core.archive.maintenance import pack_archive, unpack_archive
        from inshrink_core.chain import Archive

        begun = time.perf_counter()
        source = self.archive if isinstance(self.archive, Archive) else Archive.open(self.archive)

        if self.pack is None:
            unpack_archive(source.reader, output, progress=self.progress)
        else:
            pack_archive(source.reader, output, force=self.force, progress=self.progress)
        made = Archive.open(output)
        return PackReport(
            archive=source.reader.path,
            output=Path(output),
            steps=made.steps,
            n_frames=len(made.reader.frames),
            nbytes=made.reader.nbytes,
            seconds=time.perf_counter() - begun,
        )

    def _check(self) -> None:
        """Refuse options that exclude each other."""
        n_targets = sum(target is not None for target in (self.output, self.pack, self.unpack))
        is_copied = self.output is None and (self.weights_only or self.step is not None)
        both, is_plain = self.exact and self.ratio is not None, self.layout == "safetensors"
        refused = (
            (n_targets != 1, "say what to make", "give one of: -o FILE, --pack FILE, --unpack DIR"),
            (is_copied, "--pack and --unpack copy the whole archive as it is", "give -o FILE for a step"),
            (both, "--exact and --ratio exclude each other", "give one of them"),
            (self.layout not in LAYOUTS, "an unknown layout", f"choose one of {', '.join(LAYOUTS)}"),
            (self.dtype not in DTYPES, "an unknown dtype", f"choose one of {', '.join(DTYPES)}"),
            (not is_plain and self.dtype != "same", "a packed file keeps every dtype", "choose safetensors"),
        )
        for is_wrong, what, remedy in refused:
            if is_wrong:
                raise InputError(what, remedy=remedy)


export = python_call(Export)


def chosen_names(
    names: Iterable[str], tensors: Sequence[str] = (), without: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the names that patterns select.

    Parameters
    ----------
    names
        Names of tensors.
    tensors
        Patterns of `matching_names` to include; without any, all names are included.
    without
        Patterns to exclude, which take precedence.

    Raises
    ------
    InputError
        A regular expression is invalid.

    Examples
    --------
    >>> chosen_names(["encoder.0.weight", "encoder.0.bias", "head.weight"], ["encoder"], ["*.bias"])
    ('encoder.0.weight',)
    """
    names = tuple(names)
    gone = {name for pattern in without for name in matching_names(names, pattern)}
    chosen = {name for pattern in tensors for name in matching_names(names, pattern)}
    return tuple(name for name in names if (name in chosen or not tensors) and name not in gone)


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a folder for the archive to be packed, on the file system of `target`."""
    from inshrink_core.archive.storage.contract import storage_errors

    parent = target.absolute().parent
    folder = None
    try:
        with storage_errors("the step cannot be exported", target):
            make_folders(parent)
            with working_folder(parent) as folder:
                yield folder
    except StorageError as error:
        if folder is None or not error.where.startswith(str(folder)):
            raise
        # The folder is deleted already, so the error names the target.
        raise StorageError(error.what, where=str(target), remedy=error.remedy) from error


class _Step:
    """One step to be written as an archive or a file; only its weights if patterns are given."""

    def __init__(
        self,
        archive: Archive,
        info: FrameInfo,
        patterns: tuple[Sequence[str], Sequence[str]] | None,
        progress: OnProgress | None,
        *,
        plain: bool,
    ) -> None:
        from inshrink_core.formats.carried import carried_tensors

        self._archive, self._info, self._progress = archive.sequential(), info, progress
        self._checkpoint = self._view = self._archive.checkpoint(info)
        self._meta = self._archive.frame(info).meta
        carried: tuple[CarriedTensor, ...] = ()
        if patterns is not None:
            self._view = _weights_of(self._checkpoint, *patterns)
            carried = carried_tensors(self._checkpoint, archive.limits)
        self._carried = [
            tensor
            for tensor in carried
            if tensor.role in MODEL_ROLES and patterns and chosen_names([tensor.name], *patterns)
        ]
        self.n_tensors = len(self._view)
        files, keys = {file.path for file in self._view.files}, {spec.key for spec in self._view.specs}
        # A file that contributes tensors to the export is not left out.
        self.left_out = tuple(
            file.path
            for file in self._checkpoint.files
            if file.path not in files
            and not any(member.key in keys for region in file.regions for member in region.members)
        )
        if not plain:  # quantized tensors stay packed in their files
            self.left_out += tuple(f"{item.key} ({item.kind})" for item in carried if item.file not in files)
        self.layers_left_out = _layers_left_out(self._checkpoint, self._view)
        self._source = [archive.reader.archive_id, info.frame_id]

    def write_exact(self, folder: Path) -> ArchiveSize:
        """Write the step without loss; return its sizes."""
        from inshrink_core.chain import Archive
        from inshrink_core.chain.attachments import DROPPED, add_attachments, attachments_of
        from inshrink_core.chain.base import BASE
        from inshrink_core.chain.prune import rewrite_tensors
        from inshrink_core.chain.sizes import archive_size

        # The references to the restored frame and to the base model, and the content digest, no longer apply.
        gone = ["restored", BASE, *(() if self._view is self._checkpoint else ("content", DROPPED))]
        meta = {key: value for key, value in self._meta.items() if key not in gone}
        meta |= {"source": self._source} | ({} if self._view is self._checkpoint else {"optimizer": "drop"})
        count = self._counter("export", self._view)
        with self._single_frame(folder, "exact") as frame:
            source = self._archive, self._info, frame
            rewrite_tensors(*source, lambda spec: count(spec.key), view=self._view)
            add_attachments(frame, dict(attachments_of(self._view)))
            frame.commit(meta)
        return archive_size(Archive.open(folder))

    def write_coarse(self, folder: Path, ratio: float, exact: ArchiveSize) -> float:
        """Write the weights with the lattice codec, at a ratio; return their relative error."""
        from inshrink_core.chain.attachments import add_attachments, attachments_of
        from inshrink_core.chain.meta import FOLDER, ORIGINALS, pack_attributes
        from inshrink_core.search.coarsen import coarsen

        allowed = _float32_nbytes(exact) / ratio - exact.overhead_nbytes - _PACKING_NBYTES

        def tried(trial: int) -> None:
            if self._progress is not None:
                self._progress(Progress("coarsen", trial, trial + 1, self._info.step))

        coarse = coarsen(self._view, self._checkpoint, allowed, tried, self._archive.device)
        with self._single_frame(folder, f"coarse {ratio:g}") as frame:
            for spec, block in coarse.blocks:
                frame.add(spec.key, block.codec, block.payload, attributes=pack_attributes(spec))
            add_attachments(frame, dict(attachments_of(self._view)))
            stays = {key: value for key, value in self._meta.items() if key in (FOLDER, ORIGINALS)}
            frame.commit(coarse.config.record() | stays | {"source": self._source})
        return coarse.relative_error

    def write_plain(self, made: Archive, target: Path, dtype: str, *, force: bool) -> float:
        """Write the decoded weights of an archive as one plain file; return their relative error."""
        from inshrink_core.formats.carried import with_plain_values
        from inshrink_core.formats.write import write_safetensors, written_nbytes

        restored = made.checkpoint(made.last)
        cast = _Cast(restored, self._checkpoint, dtype)
        view = replace(restored, specs=tuple(map(cast.spec, restored.specs)), source=cast)
        view = with_plain_values(view, self._carried)
        self.n_tensors = len(view)
        nbytes = written_nbytes(replace(view, files=()), "safetensors")
        where = self._archive.where(self._info)
        self._archive.limits.require_disk(nbytes, target.parent, "exporting the step", where)
        write_safetensors(view, target, force=force, progress=self._counter("write", view))
        return cast.relative_error

    @contextlib.contextmanager
    def _single_frame(self, folder: Path, form: str) -> Iterator[FrameWriter]:
        """Make an archive of one keyframe; its id is a digest, so that equal exports have equal bytes."""
        from inshrink_core.archive import ArchiveWriter

        keys = "\0".join(spec.key for spec in self._view.specs)
        text = b"".join(self._source) + f"{form}\0{keys}".encode()
        archive_id = hashlib.sha256(text).digest()[: len(self._source[0])]
        with (
            ArchiveWriter(folder, create=True, archive_id=archive_id) as writer,
            writer.begin(step=self._info.step, kind=FrameKind.KEYFRAME, parent_id=None) as frame,
        ):
            yield frame

    def _counter(self, stage: str, view: Checkpoint) -> Callable[[str], None]:
        """Return a callback that reports each finished tensor of a view."""
        count = Counter(self._progress, stage, view.raw_bytes())
        return lambda key: count.add(view.spec(key).nbytes, self._info.step, key)


def _float32_nbytes(size: ArchiveSize) -> int:
    """Return the bytes of the weights of an archive as float32."""
    from inshrink_core.search.coarsen import FLOAT32_NBYTES

    return FLOAT32_NBYTES * size.n_weights


class _Cast:
    """Tensors cast to another dtype, with the error of all that were read against their originals."""

    def __init__(self, checkpoint: Checkpoint, original: Checkpoint, dtype: str) -> None:
        self._checkpoint, self._original, self._dtype = checkpoint, original, dtype
        self._moved = Movement()

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of a tensor after the cast."""
        is_cast = self._dtype and spec.dtype in CASTABLE
        return replace(spec, dtype=self._dtype) if is_cast else spec

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
        self._moved += movement(self._original[spec.key].double(), made.double())
        return made

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the bytes of a file outside of its tensors."""
        return self._checkpoint.source.skeleton(layout)

    @property
    def relative_error(self) -> float:
        """``sqrt(squared error / squared norm)`` of all floats read so far."""
        return self._moved.relative or 0.0


def _weights_of(checkpoint: Checkpoint, tensors: Sequence[str], without: Sequence[str]) -> Checkpoint:
    """Return chosen weights and buffers, with the files that belong to the model and not to its training.

    Raises
    ------
    NotFoundError
        The patterns select no tensor.
    """
    from inshrink_core.chain.attachments import view_of

    keys = [spec.key for spec in checkpoint.specs if spec.role in MODEL_ROLES]
    names = set(chosen_names(_model_names(checkpoint), tensors, without))
    if not names:
        raise NotFoundError(
            "no tensor is left", where=checkpoint.origin, remedy="`inshrink inspect --tensors` lists them"
        )
    chosen = {checkpoint.aliases.get(name, name) for name in names}
    model = view_of(checkpoint, chosen)
    files = tuple(
        file
        for file in model.files
        if file.kind != "opaque"
        or not (
            _TRAINING_STATE.match(file.path.rpartition("/")[2])
            # An index of shards is useless if some of them are left out.
            or (len(chosen) < len(keys) and file.path.endswith(".index.json"))
        )
    )
    aliases = {alias: key for alias, key in model.aliases.items() if alias in names}
    return replace(model, files=files, aliases=aliases)


def _model_names(checkpoint: Checkpoint) -> dict[str, None]:

    keys = {spec.key: None for spec in checkpoint.specs if spec.role in MODEL_ROLES}
    return keys | {alias: None for alias, key in checkpoint.aliases.items() if key in keys}


def _layers_left_out(checkpoint: Checkpoint, view: Checkpoint) -> tuple[str, ...]:
    """Return the outermost modules and tensors of the model that are left out entirely."""

    def above(name: str) -> list[str]:
        return [name[: dot.start()] for dot in re.finditer(r"\.|$", name)]

    names, chosen = _model_names(checkpoint), _model_names(view)
    modules = {module for name in chosen for module in above(name)}
    left_out = (name for name in names if name not in chosen)
    gone = (next((m for m in above(name) if m not in modules), name) for name in left_out)
    return tuple(dict.fromkeys(gone))

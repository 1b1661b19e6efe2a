"""Write a checkpoint to disk: in its own layout byte for byte, or as safetensors, torch's or DCP's files."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, cast

from inshrink_core.checkpoint import (
    DTYPE_SIZES,
    MODEL_ROLES,
    OPTIMIZER_ROLES,
    Checkpoint,
    FileLayout,
    TensorRole,
    TensorSpec,
)
from inshrink_core.errors import ExistsError, InputError, NotFoundError, StorageError, UnsafePathError
from inshrink_core.execution import Limits, make_folders, remove_empty, sync_path, working_folder
from inshrink_core.formats.carried import CarriedTensor, carried_tensors, with_plain_values
from inshrink_core.formats.dcp_state import STATE, write_state
from inshrink_core.formats.disk import check_names, check_target
from inshrink_core.formats.distributed import METADATA
from inshrink_core.formats.safetensors_file import SAFETENSORS_DTYPES
from inshrink_core.formats.source import DEFAULT_LIMITS, tensor_bytes, write_layout

Progress = Callable[[str], None]
Writer = Callable[[IO[bytes]], None]

NO_MATCH: Final = "no tensor matches"
LAYOUTS: Final = ("same", "safetensors", "torch", "dcp")
_DTYPE_NAMES: Final = {ours: theirs for theirs, ours in SAFETENSORS_DTYPES.items()}


def _ignore(key: str) -> None:
    """Stand in for a caller's progress function."""


def _write_safetensors(
    file: IO[bytes],
    checkpoint: Checkpoint,
    specs: Iterable[TensorSpec],
    metadata: dict[str, str],
    progress: Progress,
) -> None:
    """Write header, then tensor after tensor; wide dtypes first, so that each is aligned."""
    ordered = sorted(specs, key=lambda s: (-DTYPE_SIZES[s.dtype], s.key))
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for spec in ordered:
        if spec.dtype not in _DTYPE_NAMES:
            raise InputError(
                f"tensor '{spec.key}' is {spec.dtype}, which safetensors has no name for",
                where=checkpoint.origin,
                remedy="use the layout 'torch' or 'same'",
            )
        header[spec.key] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": _unpacked(spec),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for spec in ordered:
        file.write(tensor_bytes(checkpoint.source.read(spec), spec))
        progress(spec.key)


def _unpacked(spec: TensorSpec) -> list[int]:
    """Return the shape as the format counts it: two numbers of four bits are two elements."""
    if spec.dtype != "float4_e2m1fn_x2":
        return list(spec.shape)
    return [*spec.shape[:-1], 2 * spec.shape[-1]] if spec.shape else [2]


def _metadata(checkpoint: Checkpoint, kept: frozenset[str]) -> dict[str, str]:
    """Return what the header says beside tensors; tied names as safetensors' `save_model` writes them."""
    aliases = {alias: key for alias, key in sorted(checkpoint.aliases.items()) if key in kept}
    aliases.pop("format", None)
    aliases.pop("step", None)
    return aliases | {"format": "pt", "step": str(checkpoint.step)}


def _safetensors_writers(checkpoint: Checkpoint, progress: Progress) -> dict[str, Writer]:
    groups = {"model.safetensors": MODEL_ROLES, "optimizer.safetensors": frozenset(TensorRole) - MODEL_ROLES}
    writers: dict[str, Writer] = {}
    for name, roles in groups.items():
        specs = [spec for spec in checkpoint.specs if spec.role in roles]
        if specs or name == "model.safetensors":
            metadata = _metadata(checkpoint, frozenset(spec.key for spec in specs))
            writers[name] = partial(
                _write_safetensors, checkpoint=checkpoint, specs=specs, metadata=metadata, progress=progress
            )
    return writers


_OPTIMIZER_WORDS: Final = {TensorRole.MOMENTUM: "momentum_buffer", TensorRole.MASTER: "master_param"}
_TORCH_KEYS: Final = {TensorRole.GRADIENT: "gradients", TensorRole.EXTRA: "extra"}


class _RememberingFile:
    """Keeps the error of a write, which PyTorch's zip writer reports as one of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _write_torch(
    file: IO[bytes], checkpoint: Checkpoint, carried: Iterable[CarriedTensor], progress: Progress
) -> None:
    """Write ``{"step", "model", "optimizer", "gradients", "extra"}``; memory holds the whole checkpoint."""
    import torch

    content: dict[str, Any] = {"step": checkpoint.step, "model": checkpoint.state_dict(None)}
    beside = [spec for spec in checkpoint.specs if spec.role not in MODEL_ROLES]
    tensors = [(spec.name, spec.role, partial(checkpoint.source.read, spec)) for spec in beside]
    for name, role, read in tensors + [(one.name, one.role, one.whole) for one in carried]:
        if role in OPTIMIZER_ROLES:
            word = _OPTIMIZER_WORDS.get(role, role.value)
            content.setdefault("optimizer", {}).setdefault(name, {})[word] = read()
        else:
            content.setdefault(_TORCH_KEYS.get(role, "model"), {})[name] = read()
    remembering = _RememberingFile(file)
    try:
        torch.save(content, remembering)  # type: ignore[arg-type]
    except RuntimeError:
        if remembering.error is not None:
            raise remembering.error from None
        raise
    for spec in checkpoint.specs:
        progress(spec.key)


def _copy_opaque(file: IO[bytes], checkpoint: Checkpoint, layout: FileLayout) -> None:
    file.write(checkpoint.source.skeleton(layout))


def _side_files(checkpoint: Checkpoint, taken: Iterable[str]) -> dict[str, Writer]:
    """Return writers of what travels along; not of an index, which names shards that are no more."""
    names = {name.casefold() for name in taken}
    return {
        layout.path: partial(_copy_opaque, checkpoint=checkpoint, layout=layout)
        for layout in checkpoint.files
        if layout.kind == "opaque"
        and not layout.path.endswith((".index.json", METADATA))
        and layout.path.casefold() not in names
    }


def _same_writers(checkpoint: Checkpoint, progress: Progress, limits: Limits) -> dict[str, Writer]:
    if not checkpoint.files:
        raise InputError(
            "the checkpoint does not know its own file layout",
            where=checkpoint.origin,
            remedy="give the layout 'safetensors' or 'torch'",
        )
    writers: dict[str, Writer] = {}
    for layout in checkpoint.files:
        if layout.path in writers:
            # check_names would say so, but keys of a dict cannot repeat.
            raise UnsafePathError(
                f"the file name {layout.path[:200]!r} stands twice", where=checkpoint.origin
            )
        writers[layout.path] = partial(
            write_layout, checkpoint=checkpoint, layout=layout, progress=progress, limits=limits
        )
    return writers


def _selected_writers(
    checkpoint: Checkpoint, keys: Callable[[str], bool], progress: Progress
) -> dict[str, Writer]:
    specs = [spec for spec in checkpoint.specs if keys(spec.key)]
    chosen = {spec.key for spec in specs}
    for alias, key in checkpoint.aliases.items():
        if keys(alias) and key not in chosen:
            specs.append(checkpoint.spec(key))
            chosen.add(key)
    if not specs:
        raise NotFoundError(
            NO_MATCH,
            where=checkpoint.origin,
            remedy="`inshrink inspect` lists the tensors",
        )
    metadata = _metadata(checkpoint, frozenset(chosen))
    return {
        "model.safetensors": partial(
            _write_safetensors, checkpoint=checkpoint, specs=specs, metadata=metadata, progress=progress
        )
    }


def write_checkpoint(
    checkpoint: Checkpoint,
    directory: str | os.PathLike[str],
    *,
    layout: str = "same",
    force: bool = False,
    keys: Callable[[str], bool] | None = None,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
    converted: Progress | None = None,
) -> tuple[Path, ...]:
    """Write a checkpoint's files into a directory.

    Parameters
    ----------
    checkpoint
        From a run, or decoded from an archive; values are read tensor by tensor as they are written.
    directory
        Created if missing.
    layout
        ``same``: the files it came from, byte-identical where tensors are exact. ``safetensors``:
        ``model.safetensors`` with weights and buffers, ``optimizer.safetensors`` with the rest under
        ``name@role``, side files as they were. ``torch``: ``checkpoint.pt`` with
        ``{"step": int, "model": {name: tensor}, "optimizer": {name: {"exp_avg": tensor, …}},
        "gradients": {name: tensor}}``, side files as they were. ``dcp``: a directory for
        `torch.distributed.checkpoint.load`, of the state that was saved, where one was, else of
        ``{"step": int, "model": {name: tensor}, "optimizer": {"state": {name: {"exp_avg": tensor, …}}}}``,
        side files as they were.
    force
        Replace files that exist.
    keys
        Which tensors to write, by key; given, they alone are written as ``model.safetensors``.
    progress
        Called with the key of each tensor when it is written.
    limits
        What writing may take of memory and disk; by default what is available.
    converted
        Called with what becomes of each tensor that the layout has no form for. Of the tensors that torch
        files carry unread, ``safetensors`` and ``dcp`` take the values of a conjugated, negated or expanded
        one, and the parts of a sparse or quantized one (``q.weight.int_repr``, ``q.weight.scale``).
        ``torch`` takes all as they are.

    Returns
    -------
    tuple of Path
        The files written.

    Raises
    ------
    InputError
        An unknown layout, or a tensor that the layout cannot hold.
    NotFoundError
        `keys` chooses nothing.
    UnsafePathError
        A file name of the checkpoint would leave the directory; nothing is written.
    ExistsError
        A file exists and `force` is not set; nothing is written.
    TooLargeError
        It would take more than the limits allow; nothing is written.
    StorageError
        The disk is full or the target read-only; partial files are removed.

    Notes
    -----
    Memory is bounded by the largest tensor or skeleton, but for ``torch``, whose writer wants all
    tensors at once. Files appear under their names only when all of them are complete.

    Examples
    --------
    >>> import inshrink_core, tempfile
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> inshrink_core.formats.write_checkpoint(run[400], tempfile.mkdtemp(), layout="safetensors")[0].name
    'model.safetensors'
    """
    if layout not in LAYOUTS:
        raise InputError("an unknown layout", expected=", ".join(LAYOUTS), found=layout[:40])
    plan = _Plan(checkpoint, layout, keys, limits, converted or _ignore)
    writers = plan.writers(progress or _ignore)
    nbytes = written_nbytes(plan.checkpoint, layout, plan.keys)
    limits.require_disk(nbytes, Path(directory), f"writing step {checkpoint.step}", checkpoint.origin)
    return write_files(Path(directory), writers, force=force, origin=checkpoint.origin)


def write_safetensors(
    checkpoint: Checkpoint, path: Path, *, force: bool = False, progress: Progress | None = None
) -> None:
    """Write all tensors of a checkpoint into one safetensors file.

    Parameters
    ----------
    checkpoint
        Its tensors' keys become names; values are read one by one.
    path
        The file; its folder is created if missing.
    force
        Replace a file that exists.
    progress
        Called with the key of each tensor when it is written.

    Raises
    ------
    InputError
        The format has no name for a dtype.
    ExistsError
        The file exists and `force` is not set.
    StorageError
        The disk is full or the target read-only; what was written is removed.
    """
    metadata = _metadata(checkpoint, frozenset(checkpoint))
    write = partial(
        _write_safetensors,
        checkpoint=checkpoint,
        specs=checkpoint.specs,
        metadata=metadata,
        progress=progress or _ignore,
    )
    write_files(path.parent, {path.name: write}, force=force, origin=str(path))


def restorable_layout(checkpoint: Checkpoint) -> str:
    """Return ``same``, or a plain format where files were left out with the optimizer's tensors."""
    covered = {
        member.key for file in checkpoint.files for region in file.regions for member in region.members
    }
    if any(file.kind == STATE for file in checkpoint.files):
        return "dcp"
    return "same" if all(spec.key in covered for spec in checkpoint.specs) else "torch"


def written_nbytes(checkpoint: Checkpoint, layout: str, keys: Callable[[str], bool] | None = None) -> int:
    """Return about how many bytes `write_checkpoint` writes; headers of plain formats are not counted."""
    if layout == "same" and keys is None:
        return sum(file.nbytes for file in checkpoint.files)
    side = sum(file.nbytes for file in checkpoint.files if file.kind == "opaque" and keys is None)
    return side + sum(spec.nbytes for spec in checkpoint.specs if keys is None or keys(spec.key))


def rehearse_writing(checkpoint: Checkpoint, layout: str, limits: Limits = DEFAULT_LIMITS) -> None:
    """Do all that `write_checkpoint` does but store nothing: what passes can be written.

    Parameters
    ----------
    checkpoint
        What would be written.
    layout, limits
        As for `write_checkpoint`; the disk is not looked at, unless the limits say how much of it.

    Raises
    ------
    InshrinkError
        As `write_checkpoint`, but for what only a real directory refuses.
    """
    writers = _Plan(checkpoint, layout, None, limits, _ignore).writers(_ignore)
    check_names(writers, checkpoint.origin)
    if limits.max_disk is not None:
        nbytes = written_nbytes(checkpoint, layout)
        limits.require_disk(nbytes, Path(), f"writing step {checkpoint.step}", checkpoint.origin)
    for write in writers.values():
        write(cast("IO[bytes]", _NullFile()))


class _NullFile(io.RawIOBase):
    """A file that forgets what is written."""

    def __init__(self) -> None:
        super().__init__()
        self._at = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        self._at += nbytes
        return nbytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset if whence == io.SEEK_SET else self._at + offset
        return self._at

    def tell(self) -> int:
        return self._at


class _Plan:
    """What is written of a checkpoint in a layout, tensors that are carried unread included."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: str,
        keys: Callable[[str], bool] | None,
        limits: Limits,
        converted: Progress,
    ) -> None:
        self.checkpoint, self.keys = checkpoint, keys
        self._layout, self._limits, self._known = layout, limits, set(checkpoint)
        self._carried: list[CarriedTensor] = []
        if layout == "same" and keys is None:
            return
        self._carried = [one for one in carried_tensors(checkpoint, limits) if keys is None or keys(one.key)]
        if layout != "torch" or keys is not None:
            self.checkpoint = with_plain_values(checkpoint, self._carried, converted)
        if keys is not None:
            added = set(self.checkpoint) - self._known
            self.keys = lambda key: key in added or keys(key)

    def writers(self, progress: Progress) -> dict[str, Writer]:
        """Return what writes each file, by path; `progress` takes keys of the checkpoint alone."""
        checkpoint = self.checkpoint

        def report(key: str) -> None:
            if key in self._known:
                progress(key)

        if self.keys is not None:
            return _selected_writers(checkpoint, self.keys, report)
        if self._layout == "same":
            return _same_writers(checkpoint, report, self._limits)
        if self._layout == "dcp":
            writers = write_state(checkpoint, report)
        elif self._layout == "safetensors":
            writers = _safetensors_writers(checkpoint, report)
        else:
            write = partial(_write_torch, checkpoint=checkpoint, carried=self._carried, progress=report)
            writers = {"checkpoint.pt": write}
        return writers | _side_files(checkpoint, writers)


_REMEDIES: Final = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "free some space, or write elsewhere",
    errno.EROFS: "the file system is read-only: write elsewhere",
    errno.EACCES: "you may not write there: check the permissions",
    errno.EPERM: "you may not write there: check the permissions",
}


@contextlib.contextmanager
def _storage_errors(where: Path) -> Iterator[None]:
    """Turn what the file system refuses into an error with a remedy."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"writing failed: {error.strerror or error}",
            where=str(where),
            remedy=_REMEDIES.get(error.errno or 0, "nothing was changed there; try another place"),
        ) from error


def _write_temporary(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    with path.open("xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def write_files(
    directory: Path, writers: Mapping[str, Callable[[IO[bytes]], None]], *, force: bool, origin: str = ""
) -> tuple[Path, ...]:
    """Write several files into a directory under temporary names, then rename them all, durably.

    Parameters
    ----------
    directory
        Created if missing.
    writers
        Relative POSIX path to a function that writes the file's bytes.
    force
        Replace files that exist.
    origin
        Where the names come from, for messages.

    Returns
    -------
    tuple of Path
        The files, in the order given.

    Raises
    ------
    UnsafePathError
        A name would leave the directory; nothing is written.
    ExistsError
        A target exists and `force` is not set; nothing is written.
    StorageError
        The disk is full, the target read-only; what was written is removed.
    """
    check_names(writers, origin)
    targets = {name: check_target(directory, name) for name in writers}
    if not force:
        _refuse_existing(targets)
    made: list[Path] = []
    alone = next(iter(targets.values())) if len(targets) == 1 else directory
    try:
        with _storage_errors(alone):
            made += make_folders(directory)
            with working_folder(directory) as folder:
                # Numbers for names: a long one may leave no room for more signs.
                fresh = [folder / str(number) for number in range(len(targets))]
                for path, write in zip(fresh, writers.values(), strict=True):
                    _write_temporary(path, write)
                for parent in {target.parent for target in targets.values()} - {directory}:
                    made += make_folders(parent)
                if not force:
                    _refuse_existing(targets)
                _switch(fresh, tuple(targets.values()), folder)
    except BaseException:
        remove_empty(made)
        raise
    return tuple(targets.values())


def _switch(fresh: Sequence[Path], targets: Sequence[Path], folder: Path) -> None:
    """Give all files their names, or none.

    Of several files the old ones go first, all of them: whatever cuts this off, no old file is ever
    beside a new one. One file alone is replaced at once.
    """
    parents = {target.parent for target in targets}
    renamed: list[tuple[Path, Path]] = []

    def rename(source: Path, target: Path) -> None:
        renamed.append((source, target))
        source.rename(target)

    try:
        if len(targets) == 1:
            fresh[0].replace(targets[0])
        else:
            for number, target in enumerate(targets):
                if os.path.lexists(target):
                    rename(target, folder / f"old-{number}")
            if renamed:
                _sync(parents)
            for path, target in zip(fresh, targets, strict=True):
                rename(path, target)
        _sync(parents)
    except BaseException:
        for source, target in reversed(renamed):
            with contextlib.suppress(OSError):
                target.rename(source)
        raise


def _sync(folders: Iterable[Path]) -> None:
    for folder in folders:
        sync_path(folder)


def _refuse_existing(targets: Mapping[str, Path]) -> None:
    for path in targets.values():
        if os.path.lexists(path):
            raise ExistsError(
                "the file exists already",
                where=str(path),
                remedy="write elsewhere, or use --force to replace it",
            )

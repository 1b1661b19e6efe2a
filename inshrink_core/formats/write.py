"""Write a checkpoint to disk: byte for byte in its original layout, or as safetensors, torch or DCP files."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from inshrink_core.errors import InputError, NotFoundError, StorageError
from inshrink_core.execution.files import (
    cached_parts,
    make_folders,
    remove_empty,
    require_free,
    sync_path,
    working_folder,
)
from inshrink_core.execution.resources import Limits
from inshrink_core.formats.carried import CarriedTensor, carried_tensors, with_plain_values
from inshrink_core.formats.dcp_state import STATE, STATE_WORDS, write_state
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
    """Ignore progress; the default of a progress callback."""


def _write_safetensors(
    file: IO[bytes], checkpoint: Checkpoint, specs: Sequence[TensorSpec], progress: Progress
) -> None:
    """Write the header and then each tensor; wide dtypes come first, so that all are aligned.

    Tied names are written like in safetensors' `save_model`.
    """
    ordered = sorted(specs, key=lambda s: (-DTYPE_SIZES[s.dtype], s.key))
    remaining = {spec.key for spec in specs}
    tied = {alias: key for alias, key in sorted(checkpoint.aliases.items()) if key in remaining}
    tied = {alias: key for alias, key in tied.items() if alias not in ("format", "step")}
    header: dict[str, Any] = {"__metadata__": tied | {"format": "pt", "step": str(checkpoint.step)}}
    at = 0
    for spec in ordered:
        if spec.dtype not in _DTYPE_NAMES:
            what = f"tensor '{spec.key}' is {spec.dtype}, which safetensors has no name for"
            raise InputError(what, where=checkpoint.origin, remedy="use the layout 'torch' or 'same'")
        dtype, span = _DTYPE_NAMES[spec.dtype], [at, at + spec.nbytes]
        header[spec.key] = {"dtype": dtype, "shape": _unpacked(spec), "data_offsets": span}
        at += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for spec in ordered:
        for part in cached_parts(tensor_bytes(checkpoint.source.read(spec), spec)):
            file.write(part)
        progress(spec.key)


def _unpacked(spec: TensorSpec) -> list[int]:
    """Return the shape as safetensors counts it: one float4_e2m1fn_x2 element packs two elements."""
    if spec.dtype != "float4_e2m1fn_x2":
        return list(spec.shape)
    return [*spec.shape[:-1], 2 * spec.shape[-1]] if spec.shape else [2]


_TORCH_KEYS: Final = {TensorRole.GRADIENT: "gradients", TensorRole.EXTRA: "extra"}


def _write_torch(
    file: IO[bytes], checkpoint: Checkpoint, carried: Iterable[CarriedTensor], progress: Progress
) -> None:
    """Write ``{"step", "model", "optimizer", "gradients", "extra"}``; memory holds the whole checkpoint."""
    import torch

    content: dict[str, Any] = {"step": checkpoint.step, "model": checkpoint.state_dict(None)}
    beside = [spec for spec in checkpoint.specs if spec.role not in MODEL_ROLES]
    tensors = [(spec.name, spec.role, partial(checkpoint.source.read, spec)) for spec in beside]
    for name, role, read in tensors + [(item.name, item.role, item.restored) for item in carried]:
        if role in OPTIMIZER_ROLES:
            word = STATE_WORDS.get(role, role.value)
            content.setdefault("optimizer", {}).setdefault(name, {})[word] = read()
        else:
            content.setdefault(_TORCH_KEYS.get(role, "model"), {})[name] = read()
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # PyTorch's zip writer wraps errors of the underlying file.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    for spec in checkpoint.specs:
        progress(spec.key)


def write_checkpoint(
    checkpoint: Checkpoint,
    directory: str | os.PathLike[str],
    *,
    layout: str = "same",
    force: bool = False,
    keys: Callable[[str], bool] | None = None,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[Path, ...]:
    """Write a checkpoint's files into a directory.

    Parameters
    ----------
    checkpoint
        From a run, or decoded from an archive; values are read tensor by tensor as they are written.
    directory
        Created if missing.
    layout
        ``same``: the original files, byte-identical if all tensors are exact. ``safetensors``:
        ``model.safetensors`` with weights and buffers, ``optimizer.safetensors`` with the rest under
        ``name@role``, side files unchanged. ``torch``: ``checkpoint.pt`` with
        ``{"step": int, "model": {name: tensor}, "optimizer": {name: {"exp_avg": tensor, …}},
        "gradients": {name: tensor}}``, side files unchanged. ``dcp``: a directory for
        `torch.distributed.checkpoint.load`, with the saved state if there was one, otherwise with
        ``{"step": int, "model": {name: tensor}, "optimizer": {"state": {name: {"exp_avg": tensor, …}}}}``,
        side files unchanged.
    force
        Replace existing files.
    keys
        Selects tensors by key; only these are then written, as ``model.safetensors``.
    progress
        Called with the key of each tensor when it is written.
    limits
        Limits on memory and disk space; by default the available resources.

    Returns
    -------
    tuple of Path
        The files written.

    Raises
    ------
    InputError
        The layout is unknown or cannot represent a tensor.
    NotFoundError
        `keys` selects no tensor.
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
    Memory is bounded by the largest tensor or skeleton, except for ``torch``, whose writer needs all
    tensors at once. Files get their final names only when all of them are complete.

    Examples
    --------
    >>> import inshrink_core, tempfile
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> inshrink_core.formats.write_checkpoint(run[400], tempfile.mkdtemp(), layout="safetensors")[0].name
    'model.safetensors'
    """
    if layout not in LAYOUTS:
        raise InputError("an unknown layout", expected=", ".join(LAYOUTS), found=layout[:40])
    writers, nbytes = _writers(checkpoint, layout, keys, limits, progress or _ignore)
    limits.require_disk(nbytes, Path(directory), f"writing step {checkpoint.step}", checkpoint.origin)
    return write_files(Path(directory), writers, force=force, origin=checkpoint.origin)


def write_safetensors(
    checkpoint: Checkpoint, path: Path, *, force: bool = False, progress: Progress | None = None
) -> None:
    """Write all tensors of a checkpoint into one safetensors file.

    Parameters
    ----------
    checkpoint
        The checkpoint; its tensors' keys become names, and values are read one by one.
    path
        The file; its folder is created if missing.
    force
        Replace an existing file.
    progress
        Called with the key of each tensor when it is written.

    Raises
    ------
    InputError
        The format has no name for a dtype.
    ExistsError
        The file exists and `force` is not set.
    StorageError
        The disk is full or the target read-only; partial files are removed.
    """
    report = progress or _ignore
    write = partial(_write_safetensors, checkpoint=checkpoint, specs=checkpoint.specs, progress=report)
    write_files(path.parent, {path.name: write}, force=force, origin=str(path))


def restorable_layout(checkpoint: Checkpoint) -> str:
    """Return ``same`` if it is possible, ``dcp`` for a saved state, otherwise ``torch``."""
    covered = {m.key for file in checkpoint.files for region in file.regions for m in region.members}
    if any(file.kind == STATE for file in checkpoint.files):
        return "dcp"
    return "same" if all(spec.key in covered for spec in checkpoint.specs) else "torch"


def written_nbytes(checkpoint: Checkpoint, layout: str, keys: Callable[[str], bool] | None = None) -> int:
    """Return the approximate size that `write_checkpoint` writes, without headers of plain formats."""
    if layout == "same" and keys is None:
        return sum(file.nbytes for file in checkpoint.files)
    side = sum(file.nbytes for file in checkpoint.files if file.kind == "opaque" and keys is None)
    return side + sum(spec.nbytes for spec in checkpoint.specs if keys is None or keys(spec.key))


def rehearse_writing(checkpoint: Checkpoint, limits: Limits) -> None:
    """Run `write_checkpoint` in the `restorable_layout` without storing anything, to verify that it succeeds.

    Parameters
    ----------
    checkpoint
        The checkpoint that would be written.
    limits
        As for `write_checkpoint`; disk space is checked only if the limits set a maximum.

    Raises
    ------
    InshrinkError
        As for `write_checkpoint`, except errors of the target directory.
    """
    layout = restorable_layout(checkpoint)
    writers, nbytes = _writers(checkpoint, layout, None, limits, _ignore)
    check_names(writers, checkpoint.origin)
    if limits.max_disk is not None:
        limits.require_disk(nbytes, Path(), f"writing step {checkpoint.step}", checkpoint.origin)
    for write in writers.values():
        write(cast("IO[bytes]", _NullFile()))


class _NullFile(io.BytesIO):
    """A file that discards written data."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


def _writers(
    checkpoint: Checkpoint,
    layout: str,
    keys: Callable[[str], bool] | None,
    limits: Limits,
    progress: Progress,
) -> tuple[dict[str, Writer], int]:
    """Return the writer of each file by path, and the approximate size; skip progress of carried tensors."""
    known = set(checkpoint)

    def report(key: str) -> None:
        if key in known:
            progress(key)

    def same(file: FileLayout) -> Writer:
        return partial(write_layout, checkpoint=checkpoint, layout=file, progress=report, limits=limits)

    def safetensors(specs: Sequence[TensorSpec]) -> Writer:
        return partial(_write_safetensors, checkpoint=checkpoint, specs=specs, progress=report)

    if layout == "same" and keys is None:
        if not checkpoint.files:
            what, remedy = "the checkpoint has no file layout", "give the layout 'safetensors' or 'torch'"
            raise InputError(what, where=checkpoint.origin, remedy=remedy)
        check_names([file.path for file in checkpoint.files], checkpoint.origin)
        return {file.path: same(file) for file in checkpoint.files}, written_nbytes(checkpoint, layout)
    carried = [tensor for tensor in carried_tensors(checkpoint, limits) if keys is None or keys(tensor.key)]
    if layout != "torch" or keys is not None:
        checkpoint = with_plain_values(checkpoint, carried)
    if keys is not None:
        aliased = {key for alias, key in checkpoint.aliases.items() if keys(alias)}
        chosen = [s for s in checkpoint.specs if keys(s.key) or s.key in aliased or s.key not in known]
        if not chosen:
            remedy = "`inshrink inspect` lists the tensors"
            raise NotFoundError(NO_MATCH, where=checkpoint.origin, remedy=remedy)
        return {"model.safetensors": safetensors(chosen)}, sum(spec.nbytes for spec in chosen)
    if layout == "dcp":
        writers = write_state(checkpoint, report)
    elif layout == "safetensors":
        writers = {"model.safetensors": safetensors([s for s in checkpoint.specs if s.role in MODEL_ROLES])}
        if beside := [spec for spec in checkpoint.specs if spec.role not in MODEL_ROLES]:
            writers["optimizer.safetensors"] = safetensors(beside)
    else:
        write = partial(_write_torch, checkpoint=checkpoint, carried=carried, progress=report)
        writers = {"checkpoint.pt": write}
    names = {name.casefold() for name in writers}
    opaque = (file for file in checkpoint.files if file.kind == "opaque")
    # An index lists shards that are not written.
    side = (file for file in opaque if not file.path.endswith((".index.json", METADATA)))
    writers |= {file.path: same(file) for file in side if file.path.casefold() not in names}
    return writers, written_nbytes(checkpoint, layout)


_REMEDIES: Final = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "free some space, or write elsewhere",
    errno.EROFS: "the file system is read-only: write elsewhere",
    errno.EACCES: "you may not write there: check the permissions",
    errno.EPERM: "you may not write there: check the permissions",
}


def write_files(
    directory: Path, writers: Mapping[str, Writer], *, force: bool, origin: str = ""
) -> tuple[Path, ...]:
    """Write several files into a directory under temporary names, then rename them all, durably.

    Parameters
    ----------
    directory
        Created if missing.
    writers
        Relative POSIX path to a function that writes the file's bytes.
    force
        Replace existing files.
    origin
        Source of the names, for messages.

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
        The disk is full or the target read-only; partial files are removed.
    """
    check_names(writers, origin)
    targets = [check_target(directory, name) for name in writers]
    made: list[Path] = []
    try:
        for target in targets:
            require_free(target, force)
        made += make_folders(directory)
        with working_folder(directory) as folder:
            # Use numbers as temporary names: extending a long name could exceed the limit.
            fresh = [folder / str(number) for number in range(len(targets))]
            for path, write in zip(fresh, writers.values(), strict=True):
                with path.open("xb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
            for parent in {target.parent for target in targets} - {directory}:
                made += make_folders(parent)
            for target in targets:
                require_free(target, force)
            _switch(fresh, targets, folder)
    except BaseException as error:
        remove_empty(made)
        if not isinstance(error, OSError):
            raise
        where = str(targets[0] if len(targets) == 1 else directory)
        remedy = _REMEDIES.get(error.errno or 0, "nothing was changed there; try another place")
        what = f"writing failed: {error.strerror or error}"
        raise StorageError(what, where=where, remedy=remedy) from error
    return tuple(targets)


def _switch(fresh: Sequence[Path], targets: Sequence[Path], folder: Path) -> None:
    """Give all files their final names, or none.

    With several files, all old ones are moved away first, so that an interruption never leaves an old file
    beside a new one. A single file is replaced atomically.
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
            for parent in parents if renamed else ():
                sync_path(parent)
            for path, target in zip(fresh, targets, strict=True):
                rename(path, target)
        for parent in parents:
            sync_path(parent)
    except BaseException:
        for source, target in reversed(renamed):
            with contextlib.suppress(OSError):
                target.rename(source)
        raise

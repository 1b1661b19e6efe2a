"""Lightning: checkpoints are archived, and training resumes from archived ones.

A plug-in replaces each checkpoint file by a pointer; sharded strategies keep their checkpoint folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
import shutil
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch
from isal.isal_zlib import crc32
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from inshrink_core.chain import Archive
from inshrink_core.chain.restoring import restore_folder
from inshrink_core.errors import DamagedError, InputError, InshrinkError, NotFoundError, StorageError
from inshrink_core.execution.files import make_folders, working_folder, write_durably
from inshrink_core.formats import write_checkpoint
from inshrink_core.formats.distributed import METADATA
from inshrink_core.integrations.ranks import FirstRankSaver, is_first_rank
from inshrink_core.integrations.versions import require
from inshrink_core.training.extra import require_plain
from inshrink_core.training.spool import spool_folder

require("lightning", extra="lightning", oldest="2.5", tested="2.6")

from lightning.pytorch.plugins.io import TorchCheckpointIO  # noqa: E402 - checked above
from lightning.pytorch.strategies import (  # noqa: E402
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
)
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

if TYPE_CHECKING:
    from inshrink_core.frame import FrameInfo
    from inshrink_core.training.saver import Saver

__all__ = [
    "InshrinkCheckpointIO",
    "InshrinkFSDPStrategy",
    "InshrinkModelParallelStrategy",
    "restore_checkpoint",
]

_CHECKPOINT: Final = "checkpoint.ckpt"
_OBJECTS: Final = "meta.pt"
"""File of values that a reader without execution refuses; the engine stores it unread."""

_WITHOUT_CONTENT: Final = ".temp.ckpt"
"""Name of the file in which a worker returns the model's state dict to its launcher."""

_FAILURES: Final = "inshrink.failures"
"""Key of a worker's failures in that file."""

_ID: Final = "inshrink-save.txt"
_STATE: Final = ("state_dict", "optimizer_states")
"""Keys that a pointer omits."""

_SIGN: Final = b"Inshrink: "
_MAX_FIRST_LINE: Final = 1 << 14


class _Saved(NamedTuple):
    """The save that a pointer refers to."""

    step: int
    save_id: str
    digest: bytes


class InshrinkCheckpointIO(FirstRankSaver, TorchCheckpointIO):  # type: ignore[misc,unused-ignore]
    """Archives every checkpoint that a Lightning Trainer saves, and loads them from the archive.

    Parameters
    ----------
    archive
        The archive, created if needed; locked from the first save until the training ends.
    **options
        As for `inshrink_core.Saver`: `codec`, `config`, `optimizer_state`, `keyframe_every`,
        `device`, `threads`, `base`, `retention`. A policy cannot have `optimizer_last`, since Lightning's
        checkpoint is one file; its `keep_best` uses the metric that a ModelCheckpoint monitors.

    Raises
    ------
    LockedError
        Another process is writing the archive.
    InputError
        An option is invalid, or lightning is too old.

    Notes
    -----
    A pointer replaces each checkpoint file; it holds everything but tensors of the model and optimizers.
    Removing it does not change the archive. A checkpoint that cannot be archived is written by Lightning
    and listed in `failures`. Under a strategy that starts processes the worker of rank 0 archives; its
    failures are listed here when ``fit`` returns.
    """

    def __init__(self, archive: str | os.PathLike[str], **options: Any) -> None:
        self._last: _Saved | None = None
        self._loaded: FrameInfo | None = None
        policy = options.get("retention")
        if policy is not None and policy.optimizer_last is not None:
            raise InputError(
                "Lightning's checkpoint is one file: without the optimizer's state it would not be whole",
                found=f"optimizer_last={policy.optimizer_last}",
                remedy="prune the archive with --optimizer-last when none of its older steps is resumed",
            )
        self._archive_to(archive, options)

    def __enter__(self) -> Self:
        return self  # the process that saves, which may be forked later, opens the archive

    def _reopen(self) -> Saver | None:
        """Return the saver; a thread that opens it tears the plug-in down when it ends.

        An ``AsyncCheckpointIO`` does not pass Lightning's teardown on to the plug-in inside, but it joins its
        thread and drops the last reference to it.
        """
        before = self._saver
        saver = super()._reopen()
        if saver is not before and threading.current_thread() is not threading.main_thread():
            weakref.finalize(threading.current_thread(), self.teardown)
        return saver

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Archive a checkpoint and write a pointer to it.

        Parameters
        ----------
        checkpoint
            The content, from Lightning.
        path
            Path of the pointer.
        storage_options
            Not supported, as in Lightning's plug-in.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options")
        if Path(path).name == _WITHOUT_CONTENT:
            super().save_checkpoint({**checkpoint, _FAILURES: dict(self.failures)}, path)
            return
        step = checkpoint.get("global_step")
        saved = self._attempt(step if type(step) is int else 0, lambda saver: self._save(saver, checkpoint))
        if saved is None:
            super().save_checkpoint(checkpoint, path)
            return
        rest = {key: value for key, value in checkpoint.items() if key not in _STATE}
        record = {"step": saved.step, "save": saved.save_id, "rest": rest}
        _write_pointer(Path(path), self.path, record)

    def _save(self, saver: Saver, checkpoint: Mapping[str, Any]) -> _Saved:
        """Spool a checkpoint, unless it equals the last one."""
        step = checkpoint.get("global_step")
        digest = _digest({key: checkpoint.get(key) for key in _STATE})
        if self._last is not None and (self._last.step, self._last.digest) == (step, digest):
            return self._last
        if type(step) is not int:
            raise InputError("the checkpoint has no global_step", found=repr(step))
        if self._loaded is not None:
            saver.resume_from(self._loaded)
            self._loaded = None
        saved = _Saved(step, secrets.token_hex(16), digest)
        plain, objects = _split(checkpoint)
        files = {_CHECKPOINT: plain, _OBJECTS: objects, _ID: saved.save_id.encode()}
        saver.save_files(files, step, _monitored(checkpoint))
        self._last = saved
        return saved

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; from the archive if the path is a pointer.

        Parameters
        ----------
        path
            A pointer, or a checkpoint that Lightning wrote.
        map_location, weights_only
            As for `torch.load`.

        Raises
        ------
        NotFoundError
            The archive does not have it.
        DamagedError
            The pointer cannot be read.
        """
        body = _read_pointer(Path(path))
        if body is None:
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            if Path(path).name == _WITHOUT_CONTENT:
                self._failures |= loaded.pop(_FAILURES, {})
            return loaded
        record = torch.load(io.BytesIO(body), map_location=map_location, weights_only=weights_only)
        self._settle()
        archive = Archive.open(self.path)
        info = _find(archive, record["step"], record["save"])
        content = _content(archive, info, map_location, weights_only)
        self._loaded = info
        return {**content, **record["rest"]}

    def teardown(self) -> None:
        """Archive pending saves, also those that a worker left in the spool, and release the archive."""
        self.close()
        if is_first_rank() and spool_folder(self.path).is_dir():
            with contextlib.suppress(InshrinkError):  # such as that another process does
                self._reopen()
                self.close()


class _ShardsArchived(FirstRankSaver, ParallelStrategy):  # type: ignore[misc,unused-ignore]
    """Archives the checkpoint folders of a strategy."""

    _SHARDED: tuple[str, Any]
    """The strategy's option for saving shards, and its value."""

    def __init__(
        self,
        archive: str | os.PathLike[str],
        *,
        archive_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        name, sharded = self._SHARDED
        if options.setdefault(name, sharded) != sharded:
            raise InputError(
                f"with this {name} a checkpoint is one file",
                expected=repr(sharded),
                found=repr(options[name]),
                remedy="use Lightning's strategy with the plug-in InshrinkCheckpointIO",
            )
        super().__init__(**options)
        self._archive_to(archive, archive_options or {})

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint as the strategy does, and archive it.

        Parameters
        ----------
        checkpoint
            The content, from Lightning.
        filepath
            The folder.
        storage_options
            Passed to the strategy, which refuses them.
        """
        step = checkpoint.get("global_step", -1)
        path = Path(self.broadcast(filepath))
        if self.is_global_zero and (path / METADATA).is_file():
            # Its files may be linked into the spool and must not be written again in place.
            shutil.rmtree(path)
        self.barrier()
        super().save_checkpoint(checkpoint, path, storage_options)
        self.barrier()

        def save(saver: Saver) -> None:
            if step != saver.last_step:
                saver.save_folder(path, step)

        self._attempt(step, save)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
        """Load a checkpoint as the strategy does; a training continues from its frame.

        Parameters
        ----------
        checkpoint_path
            The folder, saved by Lightning or written by `restore_checkpoint`.
        **options
            As for the strategy.

        Raises
        ------
        StepConflictError
            The archive has later steps, but not the one that training continues from.
        """
        path = Path(self.broadcast(checkpoint_path))
        loaded: dict[str, Any] = super().load_checkpoint(path, **options)
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            saver = self._reopen()
            if saver is not None:
                saver.resume(loaded["global_step"], path)
        return loaded

    def teardown(self) -> None:
        """End the strategy; archive pending saves and release the archive."""
        super().teardown()
        self.close()


class InshrinkModelParallelStrategy(_ShardsArchived, ModelParallelStrategy):  # type: ignore[misc,unused-ignore]
    """Archives every checkpoint of a training with FSDP2 or tensor parallelism.

    Parameters
    ----------
    archive
        The archive, created if needed; locked from the first save until the training ends.
    archive_options
        As for `inshrink_core.Saver`: `codec`, `config`, `optimizer_state`, `keyframe_every`,
        `device`, `threads`, `base`, `retention`.
    **options
        As for Lightning's ``ModelParallelStrategy``.

    Raises
    ------
    LockedError
        Another process is writing the archive.
    InputError
        An option is invalid, or lightning is too old.

    Notes
    -----
    Each rank writes its shards; the first one links the finished folder into the archive's spool, so all
    ranks must share a file system. Lightning may remove the folder; the frame stays. Errors never stop the
    training (`failures`).
    """

    _SHARDED = ("save_distributed_checkpoint", True)


class InshrinkFSDPStrategy(_ShardsArchived, FSDPStrategy):  # type: ignore[misc,unused-ignore]
    """Archives every checkpoint of a training with FSDP, whose state is saved sharded.

    Parameters
    ----------
    archive, archive_options
        As for `InshrinkModelParallelStrategy`.
    **options
        As for Lightning's ``FSDPStrategy``.

    Raises
    ------
    LockedError
        Another process is writing the archive.
    InputError
        An option is invalid, or lightning is too old.
    """

    _SHARDED = ("state_dict_type", "sharded")


def restore_checkpoint(
    archive: str | os.PathLike[str],
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    weights_only: bool = True,
) -> str:
    """Write an archived step as Lightning's checkpoint, a file or a folder, which needs no plug-in.

    Parameters
    ----------
    archive
        The archive.
    path
        Path of the checkpoint.
    step
        The step; by default the last one.
    weights_only
        False to unpickle other objects of the checkpoint (paths, dataclasses); only for trusted archives.

    Returns
    -------
    str
        `path`, for ``load_from_checkpoint``.

    Raises
    ------
    NotFoundError, MissingFrameError
        The archive has no such step, or its file is missing.
    InputError
        The step was not saved by Lightning, or has objects and `weights_only` is true.
    ExistsError
        The step is a folder, of a sharded training, and `path` exists.
    StorageError
        It cannot be written.
    """
    opened = Archive.open(archive)
    info = opened.last if step is None else opened.reader.find(step)
    if METADATA in {layout.path for layout in opened.checkpoint(info).files}:
        restore_folder(opened, path, info.step)
        return str(path)
    content = _content(opened, info, "cpu", weights_only)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
    except (OSError, RuntimeError) as error:
        raise StorageError("the checkpoint cannot be written", where=str(path)) from error
    return str(path)


def _monitored(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that callbacks monitor."""
    states = checkpoint.get("callbacks")
    rows = [row for row in states.values() if isinstance(row, dict)] if isinstance(states, dict) else []
    return {str(row["monitor"]): row.get("current_score") for row in rows if row.get("monitor")}


def _digest(state: Any) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    pending = [state]
    while pending:
        value = pending.pop()
        if is_traceable_wrapper_subclass(value):
            names, context = value.__tensor_flatten__()
            pending += [type(value).__qualname__, context, *(getattr(value, name) for name in names)]
        elif isinstance(value, torch.Tensor):
            hashed.update(f"{value.dtype}{tuple(value.shape)}{_checksum(value):x}".encode())
        elif isinstance(value, Mapping):
            hashed.update(repr(list(value)).encode())
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
        else:
            hashed.update(repr(value).encode())
    return hashed.digest()


def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return int(crc32(flat.numpy()))


def _split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[tuple[str, ...], Any]]:
    """Return the plain values of a checkpoint, and the other objects by their keys."""
    plain: dict[str, Any] = {}
    objects: dict[tuple[str, ...], Any] = {}
    for key, value in checkpoint.items():
        if _is_plain(value):
            plain[key] = value
        elif type(value) is dict and all(type(inner) is str for inner in value):
            plain[key] = {inner: item for inner, item in value.items() if _is_plain(item)}
            objects |= {(key, inner): item for inner, item in value.items() if inner not in plain[key]}
        else:
            objects[(key,)] = value
    return plain, objects


def _is_plain(value: Any) -> bool:
    with contextlib.suppress(InputError):
        require_plain(value, "")
        return True
    return False


def _write_pointer(path: Path, archive: Path | str, record: Mapping[str, Any]) -> None:
    first = f"step {record['step']}, save {record['save']} of {archive}"
    first += "; `restore_checkpoint` writes it: docs/integrations/lightning"
    buffer = io.BytesIO()
    torch.save(record, buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, _SIGN + first.replace("\n", " ").encode() + b"\n" + buffer.getvalue())


def _read_pointer(path: Path) -> bytes | None:
    """Return the content of a pointer; None if the path is not one."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(len(_SIGN)) != _SIGN:
            return None
        if not file.readline(_MAX_FIRST_LINE).endswith(b"\n"):
            raise DamagedError("the pointer to a checkpoint is damaged", where=str(path))
        return file.read()


def _find(archive: Archive, step: int, save_id: str) -> FrameInfo:
    """Return the frame of a save; pruning may have changed its id."""
    for frame in reversed(archive.reader.frames):
        if frame.step == step and _part(archive, frame, _ID) == save_id.encode():
            return frame
    raise NotFoundError(
        f"the archive does not hold this save of step {step}",
        where=str(archive.path),
        remedy="it may have been pruned, or was never archived: choose another checkpoint",
    )


def _part(archive: Archive, frame: FrameInfo, name: str) -> bytes | None:
    checkpoint = archive.checkpoint(frame)
    for layout in checkpoint.files:
        if layout.path == name:
            return checkpoint.source.skeleton(layout)
    return None


def _content(
    archive: Archive, info: FrameInfo, map_location: Any, weights_only: bool | None
) -> dict[str, Any]:
    """Return the checkpoint that Lightning saved at a step."""
    checkpoint = archive.checkpoint(info)
    where = f"{archive.path}, step {info.step}"
    if not {_CHECKPOINT, _OBJECTS} <= {layout.path for layout in checkpoint.files}:
        raise InputError(
            "this step was not saved by Lightning, or its optimizer was dropped",
            where=where,
            remedy="write it to files with `inshrink restore`",
        )
    beside = spool_folder(archive.path).absolute().parent
    make_folders(beside)
    with working_folder(beside) as folder:
        write_checkpoint(checkpoint, folder / "files")
        content = torch.load(folder / "files" / _CHECKPOINT, map_location=map_location, weights_only=True)
        try:
            objects = torch.load(
                folder / "files" / _OBJECTS, map_location=map_location, weights_only=weights_only
            )
        except Exception as error:
            raise InputError(
                "the checkpoint holds objects that are unpickled only on request",
                where=where,
                remedy="if you trust the archive, give weights_only=False",
            ) from error
    for place, value in objects.items():
        target = content if len(place) == 1 else content[place[0]]
        target[place[-1]] = value
    return dict(content)

"""Lightning: checkpoints go into an archive, and a pointer stays where Lightning looks for them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from isal.isal_zlib import crc32

from inshrink_core.chain import Archive
from inshrink_core.chain.restoring import restore_folder
from inshrink_core.errors import DamagedError, InputError, NotFoundError, StorageError
from inshrink_core.execution import make_folders, new_file, working_folder
from inshrink_core.formats import write_checkpoint
from inshrink_core.formats.distributed import METADATA
from inshrink_core.integrations.ranks import FirstRankSaver
from inshrink_core.integrations.versions import require
from inshrink_core.training.extra import require_plain
from inshrink_core.training.spool import spool_folder

require("lightning", extra="lightning", oldest="2.5", tested="2.6")

from lightning.pytorch.plugins.io import TorchCheckpointIO  # noqa: E402 - what is missing is said first

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.frame import FrameInfo
    from inshrink_core.training.saver import Saver

__all__ = ["InshrinkCheckpointIO", "restore_checkpoint"]

_CHECKPOINT: Final = "checkpoint.ckpt"
_OBJECTS: Final = "meta.pt"
"""Values that a reader that executes nothing would refuse: carried, never opened by the engine."""

_HANDED_BACK: Final = ".temp.ckpt"
"""What a worker hands to the process that launched it is called so: the model's state dict alone."""

_FAILURES: Final = "inshrink.failures"
"""Key of a worker's failures in that file."""

_ID: Final = "inshrink-save.txt"
_STATE: Final = ("state_dict", "optimizer_states")
"""What a pointer leaves out."""

_SIGN: Final = b"Inshrink: "
_MAX_FIRST_LINE: Final = 1 << 14

_logger = logging.getLogger(__name__)


class _Saved(NamedTuple):
    """The save that a pointer points to."""

    step: int
    save_id: str
    digest: bytes


class InshrinkCheckpointIO(FirstRankSaver, TorchCheckpointIO):  # type: ignore[misc,unused-ignore]
    """Archives every checkpoint that a Lightning Trainer saves, and loads them from the archive.

    Parameters
    ----------
    archive
        The archive to make or to go on with; locked from the first save until the training ends.
    **options
        As for `inshrink_core.Saver`: `codec`, `config`, `optimizer_state`, `keyframe_every`,
        `device`, `threads`, `base`, `retention`: of a policy all but `optimizer_last`, for Lightning's
        checkpoint is one file. `keep_best` goes by what a ModelCheckpoint monitors.

    Raises
    ------
    LockedError
        Another process is writing the archive.
    InputError
        An option is wrong, or lightning is too old.

    Notes
    -----
    Where Lightning expects a checkpoint lies a pointer, with all that is not a tensor of the model or an
    optimizer. Removing it leaves the archive as it is. A checkpoint that cannot be archived is written as
    Lightning would write it, and counted in `failures`. Under a strategy that starts processes the worker
    of rank 0 archives; its failures are counted here when ``fit`` returns.
    """

    def __init__(self, archive: str | os.PathLike[str], **options: Any) -> None:
        self._last: _Saved | None = None
        self._loaded: FrameInfo | None = None
        self._saving = threading.local()
        policy = options.get("retention")
        if policy is not None and policy.optimizer_last is not None:
            raise InputError(
                "Lightning's checkpoint is one file: without the optimizer's state it would not be whole",
                found=f"optimizer_last={policy.optimizer_last}",
                remedy="prune the archive with --optimizer-last when none of its older steps is resumed",
            )
        self._archive_to(archive, options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_saving": None}

    def __enter__(self) -> Self:
        return self  # the process that saves, which may be forked within, opens the archive

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state, _saving=threading.local())

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Archive a checkpoint and leave a pointer to it.

        Parameters
        ----------
        checkpoint
            What Lightning saves.
        path
            Where the pointer goes.
        storage_options
            Refused, as by Lightning's own.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options")
        if Path(path).name == _HANDED_BACK:
            super().save_checkpoint({**checkpoint, _FAILURES: dict(self.failures)}, path)
            return
        step = checkpoint.get("global_step")
        done: list[_Saved] = []
        if not self._attempt(
            step if type(step) is int else 0, lambda saver: done.append(self._save(saver, checkpoint))
        ):
            super().save_checkpoint(checkpoint, path)
            return
        rest = {key: value for key, value in checkpoint.items() if key not in _STATE}
        record = {"step": done[0].step, "save": done[0].save_id, "rest": rest}
        _write_pointer(Path(path), self.path, record)

    def _save(self, saver: Saver, checkpoint: Mapping[str, Any]) -> _Saved:
        """Spool a checkpoint, unless it is the one that was saved last."""
        if threading.current_thread() is not threading.main_thread():
            end = getattr(self._saving, "end", None)
            if end is None or end.saver is not saver:
                self._saving.end = _ThreadEnd(self, saver)
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
        """Load a checkpoint, from the archive where a pointer lies at the path.

        Parameters
        ----------
        path
            A pointer, or a checkpoint of Lightning's own.
        map_location, weights_only
            As for `torch.load`.

        Raises
        ------
        NotFoundError
            The archive does not hold it.
        DamagedError
            The pointer cannot be read.
        """
        import torch

        body = _read_pointer(Path(path))
        if body is None:
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            if Path(path).name == _HANDED_BACK:
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
        """Archive what is pending, and release the archive."""
        self.close()
        self._archive_left()


class _ThreadEnd:
    """Tears a plug-in down when the thread ends that holds this, unless that was done before.

    Lightning tears down the plug-in that it was given, and an ``AsyncCheckpointIO`` does not pass that on to
    the one in it. It joins its thread, though, and what is a thread's own is freed before that returns.
    """

    def __init__(self, plugin: InshrinkCheckpointIO, saver: Saver) -> None:
        self._plugin, self.saver = plugin, saver

    def __del__(self) -> None:
        try:
            if self._plugin._saver is self.saver:
                self._plugin.teardown()
        except Exception as error:  # where this is called nobody could catch it
            _logger.warning("the archive could not be closed: %s", error)


def restore_checkpoint(
    archive: str | os.PathLike[str],
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    weights_only: bool = True,
) -> str:
    """Write an archived step as a checkpoint of Lightning's own, which needs no plug-in: a file or a folder.

    Parameters
    ----------
    archive
        The archive.
    path
        Where to write it.
    step
        The step; by default the last one.
    weights_only
        False to unpickle what else the checkpoint held (paths, dataclasses): of archives that you trust.

    Returns
    -------
    str
        `path`, for ``load_from_checkpoint``.

    Raises
    ------
    NotFoundError, MissingFrameError
        The archive has no such step, or its file is missing.
    InputError
        The step was not saved by Lightning, or holds objects and `weights_only` is set.
    ExistsError
        The step is a folder, of a sharded training, and something else lies at `path`.
    StorageError
        It cannot be written.
    """
    import torch

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
    """Return what callbacks monitor, and its value now."""
    states = checkpoint.get("callbacks")
    rows = [row for row in states.values() if isinstance(row, dict)] if isinstance(states, dict) else []
    return {str(row["monitor"]): row.get("current_score") for row in rows if row.get("monitor")}


def _digest(state: Any) -> bytes:
    """Return what tells the tensors of a state from others."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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
    import torch

    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return int(crc32(flat.numpy()))


def _split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[tuple[str, ...], Any]]:
    """Return the plain values of a checkpoint, and the others by where they are."""
    plain: dict[str, Any] = {}
    objects: dict[tuple[str, ...], Any] = {}
    for key, value in checkpoint.items():
        if _is_plain(value):
            plain[key] = value
        elif type(value) is dict and all(type(inner) is str for inner in value):
            plain[key] = {inner: one for inner, one in value.items() if _is_plain(one)}
            objects |= {(key, inner): one for inner, one in value.items() if inner not in plain[key]}
        else:
            objects[(key,)] = value
    return plain, objects


def _is_plain(value: Any) -> bool:
    with contextlib.suppress(InputError):
        require_plain(value, "")
        return True
    return False


def _write_pointer(path: Path, archive: Path | str, record: Mapping[str, Any]) -> None:
    import torch

    first = f"step {record['step']}, save {record['save']} of {archive}"
    first += "; `restore_checkpoint` writes it: docs/integrations/lightning"
    buffer = io.BytesIO()
    torch.save(record, buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with new_file(temporary) as file:
        file.write(_SIGN + first.replace("\n", " ").encode() + b"\n" + buffer.getvalue())
    temporary.replace(path)


def _read_pointer(path: Path) -> bytes | None:
    """Return what a pointer holds; None where something else lies there, or nothing."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(len(_SIGN)) != _SIGN:
            return None
        if not file.readline(_MAX_FIRST_LINE).endswith(b"\n"):
            raise DamagedError("the pointer to a checkpoint is damaged", where=str(path))
        return file.read()


def _find(archive: Archive, step: int, save_id: str) -> FrameInfo:
    """Return the frame of a save; a pruned archive has given it another id."""
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
    """Return what Lightning saved at a step."""
    import torch

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
                "the checkpoint holds objects that are unpickled only when you say so",
                where=where,
                remedy="where you trust the archive, give weights_only=False",
            ) from error
    for place, value in objects.items():
        target = content if len(place) == 1 else content[place[0]]
        target[place[-1]] = value
    return dict(content)

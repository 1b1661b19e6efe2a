"""The spool: complete saves on disk that are not archived yet.

A spool is a folder beside the archive, or on this machine for an archive in a bucket. It has one folder for
each save, numbered in order::

    run.inshrink.spool/
      00000012/
        step_000400.pt     the file to archive, a plain torch file
        gradients.pt       read while encoding, not stored (if gradients were recorded)
        optimizer.pt       the same (if the archive omits the optimizer)
        save.json          step, name of the checkpoint and lineage
        parameters.json    names of the optimizer's parameters, if the training knows them
        archived           exists once the save is archived
      00000013/
        checkpoint-500/    a trainer's folder: hard links to its files, or copies
        save.json          with the boot id of the machine, until the files are synced
      00000009.quarantined/
        why.txt            beside the files of a save that could not be archived

A folder is renamed to its number when all its files are synced, so that a crash at any moment leaves only
complete saves under such names. A trainer's files are linked at once and synced later, during training; a
crash of the machine before that loses them. A save that cannot be archived is quarantined, and its files stay
until the user removes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import pickle
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import torch
from msgspec.structs import asdict, replace

from inshrink_core.archive.storage.registry import local_beside
from inshrink_core.checkpoint import Checkpoint, TensorSpec
from inshrink_core.errors import DamagedError, InputError, InshrinkError, StorageError, clipped, named
from inshrink_core.execution.files import make_folders, new_file, read_regular, sync_path, write_durably
from inshrink_core.formats.checkpoints import read_directory
from inshrink_core.formats.disk import Access, ByteCounter
from inshrink_core.formats.readers import reader_of
from inshrink_core.training.recorded import PARAMETERS_NAME, as_recorded

GRADIENTS_NAME: Final = "gradients.pt"
OPTIMIZER_NAME: Final = "optimizer.pt"
_RECORD_NAME: Final = "save.json"
_MARK_NAME: Final = "archived"
_QUARANTINED: Final = ".quarantined"
_REASON_NAME: Final = "why.txt"
_MAX_RECORD_NBYTES: Final = 1 << 12
_MAX_REASON_NBYTES: Final = 1 << 20
"""Limits of the files that are read."""

_NO_LINKS: Final = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of linking a file after which it is copied."""

_BOOT_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
_N_DIGITS: Final = 8
_TORCH_WRITER: Final = ("PytorchStreamWriter", "iostream", "inline_container")
"""Words in the RuntimeError of PyTorch's file writer."""
_ID_NBYTES: Final = 16

_logger = logging.getLogger(__name__)


def spool_folder(archive: Path | str) -> Path:
    """Return the spool of an archive: beside it, or on this machine for a URL."""
    return local_beside(archive, ".spool")


def load_save(path: Path, *, mmap: bool = False) -> Any:
    """Load the file of a save as a restore does.

    Parameters
    ----------
    path
        The file.
    mmap
        Read values when they are first used.

    Raises
    ------
    pickle.UnpicklingError
        It has an object that torch does not load without running code.
    """
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


_FrameId = Annotated[bytes, msgspec.Meta(min_length=_ID_NBYTES, max_length=_ID_NBYTES)]


class _Record(msgspec.Struct, kw_only=True, frozen=True):
    """Content of ``save.json``, with the boot id of the machine until the files are synced."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    name: Annotated[str, msgspec.Meta(pattern=r"^(?!\.{1,2}$)[^/\\\0]+$")]
    restored: _FrameId | None = None
    parent: _FrameId | None = None
    metrics: dict[str, float | None] = {}  # None for what is not finite, which JSON lacks
    apart: bool = False
    boot: str | None = None


class SpooledSave(_Record, kw_only=True, frozen=True):
    """A save in the spool.

    Parameters
    ----------
    folder
        Its folder.
    step
        The training step.
    name
        Name of the file or folder to archive.
    restored
        Id of the frame whose values training continued from; None without a restore.
    parent
        Id of the frame that this save follows; None for the archive's last.
    metrics
        Metrics of the step.
    apart
        Whether the optimizer state, in a separate file, is archived too.
    boot
        Boot id of the machine when files were linked that are not synced yet; else None.
    """

    folder: Path

    @property
    def path(self) -> Path:
        """The file or folder to archive."""
        return self.folder / self.name


class QuarantinedSave(NamedTuple):
    """A save that could not be archived; its files stay until the user removes them.

    Parameters
    ----------
    folder
        Its folder.
    step
        The training step; None if it cannot be read.
    why
        The error.
    """

    folder: Path
    step: int | None
    why: str


@dataclass(frozen=True, kw_only=True, eq=False)
class _Accompanied(Checkpoint):
    """A checkpoint with additional tensors that an encoder may read and that are not stored."""

    beside: Mapping[str, TensorSpec]

    def spec(self, key: str) -> TensorSpec:
        return self.beside[key] if key in self.beside else super().spec(key)

    def __contains__(self, key: object) -> bool:
        return key in self.beside or super().__contains__(key)


class Spool:
    """The spool of one archive.

    Parameters
    ----------
    folder
        Created with the first save; `close` removes it if it is empty.
    """

    def __init__(self, folder: Path) -> None:
        if folder.is_symlink():
            raise InputError(
                "the spool is a link, and the files in a spool are deleted",
                where=str(folder),
                remedy="remove the link",
            )
        self.folder = folder
        self._counter = ByteCounter()
        self._made = False
        self._reported: set[Path] = set()
        self._proven: frozenset[object] = frozenset()
        named = [*_numbered(folder), *_numbered(folder, _QUARANTINED)]
        self._next = 1 + max((int(path.stem) for path in named), default=0)

    def put(
        self, step: int, files: Mapping[str, Any], *, as_folder: bool = False, **about: Any
    ) -> SpooledSave:
        """Write a save durably.

        Parameters
        ----------
        step
            The training step.
        files
            Content by file name: bytes, or an object for `torch.save`.
        as_folder
            Whether all files are archived; by default only that of the key ``checkpoint``.
        **about
            As in `SpooledSave`.

        Raises
        ------
        InputError
            It could not be read back.
        StorageError
            The disk is full, or refuses.
        """
        if as_folder:
            name = f"step_{step:06}"
            placed = {f"{name}/{key}": content for key, content in files.items()}
        else:
            name = f"step_{step:06}.pt"
            placed = {name if key == "checkpoint" else key: content for key, content in files.items()}
        save = SpooledSave(folder=self._new_folder(), step=step, name=name, **about)

        def write(folder: Path) -> None:
            with _checksums():
                for path, content in placed.items():
                    target = folder / path
                    target.parent.mkdir(exist_ok=True)
                    if isinstance(content, bytes):
                        target.write_bytes(content)
                    else:
                        torch.save(content, target)
            self._prove(replace(save, folder=folder), placed)

        return self._add(save, write)

    def _prove(self, save: SpooledSave, files: Mapping[str, Any]) -> None:
        """Read back a save that has types of values that no save before it had.

        Raises
        ------
        InputError
            It cannot be read.
        """
        kinds = _kinds(files)
        if kinds <= self._proven:
            return
        try:
            self.read(save)
            if save.path.is_file():
                load_save(save.path, mmap=True)
        except (InshrinkError, pickle.UnpicklingError) as error:
            reason = error.what if isinstance(error, InshrinkError) else "torch.load would refuse it"
            known = ("builtins", "torch", "collections")
            names = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if isinstance(kind, type)}
            odd = sorted(name for name in names if name.partition(".")[0] not in known)
            raise InputError(
                f"what is saved could not be read back ({reason})",
                where=save.name,
                found=named(odd),
                remedy="nothing was saved: leave it out of the state, turn it into plain tensors, or name a"
                " class of tensors to torch.serialization.add_safe_globals",
            ) from error
        self._proven |= kinds

    def link(self, step: int, path: Path, *, parameters: bytes | None = None, **about: Any) -> SpooledSave:
        """Add a finished checkpoint, a folder or a file.

        Its files are linked, or copied if the file system has no links, so that they stay when the trainer
        deletes its checkpoint. `settle` syncs them.

        Parameters
        ----------
        step, **about
            As for `put`.
        path
            The checkpoint. Its files must not be written again in place.
        parameters
            The training's record of parameter names (`record_of`).

        Raises
        ------
        InputError
            It contains a link to a folder or to nothing, a pipe or a device, or a name that cannot be
            archived.
        StorageError
            It does not exist, or the disk is full.
        """
        save = SpooledSave(folder=self._new_folder(), step=step, name=path.name, boot=_boot(), **about)

        def fill(folder: Path) -> None:
            _link_all(path, folder / path.name)
            if parameters is not None and path.name != PARAMETERS_NAME:
                (folder / PARAMETERS_NAME).write_bytes(parameters)

        return self._add(save, fill)

    def _new_folder(self) -> Path:
        return self.folder / f"{self._next:0{_N_DIGITS}}"

    def _add(self, save: SpooledSave, fill: Callable[[Path], None]) -> SpooledSave:
        """Make a save from a function that fills a folder: completely, or not at all."""
        temporary = self.folder / f".{save.folder.name}.tmp"
        record = _Record(**{name: getattr(save, name) for name in _Record.__struct_fields__})
        is_synced = save.boot is None
        try:
            with _storage_errors(self.folder):
                if not self._made:
                    make_folders(self.folder)
                    self._made = True
                shutil.rmtree(temporary, ignore_errors=True)  # left by an earlier save that failed
                temporary.mkdir()
                fill(temporary)
                (temporary / _RECORD_NAME).write_bytes(msgspec.json.encode(record))
                if is_synced:
                    _sync_all(temporary)
                temporary.rename(save.folder)
                if is_synced:
                    sync_path(self.folder)
        except BaseException:
            self._take_back(save.folder, temporary)
            raise
        self._next += 1
        return save

    def settle(self, save: SpooledSave) -> None:
        """Sync the files of a linked save; does nothing for others."""
        if save.boot is None:
            return
        with _storage_errors(save.folder):
            _sync_all(save.folder)
            sync_path(self.folder)
            _amend(save.folder, boot=None)

    def _take_back(self, folder: Path, temporary: Path) -> None:
        """Remove a failed save, if the system allows it: an error means no save."""
        with contextlib.suppress(OSError):
            # Renamed first: an incomplete save must not have a number as its name.
            folder.rename(temporary)
            sync_path(self.folder)
        shutil.rmtree(temporary, ignore_errors=True)
        if folder.exists():
            self._next += 1

    def recover(self) -> list[SpooledSave]:
        """Return the complete saves of an earlier process, in order.

        Temporary folders are removed. Damaged saves are quarantined.
        """
        found: list[SpooledSave] = []
        if not self.folder.is_dir():
            return found
        with _storage_errors(self.folder):
            # A process that died may not have synced a rename: removed folders must not come back.
            sync_path(self.folder)
            for path in self.folder.glob(".*.tmp"):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if earlier := self.quarantined_saves:
            _logger.warning("%d saves were quarantined earlier: see %s", len(earlier), earlier[0].folder)
        damaged: dict[Path, DamagedError] = {}
        before: list[Path] = []
        for folder in _numbered(self.folder):
            if (folder / _MARK_NAME).exists():
                self.drop(folder)
                continue
            try:
                save = _complete_save(folder)
            except DamagedError as error:
                damaged[folder] = error
                before.append(folder)
                continue
            found.append(self._inherited(save, before))
            before.clear()
        for folder, why in damaged.items():
            self.quarantine(folder, why)
        return found

    def _inherited(self, save: SpooledSave, bad: list[Path]) -> SpooledSave:
        """Return a save with the parent of damaged saves before it."""
        parent = None
        for folder in bad:
            with contextlib.suppress(DamagedError):
                parent = _read_record(folder).parent or parent
        return save if parent is None else self.adopt(save, parent)

    def adopt(self, save: SpooledSave, parent: bytes) -> SpooledSave:
        """Set the parent of a save that has none."""
        with _storage_errors(save.folder):
            if save.parent is not None:
                sync_path(save.folder)  # a process that died may not have synced it
                return save
            _amend(save.folder, parent=parent)
        return replace(save, parent=parent)

    def quarantine(self, folder: Path, error: BaseException) -> QuarantinedSave:
        """Move a save into quarantine, with all its files, so that it does not block others.

        Parameters
        ----------
        folder
            The save.
        error
            Why it cannot be archived.

        Raises
        ------
        StorageError
            The file system refused; the save stays.
        """
        number = int(folder.name)
        while (target := self.folder / f"{number:0{_N_DIGITS}}{_QUARANTINED}").exists():
            number += 1
        step, why = _step_of(folder), str(error).replace(str(folder), str(target))
        with _storage_errors(folder):
            if folder.exists():
                # A note that cannot be written must not block other saves.
                with contextlib.suppress(OSError), new_file(folder / _REASON_NAME) as file:
                    file.write(f"{why}\n".encode(errors="surrogateescape"))
                folder.rename(target)
                sync_path(self.folder)
        _logger.warning(
            "the save of step %s cannot be archived and was quarantined, others go on: %s. Its files are in "
            "%s: take from them what you need and remove it; without '%s' in its name it is tried again",
            *("?" if step is None else step, why, target, _QUARANTINED),
        )
        return QuarantinedSave(target, step, why)

    @property
    def quarantined_saves(self) -> tuple[QuarantinedSave, ...]:
        """The saves that were quarantined, in order, including those of earlier processes."""
        found = []
        for folder in _numbered(self.folder, _QUARANTINED):
            why = "it was not noted"
            with contextlib.suppress(OSError, ValueError):
                why = read_regular(folder / _REASON_NAME, _MAX_REASON_NBYTES).decode().strip()
            found.append(QuarantinedSave(folder, _step_of(folder), why))
        return tuple(found)

    def is_complete(self, save: SpooledSave) -> bool:
        """Tell whether every byte of a save can be read."""
        try:
            _require_complete(save)
        except DamagedError:
            return False
        return True

    def read(self, save: SpooledSave) -> Checkpoint:
        """Return the checkpoint of a save; values are read on demand.

        Its files and specs are those to archive; gradients, and optimizer state in a separate file, can be
        read by key.
        """
        if save.path.is_dir():
            return self._read_folder(save)
        parsed = read_directory(save.folder, Access.of(save.folder, counter=self._counter))
        parsed = as_recorded(parsed, save.folder)
        full = parsed.checkpoint(save.step, self._counter)
        names = (save.name, OPTIMIZER_NAME) if save.apart else (save.name,)
        files = tuple(file for file in full.files if file.path in names)
        archived = {member.key for file in files for region in file.regions for member in region.members}
        stored = tuple(spec for spec in full.specs if spec.key in archived)
        aliases = {alias: key for alias, key in full.aliases.items() if key in archived}
        return _Accompanied(
            **{field.name: getattr(full, field.name) for field in dataclasses.fields(full)}
            | {"specs": stored, "files": files, "aliases": aliases},
            beside={spec.key: spec for spec in full.specs if spec.key not in archived},
        )

    def _read_folder(self, save: SpooledSave) -> Checkpoint:
        access = Access.of(save.path, counter=self._counter)
        reader = reader_of(save.path, access)
        if reader is None:
            raise InputError("not a checkpoint", where=save.name, remedy="save model and optimizer there")
        parsed = as_recorded(reader.open(save.path, access), save.folder)
        for row in parsed.skipped if save.folder not in self._reported else ():
            _logger.warning("step %s is archived without '%s': %s", save.step, row.path, row.reason)
        self._reported.add(save.folder)
        return parsed.checkpoint(save.step, self._counter)

    def mark(self, save: SpooledSave) -> None:
        """Mark a save as archived, durably. Its files stay until `drop`.

        If the mark were lost and that of a later save not, the next save would follow the wrong frame.
        """
        with _storage_errors(save.folder):
            (save.folder / _MARK_NAME).touch()
            sync_path(save.folder)

    def drop(self, folder: Path) -> None:
        """Remove a save."""
        with _storage_errors(folder):
            # Renamed first: an incomplete save must not have a number as its name.
            removed = folder.with_name(f".{folder.name}.tmp")
            folder.rename(removed)
            sync_path(self.folder)
            shutil.rmtree(removed)

    def close(self) -> None:
        """Remove the spool's folder if it is empty."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _numbered(folder: Path, suffix: str = "") -> list[Path]:
    """Return the folders of saves in a folder, in order."""
    found = folder.glob("[0-9]" * _N_DIGITS + suffix)
    return sorted(path for path in found if not path.is_symlink())


def _kinds(content: Any) -> frozenset[object]:
    """Return the types of values in containers, which decide whether a file can be read."""
    found: set[object] = set()
    pending, seen = [content], set()
    while pending:
        value = pending.pop()
        found.add(type(value))
        if isinstance(value, torch.Tensor):
            found.add((value.dtype, value.layout))
        elif isinstance(value, (Mapping, list, tuple, set)) and id(value) not in seen:
            seen.add(id(value))
            pending += [*value, *value.values()] if isinstance(value, Mapping) else value
    return frozenset(found)


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """Make PyTorch write checksums, whatever the training has set: they prove that a save is complete."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextlib.contextmanager
def _storage_errors(where: Path) -> Iterator[None]:
    """Raise `StorageError` for errors of the file system; PyTorch's writer raises RuntimeError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the spool cannot be used: {error.strerror}", where=str(where), remedy="free some space"
        ) from error
    except RuntimeError as error:
        if not any(name in str(error) for name in _TORCH_WRITER):
            raise
        raise StorageError(
            "the checkpoint cannot be written to the spool", where=str(where), remedy="free some space"
        ) from error


def _boot() -> str:
    """Return the boot id of the machine; empty if unknown."""
    try:
        return _BOOT_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _sync_all(folder: Path) -> None:
    """Sync every file and folder below a folder, and then the folder."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync_path(Path(root, name))
        sync_path(Path(root))


def _link_all(source: Path, target: Path) -> None:
    """Link the files of a checkpoint, or copy them."""
    if not source.is_dir():
        _link(source, target)
        return
    for root, folders, files in os.walk(source):
        place = target / Path(root).relative_to(source)
        place.mkdir()
        for folder in folders:
            if Path(root, folder).is_symlink():
                raise InputError("a link to a folder cannot be archived", where=str(Path(root, folder)))
        for name in files:
            _link(Path(root, name), place / name)


def _link(source: Path, target: Path) -> None:
    """Link a file, or the target of a link: a relative link would be broken in the spool."""
    real = Path(os.path.realpath(source))
    if source.is_symlink() and not real.exists():
        raise InputError(f"a link leads to nothing, '{clipped(str(real))}'", where=str(source))
    if not stat.S_ISREG(real.stat().st_mode):
        raise InputError("neither a file nor a folder, which cannot be archived", where=str(source))
    try:
        os.link(real, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(real, target)


def _damaged(folder: Path, what: str) -> DamagedError:
    return DamagedError(what, where=str(folder))


def _read_record(folder: Path) -> _Record:
    try:
        return msgspec.json.decode(read_regular(folder / _RECORD_NAME, _MAX_RECORD_NBYTES), type=_Record)
    except (OSError, msgspec.DecodeError, InputError, RecursionError, UnicodeError) as error:
        raise _damaged(folder, "the record of a spooled save cannot be read") from error


def _amend(folder: Path, **changes: Any) -> None:
    record = replace(_read_record(folder), **changes)
    write_durably(folder / _RECORD_NAME, msgspec.json.encode(record))


def _step_of(folder: Path) -> int | None:
    """Return the step of a save; None if it cannot be read."""
    with contextlib.suppress(DamagedError):
        return _read_record(folder).step
    return None


def _complete_save(folder: Path) -> SpooledSave:
    """Return a save after reading every byte.

    Raises
    ------
    DamagedError
        It is incomplete, or was not synced when the machine ended.
    """
    record = _read_record(folder)
    if record.boot is not None and record.boot != (_boot() or None):
        raise _damaged(folder, "the save was not on the disk yet when the machine ended")
    save = SpooledSave(folder=folder, **asdict(record))
    _require_complete(save)
    return save


def _require_complete(save: SpooledSave) -> None:
    """Check every byte of a save."""
    if save.path.is_dir():
        files = sorted(path for path in save.path.rglob("*") if path.is_file())
    else:
        beside = (save.folder / name for name in (GRADIENTS_NAME, OPTIMIZER_NAME))
        files = [save.path, *(path for path in beside if path.exists())]
    for path in files:
        name = path.name
        if not path.is_file():
            raise _damaged(save.folder, f"the spooled file '{name}' is missing, or no regular file")
        if path != save.path and not zipfile.is_zipfile(path):
            continue
        try:
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()
        except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise _damaged(save.folder, f"the spooled file '{name}' cannot be read") from error
        if broken is not None:
            raise _damaged(save.folder, f"the spooled file '{name}' was changed or cut off")
    try:
        Spool(save.folder.parent).read(save)
    except InshrinkError as error:
        raise _damaged(save.folder, f"the spooled save is no checkpoint: {error.what}") from error

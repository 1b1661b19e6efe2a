"""Checkpoints on their way into an archive: whole on disk before training goes on.

A spool is a folder beside the archive with one folder for each save, numbered in order::

    run.inshrink.spool/
      00000012/
        step_000400.pt     what the archive will hold, a plain torch file
        gradients.pt       read while encoding, not stored (if gradients were recorded)
        optimizer.pt       the same (if the archive leaves the optimizer out)
        save.json          step, name of the checkpoint and lineage
        archived           there once the archive holds it
      00000013/
        checkpoint-500/    a folder that a trainer wrote: hard links to its files, or copies
        save.json
        synced             there once the files are on the disk

A folder gets its name when all its files are on the disk, so that the end of the process or of the machine
at any moment leaves whole saves and nothing else under such a name. What a trainer wrote is linked at once
and synced later, beside the training: until then the end of the machine loses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from inshrink_core.chain import Budget
from inshrink_core.checkpoint import Checkpoint, TensorSpec
from inshrink_core.errors import DamagedError, InputError, InshrinkError, StorageError
from inshrink_core.execution import make_folders, sync_path
from inshrink_core.formats.checkpoints import read_directory
from inshrink_core.formats.disk import Access, ByteCounter, check_names
from inshrink_core.formats.readers import Recall, reader_of

__all__ = ["GRADIENTS_NAME", "OPTIMIZER_NAME", "Spool", "SpooledSave", "spool_folder"]

GRADIENTS_NAME: Final = "gradients.pt"
OPTIMIZER_NAME: Final = "optimizer.pt"
_RECORD_NAME: Final = "save.json"
_MARK_NAME: Final = "archived"
_SYNCED_NAME: Final = "synced"
_MAX_RECORD_NBYTES: Final = 1 << 12
"""A record is a few short values."""

_NO_LINKS: Final = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Why a file cannot be linked, and can be copied."""

_BOOT_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
_N_DIGITS: Final = 8
_TORCH_WRITER: Final = ("PytorchStreamWriter", "iostream", "inline_container")
"""Signs of PyTorch's writer of files in the text of a RuntimeError."""
_ID_NBYTES: Final = 16

_logger = logging.getLogger(__name__)


def spool_folder(archive: Path) -> Path:
    """Return where the saves of an archive are spooled."""
    return archive.with_name(f"{archive.name}.spool")


class SpooledSave(NamedTuple):
    """One save that lies in the spool.

    Parameters
    ----------
    folder
        Where its files lie.
    step
        The training step.
    name
        Name in the folder of what the archive will hold, a file or a folder.
    restored
        Id of the frame whose values training continued from; None where there was no restore.
    parent
        Id of the frame that this save continues from; None for the archive's last.
    budget
        What its frame may take; None to hold everything anew.
    """

    folder: Path
    step: int
    name: str
    restored: bytes | None
    parent: bytes | None
    budget: Budget | None = None

    @property
    def path(self) -> Path:
        """What the archive will hold."""
        return self.folder / self.name


@dataclass(frozen=True, kw_only=True, eq=False)
class _Accompanied(Checkpoint):
    """A checkpoint with tensors beside it that an encoder may look at and that are not stored."""

    beside: Mapping[str, TensorSpec]

    def spec(self, key: str) -> TensorSpec:
        return self.beside[key] if key in self.beside else super().spec(key)

    def __contains__(self, key: object) -> bool:
        return key in self.beside or super().__contains__(key)


class Spool:
    """The saves on their way into one archive.

    Parameters
    ----------
    folder
        Made with the first save, removed when it is empty at `close`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._counter = ByteCounter()
        self._made = False
        self._next = 1 + max((int(path.name) for path in self._numbered()), default=0)

    def _numbered(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        named = (path for path in self.folder.iterdir() if path.name.isascii() and path.name.isdigit())
        return sorted(path for path in named if len(path.name) == _N_DIGITS)

    def put(
        self,
        step: int,
        files: Mapping[str, Any],
        *,
        restored: bytes | None = None,
        parent: bytes | None = None,
        budget: Budget | None = None,
    ) -> SpooledSave:
        """Write a save: when this returns, it survives the end of the process and of the machine.

        Parameters
        ----------
        step
            The training step.
        files
            Content by file name; the key ``checkpoint`` stands for the file the archive will hold.
        restored, parent, budget
            As in `SpooledSave`.

        Raises
        ------
        StorageError
            The disk is full, or refuses.
        """
        name = f"step_{step:06}.pt"
        placed = {name if key == "checkpoint" else key: content for key, content in files.items()}
        return self._put(SpooledSave(self._new_folder(), step, name, restored, parent, budget), placed)

    def put_folder(
        self,
        step: int,
        files: Mapping[str, Any],
        *,
        restored: bytes | None = None,
        parent: bytes | None = None,
    ) -> SpooledSave:
        """Write a save of several torch files, all of which the archive will hold.

        Parameters
        ----------
        step, restored, parent
            As for `put`.
        files
            Content by file name; bytes are written as they are.

        Raises
        ------
        StorageError
            The disk is full, or refuses.
        """
        name = f"step_{step:06}"
        placed = {f"{name}/{key}": content for key, content in files.items()}
        return self._put(SpooledSave(self._new_folder(), step, name, restored, parent), placed)

    def _put(self, save: SpooledSave, files: Mapping[str, Any]) -> SpooledSave:
        """Write what stands under each path as a torch file, and bytes as they are."""
        import torch

        def write(folder: Path) -> None:
            with _checksums():
                for path, content in files.items():
                    target = folder / path
                    if target.parent != folder:
                        target.parent.mkdir(exist_ok=True)
                    if isinstance(content, bytes):
                        target.write_bytes(content)
                    else:
                        torch.save(content, target)

        return self._add(save, write, sync=True)

    def link(
        self, step: int, path: Path, *, restored: bytes | None = None, parent: bytes | None = None
    ) -> SpooledSave:
        """Take a finished checkpoint, a folder or a file, as it lies on disk.

        Its files are linked, or copied where the file system has no links, so that they stay when the
        trainer deletes its own. They are synced by `settle`.

        Parameters
        ----------
        step, restored, parent
            As for `put`.
        path
            The checkpoint. Its files must not be written again in place.

        Raises
        ------
        InputError
            There is a link to a folder in it, or a file with a name that cannot be archived.
        StorageError
            It is not there, or the disk is full.
        """
        save = SpooledSave(self._new_folder(), step, path.name, restored, parent)
        return self._add(save, lambda folder: _link_all(path, folder / path.name), sync=False)

    def _new_folder(self) -> Path:
        return self.folder / f"{self._next:0{_N_DIGITS}}"

    def _add(self, save: SpooledSave, fill: Callable[[Path], None], *, sync: bool) -> SpooledSave:
        """Make a save of what a function writes into a folder: whole, or not at all."""
        temporary = self.folder / f".{save.folder.name}.tmp"
        record: dict[str, Any] = {"step": save.step, "name": save.name}
        record["restored"] = save.restored.hex() if save.restored else None
        record["parent"] = save.parent.hex() if save.parent else None
        if save.budget is not None:
            record["budget"] = [save.budget.nbytes, save.budget.max_age]
        if not sync:
            record["boot"] = _boot()
        try:
            with _storage_errors(self.folder):
                if not self._made:
                    make_folders(self.folder)
                    self._made = True
                shutil.rmtree(temporary, ignore_errors=True)  # what a put left that was refused
                temporary.mkdir()
                fill(temporary)
                (temporary / _RECORD_NAME).write_text(json.dumps(record), encoding="ascii")
                if sync:
                    _sync_all(temporary)
                temporary.rename(save.folder)
                if sync:
                    sync_path(self.folder)
        except BaseException:
            self._take_back(save.folder, temporary)
            raise
        self._next += 1
        return save

    def settle(self, save: SpooledSave) -> None:
        """Have the disk hold a save that was linked; harmless for others."""
        with _storage_errors(save.folder):
            if _is_settled(save.folder):
                return
            _sync_all(save.folder)
            sync_path(self.folder)
            (save.folder / _SYNCED_NAME).touch()
            sync_path(save.folder)

    def _take_back(self, folder: Path, temporary: Path) -> None:
        """Leave nothing of a save that was refused, where the system lets us: an error means no save."""
        with contextlib.suppress(OSError):
            # Never deleted under a name that means a whole one.
            folder.rename(temporary)
            sync_path(self.folder)
        shutil.rmtree(temporary, ignore_errors=True)
        if folder.exists():
            self._next += 1

    def recover(self) -> list[SpooledSave]:
        """Return the whole saves that an earlier process left, in order; removes what is not one.

        Raises
        ------
        DamagedError
            A save was whole once, and is not any more.
        """
        found: list[SpooledSave] = []
        if not self.folder.is_dir():
            return found
        with _storage_errors(self.folder):
            # A process that died may have renamed and not synced: what goes must not come back half.
            sync_path(self.folder)
            for path in self.folder.iterdir():
                if path.name.startswith(".") and path.name.endswith(".tmp"):
                    shutil.rmtree(path)
        for folder in self._numbered():
            if (folder / _MARK_NAME).exists():
                self.drop(folder)
                continue
            if not _is_settled(folder, _boot()):
                _logger.warning("a save was not on the disk yet when the machine ended: %s", folder)
                self.drop(folder)
                continue
            save = _read_record(folder)
            _require_whole(save)
            found.append(save)
        return found

    def read(self, save: SpooledSave) -> Checkpoint:
        """Return the checkpoint of a save; values are read when asked for.

        Its files and specs are those that the archive shall hold; gradients, and the optimizer where
        it lies apart, can be asked for by key.
        """
        if save.path.is_dir():
            return self._read_folder(save)
        parsed = read_directory(save.folder, Access.of(save.folder, counter=self._counter))
        whole = parsed.checkpoint(save.step, self._counter)
        files = tuple(file for file in whole.files if file.path == save.name)
        kept = {member.key for file in files for region in file.regions for member in region.members}
        stored = tuple(spec for spec in whole.specs if spec.key in kept)
        aliases = {alias: key for alias, key in whole.aliases.items() if key in kept}
        return _Accompanied(
            **{field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
            | {"specs": stored, "files": files, "aliases": aliases},
            beside={spec.key: spec for spec in whole.specs if spec.key not in kept},
        )

    def _read_folder(self, save: SpooledSave) -> Checkpoint:
        access = Access.of(save.path, counter=self._counter)
        reader = reader_of(save.path, access)
        if reader is None:
            raise InputError("not a checkpoint", where=save.name, remedy="save model and optimizer there")
        return reader.open(save.path, access, Recall()).checkpoint(save.step, self._counter)

    def mark(self, save: SpooledSave) -> None:
        """Note that the archive holds a save, durably. Its files stay until `drop`.

        Were the mark lost and that of a later save not, what follows would continue from the wrong frame.
        """
        with _storage_errors(save.folder):
            (save.folder / _MARK_NAME).touch()
            sync_path(save.folder)

    def drop(self, folder: Path) -> None:
        """Remove a save."""
        with _storage_errors(folder):
            # Renamed first: half a folder must not stand under a name that means a whole one.
            doomed = folder.with_name(f".{folder.name}.tmp")
            folder.rename(doomed)
            sync_path(self.folder)
            shutil.rmtree(doomed)

    def close(self) -> None:
        """Remove the spool's folder where nothing lies in it."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """Have PyTorch write checksums, whatever the training told it: a save is known by them to be whole."""
    import torch

    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextlib.contextmanager
def _storage_errors(where: Path) -> Iterator[None]:
    """Say what the file system refused; PyTorch's writer reports it as a RuntimeError."""
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
    """Return what tells this run of the machine from others; nothing where it cannot be told."""
    try:
        return _BOOT_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _is_settled(folder: Path, boot: str | None = None) -> bool:
    """Tell whether the files of a save are whole: on the disk, or linked since the machine began to run."""
    if (folder / _SYNCED_NAME).exists():
        return True
    linked = _record_of(folder).get("boot")
    return linked is None or (bool(boot) and linked == boot)


def _sync_all(folder: Path) -> None:
    """Sync every file and folder below a folder, and itself last."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync_path(Path(root, name))
        sync_path(Path(root))


def _link_all(source: Path, target: Path) -> None:
    """Link the files of a checkpoint; copy those that cannot be linked."""
    if not source.is_dir():
        _link(source, target)
        return
    names = []
    for root, folders, files in os.walk(source):
        place = target / Path(root).relative_to(source)
        place.mkdir()
        for folder in folders:
            if Path(root, folder).is_symlink():
                raise InputError("a link to a folder cannot be archived", where=str(Path(root, folder)))
        for name in files:
            names.append(Path(root, name).relative_to(source).as_posix())
            _link(Path(root, name), place / name)
    check_names(names, str(source))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)


def _damaged(folder: Path, what: str) -> DamagedError:
    return DamagedError(
        what, where=str(folder), remedy="this save is lost: remove the folder, and training can go on"
    )


def _record_of(folder: Path) -> dict[str, Any]:
    """Read what a save says of itself."""
    try:
        with (folder / _RECORD_NAME).open("rb") as file:
            record = json.loads(file.read(_MAX_RECORD_NBYTES))
        if isinstance(record, dict):
            return record
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(folder, "the record of a spooled save cannot be read") from error
    raise _damaged(folder, "the record of a spooled save cannot be read")


def _read_record(folder: Path) -> SpooledSave:
    """Read step and lineage of a save, trusting nothing."""
    record = _record_of(folder)
    try:
        ids = [None if record[key] is None else bytes.fromhex(record[key]) for key in ("restored", "parent")]
        step, name = record["step"], record["name"]
        budget = None if record.get("budget") is None else Budget(*record["budget"])
    except (ValueError, TypeError, KeyError, InputError) as error:
        raise _damaged(folder, "the record of a spooled save cannot be read") from error
    valid = type(step) is int and 0 <= step < 1 << 62 and type(name) is str
    valid = valid and name not in ("", ".", "..") and not set("/\\\0") & set(name)
    if not valid or any(one is not None and len(one) != _ID_NBYTES for one in ids):
        raise _damaged(folder, "the record of a spooled save contradicts itself")
    return SpooledSave(folder, step, name, ids[0], ids[1], budget)


def _require_whole(save: SpooledSave) -> None:
    """Check every byte of a save that the end of a machine may have cut off."""
    if save.path.is_dir():
        held = sorted(path for path in save.path.rglob("*") if path.is_file())
    else:
        beside = (save.folder / name for name in (GRADIENTS_NAME, OPTIMIZER_NAME))
        held = [save.path, *(path for path in beside if path.exists())]
    for path in held:
        name = path.name
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

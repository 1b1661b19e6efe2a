"""Checkpoints on their way into an archive: whole on disk before training goes on.

A spool is a folder beside the archive with one folder for each save, numbered in order::

    run.inshrink.spool/
      00000012/
        step_000400.pt     what the archive will hold, a plain torch file
        gradients.pt       read while encoding, not stored (if gradients were recorded)
        optimizer.pt       the same (if the archive leaves the optimizer out)
        save.json          step and lineage
        archived           there once the archive holds it

A folder gets its name when all its files are on the disk, so that the end of the process or of the machine
at any moment leaves whole saves and nothing else under such a name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from inshrink_core.checkpoint import Checkpoint, TensorSpec
from inshrink_core.errors import DamagedError, InshrinkError, StorageError
from inshrink_core.execution import make_folders, sync_path
from inshrink_core.formats.checkpoints import read_directory
from inshrink_core.formats.disk import Access, ByteCounter

__all__ = ["GRADIENTS_NAME", "OPTIMIZER_NAME", "Spool", "SpooledSave", "spool_folder"]

GRADIENTS_NAME: Final = "gradients.pt"
OPTIMIZER_NAME: Final = "optimizer.pt"
_RECORD_NAME: Final = "save.json"
_MARK_NAME: Final = "archived"
_MAX_RECORD_NBYTES: Final = 1 << 12
"""A record is four short values."""
_N_DIGITS: Final = 8
_TORCH_WRITER: Final = ("PytorchStreamWriter", "iostream", "inline_container")
"""Signs of PyTorch's writer of files in the text of a RuntimeError."""
_ID_NBYTES: Final = 16


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
    restored
        Id of the frame that training was last restored from; None where there was no restore.
    first
        Whether this is the first save since that restore: its frame's parent is `restored`.
    """

    folder: Path
    step: int
    restored: bytes | None
    first: bool

    @property
    def checkpoint_name(self) -> str:
        """Name of the file that the archive will hold."""
        return f"step_{self.step:06}.pt"


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

    def put(self, step: int, files: Mapping[str, Any], *, restored: bytes | None, first: bool) -> SpooledSave:
        """Write a save: when this returns, it survives the end of the process and of the machine.

        Parameters
        ----------
        step
            The training step.
        files
            Content by file name; the key ``checkpoint`` stands for the file the archive will hold.
        restored, first
            As in `SpooledSave`.

        Raises
        ------
        StorageError
            The disk is full, or refuses.
        """
        import torch

        save = SpooledSave(self.folder / f"{self._next:0{_N_DIGITS}}", step, restored, first)
        temporary = self.folder / f".{save.folder.name}.tmp"
        record = {"step": step, "restored": restored.hex() if restored else None, "first": first}
        try:
            with _storage_errors(self.folder), _checksums():
                if not self._made:
                    make_folders(self.folder)
                    self._made = True
                shutil.rmtree(temporary, ignore_errors=True)  # what a put left that was refused
                temporary.mkdir()
                for name, content in files.items():
                    path = temporary / (save.checkpoint_name if name == "checkpoint" else name)
                    torch.save(content, path)
                (temporary / _RECORD_NAME).write_text(json.dumps(record), encoding="ascii")
                for path in temporary.iterdir():
                    sync_path(path)
                sync_path(temporary)
                temporary.rename(save.folder)
                sync_path(self.folder)
        except BaseException:
            self._take_back(save.folder, temporary)
            raise
        self._next += 1
        return save

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
            save = _read_record(folder)
            _require_whole(save)
            found.append(save)
        return found

    def read(self, save: SpooledSave) -> Checkpoint:
        """Return the checkpoint of a save; values are read when asked for.

        Its files and specs are those that the archive shall hold; gradients, and the optimizer where
        it lies apart, can be asked for by key.
        """
        parsed = read_directory(save.folder, Access.of(save.folder, counter=self._counter))
        whole = parsed.checkpoint(save.step, self._counter)
        files = tuple(file for file in whole.files if file.path == save.checkpoint_name)
        kept = {member.key for file in files for region in file.regions for member in region.members}
        stored = tuple(spec for spec in whole.specs if spec.key in kept)
        aliases = {alias: key for alias, key in whole.aliases.items() if key in kept}
        return _Accompanied(
            **{field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
            | {"specs": stored, "files": files, "aliases": aliases},
            beside={spec.key: spec for spec in whole.specs if spec.key not in kept},
        )

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


def _damaged(folder: Path, what: str) -> DamagedError:
    return DamagedError(
        what, where=str(folder), remedy="this save is lost: remove the folder, and training can go on"
    )


def _read_record(folder: Path) -> SpooledSave:
    """Read step and lineage of a save, trusting nothing."""
    try:
        with (folder / _RECORD_NAME).open("rb") as file:
            record = json.loads(file.read(_MAX_RECORD_NBYTES))
        restored = None if record["restored"] is None else bytes.fromhex(record["restored"])
        step, first = record["step"], record["first"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(folder, "the record of a spooled save cannot be read") from error
    valid = type(step) is int and 0 <= step < 1 << 62 and type(first) is bool
    if not valid or (restored is not None and len(restored) != _ID_NBYTES) or (first and restored is None):
        raise _damaged(folder, "the record of a spooled save contradicts itself")
    return SpooledSave(folder, step, restored, first)


def _require_whole(save: SpooledSave) -> None:
    """Check every byte of a save that the end of a machine may have cut off."""
    for name in (save.checkpoint_name, GRADIENTS_NAME, OPTIMIZER_NAME):
        path = save.folder / name
        if name != save.checkpoint_name and not path.exists():
            continue
        try:
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()
        except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise _damaged(save.folder, f"the spooled file '{name}' cannot be read") from error
        if broken is not None:
            raise _damaged(save.folder, f"the spooled file '{name}' was changed or cut off")
    try:
        read_directory(save.folder, Access.of(save.folder))
    except InshrinkError as error:
        raise _damaged(save.folder, f"the spooled save is no checkpoint: {error.what}") from error

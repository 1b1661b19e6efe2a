"""Roots: the folders and addresses that the explorer may read, and the checks of untrusted paths."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PosixPath
from typing import NamedTuple

from inshrink_core.formats.disk import natural_key
from inshrink_core.text import url_of

MAX_ENTRIES = 2000
"""Largest number of entries of a folder that the page lists."""

_MAX_SCANNED = 20_000
"""Largest number of entries of a folder that are read, so that a folder of millions does not block a page."""

_PEEKED = 64
"""Number of entries of a subfolder that are checked to guess whether it is a run."""

_MAX_LOOKED_AT = 200_000
"""Largest number of entries below a folder that are checked for links before it is opened."""

_LONGEST = 4096
"""Longest path in characters; no current file system accepts more."""

_SIDE_FILES = ("inshrink.toml", "metrics.csv", "metrics.jsonl", "trainer_state.json")
"""Files that are read together with a checkpoint file in the same folder."""

CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


class Address(PosixPath):
    """An object or folder in a bucket, as a path whose text is its address. It exists in no file system."""

    __slots__ = ()

    def __str__(self) -> str:
        text = super().__str__()
        return url_of(text) or text


def path_of(text: str) -> Path:
    """Return text as a path, or as an address."""
    url = url_of(text)
    return Path(text) if url is None else Address(url)


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with links resolved; an address is returned unchanged."""
    found = path_of(os.fspath(path))
    return found if isinstance(found, Address) else Path(os.path.realpath(found))


class OutsideRootsError(ValueError):
    """A path that the explorer may not read, or that is invalid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one start of the explorer.

    Parameters
    ----------
    roots
        Resolved folders. Nothing outside of them is listed or opened.
    opened
        Run or archive to open first, as given; None to start with the Open page.
    addresses
        Addresses in buckets that may be opened, with everything below them.
    """

    roots: tuple[Path, ...]
    opened: str | None = None
    addresses: tuple[Address, ...] = ()

    def resolve(self, text: str) -> Path:
        """Return the real path of untrusted text.

        Parameters
        ----------
        text
            A path or an address from a text field, a link or the list of recent runs. Relative paths start at
            the first root.

        Raises
        ------
        OutsideRootsError
            The text is empty, contains a NUL or names a network share; or the path, with links resolved, is
            outside of every root; or the address is below no allowed one.
        """
        if not text.strip() or "\0" in text or text.startswith(("\\\\", "//")) or len(text) > _LONGEST:
            raise OutsideRootsError("this is not a path on this computer")
        if isinstance(address := path_of(text.strip()), Address):
            if not self.allows(address):
                raise OutsideRootsError("the explorer may not see this address")
            return address
        try:
            real = Path(os.path.realpath(self.roots[0] / Path(text.strip()).expanduser()))
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                real.lstat()  # Raises if the name is too long.
        except (OSError, ValueError, RuntimeError) as error:
            raise OutsideRootsError("this is not a path on this computer") from error
        if not self.allows(real):
            raise OutsideRootsError("this path is outside of the folders that the explorer may see")
        return real

    def allows(self, real: Path) -> bool:
        """Return whether a resolved path is inside a root, or an address below an allowed one."""
        if isinstance(real, Address):
            return ".." not in real.parts and any(real.is_relative_to(address) for address in self.addresses)
        return self.may_write(real)

    def may_write(self, real: Path) -> bool:
        """Return whether files may be written at a resolved path; never at an address."""
        return any(real.is_relative_to(root) for root in self.roots)


class _Current:
    """The settings of this process; one explorer is one process."""

    value: Settings | None = None


def configure(roots: Sequence[str | os.PathLike[str]], opened: str | None = None) -> Settings:
    """Set the roots of this process, resolved and without nested ones. Roots may be addresses."""
    resolved = [real_path(root) for root in roots]
    outermost = [
        root
        for i, root in enumerate(resolved)
        if root not in resolved[:i]
        and not any(root != other and root.is_relative_to(other) for other in resolved)
    ]
    addresses = tuple(root for root in outermost if isinstance(root, Address))
    folders = tuple(root for root in outermost if not isinstance(root, Address))
    _Current.value = Settings(roots=folders, opened=opened, addresses=addresses)
    return _Current.value


def settings() -> Settings:
    """Return the settings of this process; by default the current folder is the only root."""
    return _Current.value or configure([Path.cwd()])


def links_below(path: Path) -> Iterator[Path]:
    """Yield the links below a run or an archive; for a single file, those among its side files.

    Raises
    ------
    OSError
        There are too many entries, or the file system fails.
    """
    if not path.is_dir():
        yield from (side for name in _SIDE_FILES if (side := path.with_name(name)).is_symlink())
        return
    folders, n_seen = [path], 0
    while folders:
        with contextlib.suppress(PermissionError), os.scandir(folders.pop()) as entries:
            for entry in entries:  # The engine cannot read an unreadable folder either.
                n_seen += 1
                if n_seen > _MAX_LOOKED_AT:
                    raise OSError(errno.EFBIG, f"more than {_MAX_LOOKED_AT} files", str(path))
                if entry.is_symlink():
                    yield Path(entry.path)
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))


class Entry(NamedTuple):
    """One entry of a listing; `kind` is ``folder``, ``run``, ``archive`` or ``file``."""

    path: Path
    kind: str
    nbytes: int | None


class Listing(NamedTuple):
    """The listed entries of a folder, and the number of omitted ones."""

    entries: tuple[Entry, ...]
    n_hidden: int


def list_folder(folder: Path) -> Listing:
    """List the folders, runs, archives and checkpoint files of a folder from names and sizes only.

    Parameters
    ----------
    folder
        A resolved folder inside the roots. Entries that lead outside of them are omitted.

    Raises
    ------
    OSError
        The folder cannot be read.
    """
    found = [known for entry in scan(folder) if (known := _classify(entry)) is not None]
    found.sort(key=lambda entry: (entry.kind == "file", natural_key(entry.path.name.casefold())))
    return Listing(tuple(found[:MAX_ENTRIES]), max(0, len(found) - MAX_ENTRIES))


def scan(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder, without those whose name begins with a dot.

    Raises
    ------
    OSError
        The folder cannot be read.
    """
    with os.scandir(folder) as entries:
        yield from (entry for entry in islice(entries, _MAX_SCANNED) if not entry.name.startswith("."))


def _classify(entry: os.DirEntry[str]) -> Entry | None:
    """Classify an entry by its name and its first children; None if it is not listed."""
    try:
        path = Path(entry.path)
        if entry.is_symlink() and not settings().allows(Path(os.path.realpath(path))):
            return None
        if entry.name.endswith(".inshrink"):
            return Entry(path, "archive", None)
        if entry.is_dir():
            return Entry(path, "run" if _looks_like_run(path) else "folder", None)
        if entry.name.endswith(CHECKPOINT_SUFFIXES):
            return Entry(path, "file", entry.stat().st_size)
    except OSError:
        return None
    return None


def _looks_like_run(folder: Path) -> bool:
    """Guess from a few names; the answer only chooses an icon and offers a button."""
    try:
        with os.scandir(folder) as children:
            names = [child.name for child in islice(children, _PEEKED)]
    except OSError:
        return False
    return any(name.endswith(CHECKPOINT_SUFFIXES) or name.startswith("checkpoint-") for name in names)

"""Names from an archive are untrusted: none may lead outside the directory that is written to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from inshrink_core.errors import DamagedError, RefusedLinkError, StorageError, UnsafePathError, clipped
from inshrink_core.formats.disk import ByteCounter, FileStamp, ReadableFile, stamp_of

__all__ = [
    "Access",
    "Skipped",
    "check_names",
    "check_target",
    "is_blob",
    "is_dir",
    "is_file",
    "lies_in",
    "natural_key",
]

_DRIVE: Final = re.compile(r"^[A-Za-z]:")
_MAX_COMPONENT_BYTES: Final = 255
"""NAME_MAX of every common file system."""


def _reason(name: str) -> str | None:
    """Return why a relative POSIX path is not safe to write, or None."""
    if not name:
        return "it is empty"
    if "\0" in name or any(ord(sign) < 32 for sign in name):
        return "it holds a control sign"
    if "\\" in name:
        return "it holds a backslash"
    if name.startswith("/"):
        return "it is absolute"
    if _DRIVE.match(name):
        return "it names a drive"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"it has the component '{part}'"
        if len(part.encode(errors="surrogateescape")) > _MAX_COMPONENT_BYTES:
            return "a component is too long"
    return None


def check_names(names: Iterable[str], where: str = "") -> None:
    """Refuse relative paths that could be written outside their directory, or over one another.

    Parameters
    ----------
    names
        POSIX paths relative to the target.
    where
        The archive, for messages.

    Raises
    ------
    UnsafePathError
        One is absolute, holds ``..``, a drive letter, a backslash or a control sign, has an empty
        component, or stands twice (upper and lower case taken as one, as some file systems do).

    Examples
    --------
    >>> check_names(["model.safetensors", "side/config.json"])
    """
    seen: dict[str, str] = {}
    names = list(names)
    for name in names:
        reason = _reason(name)
        if reason is None and name.casefold() in seen:
            reason = f"it would overwrite '{seen[name.casefold()]}'"
        if reason is not None:
            raise UnsafePathError(f"the file name {name[:200]!r} is not safe to write: {reason}", where=where)
        seen[name.casefold()] = name
    for name in names:
        parts = name.casefold().split("/")
        for n in range(1, len(parts)):
            if "/".join(parts[:n]) in seen:
                raise UnsafePathError(f"the file name {name[:200]!r} lies inside another file", where=where)


def check_target(directory: Path, name: str) -> Path:
    """Return where a checked name is written, refusing links on the way.

    Raises
    ------
    UnsafePathError
        A component below `directory` is a symbolic link, or a file where a directory must be.
    """
    path = directory
    parts = name.split("/")
    for n, part in enumerate(parts):
        path = path / part
        if path.is_symlink():
            raise UnsafePathError("the target is a symbolic link", where=str(path), remedy="remove the link")
        if n < len(parts) - 1 and path.exists() and not path.is_dir():
            raise UnsafePathError("a file stands where a directory must be", where=str(path))
        if n == len(parts) - 1 and path.is_dir():
            raise UnsafePathError("a directory stands where a file must be", where=str(path))
    return path


_BLOB: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REPOSITORY: Final = re.compile(r"(models|datasets|spaces)--.+")


class Skipped(NamedTuple):
    """A file or directory that is no step of the run, or not part of one, and why.

    `rotten` tells that it is a checkpoint that does not match its own checksum, `link` that it is a link
    that was not followed.
    """

    path: str
    reason: str
    rotten: bool = False
    link: bool = False


def is_file(path: Path | os.DirEntry[str]) -> bool:
    """Tell whether a path leads to a regular file; a path that cannot be looked at does not."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for a path that is too long


def is_dir(path: Path | os.DirEntry[str]) -> bool:
    """Tell whether a path leads to a directory; a path that cannot be looked at does not."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for a path that is too long


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What opening a run may read, and who counts the bytes.

    Parameters
    ----------
    root
        Real path that links may lead into: the directory of the run.
    counter
        Told of every byte read.
    follow_links
        Follow links wherever they lead.
    allow_damaged
        Take files that do not match their own checksums.
    within
        Further real paths that links may lead into.
    """

    root: str
    counter: ByteCounter = field(default_factory=ByteCounter)
    follow_links: bool = False
    allow_damaged: bool = False
    within: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        path: Path,
        counter: ByteCounter,
        *,
        follow_links: bool = False,
        allow_damaged: bool = False,
        within: Sequence[str] = (),
    ) -> Access:
        """Return the access to a directory, which may be a link itself: that was the user's choice."""
        return cls(
            root=os.path.realpath(path),
            counter=counter,
            follow_links=follow_links,
            allow_damaged=allow_damaged,
            within=tuple(os.path.realpath(one) for one in within),
        )

    def admits(self, path: str | os.PathLike[str], real: str | None = None) -> bool:
        """Tell whether a path leads somewhere that may be read; `real` is where, if that is known."""
        if self.follow_links:
            return True
        real = os.path.realpath(path) if real is None else real
        if any(lies_in(real, root) for root in (self.root, *self.within)):
            return True
        return any(is_blob(real, root) for root in (self.root, os.path.realpath(Path(path).parent)))

    def admit(self, path: Path) -> FileStamp:
        """Return the stamp of a file, by which it is opened; refuse a path that leads out of the run.

        Raises
        ------
        RefusedLinkError
            It does.
        NotFoundError
            There is no regular file.
        """
        if not self.follow_links and not self.admits(path):
            raise RefusedLinkError(
                f"a link out of the run, to '{clipped(os.path.realpath(path), 200)}'",
                where=str(path),
                remedy="if you trust it, follow it: --follow-links, follow_links=True",
            )
        stamp = stamp_of(path)
        if not self.admits(path, stamp.real_path):
            raise RefusedLinkError("a link that changed while it was looked at", where=str(path))
        return stamp

    def read_text(self, path: Path, max_nbytes: int) -> bytes:
        """Return the content of a small file.

        Raises
        ------
        DamagedError
            It is larger than allowed.
        RefusedLinkError
            It lies outside of the run.
        """
        with ReadableFile(path, self.counter, self.admit(path)) as file:
            if file.nbytes > max_nbytes:
                raise DamagedError(
                    "the file is too large",
                    where=str(path),
                    expected=f"at most {max_nbytes} bytes",
                    found=f"{file.nbytes} bytes",
                )
            return file.read(0, file.nbytes)

    def skipped(self, path: str | os.PathLike[str]) -> Skipped:
        """Return the row of a link that was not followed."""
        target = clipped(os.path.realpath(path), 200)
        reason = f"a link out of the run, to '{target}', not followed without --follow-links"
        return Skipped(os.fspath(path), reason, link=True)

    def walk(self, root: Path, skipped: list[Skipped]) -> Iterator[Path]:
        """Yield the paths of the files below a directory; linked directories are followed once."""
        seen = {os.path.realpath(root)}
        todo = [root]
        while todo:
            folder = todo.pop()
            inner = []
            try:
                paths = sorted(folder.iterdir())
            except OSError as error:
                raise StorageError(
                    f"the directory cannot be read: {error.strerror}", where=str(folder)
                ) from error
            for path in paths:
                if not is_dir(path):
                    yield path
                    continue
                if path.is_symlink():
                    if not self.admits(path):
                        skipped.append(self.skipped(path))
                        continue
                    real = os.path.realpath(path)
                    if real in seen or any(lies_in(one, real) for one in seen):
                        skipped.append(Skipped(str(path), "a link to a directory that is read already"))
                        continue
                    seen.add(real)
                inner.append(path)
            todo += reversed(inner)


def lies_in(real: str, root: str) -> bool:
    """Tell whether a real path is a directory or lies in it."""
    return real == root or real.startswith(root if root.endswith(os.sep) else root + os.sep)


def is_blob(real: str, folder: str) -> bool:
    """Tell whether a file is a blob of the Hugging Face cache whose snapshot a folder is, or lies in.

    The layout is ``models--NAME/snapshots/REVISION/…`` with links to ``models--NAME/blobs/DIGEST``.
    """
    blob = Path(real)
    repository = blob.parent.parent
    if blob.parent.name != "blobs" or not _BLOB.fullmatch(blob.name):
        return False
    snapshots = str(repository / "snapshots")
    return bool(_REPOSITORY.fullmatch(repository.name)) and folder != snapshots and lies_in(folder, snapshots)


_DIGITS: Final = re.compile(r"(\d+)")


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that orders ``step-9`` before ``step-10``."""
    return tuple(
        (0, int(part[:4000]), part) if part.isascii() and part.isdigit() else (1, 0, part)
        for part in _DIGITS.split(text)
        if part
    )

"""Names from an archive are untrusted: none may lead outside the directory that is written to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from inshrink_core.errors import UnsafePathError

__all__ = ["check_names", "check_target"]

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

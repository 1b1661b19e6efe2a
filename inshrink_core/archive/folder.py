"""The folder of an archive: where one may be made, and clearing what was left in it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from inshrink_core.archive.durable import LOCK_NAME, is_temporary
from inshrink_core.archive.layout import FRAME_FOLDER
from inshrink_core.errors import ExistsError, NotFoundError

__all__ = ["remove_remains", "remove_temporaries", "require_place"]


def require_place(root: Path, create: bool) -> None:
    """Refuse to make an archive where something else lies."""
    if not create:
        what = "this is not an Inshrink archive" if root.exists() else "there is no such archive"
        raise NotFoundError(
            what, where=str(root), remedy="`inshrink compress RUN -o ARCHIVE` makes one of a run"
        )
    if not root.exists():
        return
    own = {LOCK_NAME, FRAME_FOLDER}
    if not root.is_dir() or _holds_others(root, own):
        raise ExistsError(
            "it exists and is not an Inshrink archive", where=str(root), remedy="choose another name"
        )


def _holds_others(root: Path, own: set[str]) -> bool:
    return any(path.name not in own and not is_temporary(path.name) for path in root.iterdir())


def remove_remains(root: Path) -> None:
    """Leave nothing behind of an archive that could not be made."""
    with contextlib.suppress(OSError):
        for folder in (root / FRAME_FOLDER, root):
            remove_temporaries(folder)
        (root / LOCK_NAME).unlink(missing_ok=True)
        if (root / FRAME_FOLDER).exists():
            (root / FRAME_FOLDER).rmdir()
        root.rmdir()


def remove_temporaries(folder: Path) -> None:
    """Delete what a writer left that was cut off."""
    if folder.is_dir():
        for path in folder.iterdir():
            if is_temporary(path.name):
                path.unlink(missing_ok=True)

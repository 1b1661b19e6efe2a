"""Opening what a path names, whichever of the two it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.errors import InputError

if TYPE_CHECKING:
    from inshrink_core.chain import Archive
    from inshrink_core.formats import Run

__all__ = ["open_run", "open_run_or_archive"]


def open_run(path: str, step_pattern: str | None = None, *, follow_links: bool = False) -> Run:
    """Open a run; headers only.

    Raises
    ------
    InputError
        The path names an archive. Without this it would be a directory without checkpoints.
    """
    from inshrink_core import formats
    from inshrink_core.archive import is_archive

    if is_archive(path):
        raise InputError(
            "this is an archive, where a run is needed", where=path, remedy="`inshrink restore` makes one"
        )
    return formats.open_run(path, step_pattern=step_pattern, follow_links=follow_links)


def open_run_or_archive(
    path: str, step_pattern: str | None = None, *, follow_links: bool = False
) -> Run | Archive:
    """Open a run or an archive; headers only."""
    from inshrink_core.archive import is_archive
    from inshrink_core.chain import Archive

    if is_archive(path):
        return Archive.open(path)
    return open_run(path, step_pattern, follow_links=follow_links)

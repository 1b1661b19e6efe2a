"""Opening whatever lies at a path: a run or an archive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inshrink_core.archive import is_archive
from inshrink_core.chain.archive import Archive
from inshrink_core.formats import Run, open_run

if TYPE_CHECKING:
    import os

    from inshrink_core.chain.base import BaseLike

__all__ = ["open_any"]


def open_any(path: str | os.PathLike[str], *, base: BaseLike | None = None, **options: Any) -> Run | Archive:
    """Open a run or an archive, whichever lies at the path; reads headers only.

    Parameters
    ----------
    path
        A run directory, glob or checkpoint file; or a directory ``NAME.inshrink``.
    base
        Of an archive, the base model that its first frame is encoded relative to (`Archive.open`).
    **options
        Of a run, as for `inshrink_core.formats.open_run`: `step_pattern`, `follow_links`, `allow_damaged`,
        `within`.

    Raises
    ------
    NotFoundError
        There is neither.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> 400 in run.steps
    True
    """
    return Archive.open(path, base=base) if is_archive(path) else open_run(path, **options)

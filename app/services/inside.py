"""Checks that a run or archive and everything it refers to are inside the roots."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import streamlit as st
from inshrink_app.model import ServiceError
from inshrink_app.server.recent import recent_file
from inshrink_app.server.roots import links_below, settings

from inshrink_core.errors import InshrinkError
from inshrink_core.formats import NoCheckpointError
from inshrink_core.samples import sample, sample_names

_Answer = TypeVar("_Answer")


@functools.cache
def samples() -> tuple[Path, ...]:
    """Return the folders of the bundled runs; empty if the package has none."""
    return tuple(Path(os.path.realpath(sample(name))) for name in sample_names())


def dropped_folder() -> Path:
    """Return the real path of the folder of dropped files."""
    return Path(os.path.realpath(recent_file().with_name("dropped")))


def is_dropped(real: Path) -> bool:
    """Return whether a resolved path is inside the folder of dropped files."""
    folder = dropped_folder()
    return real != folder and real.is_relative_to(folder)


def is_own(real: Path) -> bool:
    """Return whether a resolved path is inside a bundled run or the folder of dropped files."""
    return any(real.is_relative_to(folder) for folder in samples()) or is_dropped(real)


def is_inside(real: Path) -> bool:
    """Return whether a resolved path may be read: it is inside a root, bundled, or dropped."""
    return settings().allows(real) or is_own(real)


def require_inside(path: Path) -> None:
    """Refuse a run or an archive that leads out of the roots.

    Parameters
    ----------
    path
        Its real path. Every link below it is resolved, whether the engine would read it or not.

    Raises
    ------
    ServiceError
        A link leads out of the roots, or there are too many files to check.
    """
    try:
        for link in links_below(path):
            target = Path(os.path.realpath(link))
            if not is_inside(target):
                raise ServiceError(
                    "a link in it leads out of the folders that the explorer may see",
                    str(link),
                    "remove the link, or start the explorer with --root also for where it leads",
                    f"It leads to {target}",
                )
    except OSError as error:
        raise ServiceError(
            "its links cannot be checked, and they may lead out of the folders that the explorer may see",
            str(error.filename or path),
            "open a smaller folder, or one that you may read",
            str(error.strerror or error),
        ) from error


@contextmanager
def reported() -> Iterator[None]:
    """Turn errors of the engine and the file system into a `ServiceError`."""
    try:
        yield
    except NoCheckpointError as error:
        detail = "\n".join(f"{row.path}: {row.reason}" for row in error.skipped)
        remedy = "choose a folder of .pt, .pth, .bin, .ckpt or .safetensors files, or of checkpoint folders"
        raise ServiceError("no readable checkpoint in here", error.where, remedy, detail) from error
    except InshrinkError as error:
        detail = f"expected {error.expected}, found {error.found}" if error.expected or error.found else ""
        raise ServiceError(error.what, error.where, error.remedy, detail) from error
    except OSError as error:
        what = f"the file system refused: {error.strerror or error}"
        remedy = "check that the folder exists and that you may read it"
        raise ServiceError(what, str(error.filename or ""), remedy) from error


@st.cache_resource(show_spinner=False, max_entries=400)
def answered(question: tuple[Hashable, ...], _answer: Callable[[], _Answer]) -> _Answer:
    """Return the answer to a question, computed once; the question includes the state of the files.

    Raises
    ------
    ServiceError
        There is no answer. Errors are not cached.
    """
    with reported():
        return _answer()

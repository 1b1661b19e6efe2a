"""Find the checkpoints of a run among the files of a directory."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from inshrink_core.errors import InputError, NotFoundError, StorageError
from inshrink_core.formats.directory import WEIGHT_SUFFIXES, is_side_file
from inshrink_core.formats.steps import natural_key, step_in_name

__all__ = ["Candidate", "Discovery", "Skipped", "discover"]

_TEMPORARY: Final = re.compile(
    r"(\.(tmp|temp|part|partial|incomplete|lock)(\.[^.]*|\d*)?$|^tmp[-_])", re.IGNORECASE
)
_CANONICAL: Final = re.compile(
    r"^(model|pytorch_model|adapter_model|consolidated|diffusion_pytorch_model)"
    r"(-\d{5}-of-\d{5}|\.\d+)?\.(safetensors|bin|pt|pth)$|^trainer_state\.json$|\.index\.json$"
)
"""Names that only a checkpoint directory has; a run of single files numbers them."""

_SIDE_BY_SIDE: Final = re.compile(r"^(optim|grad)\w*\.(safetensors|bin|pt|pth)$")
_MAX_DEPTH: Final = 3
_NOT_CHECKPOINTS: Final = frozenset(
    {".json", ".jsonl", ".csv", ".txt", ".md", ".html", ".log", ".py", ".ipynb", ".toml", ".yaml", ".yml"}
    | {".npz", ".npy", ".h5", ".onnx", ".msgpack", ".pkl", ".model", ".inshrink", ".whl", ".svg", ".pdf"}
    | {".zip", ".tar", ".gz", ".zst", ".png", ".jpg"}
)


class Candidate(NamedTuple):
    """Something that may be a checkpoint: a file, or a directory that is one."""

    path: Path
    is_directory: bool


class Skipped(NamedTuple):
    """A file or directory that is no step of the run, and why."""

    path: str
    reason: str


class Discovery(NamedTuple):
    """Candidates in natural order, and what was passed over; `single` if the path itself is one."""

    root: Path
    candidates: tuple[Candidate, ...]
    skipped: tuple[Skipped, ...]
    single: bool


def _entries(root: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(root) as entries:
            return sorted(entries, key=lambda entry: natural_key(entry.name))
    except OSError as error:
        raise StorageError(f"the directory cannot be read: {error.strerror}", where=str(root)) from error


def _may_be_weights(path: Path, known_suffix_only: bool = False) -> bool:
    if path.suffix in WEIGHT_SUFFIXES:
        return not is_side_file(path.name)
    if known_suffix_only or path.suffix.lower() in _NOT_CHECKPOINTS or path.name.startswith("."):
        return False
    # Without a suffix that tells, the first bytes do: a zip's or a safetensors header's.
    try:
        with path.open("rb", buffering=0) as file:
            first = file.read(9)
    except OSError:
        return False
    return first[:4] == b"PK\x03\x04" and step_in_name(path.name) is not None


def _is_checkpoint_directory(entries: Iterable[os.DirEntry[str]]) -> bool:
    """Tell a directory that is one checkpoint from one that holds many.

    It is one if a file has a name that only stands in checkpoint directories, or if its weight files
    are not numbered apart.
    """
    files = [Path(entry.path) for entry in entries if entry.is_file()]
    weights = [path for path in files if _may_be_weights(path, known_suffix_only=True)]
    if any(path.name == ".metadata" for path in files):
        return True
    if not weights:
        return False
    if any(_CANONICAL.search(path.name) or _SIDE_BY_SIDE.match(path.name) for path in files):
        return True
    return len(weights) == 1 and step_in_name(weights[0].name) is None


def _walk(root: Path, depth: int, skipped: list[Skipped]) -> list[Candidate]:
    """Return the candidates below a directory that is no checkpoint itself."""
    found: list[Candidate] = []
    folders: list[Path] = []
    for entry in _entries(root):
        path = Path(entry.path)
        if _TEMPORARY.search(entry.name):
            if (
                entry.is_dir()
                or _may_be_weights(Path(entry.name.split(".tmp")[0]), True)
                or "." in entry.name
            ):
                skipped.append(Skipped(str(path), "still being written: it has a temporary name"))
        elif entry.is_dir():
            if entry.name.startswith(".") or entry.name.endswith(".inshrink"):
                continue
            inner = _entries(path)
            if _is_checkpoint_directory(inner) and not _holds_checkpoints(inner):
                found.append(Candidate(path, is_directory=True))
            else:
                folders.append(path)
        elif entry.is_symlink() and not entry.is_file():
            if path.suffix in WEIGHT_SUFFIXES:
                skipped.append(Skipped(str(path), "a link that leads nowhere"))
        elif entry.is_file() and _may_be_weights(path):
            found.append(Candidate(path, is_directory=False))
    if depth < _MAX_DEPTH and not found:
        for folder in folders:
            found += _walk(folder, depth + 1, skipped)
    return found


def _holds_checkpoints(entries: Iterable[os.DirEntry[str]]) -> bool:
    """Tell whether a directory has checkpoint directories inside, numbered by step."""
    return any(
        entry.is_dir()
        and step_in_name(entry.name) is not None
        and _is_checkpoint_directory(_entries(Path(entry.path)))
        for entry in entries
    )


def _without_links(candidates: list[Candidate], skipped: list[Skipped]) -> list[Candidate]:
    """Keep one of the paths that lead to the same file; a real one before a link."""
    by_target: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_target.setdefault(os.path.realpath(candidate.path), []).append(candidate)
    kept = []
    for paths in by_target.values():
        first = next((c for c in paths if not c.path.is_symlink()), paths[0])
        kept.append(first)
        skipped += [Skipped(str(c.path), f"a link to {first.path.name}") for c in paths if c is not first]
    return kept


def discover(path: str | os.PathLike[str]) -> Discovery:
    """Return what may be checkpoints under a path.

    Parameters
    ----------
    path
        A file, a directory, or a glob.

    Raises
    ------
    NotFoundError
        Nothing is there.
    InputError
        The path holds a NUL byte.
    """
    text = os.fspath(path)
    if "\0" in text:
        raise InputError("a path cannot hold a NUL byte", where=repr(text))
    root = Path(text)
    skipped: list[Skipped] = []
    if root.is_file():
        return Discovery(root, (Candidate(root, False),), (), True)
    if root.is_dir():
        entries = _entries(root)
        if _is_checkpoint_directory(entries):
            if not _holds_checkpoints(entries):
                return Discovery(root, (Candidate(root, True),), (), True)
            found = [c for c in _walk(root, 0, skipped) if c.is_directory]
            skipped += [
                Skipped(e.path, "beside the checkpoints of the run, not one of its steps")
                for e in entries
                if e.is_file() and _may_be_weights(Path(e.path), True)
            ]
        else:
            found = _walk(root, 0, skipped)
    elif glob.has_magic(text):
        found = _from_glob(text, skipped)
        root = _fixed_part(root)
    else:
        raise NotFoundError("there is no such file or directory", where=text)
    found = _without_links(found, skipped)
    found.sort(key=lambda candidate: natural_key(str(candidate.path)))
    return Discovery(root, tuple(found), tuple(skipped), False)


def _from_glob(pattern: str, skipped: list[Skipped]) -> list[Candidate]:
    matches = sorted(
        (Path(m) for m in glob.glob(pattern, recursive=True)),  # noqa: PTH207 - absolute patterns too
        key=lambda p: natural_key(str(p)),
    )
    if not matches:
        raise NotFoundError("nothing matches the pattern", where=pattern)
    found: list[Candidate] = []
    for match in matches:
        if _TEMPORARY.search(match.name):
            skipped.append(Skipped(str(match), "still being written: it has a temporary name"))
        elif match.is_dir():
            if _is_checkpoint_directory(_entries(match)):
                found.append(Candidate(match, True))
        elif match.is_file() and _may_be_weights(match):
            found.append(Candidate(match, False))
    return found


def _fixed_part(pattern: Path) -> Path:
    """Return the directory before the first wildcard."""
    parts = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts) if parts else Path()

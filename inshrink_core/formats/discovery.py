"""Find the checkpoints of a run among the files of a directory."""

from __future__ import annotations

import errno
import glob
import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from inshrink_core.errors import InputError, NotFoundError, StorageError, clipped
from inshrink_core.formats.disk import Access, Fate, Skipped, is_dir, is_file, natural_key, scan
from inshrink_core.formats.names import is_numbered
from inshrink_core.formats.readers import Reader, reader_of, readers

_TEMPORARY: Final = re.compile(
    r"(\.(tmp|temp|part|partial|incomplete|lock)(\.[^.]*|\d*)?$|^tmp[-_])", re.IGNORECASE
)
_UNFINISHED: Final = "still being written: it has a temporary name"
_DANGLING: Final = "a link that leads nowhere"
MAX_ENTRIES: Final = 200_000
"""Names below a run that are searched for checkpoints: a data set in it may have millions."""

ARCHIVE_MARK: Final = "inshrink-manifest"
"""File that makes a folder an archive."""

SHARDED_PART: Final = re.compile(r"^(pytorch_model_fsdp|optimizer)_\d+$")
"""Directories that accelerate and Hugging Face's trainer write shards into: parts of one checkpoint."""

STEP_FOLDER: Final = re.compile(
    r"(?:^|[^a-z])(step|iter(ation)?|checkpoint|ckpt|epoch)s?[-_=. ]?\d", re.IGNORECASE
)
"""Folders that are called like a step."""

_TAG: Final = re.compile(r"^global_step\d+$")
"""A folder of DeepSpeed: a part, where the trainer's state lies beside it."""

TRAINER_STATE: Final = "trainer_state.json"
"""What Hugging Face's trainer writes into each checkpoint."""

WEIGHT_SUFFIXES: Final = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

_SIDE_FILE: Final = re.compile(
    r"^(training_args|scheduler|lr_scheduler|scaler|sampler|dl_state_dict|random_states|rng_state|"
    r"custom_checkpoint|tokenizer|spiece|meta)([._-].*)?$",
    re.IGNORECASE,
)
"""Never opened: pickles of schedulers, random-number generators and arguments, and tokenizers."""

METADATA: Final = ".metadata"
"""Of a distributed checkpoint, written last: a directory that has it is a finished one."""


def is_weight_file(name: str) -> bool:
    """Tell from its name that a file is read for tensors, not carried without being opened."""
    return has_weight_suffix(name) and _SIDE_FILE.match(name) is None


def has_weight_suffix(name: str) -> bool:
    """Tell from its suffix that a file may hold tensors, such as ``model.pth.tar``."""
    return name.lower().removesuffix(".tar").endswith(WEIGHT_SUFFIXES)


class CheckpointPath(NamedTuple):
    """A possible checkpoint, a file or a directory, and its reader.

    `members` are the files of a checkpoint that lies in several files beside those of other steps.
    """

    path: Path
    reader: Reader
    members: tuple[Path, ...] = ()


class Discovery(NamedTuple):
    """What was found below a path.

    Parameters
    ----------
    root
        The path.
    candidates
        In natural order.
    skipped
        What was passed over.
    single
        The path itself is the one candidate.
    others
        What no reader takes for a checkpoint. Beside checkpoints with names of the same shape, one is a
        checkpoint that has lost what it was known by.
    """

    root: Path
    candidates: tuple[CheckpointPath, ...]
    skipped: tuple[Skipped, ...]
    single: bool
    others: tuple[Path, ...] = ()


class _Search:
    """A search for checkpoints below a directory."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.skipped: list[Skipped] = []
        self.others: list[Path] = []
        self._n_left = MAX_ENTRIES
        self._seen: set[str] = set()

    def walk(self, root: Path) -> list[CheckpointPath]:
        """Return the candidates at any depth below a directory that is no checkpoint itself."""
        found: list[CheckpointPath] = []
        todo = [root]
        while todo:
            folder = todo.pop()
            try:
                entries = scan(folder)
            except StorageError as error:
                if folder == root:
                    raise
                self.skipped.append(Skipped(str(folder), error.what, Fate.LEFT_OUT))
                continue
            self._n_left -= len(entries)
            if self._n_left < 0:
                reason = f"not searched: the run has more than {MAX_ENTRIES:,} files and folders"
                self.skipped += [Skipped(str(one), reason, Fate.LEFT_OUT) for one in (folder, *todo)]
                return found
            if any(entry.name == ARCHIVE_MARK for entry in entries):
                continue
            inner: list[Path] = []
            for entry in entries:
                path = Path(entry.path)
                if _TEMPORARY.search(entry.name):
                    if is_dir(entry) or "." in entry.name:
                        self.skipped.append(Skipped(str(path), _UNFINISHED, Fate.PENDING))
                elif is_dir(entry):
                    if entry.name.startswith(".") or entry.name.endswith(".inshrink"):
                        continue
                    if not self.is_refused(path):
                        self._take_folder(path, entry.is_symlink(), found, inner)
                elif entry.is_symlink() and not is_file(entry):
                    self.others.append(path)
                    if is_weight_file(path.name):
                        self.skipped.append(Skipped(str(path), _DANGLING))
                elif (reader := reader_of(path, self.access)) is not None:
                    found.append(CheckpointPath(path, reader))
                else:
                    self.others.append(path)
            todo += reversed(inner)
        return found

    def _take_folder(self, path: Path, is_link: bool, found: list[CheckpointPath], inner: list[Path]) -> None:
        reader = reader_of(path, self.access)
        if reader is not None and not self.holds_checkpoints(path):
            found.append(CheckpointPath(path, reader))
            return
        self.others.append(path)
        real = os.path.realpath(path) if is_link else ""
        if real not in self._seen or not is_link:  # a link may lead to a folder above itself
            self._seen.add(real)
            inner.append(path)

    def is_refused(self, folder: Path) -> bool:
        """Tell whether a directory is a link out of the run; one that is a step is an error.

        Raises
        ------
        RefusedLinkError
            Its name says that it is one of the checkpoints.
        """
        if self.access.admits(folder):
            return False
        if is_numbered(folder.name):
            self.access.admit(folder)
        self.skipped.append(self.access.skipped(folder))
        return True

    def holds_checkpoints(self, folder: Path) -> bool:
        """Tell whether a directory has checkpoint directories inside, numbered by step."""
        return any(
            is_dir(entry)
            and is_numbered(entry.name)
            and not _is_part(folder, entry.name)
            and self.access.admits(entry.path)
            and reader_of(Path(entry.path), self.access) is not None
            for entry in scan(folder)
        )

    def match(self, pattern: str) -> list[CheckpointPath]:
        """Return the candidates that a pattern matches."""
        matches = sorted(
            (Path(m) for m in glob.glob(pattern, recursive=True)),  # noqa: PTH207 - absolute patterns too
            key=lambda p: natural_key(str(p)),
        )
        if not matches:
            raise NotFoundError("nothing matches the pattern", where=pattern)
        found: list[CheckpointPath] = []
        for match in matches:
            if _TEMPORARY.search(match.name):
                self.skipped.append(Skipped(str(match), _UNFINISHED, Fate.PENDING))
            elif is_dir(match) and self.is_refused(match):
                continue
            elif (reader := reader_of(match, self.access)) is not None:
                found.append(CheckpointPath(match, reader))
            else:
                self.others.append(match)
        return found

    def without_links(self, candidates: list[CheckpointPath]) -> list[CheckpointPath]:
        """Keep one of the paths that lead to the same file; a real one before a link."""
        by_target: dict[str, list[CheckpointPath]] = {}
        for candidate in candidates:
            by_target.setdefault(os.path.realpath(candidate.path), []).append(candidate)
        kept = []
        for paths in by_target.values():
            first = next((c for c in paths if not c.path.is_symlink()), paths[0])
            kept.append(first)
            self.skipped += [
                Skipped(str(c.path), f"a link to {first.path.name}", Fate.DUPLICATE)
                for c in paths
                if c is not first
            ]
        return kept


def _is_part(folder: Path, name: str) -> bool:
    """Tell whether a folder inside another is a part of the checkpoint that the other is."""
    if SHARDED_PART.match(name):
        return True
    if STEP_FOLDER.search(folder.name) and not STEP_FOLDER.search(name):
        return True  # a model of its own, whatever number is in its name
    return _TAG.match(name) is not None and is_file(folder / TRAINER_STATE)


def fixed_part(path: str | os.PathLike[str]) -> Path:
    """Return the directory that a path names, without links in it resolved.

    Of a file that is its directory, of a pattern the part before the first wildcard.
    """
    named = Path(path)
    if is_dir(named):
        return named
    if os.path.lexists(named) or not glob.has_magic(os.fspath(path)):
        return named.parent
    parts = []
    for part in named.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts) if parts else Path()


def _check_path(text: str) -> None:
    """Refuse a path that no file can have, and say what the system says of others.

    Raises
    ------
    InputError
        It holds a NUL byte, or is too long.
    """
    if "\0" in text:
        raise InputError("a path cannot hold a NUL byte", where=clipped(repr(text)))
    try:
        os.lstat(text)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.EACCES, errno.EIO):
            raise InputError(f"the path cannot be opened: {error.strerror}", where=clipped(text)) from error


def discover(path: str | os.PathLike[str], access: Access) -> Discovery:
    """Return what may be checkpoints under a path.

    Parameters
    ----------
    path
        A file, a directory, or a glob.
    access
        Where links may lead.

    Raises
    ------
    NotFoundError
        Nothing is there.
    RefusedLinkError
        A directory of a step is a link out of the run.
    InputError
        The path holds a NUL byte, or is too long.
    """
    text = os.fspath(path)
    _check_path(text)
    root = Path(text)
    search = _Search(access)
    if is_file(root):
        # A file that no reader knows is opened all the same, to say what is wrong with it.
        return Discovery(root, (CheckpointPath(root, reader_of(root, access) or readers()[-1]),), (), True)
    if is_dir(root):
        reader = reader_of(root, access)
        if reader is not None and not search.holds_checkpoints(root):
            return Discovery(root, (CheckpointPath(root, reader),), (), True)
        found = search.walk(root)
    elif glob.has_magic(text):
        found = search.match(text)
        root = fixed_part(text)
    else:
        raise NotFoundError("there is no such file or directory", where=text)
    found = search.without_links(found)
    found.sort(key=lambda candidate: natural_key(str(candidate.path)))
    return Discovery(root, tuple(found), tuple(search.skipped), False, tuple(search.others))

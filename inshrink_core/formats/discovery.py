"""Find the checkpoints of a run among the files of a directory."""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from inshrink_core.errors import (
    InputError,
    InshrinkError,
    NotFoundError,
    RefusedLinkError,
    StorageError,
    clipped,
)
from inshrink_core.formats.assembly import ParsedCheckpoint
from inshrink_core.formats.disk import (
    Access,
    Fate,
    FileStamp,
    Skipped,
    is_dir,
    is_file,
    natural_key,
    scan,
    stamp_of,
)
from inshrink_core.formats.names import is_numbered
from inshrink_core.formats.readers import Reader, reader_of, readers

_TEMPORARY: Final = re.compile(
    r"(\.(tmp|temp|part|partial|incomplete|lock)(\.[^.]*|\d*)?$|^tmp[-_])", re.IGNORECASE
)
_UNFINISHED: Final = "still being written: it has a temporary name"
_DANGLING: Final = "a link that leads nowhere"
MAX_ENTRIES: Final = 200_000
"""Maximum number of paths below a run that are searched: a data set inside it may have millions."""

ARCHIVE_MARK: Final = "inshrink-manifest"
"""The file that marks a folder as an archive."""

SHARDED_PART: Final = re.compile(r"^(pytorch_model_fsdp|optimizer)_\d+$")
"""Shard directories of accelerate and Hugging Face's trainer: parts of one checkpoint."""

STEP_FOLDER: Final = re.compile(
    r"(?:^|[^a-z])(step|iter(ation)?|checkpoint|ckpt|epoch)s?[-_=. ]?\d", re.IGNORECASE
)
"""Folders named after a step."""

_TAG: Final = re.compile(r"^global_step\d+$")
"""A folder of DeepSpeed; it is a part of a checkpoint if the trainer's state is beside it."""

TRAINER_STATE: Final = "trainer_state.json"
"""The file that Hugging Face's trainer writes into each checkpoint."""

WEIGHT_SUFFIXES: Final = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

_SIDE_FILE: Final = re.compile(
    r"^(training_args|scheduler|lr_scheduler|scaler|sampler|dl_state_dict|random_states|rng_state|"
    r"custom_checkpoint|tokenizer|spiece|meta)([._-].*)?$",
    re.IGNORECASE,
)
"""Files that are never opened: pickles of schedulers, random-number generators and arguments; tokenizers."""

METADATA: Final = ".metadata"
"""The index of a distributed checkpoint. It is written last, so its presence marks a finished checkpoint."""


def is_weight_file(name: str) -> bool:
    """Return whether a file is read for tensors, by its name; other files are carried unread."""
    return has_weight_suffix(name) and _SIDE_FILE.match(name) is None


def has_weight_suffix(name: str) -> bool:
    """Return whether a file may hold tensors, by its suffix; accepts names such as ``model.pth.tar``."""
    return name.lower().removesuffix(".tar").endswith(WEIGHT_SUFFIXES)


@dataclass(slots=True, eq=False)
class Found:
    """A file or directory that a reader detects as a checkpoint, and the result of reading it.

    Parameters
    ----------
    path, reader
        The path, and the reader that opens it.
    members
        The files of a checkpoint split into several files beside those of other steps.
    stamps
        The stamps that identify its unchanged state.
    parsed, error
        Its headers, or the error that prevents reading them.
    """

    path: Path
    reader: Reader
    members: tuple[Path, ...] = ()
    stamps: tuple[FileStamp, ...] = ()
    parsed: ParsedCheckpoint | None = None
    error: InshrinkError | None = None

    @property
    def key(self) -> tuple[Path, ...]:
        """The paths that identify the candidate."""
        return self.members or (self.path,)

    def read(self, known: Mapping[tuple[Path, ...], Found], access: Access) -> Found:
        """Read the headers, or reuse those of unchanged files in `known`; return itself.

        Raises
        ------
        RefusedLinkError
            Tensors are behind a link out of the run; skipping them would leave an unnoticed gap.
        """
        before = known.get(self.key)
        try:
            self.stamps = tuple(stamp for place in self.key for stamp in stamps_of(place, access))
            if before is not None and before.stamps == self.stamps:
                self.parsed, self.error = before.parsed, before.error
            else:
                self.parsed = self.reader.open(self.path, access)
        except InshrinkError as error:
            if isinstance(error, RefusedLinkError):
                raise
            self.error = error
        return self


def reason_of(path: Path, error: InshrinkError) -> str:
    """Return the reason why a checkpoint cannot be read, without its path, which is shown separately."""
    return str(error).removeprefix(f"{path}: ")


def stamps_of(path: Path, access: Access) -> tuple[FileStamp, ...]:
    """Return the stamps of a file, or of all files below a directory."""
    paths = [item for item in sorted(access.walk(path, [])) if is_file(item)] if is_dir(path) else [path]
    return tuple(map(stamp_of, paths))


class Discovery:
    """The candidates for checkpoints under a path.

    Parameters
    ----------
    path
        A file, a directory, or a glob.
    access
        Access rights for links.

    Attributes
    ----------
    root
        The path, or the fixed part of a glob.
    found
        The candidates in natural order.
    skipped
        The files that were passed over.
    single
        Whether the path itself is the only candidate.
    others
        Paths that no reader detects. One of them is a broken checkpoint if checkpoints have names of the same
        pattern.

    Raises
    ------
    NotFoundError
        The path does not exist.
    RefusedLinkError
        A step directory is a link out of the run.
    InputError
        The path contains a NUL byte, or is too long.
    """

    def __init__(self, path: str | os.PathLike[str], access: Access) -> None:
        text = os.fspath(path)
        _check_path(text)
        self.root = root = Path(text)
        self.skipped: list[Skipped] = []
        self.others: list[Path] = []
        self.single = is_file(root)
        self._access = access
        self._n_left = MAX_ENTRIES
        self._seen: set[str] = set()
        if self.single:
            # Open a file that no reader detects as well, for a specific error message.
            found = [Found(root, reader_of(root, access) or readers()[-1])]
        elif is_dir(root):
            reader = reader_of(root, access)
            self.single = reader is not None and not self._holds_checkpoints(root)
            found = [Found(root, reader)] if self.single and reader else [*self._walk(root)]
        elif glob.has_magic(text):
            found = [*self._match(text)]
            self.root = fixed_part(text)
        else:
            raise NotFoundError("there is no such file or directory", where=text)
        self.found = sorted(self._without_links(found), key=lambda item: natural_key(str(item.path)))

    def _take(self, path: Path, inner: list[Path] | None = None) -> Iterator[Found]:
        """Yield the candidate at a path; add a folder that holds others to `inner`, if given."""
        reader = reader_of(path, self._access)
        if reader is not None and (inner is None or not self._holds_checkpoints(path)):
            yield Found(path, reader)
            return
        self.others.append(path)
        real = os.path.realpath(path) if path.is_symlink() else ""
        if inner is not None and real not in self._seen:  # a link may lead to a parent folder
            self._seen |= {real} - {""}
            inner.append(path)

    def _walk(self, root: Path) -> Iterator[Found]:
        """Yield the candidates at any depth below a directory that is not itself a checkpoint."""
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
                self.skipped += [Skipped(str(path), reason, Fate.LEFT_OUT) for path in (folder, *todo)]
                return
            if any(entry.name == ARCHIVE_MARK for entry in entries):
                continue
            inner: list[Path] = []
            for entry in entries:
                path = Path(entry.path)
                if _TEMPORARY.search(entry.name):
                    if is_dir(entry) or "." in entry.name:
                        self.skipped.append(Skipped(str(path), _UNFINISHED, Fate.PENDING))
                elif is_dir(entry):
                    is_hidden = entry.name.startswith(".") or entry.name.endswith(".inshrink")
                    if not is_hidden and not self._is_refused(path):
                        yield from self._take(path, inner)
                elif entry.is_symlink() and not is_file(entry):
                    self.others.append(path)
                    if is_weight_file(path.name):
                        self.skipped.append(Skipped(str(path), _DANGLING, None))
                else:
                    yield from self._take(path)
            todo += reversed(inner)

    def _is_refused(self, folder: Path) -> bool:
        """Return whether a directory is a link out of the run; raise an error if its name has a step."""
        if self._access.admits(folder):
            return False
        if is_numbered(folder.name):
            self._access.admit(folder)
        self.skipped.append(self._access.skipped(folder))
        return True

    def _holds_checkpoints(self, folder: Path) -> bool:
        """Return whether a directory contains checkpoint directories numbered by step."""
        return any(
            is_dir(entry)
            and is_numbered(entry.name)
            and not _is_part(folder, entry.name)
            and self._access.admits(entry.path)
            and reader_of(Path(entry.path), self._access) is not None
            for entry in scan(folder)
        )

    def _match(self, pattern: str) -> Iterator[Found]:
        """Yield the candidates that match a pattern."""
        matches = [Path(match) for match in glob.glob(pattern, recursive=True)]  # noqa: PTH207 - absolute too
        if not matches:
            raise NotFoundError("nothing matches the pattern", where=pattern)
        for match in sorted(matches, key=lambda path: natural_key(str(path))):
            if _TEMPORARY.search(match.name):
                self.skipped.append(Skipped(str(match), _UNFINISHED, Fate.PENDING))
            elif not is_dir(match) or not self._is_refused(match):
                yield from self._take(match)

    def _without_links(self, found: list[Found]) -> Iterator[Found]:
        """Yield one path per real file; paths without links take precedence."""
        by_target: dict[str, list[Found]] = {}
        for item in found:
            by_target.setdefault(os.path.realpath(item.path), []).append(item)
        for alike in by_target.values():
            first = next((item for item in alike if not item.path.is_symlink()), alike[0])
            yield first
            others = (str(item.path) for item in alike if item is not first)
            reason = f"a link to {first.path.name}"
            self.skipped += [Skipped(path, reason, Fate.DUPLICATE) for path in others]


def _is_part(folder: Path, name: str) -> bool:
    """Return whether a folder is a part of the checkpoint in its parent folder."""
    if SHARDED_PART.match(name):
        return True
    if STEP_FOLDER.search(folder.name) and not STEP_FOLDER.search(name):
        return True  # a separate model, regardless of numbers in its name
    return _TAG.match(name) is not None and is_file(folder / TRAINER_STATE)


def fixed_part(path: str | os.PathLike[str]) -> Path:
    """Return the directory that a path refers to, without resolving links.

    For a file it is its parent directory, for a pattern the part before the first wildcard.
    """
    named = Path(path)
    if is_dir(named):
        return named
    if os.path.lexists(named) or not glob.has_magic(os.fspath(path)):
        return named.parent
    return Path(*takewhile(lambda part: not glob.has_magic(part), named.parts[:-1]))


def _check_path(text: str) -> None:
    """Refuse an impossible path, and raise an error if the system cannot access it.

    Raises
    ------
    InputError
        The path contains a NUL byte, is too long, or cannot be accessed.
    """
    if "\0" in text:
        raise InputError("a path cannot hold a NUL byte", where=clipped(repr(text)))
    try:
        os.lstat(text)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.EACCES, errno.EIO):
            raise InputError(f"the path cannot be opened: {error.strerror}", where=clipped(text)) from error

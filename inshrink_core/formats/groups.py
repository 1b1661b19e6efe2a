"""Checkpoints in several files of a directory, such as ``model_100.pt`` with ``optim_100.pt``."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from inshrink_core.checkpoint import is_average_name
from inshrink_core.errors import InputError, NotCheckpointError
from inshrink_core.formats.assembly import NO_WEIGHTS, ParsedCheckpoint
from inshrink_core.formats.checkpoints import Contents, FilesReader, named_apart
from inshrink_core.formats.content import FileContent, read_content
from inshrink_core.formats.discovery import STEP_FOLDER, Found, is_weight_file
from inshrink_core.formats.disk import Access, Skipped, is_dir, is_file
from inshrink_core.formats.names import RANK, Name, is_numbered, read_name

_SHARD: Final = re.compile(rf"-\d+-of-\d+|{RANK.pattern}|(?<=hf_model)_\d{{4}}(?=_)", re.IGNORECASE)
_AVERAGES: Final = frozenset({"ema", "swa"})
"""Labels of averages that are saved beside the model of a step; others name an average of several steps."""
_MODEL: Final = frozenset({"model", "net", "network", "weights", "checkpoint", "ckpt"})


class GroupReader(FilesReader):
    """Several files of one step in a directory that holds those of other steps, too.

    Parameters
    ----------
    members
        The files, a model's first.
    """

    name: ClassVar[str] = "files"
    needs_weights: ClassVar[bool] = False

    def __init__(self, members: Sequence[Path]) -> None:
        self.members = tuple(members)

    def detect(self, path: Path, access: Access) -> bool:
        """Return False: a group is found among files, never by one path."""
        return False

    def paths(self, path: Path, access: Access, skipped: list[Skipped]) -> dict[str, Path]:
        """Return the members, or all files of the folder of a step."""
        if is_dir(path):
            return super().paths(path, access, skipped)
        root = os.path.commonpath([member.parent for member in self.members])
        return {member.relative_to(root).as_posix(): member for member in self.members}

    def contents(self, path: Path, paths: dict[str, Path], access: Access) -> Contents:
        """Return what the members hold, several models with names of their own."""
        names = {member: name for name, member in paths.items()}
        contents: dict[str, FileContent] = {}
        for member in self.members:
            with suppress(NotCheckpointError):
                contents[names[member]] = read_content(member, access)
        if not contents:
            raise NotCheckpointError(NO_WEIGHTS, where=str(path))
        return Contents(_apart(contents), next(iter(contents.values())).kind)


def _apart(contents: Mapping[str, FileContent]) -> dict[str, FileContent]:
    """Give the tensors of several models prefixes; those of a model beside its average keep their names."""
    models = [name for name, content in contents.items() if content.tree.model]
    distinct = {_SHARD.sub("", name) for name in models if not is_average_name(name)}
    words = Counter(_prefix(name) for name in distinct)
    taken: set[str] = set()
    found = {}
    for name, content in contents.items():
        if name in models and (len(distinct) > 1 or (distinct and is_average_name(name))):
            prefix = _prefix(name)
            folder = name.rpartition("/")[0].replace("/", ".")
            content = named_apart(content, folder if words[prefix] > 1 and folder else prefix)
        tensors = {tensor for tensor, _ in (*content.tree.model, *content.tree.extra)}
        if shard := _SHARD.search(name) if taken & tensors else None:
            rank = partial("{}.{}".format, shard[0].strip("._-"))
            content = content._replace(tree=content.tree.renamed(rank))
        taken |= tensors
        found[name] = content
    return found


def _prefix(name: str) -> str:
    """Return the name of the model in a file: the words of the file's name."""
    said = read_name(_SHARD.sub("", name.rpartition("/")[2]))
    return next((label for label in said.labels if label in _AVERAGES), "_".join(said.words) or "model")


class _File(NamedTuple):
    """A file that may be of a group: what its name says, and its headers.

    Where the name has no counter, it is the folder above that is called like a step (`step_folder`) that
    counts. `folder` and `name` are without ranks; `parsed` is None of a file without weights.
    """

    path: Path
    parsed: ParsedCheckpoint | None
    folder: Path
    name: str
    said: Name
    step_folder: Path | None = None

    @classmethod
    def of(cls, path: Path, parsed: ParsedCheckpoint | None, root: Path) -> _File:
        stripped = Path(_SHARD.sub("", str(path.relative_to(root))))
        said = read_name(stripped.name)
        folders = [] if said.numbers else [one for one in stripped.parents if STEP_FOLDER.search(one.name)]
        if not folders:
            return cls(path, parsed, stripped.parent, stripped.name, said)
        inner = stripped.relative_to(folders[0])
        said = read_name(folders[0].name)._replace(words=read_name("_".join(inner.parts)).words)
        return cls(path, parsed, folders[0].parent, str(inner), said, root / folders[0])

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(self.said.labels) - _AVERAGES

    @property
    def role(self) -> tuple[Path, tuple[str, ...]]:
        return self.folder, self.said.words

    def goes_with(self, other: _File, roles: Set[tuple[Path, tuple[str, ...]]]) -> bool:
        """Tell whether two files of one directory with the same counters are of one checkpoint."""
        if self.name == other.name:
            return True  # shards
        if not self.said.numbers:
            return bool(self.labels) and roles >= {self.role, other.role}
        is_alike = (self.said.words, self.said.labels) == (other.said.words, other.said.labels)
        if self.step_folder is None and not is_alike:
            return not self.labels
        first, second = (one.parsed.weight_shapes if one.parsed else {} for one in (self, other))
        return 2 * len(first.items() & second.items()) < min(len(first), len(second))


def _files(found: Iterable[Found], root: Path) -> Iterator[_File]:
    """Yield the files that may be of a group."""
    for one in found:
        path, error = one.path, one.error
        is_part = isinstance(error, InputError) and error.what == NO_WEIGHTS
        if isinstance(error, NotCheckpointError):
            is_part = bool(read_name(path.name).numbers)
        if is_file(path) and (one.parsed is not None or is_part):
            yield _File.of(path, one.parsed, root)
        elif is_part and not is_numbered(path.name):
            inner = (held for held in sorted(path.rglob("*")) if is_file(held) and is_weight_file(held.name))
            yield from (_File.of(held, None, root) for held in inner)


def group_files(found: Iterable[Found], root: Path) -> Iterator[Found]:
    """Yield the checkpoints that lie in several files, or in one without weights.

    Parameters
    ----------
    found
        The candidates of a run, read, in natural order.
    root
        The run.

    Notes
    -----
    Files of one directory with the same counters and labels in their names are a group if their other words
    differ, as those of ``G_100.pth`` and ``D_100.pth``; so are different models below a folder that is called
    like a step. Shards are a group. Files without a counter are, if their words are those of numbered groups.
    A file without weights joins the files of its counters, in its directory or in the only one that has some;
    without counters, such files are a group of their own.
    """
    files = list(_files(found, root))
    classes = _classes([one for one in files if one.parsed is not None])
    alone: dict[Path, list[_File]] = {}
    for one in files:
        if one.parsed is not None:
            continue
        key = one.said.numbers, one.labels
        near = classes.get((one.folder, *key), [])
        far = [groups for (_, *other), groups in classes.items() if tuple(other) == key]
        groups = near or (far[0] if len(far) == 1 else [])
        if one.said.numbers and groups:
            next((group for group in groups if _MODEL & {*group[0].said.words}), groups[0]).append(one)
        elif not one.said.numbers:
            alone.setdefault(one.folder, []).append(one)
    for group in [*(group for groups in classes.values() for group in groups), *alone.values()]:
        if len(group) > 1 or group[0].parsed is None:
            members = sorted(group, key=lambda one: bool(_AVERAGES & {*one.said.labels}))
            paths = tuple(one.path for one in members)
            yield Found(members[0].step_folder or paths[0], GroupReader(paths), paths)


def _classes(files: list[_File]) -> dict[tuple[Path, tuple[Any, ...], frozenset[str]], list[list[_File]]]:
    """Return the groups of files with weights by directory, counters and labels."""
    classes: dict[tuple[Path, tuple[Any, ...], frozenset[str]], list[list[_File]]] = {}
    roles: set[tuple[Path, tuple[str, ...]]] = set()
    for one in sorted(files, key=lambda one: not one.said.numbers):
        groups = classes.setdefault((one.folder, one.said.numbers, one.labels), [])
        group = next((held for held in groups if all(one.goes_with(other, roles) for other in held)), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
            roles |= {other.role for other in group}
    return classes

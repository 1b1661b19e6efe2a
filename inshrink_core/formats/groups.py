"""Checkpoints in several files of a directory, such as ``model_100.pt`` with ``optim_100.pt``."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from inshrink_core.checkpoint import is_average_name
from inshrink_core.errors import InputError, InshrinkError, NotCheckpointError
from inshrink_core.formats.assembly import NO_WEIGHTS, ParsedCheckpoint, Recall, assemble
from inshrink_core.formats.checkpoints import all_files, named_apart
from inshrink_core.formats.content import FileContent, read_content
from inshrink_core.formats.discovery import STEP_FOLDER, CheckpointPath, is_weight_file
from inshrink_core.formats.disk import Access, Skipped, is_dir, is_file
from inshrink_core.formats.names import RANK, Counters, counters_in, is_numbered
from inshrink_core.formats.readers import Reader

_SHARD: Final = re.compile(rf"-\d+-of-\d+|{RANK.pattern}|(?<=hf_model)_\d{{4}}(?=_)", re.IGNORECASE)
_AVERAGES: Final = frozenset({"ema", "swa"})
"""Labels of averages that are saved beside the model of a step; others name an average of several steps."""
_MODEL: Final = frozenset({"model", "net", "network", "weights", "checkpoint", "ckpt"})


class GroupReader(Reader):
    """Several files of one step in a directory that holds those of other steps, too.

    Parameters
    ----------
    members
        The files, a model's first.
    """

    name: ClassVar[str] = "files"

    def __init__(self, members: Sequence[Path]) -> None:
        self.members = tuple(members)

    def detect(self, path: Path, access: Access) -> bool:
        """Return False: a group is found among files, never by one path."""
        return False

    def open(self, path: Path, access: Access, recall: Recall | None = None) -> ParsedCheckpoint:
        """Return the checkpoint that the files are together.

        Raises
        ------
        InshrinkError
            As `read_content`, of a file with tensors.
        """
        skipped: list[Skipped] = []
        if is_dir(path):
            paths = all_files(path, access, skipped)
        else:
            root = os.path.commonpath([member.parent for member in self.members])
            paths = {member.relative_to(root).as_posix(): member for member in self.members}
        contents: dict[str, FileContent] = {}
        for member in self.members:
            name = next(name for name, one in paths.items() if one == member)
            with suppress(NotCheckpointError):
                contents[name] = read_content(member, access)
        if not contents:
            raise NotCheckpointError(NO_WEIGHTS, where=str(path))
        opaque = {name: access.admit(one) for name, one in paths.items() if name not in contents}
        return assemble(
            path,
            next(iter(contents.values())).kind,
            _apart(contents),
            paths=paths,
            opaque=opaque,
            recall=recall,
            needs_weights=False,
            skipped=skipped,
        )


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
    said = counters_in(_SHARD.sub("", name.rpartition("/")[2]))
    return next((label for label in said.labels if label in _AVERAGES), "_".join(said.words) or "model")


class _Place(NamedTuple):
    """A file's directory without ranks, what its name says, and its name without shard or rank.

    Where the name has no counter, they are those of the folder above that is called like a step.
    """

    folder: Path
    said: Counters
    name: str
    step_folder: Path | None = None

    @classmethod
    def of(cls, path: Path, root: Path) -> _Place:
        stripped = Path(_SHARD.sub("", str(path.relative_to(root))))
        said = counters_in(stripped.name)
        folders = [] if said.numbers else [one for one in stripped.parents if STEP_FOLDER.search(one.name)]
        if not folders:
            return cls(stripped.parent, said, stripped.name)
        inner = stripped.relative_to(folders[0])
        said = counters_in(folders[0].name)._replace(words=counters_in("_".join(inner.parts)).words)
        return cls(folders[0].parent, said, str(inner), root / folders[0])

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(self.said.labels) - _AVERAGES

    @property
    def key(self) -> tuple[tuple[Any, ...], frozenset[str]]:
        return self.said.numbers, self.labels


class Read(Protocol):
    """What reading a file gave: a checkpoint, or an error."""

    @property
    def parsed(self) -> ParsedCheckpoint | None:
        """The headers of the checkpoint."""

    @property
    def error(self) -> InshrinkError | None:
        """Why there are none."""


def _contents(reads: Mapping[Path, Read]) -> dict[Path, ParsedCheckpoint | None]:
    """Return the files that may be of a group; None for one without weights, such as an optimizer's."""
    files: dict[Path, ParsedCheckpoint | None] = {}
    for path, read in reads.items():
        error = read.error
        is_part = isinstance(error, InputError) and error.what == NO_WEIGHTS
        if isinstance(error, NotCheckpointError):
            is_part = bool(counters_in(path.name).numbers)
        if is_file(path) and (read.parsed is not None or is_part):
            files[path] = read.parsed
        elif is_part and not is_numbered(path.name):
            files |= {
                one: None for one in sorted(path.rglob("*")) if is_file(one) and is_weight_file(one.name)
            }
    return files


def _are_apart(one: ParsedCheckpoint, other: ParsedCheckpoint) -> bool:
    """Tell whether most weights of two files differ in name or shape."""
    first, second = one.weight_shapes, other.weight_shapes
    return 2 * len(first.items() & second.items()) < min(len(first), len(second))


def group_files(reads: Mapping[Path, Read], root: Path) -> Iterator[CheckpointPath]:
    """Yield the checkpoints that lie in several files, or in one without weights.

    Parameters
    ----------
    reads
        What reading each candidate of a run gave, in natural order.
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
    parsed = _contents(reads)
    places = {path: _Place.of(path, root) for path in parsed}
    classes = _classes(parsed, places)
    alone: dict[Path, list[Path]] = {}
    for path in (path for path, one in parsed.items() if one is None):
        place = places[path]
        near = classes.get((place.folder, *place.key), [])
        far = [found for (_, *key), found in classes.items() if tuple(key) == place.key]
        groups = near or (far[0] if len(far) == 1 else [])
        if place.said.numbers and groups:
            next((one for one in groups if _MODEL & {*places[one[0]].said.words}), groups[0]).append(path)
        elif not place.said.numbers:
            alone.setdefault(place.folder, []).append(path)
    for group in [*(group for groups in classes.values() for group in groups), *alone.values()]:
        if len(group) > 1 or parsed[group[0]] is None:
            members = sorted(group, key=lambda path: bool(_AVERAGES & {*places[path].said.labels}))
            path = places[members[0]].step_folder or members[0]
            yield CheckpointPath(path, GroupReader(members), tuple(members))


def _classes(
    parsed: Mapping[Path, ParsedCheckpoint | None], places: Mapping[Path, _Place]
) -> dict[tuple[Path, tuple[Any, ...], frozenset[str]], list[list[Path]]]:
    """Return the groups of files with weights by directory, counters and labels."""
    classes: dict[tuple[Path, tuple[Any, ...], frozenset[str]], list[list[Path]]] = {}
    roles: set[tuple[Path, tuple[str, ...]]] = set()
    with_weights = [(path, one) for path, one in parsed.items() if one is not None]
    for path, one in sorted(with_weights, key=lambda row: not places[row[0]].said.numbers):
        place = places[path]
        groups = classes.setdefault((place.folder, *place.key), [])
        for group in groups:
            others = [(places[other], parsed[other]) for other in group]
            if all(_go_together(place, one, *other, roles) for other in others):
                group.append(path)
                roles |= {(places[other].folder, places[other].said.words) for other in group}
                break
        else:
            groups.append([path])
    return classes


def _go_together(
    place: _Place,
    one: ParsedCheckpoint,
    other_place: _Place,
    other: ParsedCheckpoint | None,
    roles: Set[tuple[Path, tuple[str, ...]]],
) -> bool:
    """Tell whether two files of one directory with the same counters are of one checkpoint."""
    if place.name == other_place.name:
        return True  # shards
    if other is None:
        return False
    if not place.said.numbers:
        both = ((place.folder, place.said.words), (other_place.folder, other_place.said.words))
        return bool(place.labels) and roles >= {*both}
    if place.step_folder is not None:
        return _are_apart(one, other)
    if place.said.words == other_place.said.words and place.said.labels == other_place.said.labels:
        return _are_apart(one, other)
    return not place.labels

"""Select the checkpoints below a path: group files, number the steps, and name the others.

Some checkpoints consist of several files in a directory, such as ``model_100.pt`` with ``optim_100.pt``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import chain, compress
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from inshrink_core.checkpoint import is_average_name
from inshrink_core.errors import InputError, NotCheckpointError
from inshrink_core.execution.mirror import mirror_of
from inshrink_core.formats.assembly import NO_WEIGHTS, ParsedCheckpoint
from inshrink_core.formats.checkpoints import Contents, FilesReader, named_apart
from inshrink_core.formats.content import FileContent, read_content
from inshrink_core.formats.discovery import STEP_FOLDER, Found, is_weight_file
from inshrink_core.formats.disk import Access, Fate, Skipped, is_dir, is_file
from inshrink_core.formats.names import (
    RANK,
    Name,
    is_numbered,
    name_shape,
    read_name,
    stem_of,
    step_by_pattern,
)
from inshrink_core.formats.order import Evidence, order_checkpoints

_SHARD: Final = re.compile(rf"-\d+-of-\d+|{RANK.pattern}|(?<=hf_model)_\d{{4}}(?=_)", re.IGNORECASE)
_AVERAGES: Final = frozenset({"ema", "swa"})
"""Labels of averages saved beside the model of a step; other labels name an average of several steps."""
_MODEL: Final = frozenset({"model", "net", "network", "weights", "checkpoint", "ckpt"})


class GroupReader(FilesReader):
    """Reads several files of one step in a directory shared with other steps.

    Parameters
    ----------
    members
        The files, with those of a model first.
    """

    name: ClassVar[str] = "files"
    needs_weights: ClassVar[bool] = False

    def __init__(self, members: Sequence[Path]) -> None:
        self.members = tuple(members)

    def detect(self, path: Path, access: Access) -> bool:
        """Return False: groups are found among files, never by a single path."""
        return False

    def paths(self, path: Path, access: Access, skipped: list[Skipped]) -> dict[str, Path]:
        """Return the members, or all files in the folder of a step."""
        if is_dir(path):
            return super().paths(path, access, skipped)
        root = os.path.commonpath([member.parent for member in self.members])
        return {member.relative_to(root).as_posix(): member for member in self.members}

    def contents(self, path: Path, paths: dict[str, Path], access: Access) -> Contents:
        """Return the content of the members, with prefixed names for several models."""
        names = {member: name for name, member in paths.items()}
        contents: dict[str, FileContent] = {}
        for member in self.members:
            with suppress(NotCheckpointError):
                contents[names[member]] = read_content(member, access)
        if not contents:
            raise NotCheckpointError(NO_WEIGHTS, where=str(path))
        return Contents(_apart(contents), next(iter(contents.values())).kind)


def _apart(contents: Mapping[str, FileContent]) -> dict[str, FileContent]:
    """Prefix the tensors of several models; a model beside its average keeps its names."""
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
            prefix = f"{shard[0].strip('._-')}."
            content = content._replace(tree=content.tree.prefixed(prefix))
        taken |= tensors
        found[name] = content
    return found


def _prefix(name: str) -> str:
    """Return the prefix of a file's model: an average's label, or the words of the file's name."""
    name_read = read_name(_SHARD.sub("", name.rpartition("/")[2]))
    averages = (label for label in name_read.labels if label in _AVERAGES)
    return next(averages, "_".join(name_read.words) or "model")


class _File(NamedTuple):
    """A file that may belong to a group: the content of its name, and its headers.

    If the name has no counter, the name of the nearest step folder above provides it (`step_folder`).
    `folder` and `name` omit ranks; `parsed` is None for a file without weights.
    """

    path: Path
    parsed: ParsedCheckpoint | None
    folder: Path
    name: str
    reading: Name
    step_folder: Path | None = None

    @classmethod
    def of(cls, path: Path, parsed: ParsedCheckpoint | None, root: Path) -> _File:
        stripped = Path(_SHARD.sub("", str(path.relative_to(root))))
        name_read = read_name(stripped.name)
        folders = [parent for parent in stripped.parents if STEP_FOLDER.search(parent.name)]
        if name_read.numbers or not folders:
            return cls(path, parsed, stripped.parent, stripped.name, name_read)
        inner = stripped.relative_to(folders[0])
        name_read = read_name(folders[0].name)._replace(words=read_name("_".join(inner.parts)).words)
        return cls(path, parsed, folders[0].parent, str(inner), name_read, root / folders[0])

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(self.reading.labels) - _AVERAGES

    @property
    def role(self) -> tuple[Path, tuple[str, ...]]:
        return self.folder, self.reading.words

    def goes_with(self, other: _File, roles: Set[tuple[Path, tuple[str, ...]]]) -> bool:
        """Return whether two files with equal counters in one directory belong to one checkpoint."""
        if self.name == other.name:
            return True  # shards
        if not self.reading.numbers:
            return bool(self.labels) and roles >= {self.role, other.role}
        is_alike = (self.reading.words, self.reading.labels) == (other.reading.words, other.reading.labels)
        if self.step_folder is None and not is_alike:
            return not self.labels
        first, second = (item.parsed.weight_shapes if item.parsed else {} for item in (self, other))
        return 2 * len(first.items() & second.items()) < min(len(first), len(second))


def _files(found: Iterable[Found], root: Path) -> Iterator[_File]:
    """Yield the files that may belong to a group."""
    for candidate in found:
        path, error = candidate.path, candidate.error
        is_part = isinstance(error, InputError) and error.what == NO_WEIGHTS
        if isinstance(error, NotCheckpointError):
            is_part = bool(read_name(path.name).numbers)
        if is_file(path) and (candidate.parsed is not None or is_part):
            yield _File.of(path, candidate.parsed, root)
        elif is_part and not is_numbered(path.name):
            for inner in sorted(path.rglob("*")):
                if is_file(inner) and is_weight_file(inner.name):
                    yield _File.of(inner, None, root)


def group_files(found: Iterable[Found], root: Path) -> Iterator[Found]:
    """Yield the checkpoints that consist of several files, or of one without weights.

    Parameters
    ----------
    found
        The candidates of a run, already read, in natural order.
    root
        The run.

    Notes
    -----
    Files of one directory with equal counters and labels in their names form a group if their
    other words differ, as in ``G_100.pth`` and ``D_100.pth``; so do different models below a folder named
    like a step. Shards form a group. Files without a counter form one if their words match those of numbered
    groups. A file without weights joins the files with its counters, in its directory or in the only one that
    has some; without counters, such files form their own group.
    """
    files = list(_files(found, root))
    classes = _classes([file for file in files if file.parsed is not None])
    alone: dict[Path, list[_File]] = {}
    for file in files:
        if file.parsed is not None:
            continue
        key = file.reading.numbers, file.labels
        near = classes.get((file.folder, *key), [])
        far = [groups for (_, *other), groups in classes.items() if tuple(other) == key]
        groups = near or (far[0] if len(far) == 1 else [])
        if file.reading.numbers and groups:
            next((group for group in groups if _MODEL & {*group[0].reading.words}), groups[0]).append(file)
        elif not file.reading.numbers:
            alone.setdefault(file.folder, []).append(file)
    for group in [*(group for groups in classes.values() for group in groups), *alone.values()]:
        if len(group) > 1 or group[0].parsed is None:
            members = sorted(group, key=lambda file: bool(_AVERAGES & {*file.reading.labels}))
            paths = tuple(member.path for member in members)
            yield Found(members[0].step_folder or paths[0], GroupReader(paths), paths)


def _classes(files: list[_File]) -> dict[tuple[Path, tuple[Any, ...], frozenset[str]], list[list[_File]]]:
    """Return the groups of files with weights, by directory, counters and labels."""
    classes: dict[tuple[Path, tuple[Any, ...], frozenset[str]], list[list[_File]]] = {}
    roles: set[tuple[Path, tuple[str, ...]]] = set()
    for file in sorted(files, key=lambda unread: not unread.reading.numbers):
        groups = classes.setdefault((file.folder, file.reading.numbers, file.labels), [])
        fitting = (group for group in groups if all(file.goes_with(other, roles) for other in group))
        group = next(fitting, None)
        if group is None:
            groups.append([file])
        else:
            group.append(file)
            roles |= {other.role for other in group}
    return classes


_BESIDE: Final = frozenset(
    {"best", "optimal", "last", "latest", "final", "finished", "lowest", "highest"}
    | {"avg", "average", "averaged", "ave"}
)
"""Words in the names of checkpoints that are no steps."""


class Named(NamedTuple):
    """A named checkpoint beside the steps.

    Parameters
    ----------
    name
        Its name, unique in the run.
    step
        The step that it belongs to.
    parsed
        Its headers.
    """

    name: str
    step: int
    parsed: ParsedCheckpoint


class Selection(NamedTuple):
    """The steps of a run, its named checkpoints, and a sentence about the origin of the order."""

    by_step: dict[int, ParsedCheckpoint]
    named: tuple[Named, ...]
    origin: str


def are_other_models(first: ParsedCheckpoint, second: ParsedCheckpoint) -> bool:
    """Return whether two checkpoints are of different models: they share few names, or hardly any shape."""
    if first.specs == second.specs:
        return False
    shapes, others = first.weight_shapes, second.weight_shapes
    common = shapes.keys() & others.keys()
    n_smaller = min(len(shapes), len(others))
    n_same = sum(shapes[name] == others[name] for name in common)
    return 2 * len(common) < n_smaller or (n_smaller >= 4 and 4 * n_same < len(common))


def main_model(
    parsed: Sequence[ParsedCheckpoint], skipped: list[Skipped]
) -> tuple[list[ParsedCheckpoint], list[ParsedCheckpoint]]:
    """Return the checkpoints of the most frequent model, and those without weights; record the others.

    Raises
    ------
    InputError
        Two models have equally many checkpoints.
    """
    partial = [checkpoint for checkpoint in parsed if not checkpoint.weight_shapes]
    models: list[list[ParsedCheckpoint]] = []
    for checkpoint in (item for item in parsed if item.weight_shapes):
        model = next((model for model in models if not are_other_models(model[0], checkpoint)), None)
        if model is None:
            models.append(model := [])
        model.append(checkpoint)

    def merit(model: Sequence[ParsedCheckpoint]) -> tuple[int, int]:
        numbered = sum(bool(item.steps) or is_numbered(item.path.name) for item in model)
        return numbered, -min(len(item.path.parts) for item in model)

    models.sort(key=merit, reverse=True)
    if len(models) > 1 and merit(models[0]) == merit(models[1]):
        first, second = models[0][0].path, models[1][0].path
        what = f"two different models in one run: '{first}' and '{second}' share few weights"
        remedy = "name the checkpoints of one with a glob, such as 'runs/model-a-*.pt'"
        raise InputError(what, where=os.path.commonpath([first, second]), remedy=remedy)
    reason = "most names or shapes of its weights are those of another model"
    series = {(item.path.parent, name_shape(item.path.name)) for item in models[0]} if models else set()
    for item in chain.from_iterable(models[1:]):
        is_step = (item.path.parent, name_shape(item.path.name)) in series
        fate = Fate.LEFT_OUT if is_step else Fate.OTHER_MODEL
        skipped += [Skipped(path, reason, fate) for path in _paths([item])]
    return (models[0] if models else []), partial


def _paths(parsed: Iterable[ParsedCheckpoint]) -> Iterator[str]:
    """Yield the paths of directory checkpoints, and the files of others."""
    for checkpoint in parsed:
        yield from map(str, [checkpoint.path] if is_dir(checkpoint.path) else checkpoint.paths.values())


def by_pattern(parsed: Sequence[ParsedCheckpoint], pattern: str, skipped: list[Skipped]) -> Selection:
    """Return the checkpoints numbered by a step pattern."""
    by_step: dict[int, ParsedCheckpoint] = {}
    for item in parsed:
        step = step_by_pattern(item.path.name, pattern)
        if step is not None and by_step.setdefault(step, item) is item:
            continue
        reason, fate = f"its name does not match the step pattern '{pattern}'", Fate.EXCLUDED
        if step is not None:
            reason, fate = f"step {step} is in {by_step[step].path.name} already", Fate.LEFT_OUT
        skipped += [Skipped(path, reason, fate) for path in _paths([item])]
    return Selection(by_step, (), "steps come from the pattern given")


def by_evidence(
    parsed: Sequence[ParsedCheckpoint], partial: Sequence[ParsedCheckpoint], root: Path
) -> Selection:
    """Return the checkpoints of one model, ordered by their names and keys."""
    above = _above(parsed)
    of_run = [checkpoint for checkpoint in parsed if id(checkpoint) not in above]
    is_main = _on_main_line([entry.path.name for entry in of_run])
    evidence = []
    for entry in compress(of_run, is_main):
        mtime_ns = None if mirror_of(root) else max(stamp.mtime_ns for stamp in entry.stamps.values())
        evidence.append(Evidence(_inside(entry.path, root), entry.steps, mtime_ns))
    placements, origin = order_checkpoints(evidence)
    rows = iter(placements)
    by_step: dict[int, ParsedCheckpoint] = {}
    beside: list[tuple[int | None, ParsedCheckpoint]] = [(None, entry) for entry in partial]
    for item, main in zip(of_run, is_main, strict=True):
        step, is_step = next(rows) if main else (next((step for _, step in item.steps), None), False)
        if is_step and step is not None and step not in by_step:
            by_step[step] = item
        else:
            beside.append((step, item))
    last = max(by_step, default=0)
    named = [Named(_branch_name(entry), last if step is None else step, entry) for step, entry in beside]
    step_of = {id(entry): step for step, entry in by_step.items()}
    for entry in parsed:
        if id(entry) in above:
            twin = step_of.get(id(above[id(entry)]))
            named.append(Named(_inside(entry.path, root), last if twin is None else twin, entry))
    taken = Counter(entry.name for entry in named)
    for at, branch in enumerate(named):
        if taken[branch.name] > 1:
            named[at] = branch._replace(name=_inside(branch.parsed.path, root))
    return Selection(by_step, tuple(named), origin)


def _above(parsed: Sequence[ParsedCheckpoint]) -> dict[int, ParsedCheckpoint]:
    """Return checkpoints of equal name, keys and sizes in a folder above, by the id of the lower one."""
    first: dict[object, ParsedCheckpoint] = {}
    found = {}
    for checkpoint in sorted(parsed, key=lambda item: len(item.path.parts)):
        sizes = tuple(sorted((name, stamp.nbytes) for name, stamp in checkpoint.stamps.items()))
        twin = first.setdefault((checkpoint.path.name, checkpoint.steps, sizes), checkpoint)
        if twin.path.parent in checkpoint.path.parent.parents:
            found[id(checkpoint)] = twin
    return found


def _on_main_line(names: Sequence[str]) -> list[bool]:
    """Return which names are steps; labels such as best and last exclude a checkpoint."""
    is_step = [not _BESIDE & {*read_name(name).labels} for name in names]
    if not any(is_numbered(name) for name, found in zip(names, is_step, strict=True) if found):
        is_step = [found or is_numbered(name) for name, found in zip(names, is_step, strict=True)]
    return is_step if any(is_step) else [True] * len(names)


def _branch_name(parsed: ParsedCheckpoint) -> str:
    labels = read_name(parsed.path.name).labels
    is_group = len(parsed.paths) > 1 and parsed.path in parsed.paths.values()
    stem = parsed.path.name if is_dir(parsed.path) else stem_of(parsed.path.name)
    return labels[0] if is_group and labels else stem


def _inside(path: Path, root: Path) -> str:
    """Return a POSIX path relative to the run; for the run itself, its name."""
    if path == root:
        return path.name
    return os.path.relpath(path, root if is_dir(root) else root.parent).replace(os.sep, "/")

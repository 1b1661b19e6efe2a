"""Checkpoints in several files of a directory, such as ``model_100.pt`` with ``optim_100.pt``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from inshrink_core.errors import NotCheckpointError
from inshrink_core.formats.assembly import ParsedCheckpoint, Recall, assemble
from inshrink_core.formats.content import FileContent, read_content
from inshrink_core.formats.discovery import CheckpointPath
from inshrink_core.formats.disk import Access
from inshrink_core.formats.readers import Reader

_SUFFIXES: Final = re.compile(r"(\.[a-z]\w*)+$", re.IGNORECASE)
_SHARD: Final = re.compile(
    r"-\d+-of-\d+|[._-]?(mp|dp|tp|pp|zero|local)?_?(pp_)?rank[._-]?\d+([._-]\d+)*", re.IGNORECASE
)
_DECIMAL: Final = re.compile(r"\d+\.\d+(e-?\d+)?")
_NUMBER: Final = re.compile(r"\d{1,18}")
_AVERAGE: Final = re.compile(r"(^|[^a-z])(ema|avg|averaged?|swa)([^a-z]|$)", re.IGNORECASE)
_MODEL: Final = re.compile(r"(^|[^a-z])(model|net|network|weights|checkpoint|ckpt)([^a-z]|$)", re.IGNORECASE)


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
        contents: dict[str, FileContent] = {}
        opaque = {}
        for member in self.members:
            try:
                contents[member.name] = read_content(member, access)
            except NotCheckpointError:
                opaque[member.name] = access.admit(member)
        paths = {member.name: member for member in self.members}
        return assemble(
            path,
            next(iter(contents.values())).kind,
            _apart(contents),
            paths=paths,
            opaque=opaque,
            recall=recall,
            needs_weights=False,
        )


def _apart(contents: Mapping[str, FileContent]) -> dict[str, FileContent]:
    """Give the tensors of a second model a prefix where its names are those of the first."""
    taken: set[str] = set()
    found = {}
    for name, content in contents.items():
        model = content.tree.model
        names = {tensor for tensor, _ in model}
        if names & taken and not _SHARD.search(name):
            word = _word(name)
            model = [(f"{word}.{tensor}", place) for tensor, place in model]
            content = content._replace(tree=content.tree._replace(model=model))
        taken |= {tensor for tensor, _ in model}
        found[name] = content
    return found


def _word(name: str) -> str:
    """Return a file's name without numbers and suffixes: the name of the model in it."""
    if _AVERAGE.search(name):
        return "ema"
    return re.sub(r"[._-]*\d+[._-]*", "_", _SUFFIXES.sub("", name)).strip("._-") or "model"


def counters(name: str) -> tuple[int, ...]:
    """Return the integers in a file's name that may count steps: no shards, ranks or decimals.

    Examples
    --------
    >>> counters("ema_0.9999_010000.pt"), counters("optim_000100_rank3.pt"), counters("10_net_G_A.pth")
    ((10000,), (100,), (10,))
    """
    stem = _DECIMAL.sub("", _SHARD.sub("", _SUFFIXES.sub("", name)))
    return tuple(int(number) for number in _NUMBER.findall(stem))


def group_files(
    parsed: Mapping[Path, ParsedCheckpoint | None],
    differ: Callable[[ParsedCheckpoint, ParsedCheckpoint], bool],
) -> Iterator[CheckpointPath]:
    """Yield the groups among files of one directory.

    Parameters
    ----------
    parsed
        The files in natural order; None for one without weights, such as that of an optimizer.
    differ
        Whether two checkpoints are of different models.

    Notes
    -----
    Files with the same counters in their names are a group if their models differ, if one is the moving
    average of the other, or if they are shards. A file without weights joins the group of its counters, if
    there is one; without counters, such files are a group of their own.
    """
    classes: dict[tuple[int, ...], list[Path]] = {}
    for path in parsed:
        classes.setdefault(counters(path.name), []).append(path)
    for numbers, paths in classes.items():
        groups: list[list[Path]] = []
        for path in paths:
            one = parsed[path]
            if one is None:
                continue
            fits = (
                group
                for group in groups
                if all(_go_together(path, one, other, parsed[other], differ, numbers) for other in group)
            )
            group = next(fits, None)
            if group is None:
                groups.append([path])
            else:
                group.append(path)
        parts = [path for path in paths if parsed[path] is None]
        if parts and not numbers:
            groups.append(parts)
        elif parts and groups:
            next((group for group in groups if _MODEL.search(group[0].name)), groups[0]).extend(parts)
        for group in groups:
            if len(group) > 1 or parsed[group[0]] is None:
                members = sorted(group, key=lambda path: bool(_AVERAGE.search(path.name)))
                yield CheckpointPath(members[0], GroupReader(members), tuple(members))


def _go_together(
    path: Path,
    one: ParsedCheckpoint,
    other_path: Path,
    other: ParsedCheckpoint | None,
    differ: Callable[[ParsedCheckpoint, ParsedCheckpoint], bool],
    numbers: tuple[int, ...],
) -> bool:
    if _SHARD.search(path.name) and _SHARD.sub("", path.name) == _SHARD.sub("", other_path.name):
        return True
    if not numbers or other is None:
        return False
    if bool(_AVERAGE.search(path.name)) != bool(_AVERAGE.search(other_path.name)):
        return True
    return differ(one, other)

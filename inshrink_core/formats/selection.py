"""Which checkpoints below a path are the steps of the run, and which lie beside them under other names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from operator import and_, or_
from pathlib import Path
from typing import Final, NamedTuple

from inshrink_core.errors import InputError
from inshrink_core.execution.mirror import mirror_of
from inshrink_core.formats.assembly import ParsedCheckpoint
from inshrink_core.formats.disk import Fate, Skipped, is_dir
from inshrink_core.formats.names import is_numbered, read_name, stem_of
from inshrink_core.formats.order import Evidence, order_checkpoints
from inshrink_core.formats.step_pattern import compile_step_pattern, steps_by_pattern

_BESIDE: Final = frozenset(
    {"best", "optimal", "last", "latest", "final", "finished", "lowest", "highest"}
    | {"avg", "average", "averaged", "ave"}
)
"""Words in the names of checkpoints that are no steps."""


class Named(NamedTuple):
    """A checkpoint beside the steps.

    Parameters
    ----------
    name
        Its name, unique in the run.
    step
        The step that it belongs to.
    parsed
        Its headers.
    above
        Step of the file with the same name and size that lies in a folder above, as of a restored copy.
    """

    name: str
    step: int
    parsed: ParsedCheckpoint
    above: int | None = None


class Selection(NamedTuple):
    """The steps of a run, its checkpoints beside them, and a sentence on where the order comes from."""

    by_step: dict[int, ParsedCheckpoint]
    named: tuple[Named, ...]
    origin: str


def are_other_models(one: ParsedCheckpoint, other: ParsedCheckpoint) -> bool:
    """Tell two models from two states of one: few common names, or hardly a common shape."""
    if one.specs == other.specs:
        return False
    first, second = one.weight_shapes, other.weight_shapes
    common = first.keys() & second.keys()
    n_smaller = min(len(first), len(second))
    n_same = sum(first[name] == second[name] for name in common)
    return 2 * len(common) < n_smaller or (n_smaller >= 4 and 4 * n_same < len(common))


def main_model(
    parsed: Sequence[ParsedCheckpoint], skipped: list[Skipped]
) -> tuple[list[ParsedCheckpoint], list[ParsedCheckpoint]]:
    """Return the checkpoints of the model that most are of, and those without weights; name the others.

    Raises
    ------
    InputError
        Two models have as many checkpoints.
    """
    partial = [one for one in parsed if not one.weight_shapes]
    models: list[list[ParsedCheckpoint]] = []
    for one in parsed:
        if not one.weight_shapes:
            continue
        model = next((model for model in models if not are_other_models(model[0], one)), None)
        if model is None:
            models.append([one])
        else:
            model.append(one)

    def merit(model: Sequence[ParsedCheckpoint]) -> tuple[int, int]:
        numbered = sum(bool(one.steps) or is_numbered(one.path.name) for one in model)
        return numbered, -min(len(one.path.parts) for one in model)

    models.sort(key=merit, reverse=True)
    if len(models) > 1 and merit(models[0]) == merit(models[1]):
        first, second = models[0][0].path, models[1][0].path
        raise InputError(
            f"two different models in one run: '{first}' and '{second}' share few weights",
            where=os.path.commonpath([first, second]),
            remedy="name the checkpoints of one with a glob, such as 'runs/model-a-*.pt'",
        )
    reason = "most names or shapes of its weights are those of another model"
    skipped += [Skipped(path, reason, Fate.OTHER_MODEL) for model in models[1:] for path in _paths(model)]
    return (models[0] if models else []), partial


def _paths(parsed: Iterable[ParsedCheckpoint]) -> Iterator[str]:
    """Yield the directories that are checkpoints, and the files of others."""
    for one in parsed:
        yield from map(str, [one.path] if is_dir(one.path) else one.paths.values())


def by_pattern(parsed: Sequence[ParsedCheckpoint], pattern: str, skipped: list[Skipped]) -> Selection:
    """Return the checkpoints that a step pattern numbers."""
    by_step: dict[int, ParsedCheckpoint] = {}
    matches = compile_step_pattern(pattern).search
    for row, item in zip(steps_by_pattern([p.path.name for p in parsed], pattern), parsed, strict=True):
        if row.step is not None:
            by_step[row.step] = item
        else:
            fate = Fate.LEFT_OUT if matches(row.name) else Fate.EXCLUDED
            skipped += [Skipped(path, row.reason, fate) for path in _paths([item])]
    return Selection(by_step, (), "steps come from the pattern given")


def by_evidence(
    parsed: Sequence[ParsedCheckpoint], partial: Sequence[ParsedCheckpoint], root: Path
) -> Selection:
    """Return the checkpoints of one model in the order of their names and keys."""
    above = _above(parsed)
    of_run = [one for one in parsed if id(one) not in above]
    is_main = _on_main_line([one.path.name for one in of_run])
    evidence = []
    for one in compress(of_run, is_main):
        mtime_ns = None if mirror_of(root) else max(stamp.mtime_ns for stamp in one.stamps.values())
        evidence.append(Evidence(_inside(one.path, root), one.steps, mtime_ns))
    placements, origin = order_checkpoints(evidence)
    rows = iter(placements)
    by_step: dict[int, ParsedCheckpoint] = {}
    beside: list[tuple[int | None, ParsedCheckpoint]] = [(None, one) for one in partial]
    for item, main in zip(of_run, is_main, strict=True):
        step, is_step = next(rows) if main else (next((step for _, step in item.steps), None), False)
        if is_step and step is not None and step not in by_step:
            by_step[step] = item
        else:
            beside.append((step, item))
    last = max(by_step, default=0)
    named = [Named(_branch_name(one), last if step is None else step, one) for step, one in beside]
    step_of = {id(one): step for step, one in by_step.items()}
    for one in parsed:
        if id(one) in above:
            twin = step_of.get(id(above[id(one)]))
            named.append(Named(_inside(one.path, root), last if twin is None else twin, one, twin))
    taken = Counter(one.name for one in named)
    renamed = (
        one if taken[one.name] == 1 else one._replace(name=_inside(one.parsed.path, root)) for one in named
    )
    return Selection(by_step, tuple(renamed), origin)


def _above(parsed: Sequence[ParsedCheckpoint]) -> dict[int, ParsedCheckpoint]:
    """Return checkpoints of the same name, keys and sizes in a folder above, by the id of the lower one."""
    first: dict[object, ParsedCheckpoint] = {}
    found = {}
    for one in sorted(parsed, key=lambda one: len(one.path.parts)):
        sizes = tuple(sorted((name, stamp.nbytes) for name, stamp in one.stamps.items()))
        twin = first.setdefault((one.path.name, one.steps, sizes), one)
        if twin.path.parent in one.path.parent.parents:
            found[id(one)] = twin
    return found


def _on_main_line(names: Sequence[str]) -> list[bool]:
    """Tell steps from checkpoints whose names say that they are none, such as best and last."""
    numbered = list(map(is_numbered, names))
    is_main = [not _BESIDE & {*read_name(name).labels} for name in names]
    if not any(map(and_, is_main, numbered)):
        is_main = list(map(or_, is_main, numbered))
    return is_main if any(is_main) else [True] * len(names)


def _branch_name(parsed: ParsedCheckpoint) -> str:
    labels = read_name(parsed.path.name).labels
    is_group = len(parsed.paths) > 1 and parsed.path in parsed.paths.values()
    stem = parsed.path.name if is_dir(parsed.path) else stem_of(parsed.path.name)
    return labels[0] if is_group and labels else stem


def _inside(path: Path, root: Path) -> str:
    """Return a path relative to the run, with ``/``; of the run itself, its name."""
    if path == root:
        return path.name
    return os.path.relpath(path, root if is_dir(root) else root.parent).replace(os.sep, "/")

"""What moved between two steps: per tensor, by layer type, and altogether."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from inshrink_core.analysis.movement import Movement, measure_movement
from inshrink_core.chain import Archive
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorRole, TensorSpec
from inshrink_core.errors import InputError, StorageError
from inshrink_core.execution import resolve_device
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.formats import Run
from inshrink_core.report import Report
from inshrink_core.verbs.restore import open_any

__all__ = ["StepDiff", "TensorMovement", "diff"]

_NOT_COUNTERS = ("float", "bfloat", "complex")
"""How the names of dtypes begin whose values are learned or estimated."""


class TensorMovement(NamedTuple):
    """One tensor and how far it moved."""

    spec: TensorSpec
    movement: Movement


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDiff(Report):
    """What moved between two steps.

    Parameters
    ----------
    path
        The run or archive.
    steps
        The two steps.
    tensors
        Tensors of one shape and dtype in both, by falling relative movement; integers, which count, last.
    added, removed, reshaped
        Keys of tensors that only the second or only the first has, or whose shape or dtype is another.
    device
        Where the steps of an archive were decoded.
    """

    path: str
    steps: tuple[int, int]
    tensors: tuple[TensorMovement, ...]
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    device: str = "cpu"

    DOCUMENT: ClassVar = "path steps total layers tensors added removed reshaped device"

    @property
    def total(self) -> Movement:
        """The movement of all weights together."""
        return _sum(row.movement for row in self.tensors if row.spec.role is TensorRole.WEIGHT)

    @property
    def layers(self) -> Mapping[str, Movement]:
        """The movement by layer type of weights, and by role of everything else."""
        groups: dict[str, Movement] = {}
        for spec, movement in self.tensors:
            layer = spec.layer.value if spec.layer and spec.role is TensorRole.WEIGHT else spec.role.value
            groups[layer] = groups.get(layer, Movement()) + movement
        return dict(sorted(groups.items(), key=lambda item: _order(item[0], item[1])))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row a tensor, for a table or a CSV file."""
        return [
            {
                "key": spec.key,
                "role": spec.role.value,
                "layer": spec.layer.value if spec.layer else None,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                **movement.to_json(),
            }
            for spec, movement in self.tensors
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink diff --json``."""
        return Report.to_json(self) | {"tensors": self.rows()}

    def write_csv(self, path: Path) -> None:
        """Write a row a tensor; a file that is there is replaced once the new one is whole.

        Raises
        ------
        StorageError
            The disk is full, or refuses.
        """
        rows = [row | {"shape": "x".join(map(str, row["shape"]))} for row in self.rows()]
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["key"])
                writer.writeheader()
                writer.writerows(rows)
            temporary.replace(path)
        except OSError as error:
            raise StorageError(
                f"the table cannot be written: {error.strerror or os.strerror(0)}", where=str(path)
            ) from error


def _sum(movements: Iterable[Movement]) -> Movement:
    total = Movement()
    for movement in movements:
        total += movement
    return total


def _order(name: str, movement: Movement) -> tuple[float, str]:
    """Order by falling relative movement; from zero to something counts as the most."""
    return (-math.inf if movement.relative is None else -movement.relative, name)


def _rank(row: TensorMovement) -> tuple[bool, tuple[float, str]]:
    """Order as above, but counters behind all else: they say nothing about learning."""
    return (not row.spec.dtype.startswith(_NOT_COUNTERS), _order(row.spec.key, row.movement))


def diff(
    run: Run | Archive | str | os.PathLike[str],
    *,
    steps: tuple[int, int] | None = None,
    everything: bool = False,
    device: str = "auto",
    progress: OnProgress | None = None,
) -> StepDiff:
    """Measure what moved between two steps of a run or an archive.

    Parameters
    ----------
    run
        A run or an archive, or its path.
    steps
        The two steps; by default the last two.
    everything
        Measure the optimizer's state too, not weights and buffers alone.
    device
        Where the steps of an archive are decoded: ``auto``, ``cpu`` or ``cuda``.
    progress
        Called after each tensor.

    Raises
    ------
    NotFoundError
        There is no such step.
    InputError
        There are no two steps.

    Notes
    -----
    Reads both steps once, tensor by tensor; memory is bounded by a few copies of the largest.

    Examples
    --------
    >>> import inshrink_core
    >>> moved = inshrink_core.verbs.diff(inshrink_core.sample("digits-cnn"), steps=(200, 400))
    >>> moved.total.changed > 0.9
    True
    """
    opened = run if isinstance(run, Run | Archive) else open_any(run)
    device = resolve_device(device if isinstance(opened, Archive) else "cpu")
    if isinstance(opened, Archive):
        opened = opened.on(device)
    where = opened.reader.path if isinstance(opened, Archive) else str(opened.path)
    if steps is None:
        known = opened.listed_steps if isinstance(opened, Archive) else opened.steps
        if len(known) < 2:
            raise InputError("it takes two steps to tell what moved", where=where)
        steps = (known[-2], known[-1])
    if steps[0] == steps[1]:
        raise InputError(
            f"step {steps[0]} against itself moves nothing", where=where, remedy="name two steps"
        )
    before, after = opened[steps[0]], opened[steps[1]]
    chosen = _specs(before, everything)
    other = _specs(after, everything)
    common = [spec for key, spec in chosen.items() if key in other and _alike(spec, other[key])]
    total, done = sum(spec.nbytes for spec in common), 0
    rows = []
    for spec in common:
        rows.append(TensorMovement(spec, measure_movement(before.source.read(spec), after[spec.key], spec)))
        done += spec.nbytes
        if progress is not None:
            progress(Progress("diff", done, total, steps[1], spec.key))
    return StepDiff(
        path=where,
        steps=steps,
        tensors=tuple(sorted(rows, key=_rank)),
        added=tuple(key for key in other if key not in chosen),
        removed=tuple(key for key in chosen if key not in other),
        reshaped=tuple(key for key, spec in chosen.items() if key in other and not _alike(spec, other[key])),
        device=device,
    )


def _specs(checkpoint: Checkpoint, everything: bool) -> dict[str, TensorSpec]:
    return {spec.key: spec for spec in checkpoint.specs if everything or spec.role in MODEL_ROLES}


def _alike(spec: TensorSpec, other: TensorSpec) -> bool:
    return (spec.shape, spec.dtype) == (other.shape, other.dtype)

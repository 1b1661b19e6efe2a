"""What moved between two steps: per tensor, by layer type, and altogether."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple

from inshrink_core.errors import InputError, StorageError
from inshrink_core.execution.progress import Progress
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.text import count, csv_cell, error_size, plain, printable
from inshrink_core.verbs.shared.groups import OnDevice, Opening, PathLike, RunOrArchive, chosen_steps
from inshrink_core.verbs.shared.showing import show_table

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.analysis.movement import Movement
    from inshrink_core.chain import Archive
    from inshrink_core.checkpoint import Checkpoint, TensorSpec
    from inshrink_core.formats import Run

__all__ = ["Diff", "StepDiff", "TensorMovement", "diff"]

_NOT_COUNTERS = ("float", "bfloat", "complex")
"""How the names of dtypes begin whose values are learned or estimated."""

_MOST_ROWS: Final = 40
_COLUMNS: Final = ("moved", "largest", "cosine", "values", "bits")


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
    most_rows
        How many tensors are shown; None: all.
    """

    path: str
    steps: tuple[int, int]
    tensors: tuple[TensorMovement, ...]
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    device: str = "cpu"
    most_rows: int | None = None

    SAYS: ClassVar = "path steps total layers tensors added removed reshaped device"

    @property
    def total(self) -> Movement:
        """The movement of all weights together."""
        from inshrink_core.checkpoint import TensorRole

        return _sum(row.movement for row in self.tensors if row.spec.role is TensorRole.WEIGHT)

    @property
    def layers(self) -> Mapping[str, Movement]:
        """The movement by layer type of weights, and by role of everything else."""
        from inshrink_core.analysis.movement import Movement
        from inshrink_core.checkpoint import TensorRole

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
        from inshrink_core.execution import new_file

        rows = [row | {"shape": "x".join(map(str, row["shape"]))} for row in self.rows()]
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with io.TextIOWrapper(new_file(temporary), encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["key"])
                writer.writeheader()
                writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
            temporary.replace(path)
        except OSError as error:
            raise StorageError(
                f"the table cannot be written: {error.strerror or os.strerror(0)}", where=str(path)
            ) from error

    def show(self, console: Console) -> None:
        """Print layer types, then tensors, the most moved first."""
        layers = {**self.layers, "all weights": self.total}
        rows = [_cells(name, movement.to_json()) for name, movement in layers.items()]
        show_table(console, (f"layer type, step {self.steps[0]} to {self.steps[1]}", *_COLUMNS), rows)
        console.print()
        tensors = self.rows()
        shown = tensors[: self.most_rows]
        show_table(console, ("tensor", *_COLUMNS), (_cells(printable(row["key"]), row) for row in shown))
        if len(shown) < len(tensors):
            rest = count(len(tensors) - len(shown))
            console.print(f"… and {rest} tensors that moved less; --all shows them")
        named = (("new", self.added), ("gone", self.removed), ("of another shape", self.reshaped))
        for what, keys in named:
            if keys:
                console.print(printable(f"{what}: {', '.join(keys)}"), soft_wrap=True)


def _cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return relative movement, largest one, cosine, and shares of values and bits that changed."""
    return (
        name,
        error_size(row["relative"]),
        error_size(row["max_abs"]),
        plain(row["cosine"]),
        f"{100 * row['changed']:.1f} %",
        f"{100 * row['bits_changed']:.1f} %",
    )


def _sum(movements: Iterable[Movement]) -> Movement:
    from inshrink_core.analysis.movement import Movement

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


@dataclass(frozen=True)
class Diff(OnDevice, Opening, Request[StepDiff]):
    """Show what moved between two steps, tensor by tensor, the most first.

    Parameters
    ----------
    path
        A run or an archive.
    steps
        The two steps; by default the last two.
    everything
        The optimizer's state too, and every row of the table.
    csv
        Write a row a tensor there too.

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

    path: RunOrArchive
    _: KW_ONLY
    steps: Annotated[tuple[int, int] | None, Option(metavar="FIRST SECOND")] = None
    everything: Annotated[bool, Option(("--all",))] = False
    csv: Annotated[PathLike | None, Option(metavar="FILE")] = None

    EXAMPLES: ClassVar = (
        "inshrink diff runs/digits --steps 200 400",
        "inshrink diff digits.inshrink --steps 200 400 --csv moved.csv",
    )

    def perform(self) -> StepDiff:
        """Measure what moved."""
        from inshrink_core.analysis.movement import measure_movement
        from inshrink_core.chain import Archive
        from inshrink_core.execution import resolve_device

        opened = self.opened(self.path)
        device = resolve_device(self.device if isinstance(opened, Archive) else "cpu")
        if isinstance(opened, Archive):
            opened = opened.on(device)
        where = opened.reader.path if isinstance(opened, Archive) else str(opened.path)
        first, second = self._chosen(opened, where)
        before, after = opened[first], opened[second]
        chosen = _specs(before, self.everything)
        other = _specs(after, self.everything)
        common = [spec for key, spec in chosen.items() if key in other and _alike(spec, other[key])]
        total, done = sum(spec.nbytes for spec in common), 0
        rows = []
        for spec in common:
            movement = measure_movement(before.source.read(spec), after[spec.key], spec)
            rows.append(TensorMovement(spec, movement))
            done += spec.nbytes
            if self.progress is not None:
                self.progress(Progress("diff", done, total, second, spec.key))
        moved = StepDiff(
            path=where,
            steps=(first, second),
            tensors=tuple(sorted(rows, key=_rank)),
            added=tuple(key for key in other if key not in chosen),
            removed=tuple(key for key in chosen if key not in other),
            reshaped=tuple(k for k, spec in chosen.items() if k in other and not _alike(spec, other[k])),
            device=device,
            most_rows=None if self.everything else _MOST_ROWS,
        )
        if self.csv is not None:
            moved.write_csv(Path(self.csv))
        return moved

    def _chosen(self, opened: Run | Archive, where: str) -> tuple[int, int]:
        """Return the two steps."""
        from inshrink_core.chain import Archive

        known = opened.listed_steps if isinstance(opened, Archive) else opened.steps
        asked = chosen_steps(self.steps, lambda: known, where)
        steps = known[-2:] if asked is None else asked
        if len(steps) != 2:
            raise InputError("it takes two steps to tell what moved", where=where, found=f"steps {steps}")
        first, second = steps
        if first == second:
            raise InputError(
                f"step {first} against itself moves nothing", where=where, remedy="name two steps"
            )
        return first, second


diff = python_call(Diff)


def _specs(checkpoint: Checkpoint, everything: bool) -> dict[str, TensorSpec]:
    from inshrink_core.checkpoint import MODEL_ROLES

    return {spec.key: spec for spec in checkpoint.specs if everything or spec.role in MODEL_ROLES}


def _alike(spec: TensorSpec, other: TensorSpec) -> bool:
    return (spec.shape, spec.dtype) == (other.shape, other.dtype)

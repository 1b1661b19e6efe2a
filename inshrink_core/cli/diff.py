"""``inshrink diff``: what moved between two steps."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.formatting import count, error_size, plain, printable
from inshrink_core.cli.options import FollowLinks, Json, Quiet, StepPattern, open_run_or_archive
from inshrink_core.cli.output import make_table, present, progress_bar
from inshrink_core.errors import StorageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from inshrink_core.execution.progress import Progress
    from inshrink_core.verbs.diff import StepDiff

__all__ = ["EXAMPLE", "diff"]

EXAMPLE = (
    "$ inshrink diff runs/digits --steps 200 400\n"
    "$ inshrink diff digits.inshrink --steps 200 400 --csv moved.csv"
)

_MOST_ROWS = 40


def diff(
    path: Annotated[str, typer.Argument(metavar="RUN|ARCHIVE", help="A run or an archive.")],
    steps: Annotated[
        tuple[int, int] | None,
        typer.Option("--steps", metavar="FIRST SECOND", help="The two steps. (default: the last two)"),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="The optimizer's state too, and every row of the table.")
    ] = False,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write a row a tensor there too.")
    ] = None,
    step_pattern: StepPattern = None,
    follow_links: FollowLinks = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what moved between two steps, tensor by tensor, the most first."""
    import inshrink_core

    opened = open_run_or_archive(path, step_pattern, follow_links=follow_links)
    with progress_bar("diff", hidden=as_json or quiet) as advance:

        def progress(now: Progress) -> None:
            if advance is not None:
                advance(now.done, now.total, now.step)

        moved = inshrink_core.diff(opened, steps=steps, everything=everything, progress=progress)
    if csv_file is not None:
        _write_csv(csv_file, moved)
    present(
        moved.to_json(),
        as_json=as_json,
        quiet=quiet,
        text=lambda console: _show(console, moved, everything),
    )


def _write_csv(path: Path, moved: StepDiff) -> None:
    """Write the rows; a file that is there is replaced once they are whole."""
    rows = [row | {"shape": "x".join(map(str, row["shape"]))} for row in moved.rows()]
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


def _show(console: Console, moved: StepDiff, everything: bool) -> None:
    """Print layer types, then tensors, the most moved first."""
    layers = _table(f"layer type, step {moved.steps[0]} to {moved.steps[1]}")
    for name, movement in moved.layers.items():
        _add(layers, name, movement.to_json())
    _add(layers, "all weights", moved.total.to_json())
    console.print(layers)
    console.print()
    rows = moved.rows()
    shown = rows if everything else rows[:_MOST_ROWS]
    tensors = _table("tensor")
    for row in shown:
        _add(tensors, printable(row["key"]), row)
    console.print(tensors)
    if len(shown) < len(rows):
        console.print(f"… and {count(len(rows) - len(shown))} tensors that moved less; --all shows them")
    for what, keys in (("new", moved.added), ("gone", moved.removed), ("of another shape", moved.reshaped)):
        if keys:
            console.print(printable(f"{what}: {', '.join(keys)}"), soft_wrap=True)


def _table(heading: str) -> Table:
    return make_table(heading, "moved", "largest", "cosine", "values", "bits")


def _add(table: Table, name: str, row: dict[str, Any]) -> None:
    """Add a row: relative movement, largest one, cosine, shares of values and bits that changed."""
    table.add_row(
        name,
        error_size(row["relative"]),
        error_size(row["max_abs"]),
        plain(row["cosine"]),
        _share(row["changed"]),
        _share(row["bits_changed"]),
    )


def _share(value: float) -> str:
    """Return a fraction as a percentage."""
    return f"{100 * value:.1f} %"

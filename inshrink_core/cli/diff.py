"""``inshrink diff``: what moved between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.options import Based, OnDevice, Output, Reading, verb
from inshrink_core.cli.showing import show_table
from inshrink_core.text import count, error_size, plain, printable

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.verbs.diff import StepDiff

__all__ = ["EXAMPLE", "diff"]

EXAMPLE = (
    "$ inshrink diff runs/digits --steps 200 400\n"
    "$ inshrink diff digits.inshrink --steps 200 400 --csv moved.csv"
)

_MOST_ROWS = 40
_COLUMNS = ("moved", "largest", "cosine", "values", "bits")


@verb
def diff(
    path: Annotated[str, typer.Argument(metavar="RUN|ARCHIVE", help="A run or an archive.")],
    *,
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
    based: Based,
    reading: Reading,
    placed: OnDevice,
    out: Output,
) -> None:
    """Show what moved between two steps, tensor by tensor, the most first."""
    import inshrink_core

    opened = based.open_any(path, reading)
    with out.progress("diff") as progress:
        moved = inshrink_core.verbs.diff(
            opened, steps=steps, everything=everything, **vars(placed), progress=progress
        )
    if csv_file is not None:
        moved.write_csv(csv_file)
    out.present(moved, lambda console, moved: _show(console, moved, everything))


def _show(console: Console, moved: StepDiff, everything: bool) -> None:
    """Print layer types, then tensors, the most moved first."""
    layers = {**moved.layers, "all weights": moved.total}
    rows = [_cells(name, movement.to_json()) for name, movement in layers.items()]
    show_table(console, (f"layer type, step {moved.steps[0]} to {moved.steps[1]}", *_COLUMNS), rows)
    console.print()
    tensors = moved.rows()
    shown = tensors if everything else tensors[:_MOST_ROWS]
    show_table(console, ("tensor", *_COLUMNS), (_cells(printable(row["key"]), row) for row in shown))
    if len(shown) < len(tensors):
        console.print(f"… and {count(len(tensors) - len(shown))} tensors that moved less; --all shows them")
    for what, keys in (("new", moved.added), ("gone", moved.removed), ("of another shape", moved.reshaped)):
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

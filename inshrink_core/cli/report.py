"""``inshrink report``: one HTML file about a run and its archive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inshrink_core.cli.options import Based, OnDevice, Output, Reading, verb
from inshrink_core.cli.showing import show_facts, show_notes
from inshrink_core.errors import InputError
from inshrink_core.text import printable, size

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.verbs.report import PageReport

__all__ = ["EXAMPLE", "report"]

EXAMPLE = (
    "$ inshrink report runs/digits --out digits.html\n"
    "$ inshrink report digits.inshrink --against runs/digits --compared compared.json --out digits.html"
)


@verb
def report(
    path: Annotated[str, typer.Argument(metavar="RUN|ARCHIVE", help="A run or an archive.")],
    *,
    output: Annotated[
        Path, typer.Option("-o", "--out", "--output", metavar="FILE", help="The HTML file to make.")
    ],
    against: Annotated[
        str | None, typer.Option(metavar="RUN", help="Of an archive, the original run.")
    ] = None,
    compared: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `inshrink compare --json` printed.")
    ] = None,
    rehearsed: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `inshrink rehearse --json` printed.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="magnitude|taylor|fisher|update",
            help="What the heatmap shows. (default: fisher where the run tells it, else update)",
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Metrics of the training: CSV, JSON lines, or an event file of TensorBoard. "
            "(default: what the run has logged)",
        ),
    ] = None,
    step_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --log, the column of the step. (default: called like one)"),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --log, a metric; may be repeated. (default: all)"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    based: Based,
    reading: Reading,
    placed: OnDevice,
    out: Output,
) -> None:
    """Write one HTML file that tells of a run and its archive, and asks nobody for anything."""
    import inshrink_core
    from inshrink_core.formats import read_metrics

    if log is None and (step_column is not None or column):
        raise InputError("--step-column and --column go with --log", remedy="add --log, or leave them out")
    opened = based.open_any(path, reading)
    original = None if against is None else reading.open(against)
    with out.progress("report", in_bytes=False) as progress:
        made = inshrink_core.verbs.report(
            opened,
            output,
            against=original,
            compared=compared,
            rehearsed=rehearsed,
            metric=metric,
            log=None if log is None else read_metrics(log).log(step_column, column),
            force=force,
            **vars(placed),
            progress=progress,
        )
    out.present(made, _show)


def _show(console: Console, made: PageReport) -> None:
    """Print what was made."""
    show_facts(
        console,
        [
            ("written", f"{printable(str(made.output))}, {size(made.nbytes)}"),
            ("it tells", ", ".join(made.sections)),
            ("sha256", made.digest),
        ],
    )
    show_notes(console, made.notes)

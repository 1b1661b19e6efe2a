"""``inshrink sensitivity``: how much the loss minds an error, per tensor and step."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inshrink_core.cli.options import Based, OnDevice, Output, Reading, Steps, verb
from inshrink_core.cli.output import write_document
from inshrink_core.cli.showing import show_facts, show_notes, show_table
from inshrink_core.cli.values import choose_steps
from inshrink_core.errors import ExistsError, InputError
from inshrink_core.sensitivity import STATISTICS, Grouping, SensitivityMetric
from inshrink_core.text import UNKNOWN, printable, steps_in_short

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.analysis.profile import SensitivityReport

__all__ = ["EXAMPLE", "sensitivity"]

EXAMPLE = (
    "$ inshrink sensitivity runs/digits --metric fisher --by layer_type\n"
    "$ inshrink sensitivity runs/digits --metric update --csv update.csv"
)

METRICS = tuple(map(str, SensitivityMetric))
GROUPINGS = tuple(map(str, Grouping))

_SOURCES = {"gradient": "recorded gradients", "exp_avg": "Adam's first moment, in place of the gradient"}

_COLUMNS = 6
"""Steps that fit a line of 100 columns beside a name."""


@verb
def sensitivity(
    run: Annotated[
        str, typer.Argument(metavar="RUN|ARCHIVE", help="A run, a checkpoint file or an archive.")
    ],
    *,
    metric: Annotated[
        str,
        typer.Option(
            metavar="|".join(METRICS),
            help="abs(w), abs(g·w), Adam's second moment, or the movement since the step before.",
        ),
    ] = "magnitude",
    by: Annotated[
        str,
        typer.Option(metavar="|".join(GROUPINGS), help="What a row is; with --json also several: a,b."),
    ] = "tensor",
    statistic: Annotated[
        str, typer.Option(metavar="|".join(STATISTICS), help="What of a row's parameters the table shows.")
    ] = "mean",
    steps: Steps = None,
    csv_file: Annotated[
        str | None,
        typer.Option(
            "--csv", metavar="FILE", help="Write every row, step and statistic as CSV; - is stdout."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the CSV file if it exists.")] = False,
    based: Based,
    reading: Reading,
    placed: OnDevice,
    out: Output,
) -> None:
    """Show how much the loss minds an error, per tensor and step."""
    groupings = by.split(",")
    for option, value, choices in (
        ("--metric", metric, METRICS),
        *(("--by", grouping, GROUPINGS) for grouping in groupings),
        ("--statistic", statistic, STATISTICS),
    ):
        if value not in choices:
            raise InputError(f"{option} {value}", remedy=f"choose one of {', '.join(choices)}")
    if len(groupings) > 1 and (csv_file is not None or not out.as_json):
        raise InputError("--by with several groupings goes with --json", remedy="give one, or --json alone")
    if csv_file == "-" and out.as_json:
        raise InputError("--csv - and --json both want stdout", remedy="give --csv a file")
    if csv_file not in (None, "-") and Path(str(csv_file)).is_file() and not force:
        raise ExistsError("the file exists", where=str(csv_file), remedy="give --force to overwrite it")
    from inshrink_core.analysis.profile import sensitivity as measure
    from inshrink_core.formats import Run

    opened = based.open_any(run, reading)
    with out.advance("profile") as advance:
        read = opened if isinstance(opened, Run) else opened.sequential()
        chosen = choose_steps(steps or (), opened.steps, run)
        profile = measure(read, metric, steps=chosen, **vars(placed), progress=advance)
    if len(groupings) > 1:
        tables = [profile.report(run, grouping).to_json() for grouping in groupings]
        write_document(
            {
                "run": run,
                "metric": metric,
                "restored": read is not opened,
                "device": profile.device,
                "tables": tables,
            }
        )
        return
    report = profile.report(run, groupings[0])
    if csv_file is not None:
        report.write_csv(sys.stdout if csv_file == "-" else Path(csv_file))
    if csv_file != "-":
        out.present(report, lambda console, report: _show(console, report, statistic))


def _show(console: Console, report: SensitivityReport, statistic: str) -> None:
    """Print a row a tensor and as many steps as fit; all of them are in --json and --csv."""
    table = report.table
    steps, by = table.steps, str(table.grouping).replace("_", " ")
    shown = list(range(len(steps)))
    if len(steps) > _COLUMNS:
        shown = [round(i * (len(steps) - 1) / (_COLUMNS - 1)) for i in range(_COLUMNS)]
    rows = (
        (
            printable(row["name"]),
            *(UNKNOWN if math.isnan(row[statistic][i]) else f"{row[statistic][i]:.3g}" for i in shown),
        )
        for row in report.rows
    )
    show_table(console, (by, *(f"step {steps[i]}" for i in shown)), rows)
    console.print()
    sources = sorted({str(source) for source in table.sources if source is not None})
    shown_steps = steps_in_short(steps) if len(shown) == len(steps) else f"{len(shown)} of {len(steps)} shown"
    facts = [
        ("metric", f"{table.metric}, {statistic} of each {by}"),
        ("steps", shown_steps),
        ("scores from", ", ".join(_SOURCES.get(source, source) for source in sources)),
    ]
    show_facts(console, facts)
    show_notes(console, filter(None, [printable(table.findings().sentence())]))

"""``inshrink sensitivity``: how much the loss minds an error, per tensor and step."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.formatting import UNKNOWN, printable, steps_in_short
from inshrink_core.cli.options import (
    STEPS_HELP,
    FollowLinks,
    Json,
    Quiet,
    StepPattern,
    choose_steps,
    open_run_or_archive,
)
from inshrink_core.cli.output import make_table, present, progress_bar, show_facts
from inshrink_core.errors import ExistsError, InputError, StorageError

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.analysis.profile import SensitivityTable

__all__ = ["EXAMPLE", "sensitivity"]

EXAMPLE = (
    "$ inshrink sensitivity runs/digits --metric fisher --by layer_type\n"
    "$ inshrink sensitivity runs/digits --metric update --csv update.csv"
)

METRICS = ("magnitude", "taylor", "fisher", "update")
GROUPINGS = ("tensor", "block", "layer_type")
STATISTICS = ("mean", "p50", "p99")

_SOURCES = {"gradient": "recorded gradients", "exp_avg": "Adam's first moment, in place of the gradient"}

_COLUMNS = 6
"""Steps that fit a line of 100 columns beside a name."""


def sensitivity(
    run: Annotated[
        str, typer.Argument(metavar="RUN|ARCHIVE", help="A run, a checkpoint file or an archive.")
    ],
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
    steps: Annotated[
        list[str] | None, typer.Option("--steps", "--step", metavar="STEPS", help=STEPS_HELP)
    ] = None,
    csv_file: Annotated[
        str | None,
        typer.Option(
            "--csv", metavar="FILE", help="Write every row, step and statistic as CSV; - is stdout."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the CSV file if it exists.")] = False,
    step_pattern: StepPattern = None,
    follow_links: FollowLinks = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show how much the loss minds an error, per tensor and step."""
    _require("--metric", metric, METRICS)
    groupings = by.split(",")
    for grouping in groupings:
        _require("--by", grouping, GROUPINGS)
    if len(groupings) > 1 and (csv_file is not None or not as_json):
        raise InputError("--by with several groupings goes with --json", remedy="give one, or --json alone")
    _require("--statistic", statistic, STATISTICS)
    if csv_file == "-" and as_json:
        raise InputError("--csv - and --json both want stdout", remedy="give --csv a file")
    if csv_file not in (None, "-") and Path(str(csv_file)).is_file() and not force:
        raise ExistsError("the file exists", where=str(csv_file), remedy="give --force to overwrite it")
    from inshrink_core.analysis import profile
    from inshrink_core.chain import Archive

    opened = open_run_or_archive(run, step_pattern, follow_links=follow_links)
    with progress_bar("profile", hidden=as_json or quiet, in_bytes=False) as advance:
        measured = profile.sensitivity(
            opened.sequential() if isinstance(opened, Archive) else opened,
            metric,
            steps=choose_steps(steps or [], opened.steps, str(opened.path)),
            progress=advance,
        )
    documents = [_document(run, measured.by(grouping), measured.bytes_read) for grouping in groupings]
    document = documents[0]
    if len(documents) > 1:
        restored = isinstance(opened, Archive)
        document = {"run": run, "metric": metric, "restored": restored, "tables": documents}
    if csv_file is not None:
        _write_csv(csv_file, document)
    present(
        document,
        as_json=as_json,
        quiet=quiet or csv_file == "-",
        text=lambda console: _show(console, document, statistic),
    )


def _require(option: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a word that is not among the choices."""
    if value not in choices:
        raise InputError(f"{option} {value}", remedy=f"choose one of {', '.join(choices)}")


def _document(run: str, table: SensitivityTable, bytes_read: int) -> dict[str, Any]:
    """Return the document of ``--json``: a row has a value a step, null where it was not there."""
    statistics = {name: getattr(table, name).tolist() for name in STATISTICS}
    return {
        "run": run,
        "metric": str(table.metric),
        "by": str(table.grouping),
        "steps": list(table.steps),
        "sources": list(table.sources),
        "bytes_read": bytes_read,
        "rows": [
            {
                "name": row.name,
                "block": row.block,
                "layer_type": row.layer_type,
                "n_parameters": row.numel,
                "shape": None if row.shape is None else list(row.shape),
                **{name: values[position] for name, values in statistics.items()},
                "n_nonfinite": table.n_nonfinite[position].tolist(),
            }
            for position, row in enumerate(table.details)
        ],
    }


def _write_csv(target: str, document: Mapping[str, Any]) -> None:
    """Write a line a row and step; a gap is an empty cell."""
    if target == "-":
        _write_rows(sys.stdout, document)
        return
    try:
        with Path(target).open("w", newline="", encoding="utf-8") as file:
            _write_rows(file, document)
    except OSError as error:
        raise StorageError(f"the CSV cannot be written ({error.strerror})", where=target) from error


def _write_rows(file: Any, document: Mapping[str, Any]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["metric", document["by"], "step", *STATISTICS])
    for row in document["rows"]:
        for position, step in enumerate(document["steps"]):
            values = [row[statistic][position] for statistic in STATISTICS]
            cells = ["" if math.isnan(value) else repr(value) for value in values]
            writer.writerow([document["metric"], row["name"], step, *cells])


def _show(console: Console, document: Mapping[str, Any], statistic: str) -> None:
    """Print a row a tensor and as many steps as fit; all of them are in --json and --csv."""
    steps = document["steps"]
    if len(steps) <= _COLUMNS:
        shown = list(range(len(steps)))
    else:
        shown = [round(i * (len(steps) - 1) / (_COLUMNS - 1)) for i in range(_COLUMNS)]
    table = make_table(str(document["by"]).replace("_", " "), *(f"step {steps[i]}" for i in shown))
    for row in document["rows"]:
        values = row[statistic]
        cells = [UNKNOWN if math.isnan(values[i]) else f"{values[i]:.3g}" for i in shown]
        table.add_row(printable(row["name"]), *cells)
    console.print(table)
    console.print()
    sources = {str(source) for source in document["sources"] if source is not None}
    shown_steps = steps_in_short(steps) if len(shown) == len(steps) else f"{len(shown)} of {len(steps)} shown"
    facts = [
        ("metric", f"{document['metric']}, {statistic} of each {document['by'].replace('_', ' ')}"),
        ("steps", shown_steps),
        ("scores from", ", ".join(_SOURCES.get(source, source) for source in sorted(sources))),
    ]
    show_facts(console, [fact for fact in facts if fact[1]])

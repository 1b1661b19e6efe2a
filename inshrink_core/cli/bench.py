"""``inshrink bench``: every codec on one run, at equal fidelity."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.options import Computing, Evaluating, Output, Reading, Steps, steps_of, verb
from inshrink_core.cli.showing import show_facts, show_notes, show_table
from inshrink_core.text import (
    UNKNOWN,
    duration,
    nats,
    percent,
    plain,
    printable,
    rate,
    ratio,
    size,
    steps_in_short,
)

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.bench import BenchReport, Point, Row

__all__ = ["EXAMPLE", "bench"]

EXAMPLE = (
    "$ inshrink bench runs/digits --trust-run -o bench\n"
    "$ inshrink bench runs/digits --codecs inshrinkerator,excp:coder=rans --bounds drop=0.01"
)

_WIDE = 110
"""Columns from which a terminal has room for everything that stands behind a ratio."""

REPEAT = "repeat"
"""Label of the previous checkpoint (`inshrink_core.bench`, which loads torch)."""


@verb
def bench(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run of at least two steps.")],
    *,
    codecs: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Codecs, each NAME or NAME:KEY=VALUE,… with settings that are held. (default: all)",
        ),
    ] = None,
    bounds: Annotated[
        str | None,
        typer.Option(
            metavar="KIND=LIMIT,…",
            help="What has to be kept: drop is of the worst step, divergence in mean over the steps."
            " (default: drop .005, .01, .02 and divergence .003, .01, .03)",
        ),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="exact|compressed|compact|drop",
            help="How codecs that leave the optimizer's state to others have it stored; without it, sweeps"
            " are fast.",
        ),
    ] = "drop",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write tables, plots and measured points there, and go on from those there are.",
        ),
    ] = None,
    refine: Annotated[
        int, typer.Option(min=0, help="How often the knob's gap below each bound is halved.")
    ] = 2,
    evaluating: Evaluating,
    keyframe_every: Annotated[int, typer.Option(min=1, help="Frames from one keyframe to the next.")] = 32,
    steps: Steps = None,
    computing: Computing,
    reading: Reading,
    out: Output,
) -> None:
    """Measure the largest ratio of each codec that keeps each bound."""
    from inshrink_core.bench import bench as run_bench

    opened = reading.open(run)
    with out.progress("bench", in_bytes=False) as progress:
        report = run_bench(
            opened,
            codecs=codecs,
            bounds=bounds,
            optimizer=optimizer,
            **vars(evaluating),
            steps=steps_of(opened, steps),
            output=output,
            refine=refine,
            keyframe_every=keyframe_every,
            **vars(computing),
            progress=progress,
        )
    out.present(report, _show)


def _show(console: Console, report: BenchReport) -> None:
    """Print the ratios, what stands behind each, what they cost, and what to know of all."""
    _show_ratios(console, report)
    _show_rows(console, report.rows)
    _show_costs(console, report.points)
    console.print()
    show_facts(
        console,
        [
            ("metric", f"{printable(report.metric)}, {report.direction} is better"),
            ("steps", steps_in_short(report.steps)),
            ("optimizer", report.optimizer),
            ("measured", f"{report.measured} configurations, {report.resumed} were there already"),
            ("time", f"{duration(report.seconds)} on {report.device}"),
            ("files", ", ".join(report.files) or "none (--output DIR keeps what is measured)"),
        ],
    )
    show_notes(console, report.notes)


def _show_ratios(console: Console, report: BenchReport) -> None:
    """Print the ratio of everything stored of each codec under each bound, and that of the weights."""
    headings = ("codec", *(_limit(bound.kind, bound.limit) for bound in report.bounds))
    show_table(
        console,
        headings,
        (
            (printable(label), *(_ratios(row) for row in report.rows if row.codec == label))
            for label in report.points
        ),
    )
    console.print("ratio of everything that is stored / of the weights")
    if report.stale_bounds:
        console.print("≈ the previous checkpoint, which stores nothing, keeps this bound: it proves little")
    console.print()


def _show_costs(console: Console, points: Mapping[str, Sequence[Point]]) -> None:
    """Print what each codec costs: the median over its measured configurations."""
    rows = (
        (
            printable(label),
            str(len(group)),
            rate(_median([point.encode_mb_per_s for point in group])),
            rate(_median([point.decode_mb_per_s for point in group])),
            duration(_median([point.restore_seconds for point in group])),
            size(_median([point.peak_memory_bytes for point in group])),
        )
        for label, group in points.items()
        if label != REPEAT
    )
    console.print()
    show_table(console, ("codec", "configurations", "encode", "decode", "restore", "memory"), rows)


def _show_rows(console: Console, rows: Sequence[Row]) -> None:
    """Print what stands behind each ratio."""
    headings = ("codec", "bound", "of all", "of weights", "drop", "divergence", "gain", "noise", "knob")
    shown = len(headings) if console.width >= _WIDE else 6
    cells = []
    for position, row in enumerate(rows):
        if row.codec == REPEAT and position:
            continue  # the previous checkpoint is the same under every bound
        values: Mapping[str, Any] = row.to_json()
        whole = (
            printable(row.codec),
            "" if row.codec == REPEAT else _limit(row.bound.kind, row.bound.limit),
            ratio(values["ratio_total"]),
            ratio(values["ratio_weights"]),
            percent(values["max_drop"]),
            nats(values["mean_divergence"]),
            plain(values["restore_gain"], 3),
            plain(values["restore_noise"], 3),
            _knob(row),
        )
        cells.append(whole[:shown])
    show_table(console, headings[:shown], cells, left=(0, 8))


def _ratios(row: Row) -> str:
    """Return the ratios of a row: a dash out of reach, a sign where nothing was stored."""
    if not row.kept or row.point is None:
        return UNKNOWN
    if row.codec == REPEAT:
        return "≈"
    return f"{ratio(row.point.ratio_total)} / {ratio(row.point.ratio_weights)}"


def _knob(row: Row) -> str:
    """Return where the knob stood; in brackets where that does not keep the bound."""
    if row.point is None or row.point.knob is None:
        return ""
    text = json.dumps(row.point.knob)
    return text if row.kept else f"({text})"


def _limit(kind: str, limit: float) -> str:
    """Return a bound as a heading."""
    return f"≤ {limit * 100:g} %" if kind == "drop" else f"≤ {limit:g} nat"


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None

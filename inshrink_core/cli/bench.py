"""``inshrink bench``: every codec on one run, at equal fidelity."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.formatting import (
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
from inshrink_core.cli.options import (
    Device,
    Direction,
    EvalMetric,
    EvaluatorFile,
    FollowLinks,
    Json,
    Quiet,
    StepPattern,
    Steps,
    Threads,
    Timeout,
    TrustRun,
    choose_steps,
    open_run,
)
from inshrink_core.cli.output import make_table, present, progress_bar, show_facts

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.bench import BenchReport, Point, Row
    from inshrink_core.execution.progress import Progress

__all__ = ["EXAMPLE", "bench"]

EXAMPLE = (
    "$ inshrink bench runs/digits --trust-run -o bench\n"
    "$ inshrink bench runs/digits --codecs inshrinkerator,excp:coder=rans --bounds drop=0.01"
)

_WIDE = 110
"""Columns from which a terminal has room for everything that stands behind a ratio."""

REPEAT = "repeat"
"""Label of the stale copy (`inshrink_core.bench`, which loads torch)."""


def bench(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run of at least two steps.")],
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
            metavar="lossless|lattice|lattice-ratio|drop",
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
    evaluator: EvaluatorFile = None,
    eval_metric: EvalMetric = None,
    direction: Direction = None,
    trust_run: TrustRun = False,
    timeout: Timeout = 600.0,
    keyframe_every: Annotated[int, typer.Option(min=1, help="Frames from one keyframe to the next.")] = 32,
    steps: Steps = None,
    device: Device = "cpu",
    threads: Threads = None,
    step_pattern: StepPattern = None,
    follow_links: FollowLinks = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the largest ratio of each codec that keeps each bound."""
    from inshrink_core.bench import bench as run_bench

    opened = open_run(run, step_pattern, follow_links=follow_links)
    with progress_bar("bench", hidden=as_json or quiet, in_bytes=False) as advance:

        def progress(now: Progress) -> None:
            if advance is not None:
                advance(now.done, now.total, now.step)

        report = run_bench(
            opened,
            codecs=codecs,
            bounds=bounds,
            optimizer=optimizer,
            evaluator=evaluator,
            metric=eval_metric,
            direction=direction,
            trust_run=trust_run,
            timeout=timeout,
            steps=choose_steps(steps or [], opened.steps, str(opened.path)),
            output=output,
            refine=refine,
            keyframe_every=keyframe_every,
            device=device,
            threads=threads,
            progress=None if advance is None else progress,
        )
    present(report.to_json(), as_json=as_json, quiet=quiet, text=lambda console: _show(console, report))


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
            ("time", duration(report.seconds)),
            ("files", ", ".join(report.files) or "none (--output DIR keeps what is measured)"),
        ],
    )
    for note in report.notes:
        console.print(printable(f"note: {note}"), soft_wrap=True)


def _show_ratios(console: Console, report: BenchReport) -> None:
    """Print the ratio of everything stored of each codec under each bound, and that of the weights."""
    table = make_table("codec", *(_limit(bound.kind, bound.limit) for bound in report.bounds))
    for label in report.points:
        rows = [row for row in report.rows if row.codec == label]
        table.add_row(printable(label), *map(_ratios, rows))
    console.print(table)
    console.print("ratio of everything that is stored / of the weights")
    if report.stale_bounds:
        console.print("≈ the stale copy, which stores nothing, keeps this bound: keeping it proves little")
    console.print()


def _show_costs(console: Console, points: Mapping[str, Sequence[Point]]) -> None:
    """Print what each codec costs: the median over its measured configurations."""
    table = make_table("codec", "configurations", "encode", "decode", "restore", "memory")
    for label, group in points.items():
        if label == REPEAT:
            continue
        table.add_row(
            printable(label),
            str(len(group)),
            rate(_median([point.encode_mb_per_s for point in group])),
            rate(_median([point.decode_mb_per_s for point in group])),
            duration(_median([point.restore_seconds for point in group])),
            size(_median([point.peak_memory_bytes for point in group])),
        )
    console.print()
    console.print(table)


def _show_rows(console: Console, rows: Sequence[Row]) -> None:
    """Print what stands behind each ratio."""
    headings = ("codec", "bound", "of all", "of weights", "drop", "divergence", "gain", "noise", "knob")
    shown = len(headings) if console.width >= _WIDE else 6
    table = make_table(*headings[:shown], left=(0, 8))
    for position, row in enumerate(rows):
        if row.codec == REPEAT and position:
            continue  # the stale copy is the same under every bound
        values: Mapping[str, Any] = row.to_json()
        cells = (
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
        table.add_row(*cells[:shown])
    console.print(table)


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

"""``inshrink estimate``: what a configuration would do, in seconds and without the evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.options import Computing, Output, Reading, Steps, Writing, steps_of, verb
from inshrink_core.cli.showing import show_facts, show_notes, show_table
from inshrink_core.errors import InputError
from inshrink_core.text import UNKNOWN, count, duration, nats, percent, plain, printable, ratio, size

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.verbs.estimate import EstimateReport, GoalsReport, LevelsReport

__all__ = ["EXAMPLE", "estimate"]

EXAMPLE = (
    "$ inshrink estimate runs/digits --config my.toml\n"
    "$ inshrink estimate runs/digits --set coarseness=4 --trials search.trials.jsonl\n"
    "$ inshrink estimate runs/digits --codec uniform --levels 7\n"
    "$ inshrink estimate runs/digits --goals"
)


@verb
def estimate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run it would be of.")],
    *,
    writing: Writing,
    trials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Trials of a search, which tell what an error costs. (default: the run's own)",
        ),
    ] = None,
    levels: Annotated[
        int | None,
        typer.Option(min=1, help="Estimate the codec from fine to coarse instead, at most so often."),
    ] = None,
    goals: Annotated[
        bool,
        typer.Option(
            "--goals",
            help="Try two steps for three goals instead: to resume exactly, to resume, weights alone.",
        ),
    ] = False,
    by_tensor: Annotated[
        bool,
        typer.Option("--by-tensor", help="Also tell bits, sensitivity and damage of every tensor."),
    ] = False,
    steps: Steps = None,
    computing: Computing,
    reading: Reading,
    out: Output,
) -> None:
    """Estimate the ratio and the drop of a configuration; nothing is measured."""
    import inshrink_core

    opened = reading.open(run)
    asked = writing.keywords() | vars(computing) | {"steps": steps_of(opened, steps), "trials": trials}
    if goals:
        _require_alone(asked, levels)
        with out.progress("estimate", in_bytes=False) as progress:
            found = inshrink_core.verbs.estimate_goals(opened, **asked, progress=progress)
        out.present(found, _show_goals)
        return
    asked["by_tensor"] = by_tensor
    if levels is None:
        out.present(inshrink_core.verbs.estimate(opened, **asked), _show)
        return
    with out.progress("estimate", in_bytes=False) as progress:
        report = inshrink_core.verbs.estimate_levels(opened, levels=levels, **asked, progress=progress)
    out.present(report, _show_levels)


def _require_alone(asked: dict[str, Any], levels: int | None) -> None:
    """Refuse what a goal says already, and take it out of what was asked."""
    told = [name for name in ("codec", "config", "optimizer") if asked.pop(name)]
    if told or levels is not None:
        raise InputError(
            "--goals says itself how the run is written",
            found=", ".join([*told, *(["levels"] if levels is not None else [])]),
            remedy="leave out --codec, --set, --config, --optimizer and --levels",
        )


def _show_goals(console: Console, report: GoalsReport) -> None:
    """Print a row a goal, and what the figures stand on."""
    rows = (
        (
            one.goal,
            size(report.run_bytes),
            size(one.archive_bytes),
            ratio(one.ratio_total),
            plain(one.bits_per_weight, 3),
            percent(one.restore_cost),
            one.basis,
        )
        for one in report.goals
    )
    headings = ("goal", "before", "after", "ratio", "bits per weight", "restore cost", "which is")
    show_table(console, headings, rows, left=(0, 6))
    console.print()
    tried = ", ".join(map(count, report.tried))
    facts = [
        ("estimated from", f"steps {tried}, {report.sampled * 100:.0f} % of their weights"),
        ("time", f"{duration(report.seconds)} on {report.device}"),
    ]
    show_facts(console, facts)


def _show(console: Console, report: EstimateReport) -> None:
    """Print the estimates, and what they stand on."""
    document = report.to_json()
    drop, divergence = percent(document["drop"]), nats(document["divergence"])
    known = document["n_trials"] > 0
    how = "" if known else ", uncalibrated"
    correlation = plain(document["rank_correlation"], 2)
    facts = [
        ("estimated ratio", f"{ratio(document['ratio_total'])}  (of everything)"),
        ("of the weights", f"{ratio(document['ratio_weights'])}"),
        ("estimated drop", f"{drop}  (of the worst step{how})"),
        ("estimated divergence", f"{divergence} nats  (of the worst step{how})"),
        (
            "calibrated on",
            f"{count(document['n_trials'])} trials (rank correlation {correlation})" if known else "nothing",
        ),
        ("encoded", f"{document['sampled'] * 100:.0f} % of {document['n_steps']} steps"),
        ("time", f"{duration(document['seconds'])} on {document['device']}"),
    ]
    show_facts(console, facts)
    show_notes(console, document["notes"])
    if report.tensors:
        console.print()
        rows = (
            (printable(one.key), count(one.n_values), f"{one.bits_per_weight:.2f}", _short(one.sensitivity))
            for one in report.tensors
        )
        show_table(console, ("tensor", "values", "bits per weight", "sensitivity"), rows)


def _short(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}"


def _show_levels(console: Console, report: LevelsReport) -> None:
    """Print a row a configuration, and what the figures stand on."""
    rows = (
        (
            ", ".join(f"{name}={value}" for name, value in candidate.settings.items()),
            ratio(one.ratio_total),
            ratio(one.ratio_weights),
            percent(one.drop),
            nats(one.divergence),
        )
        for candidate, one in report.levels
    )
    headings = ("estimated", "ratio", "of the weights", "drop", "divergence")
    show_table(console, headings, rows, left=(0,))
    console.print()
    show_notes(console, dict.fromkeys(note for _, one in report.levels for note in one.notes))

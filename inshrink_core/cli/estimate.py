"""``inshrink estimate``: what a configuration would do, in seconds and without the evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inshrink_core.cli.options import Computing, Output, Reading, Steps, Writing, steps_of, verb
from inshrink_core.cli.showing import show_facts, show_notes
from inshrink_core.text import count, duration, nats, percent, plain, ratio

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.verbs.estimate import EstimateReport

__all__ = ["EXAMPLE", "estimate"]

EXAMPLE = (
    "$ inshrink estimate runs/digits --config my.toml\n"
    "$ inshrink estimate runs/digits --set coarseness=4 --trials search.trials.jsonl"
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
    steps: Steps = None,
    computing: Computing,
    reading: Reading,
    out: Output,
) -> None:
    """Estimate the ratio and the drop of a configuration; nothing is measured."""
    import inshrink_core

    opened = reading.open(run)
    report = inshrink_core.verbs.estimate(
        opened, **writing.keywords(), **vars(computing), steps=steps_of(opened, steps), trials=trials
    )
    out.present(report, _show)


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
        ("time", duration(document["seconds"])),
    ]
    show_facts(console, facts)
    show_notes(console, document["notes"])

"""``inshrink estimate``: what a configuration would do, in seconds and without the evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.formatting import count, duration, nats, percent, plain, printable, ratio
from inshrink_core.cli.options import (
    ConfigFile,
    FollowLinks,
    Json,
    KeyframeEvery,
    Optimizer,
    Quiet,
    Settings,
    StepPattern,
    Steps,
    Threads,
    choose_steps,
    open_run,
    written_as,
)
from inshrink_core.cli.output import present, show_facts

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EXAMPLE", "estimate"]

EXAMPLE = (
    "$ inshrink estimate runs/digits --config my.toml\n"
    "$ inshrink estimate runs/digits --set coarseness=4 --trials search.trials.jsonl"
)


def estimate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run it would be of.")],
    config: ConfigFile = None,
    codec: Annotated[str | None, typer.Option(help="Codec of the weights. (default: lattice)")] = None,
    settings: Settings = None,
    optimizer: Optimizer = None,
    keyframe_every: KeyframeEvery = None,
    trials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Trials of a search, which tell what an error costs. (default: the run's own)",
        ),
    ] = None,
    steps: Steps = None,
    threads: Threads = None,
    step_pattern: StepPattern = None,
    follow_links: FollowLinks = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Estimate the ratio and the drop of a configuration; nothing is measured."""
    import inshrink_core

    written = written_as(config, settings, codec=codec, optimizer=optimizer, keyframe_every=keyframe_every)
    opened = open_run(run, step_pattern, follow_links=follow_links)
    report = inshrink_core.estimate(
        opened,
        **written._asdict(),
        steps=choose_steps(steps or [], opened.steps, str(opened.path)),
        trials=trials,
        threads=threads,
    )
    document = report.to_json()
    present(document, as_json=as_json, quiet=quiet, text=lambda console: _show(console, document))


def _show(console: Console, document: Mapping[str, Any]) -> None:
    """Print the estimates, and what they stand on."""
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
    for note in document["notes"]:
        console.print(printable(f"note: {note}"), soft_wrap=True)

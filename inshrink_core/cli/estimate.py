"""``inshrink estimate``: what a configuration would do, in seconds and without the evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.formatting import UNKNOWN, count, duration, nats, percent, plain, printable, ratio
from inshrink_core.cli.opening import open_run
from inshrink_core.cli.options import Json, Quiet, StepPattern, Threads
from inshrink_core.cli.output import present, show_facts
from inshrink_core.cli.settings import given_settings, read_config_file
from inshrink_core.cli.steps import STEPS_HELP, choose_steps

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EXAMPLE", "estimate"]

EXAMPLE = (
    "$ inshrink estimate runs/digits --config my.toml\n"
    "$ inshrink estimate runs/digits --set coarseness=4 --trials search.trials.jsonl"
)


def estimate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run it would be of.")],
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings from a TOML or JSON file, or a search's result."),
    ] = None,
    codec: Annotated[str | None, typer.Option(help="Codec of the weights. (default: lattice)")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the codec; may be repeated."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="lossless|lattice|lattice-ratio|drop",
            help="How the optimizer's state would be stored, as for compress.",
        ),
    ] = None,
    keyframe_every: Annotated[
        int | None, typer.Option(min=1, help="Frames from one keyframe to the next. (default: 32)")
    ] = None,
    trials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Trials of a search, which tell what an error costs. (default: the run's own)",
        ),
    ] = None,
    steps: Annotated[
        list[str] | None, typer.Option("--steps", "--step", metavar="STEPS", help=STEPS_HELP)
    ] = None,
    threads: Threads = None,
    step_pattern: StepPattern = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Estimate the ratio and the drop of a configuration; nothing is measured."""
    from inshrink_core import session

    given = read_config_file(config) if config is not None else {}
    opened = open_run(run, step_pattern)
    report = session.estimate(
        opened,
        codec=codec or given.get("codec"),
        config=given_settings(given, settings or []) or None,
        optimizer=optimizer or given.get("optimizer"),
        keyframe_every=keyframe_every or given.get("keyframe_every", 32),
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
    correlation = plain(document["rank_correlation"], 2)
    facts = [
        ("estimated ratio", f"{ratio(document['ratio_weights'])}  (of the weights)"),
        ("estimated drop", f"{drop}  (of the worst step)" if known else UNKNOWN),
        ("estimated divergence", f"{divergence} nats" if known else UNKNOWN),
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

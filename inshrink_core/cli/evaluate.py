"""``inshrink evaluate``: what an evaluator says of one step, or an evaluator to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inshrink_core.cli.options import Evaluating, Output, Reading, verb
from inshrink_core.cli.showing import show_facts
from inshrink_core.errors import InputError
from inshrink_core.text import duration, plain, printable

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.verbs.evaluate import EvaluateReport, EvaluatorReport

__all__ = ["EXAMPLE", "evaluate"]

EXAMPLE = (
    "$ inshrink evaluate runs/digits --write judge.py\n"
    "$ inshrink evaluate runs/digits --evaluator judge.py:evaluate"
)


@verb
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, glob or checkpoint file.")],
    *,
    step: Annotated[
        int | None, typer.Option("--step", metavar="STEP", help="Which step. (default: the last)")
    ] = None,
    evaluating: Evaluating,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.py", help="Write an evaluator to begin with instead; nothing is executed."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="language|classifier|regression",
            help="With --write, what the model is for. (default: what the tensors tell)",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:CLASS", help="With --write, the model's class, made without arguments."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="With --write, replace a file that exists.")] = False,
    reading: Reading,
    out: Output,
) -> None:
    """Evaluate one step, to see that an evaluator works; or write one to begin with."""
    import inshrink_core

    opened = reading.open(run)
    if write is not None:
        made = inshrink_core.verbs.make_evaluator(opened, write, task=task, model=model, force=force)
        out.present(made, _show_made)
        return
    if task is not None or model is not None or force:
        raise InputError("--task, --model and --force go with --write", remedy="add --write FILE.py")
    out.present(inshrink_core.verbs.evaluate(opened, step=step, **vars(evaluating)), _show)


def _show(console: Console, found: EvaluateReport) -> None:
    """Print the figures, the one that counts first."""
    others = [(name, value) for name, value in found.metrics.items() if name != found.metric]
    arrays = [("log_probs", found.log_probs), ("predictions", found.predictions)]
    show_facts(
        console,
        [
            ("step", str(found.step)),
            (printable(found.metric), f"{plain(found.value)}  ({found.direction} is better)"),
            *((printable(name), plain(value)) for name, value in others),
            *((name, " × ".join(map(str, shape))) for name, shape in arrays if shape is not None),
            *([("printed", printable(found.printed))] if found.printed else []),
            ("time", duration(found.seconds)),
        ],
    )


def _show_made(console: Console, made: EvaluatorReport) -> None:
    """Print what was guessed."""
    show_facts(
        console,
        [
            ("written", printable(str(made.output))),
            ("task", f"{made.task}: {printable(made.why)}"),
            ("left to do", "what is marked TODO in it"),
            ("SHA-256", made.digest),
        ],
    )

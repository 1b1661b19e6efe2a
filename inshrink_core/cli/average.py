"""``inshrink average``: several steps as one, by coefficients that are given or searched for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inshrink_core.cli.options import (
    Based,
    Evaluating,
    MemoryLimit,
    OnDevice,
    Output,
    Reading,
    Steps,
    steps_of,
    verb,
)
from inshrink_core.cli.showing import show_facts
from inshrink_core.errors import InputError
from inshrink_core.text import count, duration, plain, steps_in_short

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.verbs.average import AverageReport

__all__ = ["EXAMPLE", "average"]

EXAMPLE = (
    "$ inshrink average digits.inshrink --steps 1600: -o averaged/\n"
    "$ inshrink average runs/digits --search --evaluator judge.py:evaluate -o averaged/"
)

_MOST_SHOWN = 12


@verb
def average(
    path: Annotated[str, typer.Argument(metavar="RUN|ARCHIVE", help="A run or an archive.")],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write the step into.")
    ],
    steps: Steps = None,
    weights: Annotated[
        str, typer.Option(metavar="uniform|ema", help="The same for every step, or more for later ones.")
    ] = "uniform",
    decay: Annotated[
        float | None, typer.Option(help="Of --weights ema, from one step to the next. (default: 0.9)")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Search for the coefficients that the evaluator likes best.")
    ] = False,
    budget: Annotated[
        int | None, typer.Option(min=1, help="With --search, how many to try. (default: 600)")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of --search.")] = 0,
    evaluating: Evaluating,
    held_out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION|NAME",
            help="An evaluator on other data: it judges what was found, and decides nothing.",
        ),
    ] = None,
    layout: Annotated[
        str, typer.Option("--format", metavar="same|safetensors|torch", help="As what to write it.")
    ] = "same",
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    based: Based,
    reading: Reading,
    placed: OnDevice,
    limiting: MemoryLimit,
    out: Output,
) -> None:
    """Write an average of several steps as a step that loads like the run's own."""
    import inshrink_core
    from inshrink_core.verbs.average import DEFAULT_BUDGET, DEFAULT_DECAY

    if weights not in ("uniform", "ema"):
        raise InputError(f"--weights {weights}", remedy="choose uniform or ema, or give --search")
    if search and weights != "uniform":
        raise InputError("--search and --weights exclude each other", remedy="give one of them")
    if budget is not None and not search:
        raise InputError("--budget goes with --search", remedy="add --search")
    opened = based.open_any(path, reading)
    with out.progress("average", in_bytes=False) as progress:
        made = inshrink_core.verbs.average(
            opened,
            output,
            steps=steps_of(opened, steps),
            weights="search" if search else weights,
            decay=DEFAULT_DECAY if decay is None else decay,
            held_out=held_out,
            **vars(evaluating),
            budget=DEFAULT_BUDGET if budget is None else budget,
            seed=seed,
            layout=layout,
            force=force,
            **vars(placed),
            **limiting.keywords(),
            progress=progress,
        )
    out.present(made, _show)


def _show(console: Console, made: AverageReport) -> None:
    """Print the coefficients, what they are worth, and what is no average."""
    largest = sorted(zip(made.coefficients, made.steps, strict=True), key=lambda row: -abs(row[0]))
    shown = ", ".join(f"{step}: {coefficient:.3f}" for coefficient, step in largest[:_MOST_SHOWN])
    judged = [
        (
            f"{made.metric} of {row.name}",
            plain(row.value) + ("" if row.held_out is None else f"  (held out {plain(row.held_out)})"),
        )
        for row in made.judged
    ]
    kept = ", ".join(f"{count(number)} of {role}" for role, number in made.from_last.items())
    show_facts(
        console,
        [
            ("steps", f"{steps_in_short(made.steps)}  ({made.weights})"),
            ("coefficients", shown + (", …" if len(largest) > _MOST_SHOWN else "")),
            *judged,
            ("tried", count(made.n_candidates) if made.n_candidates else ""),
            ("averaged", f"{count(made.n_averaged)} values"),
            ("as the last step has them", kept),
            ("files", f"{len(made.paths)} in {made.paths[0].parent}"),
            ("time", duration(made.seconds)),
        ],
    )

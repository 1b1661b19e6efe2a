"""``inshrink compare``: the task metric of every step, as trained and as restored."""

from __future__ import annotations

from collections.abc import Sequence
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
from inshrink_core.cli.showing import show_facts, show_table
from inshrink_core.text import nats, percent, plain, printable

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.evaluate import Comparison

__all__ = ["EXAMPLE", "compare"]

EXAMPLE = (
    "$ inshrink compare digits.inshrink --against runs/digits --evaluator judge.py:evaluate\n"
    "$ inshrink compare digits.inshrink --against runs/digits --trust-run --max-drop 0.01\n"
    "$ inshrink compare lattice.inshrink uniform.inshrink --against runs/digits --trust-run"
)


@verb
def compare(
    archives: Annotated[
        list[str], typer.Argument(metavar="ARCHIVE…", help="The archive to judge, or several of the run.")
    ],
    *,
    against: Annotated[str, typer.Option(metavar="RUN", help="The original run.")],
    evaluating: Evaluating,
    steps: Steps = None,
    max_drop: Annotated[
        float | None,
        typer.Option(metavar="FRACTION", help="End with 1 if any step drops by more: 0.01 is 1 %."),
    ] = None,
    max_divergence: Annotated[
        float | None, typer.Option(metavar="NATS", help="End with 1 if any step diverges by more.")
    ] = None,
    max_restore_cost: Annotated[
        float | None,
        typer.Option(metavar="FRACTION", help="End with 1 if a restore of any step costs more of the loss."),
    ] = None,
    gain: Annotated[
        bool,
        typer.Option("--gain", help="Measure too how much of each step's movement a restore would keep."),
    ] = False,
    based: Based,
    reading: Reading,
    placed: OnDevice,
    limit: MemoryLimit,
    out: Output,
) -> None:
    """Evaluate every step as trained, as restored, and with the previous checkpoint in its place."""
    import inshrink_core
    from inshrink_core.verbs.compare import CheckedBounds

    bounds = CheckedBounds(
        max_drop=max_drop, max_divergence=max_divergence, max_restore_cost=max_restore_cost
    )
    opened = [based.open(archive).limited(limit.limits()) for archive in archives]
    run = reading.open(against)
    listed = opened[0] if len(opened) == 1 else run
    with out.progress("compare", in_bytes=False) as progress:
        compared = inshrink_core.verbs.compare_archives(
            opened,
            run,
            **vars(evaluating),
            **vars(placed),
            steps=steps_of(listed, steps),
            gain=gain,
            progress=progress,
        )

    def show(console: Console, _: object) -> None:
        for path, comparison in compared.archives:
            if len(opened) > 1:
                console.print(printable(path), style="bold", soft_wrap=True)
            _show(console, comparison, bounds.passed_by_previous(comparison), with_gain=gain)

    failures = (bounds.failure(comparison, path) for path, comparison in compared.archives)
    report = compared.archives[0][1] if len(opened) == 1 else compared
    out.present(report, show, next((failure for failure in failures if failure is not None), None))


def _show(console: Console, comparison: Comparison, passed: Sequence[int], *, with_gain: bool) -> None:
    """Print a row a step, with the previous checkpoint's figures beside the archive's."""
    mark = ("≈",) if passed else ()
    rows = (
        (
            str(row.step),
            plain(row.original),
            plain(row.restored),
            percent(row.drop),
            nats(row.divergence),
            percent(row.stale_drop),
            nats(row.stale_divergence),
            *(sign if row.step in passed else "" for sign in mark),
        )
        for row in comparison.steps
    )
    headings = (
        "step",
        "original",
        "restored",
        "drop",
        "divergence",
        "previous drop",
        "previous div.",
    )
    show_table(console, (*headings, *("" for _ in mark)), rows, left=())
    if passed:
        console.print(
            "≈ the previous checkpoint, which stores nothing, does as well here: the step proves little"
        )
    if with_gain:
        gains = (
            (str(row.step), plain(row.restore_gain, 3), plain(row.restore_noise, 3))
            for row in comparison.steps
        )
        console.print()
        title = "After a restore at the step before"
        show_table(console, ("step", "gain", "noise"), gains, left=(), title=title)
    console.print()
    show_facts(
        console,
        [
            ("metric", f"{printable(comparison.metric)}, {comparison.direction} is better"),
            ("largest drop", percent(comparison.max_drop)),
            ("largest divergence", f"{nats(comparison.max_divergence)} nats"),
            ("mean divergence", f"{nats(comparison.mean_divergence)} nats"),
            ("largest restore cost", f"{percent(comparison.max_restore_cost)} of the loss"),
        ],
    )

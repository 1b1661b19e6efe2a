"""``inshrink compare``: the task metric of every step, as trained and as restored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.formatting import nats, percent, plain, printable
from inshrink_core.cli.options import (
    Direction,
    EvalMetric,
    EvaluatorFile,
    FollowLinks,
    Json,
    MaxMemory,
    Quiet,
    StepPattern,
    Steps,
    Timeout,
    TrustRun,
    choose_steps,
    open_run,
)
from inshrink_core.cli.output import make_table, present, progress_bar, show_facts
from inshrink_core.errors import CheckFailedError, InputError
from inshrink_core.execution import Limits, parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.execution.progress import Progress

__all__ = ["EXAMPLE", "compare"]

EXAMPLE = (
    "$ inshrink compare digits.inshrink --against runs/digits --evaluator judge.py:evaluate\n"
    "$ inshrink compare digits.inshrink --against runs/digits --trust-run --max-drop 0.01"
)


def compare(
    archive: Annotated[str, typer.Argument(metavar="ARCHIVE", help="The archive to judge.")],
    against: Annotated[str, typer.Option(metavar="RUN", help="The original run.")],
    evaluator: EvaluatorFile = None,
    eval_metric: EvalMetric = None,
    direction: Direction = None,
    trust_run: TrustRun = False,
    timeout: Timeout = 600.0,
    steps: Steps = None,
    max_drop: Annotated[
        float | None,
        typer.Option(metavar="FRACTION", help="End with 1 if any step drops by more: 0.01 is 1 %."),
    ] = None,
    max_divergence: Annotated[
        float | None, typer.Option(metavar="NATS", help="End with 1 if any step diverges by more.")
    ] = None,
    gain: Annotated[
        bool,
        typer.Option("--gain", help="Measure too how much of each step's movement a restore would keep."),
    ] = False,
    step_pattern: StepPattern = None,
    follow_links: FollowLinks = False,
    max_memory: MaxMemory = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate every step as trained, as restored, and a step stale."""
    import inshrink_core
    from inshrink_core.chain import Archive

    bounds = {"drop": max_drop, "divergence": max_divergence}
    for name, bound in bounds.items():
        if bound is not None and math.isnan(bound):
            raise InputError(f"--max-{name} nan bounds nothing", remedy="give a number")
    run, opened = open_run(against, step_pattern, follow_links=follow_links), Archive.open(archive)
    opened = opened.limited(Limits(max_memory=None if max_memory is None else parse_size(max_memory)))
    with progress_bar("compare", hidden=as_json or quiet, in_bytes=False) as advance:

        def progress(now: Progress) -> None:
            if advance is not None:
                advance(now.done, now.total, now.step, now.found)

        comparison = inshrink_core.compare(
            opened,
            run,
            evaluator=evaluator,
            metric=eval_metric,
            direction=direction,
            trust_run=trust_run,
            timeout=timeout,
            steps=choose_steps(steps or [], opened.listed_steps, archive),
            gain=gain,
            progress=progress,
        )
    document = comparison.to_json()
    present(
        document,
        as_json=as_json,
        quiet=quiet,
        text=lambda console: _show(console, document, bounds, with_gain=gain),
        failure=_judge(document, bounds, archive),
    )


def _judge(
    document: Mapping[str, Any], bounds: Mapping[str, float | None], archive: str
) -> CheckFailedError | InputError | None:
    """Return why the bounds are not kept; None if they are, or there are none."""
    for name, bound in bounds.items():
        if bound is None:
            continue
        rows = document["steps"]
        for row in rows:
            if row[name] is None:
                return InputError(
                    f"--max-{name} cannot be checked: step {row['step']} has no {name}",
                    where=archive,
                    remedy=_REMEDIES[name],
                )
        worst = max(rows, key=lambda row: float(row[name]))
        if worst[name] > bound:
            return CheckFailedError(
                f"step {worst['step']} exceeds --max-{name}",
                where=archive,
                expected=f"at most {bound:g}",
                found=f"{worst[name]:.4g}",
            )
    return None


_REMEDIES = {
    "drop": "a metric of zero has no relative change; choose another with --eval-metric",
    "divergence": "the evaluator must return 'log_probs'",
}


def _show(
    console: Console, document: Mapping[str, Any], bounds: Mapping[str, float | None], *, with_gain: bool
) -> None:
    """Print a row a step, with the stale copy's figures beside the archive's."""
    marks = ["≈" if _stale_passes(row, bounds) else "" for row in document["steps"]]
    headings = ("step", "original", "restored", "drop", "divergence", "stale drop", "stale div.")
    table = make_table(*headings, *([""] if any(marks) else []), left=())
    for row, mark in zip(document["steps"], marks, strict=True):
        table.add_row(
            str(row["step"]),
            plain(row["original"]),
            plain(row["restored"]),
            percent(row["drop"]),
            nats(row["divergence"]),
            percent(row["stale_drop"]),
            nats(row["stale_divergence"]),
            *([mark] if any(marks) else []),
        )
    console.print(table)
    if any(marks):
        console.print("≈ the stale copy, which stores nothing, does as well here: the step proves little")
    if with_gain:
        gains = make_table("step", "gain", "noise", left=(), title="After a restore at the step before")
        for row in document["steps"]:
            gains.add_row(str(row["step"]), plain(row["restore_gain"], 3), plain(row["restore_noise"], 3))
        console.print()
        console.print(gains)
    console.print()
    show_facts(
        console,
        [
            ("metric", f"{printable(str(document['metric']))}, {document['direction']} is better"),
            ("largest drop", percent(document["max_drop"])),
            ("largest divergence", f"{nats(document['max_divergence'])} nats"),
            ("mean divergence", f"{nats(document['mean_divergence'])} nats"),
        ],
    )


def _stale_passes(row: Mapping[str, Any], bounds: Mapping[str, float | None]) -> bool:
    """Whether the stale copy keeps the bounds too, or, without bounds, is no worse than the archive."""
    pairs = [
        (row[f"stale_{name}"], row[name] if bound is None else bound)
        for name, bound in bounds.items()
        if bound is not None or all(other is None for other in bounds.values())
    ]
    known = [(stale, limit) for stale, limit in pairs if stale is not None and limit is not None]
    return bool(known) and all(stale <= limit for stale, limit in known)

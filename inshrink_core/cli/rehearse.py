"""``inshrink rehearse``: what repeated restores from the archive do to a training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.options import BoundOptions, Output, Writing, verb
from inshrink_core.cli.showing import promised_facts, show_facts, show_table
from inshrink_core.errors import InputError
from inshrink_core.text import duration, percent, plain, printable, ratio, size, steps_in_short

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.report import Report
    from inshrink_core.training.losing import PartialFailure, PartialRehearsal
    from inshrink_core.training.rehearsal import Rehearsal

__all__ = ["EXAMPLE", "rehearse"]

EXAMPLE = (
    "$ inshrink rehearse char-gpt --codec inshrinkerator --set bins=32 -o rehearsal\n"
    "$ inshrink rehearse char-gpt --max-drop 0.01 -o rehearsal\n"
    "$ inshrink rehearse char-gpt --scale large --device cuda -o rehearsal\n"
    "$ inshrink rehearse my_task.py:MyTask --codec lossless --restores 4 --seeds 5\n"
    "$ inshrink rehearse char-gpt --lose 0.25 --budget 0.125"
)


@verb
def rehearse(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="A shipped task, such as char-gpt (docs/rehearsal.md lists them), or FILE.py:CLASS, "
            "which is executed.",
        ),
    ],
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Where finished trainings are kept: shared by all codecs."
        ),
    ] = Path("rehearsal"),
    writing: Writing,
    scale: Annotated[
        str | None,
        typer.Option(metavar="large", help="Train the task's model for a GPU; another task's results."),
    ] = None,
    restores: Annotated[
        int | None, typer.Option(min=0, help="Evenly spaced failures of each training. (default: the task's)")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Pairs of trainings.")] = 3,
    saves: Annotated[
        int | None, typer.Option(min=1, help="Evenly spaced saves of each training. (default: the task's)")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each training. (default: the task's)")
    ] = None,
    bounds: BoundOptions,
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Train each seed a third time, its weights moved by their last bits at each restore: "
            "what chance alone costs.",
        ),
    ] = False,
    lose: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Lose this share of the model's tensors between two saves, restore these alone, and count "
            "the steps that it costs; nothing is kept of such trainings.",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="With --lose, let a save take this share of a whole one's bytes, and save as many times as "
            "often.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(metavar="auto|cpu|cuda", help="Where training happens; another one is another result."),
    ] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Threads that training uses.")] = 1,
    keep_archives: Annotated[
        bool, typer.Option("--keep-archives", help="Keep the archives of the restored trainings.")
    ] = False,
    out: Output,
) -> None:
    """Train with failures restored from the archive, against uninterrupted training."""
    import inshrink_core

    shared = {
        "scale": scale,
        **writing.keywords(),
        "restores": restores,
        "seeds": seeds,
        "saves": saves,
        "steps": steps,
        "device": device,
        "threads": threads,
    }
    if budget is not None and lose is None:
        raise InputError("--budget goes with --lose", remedy="add --lose SHARE, or leave it out")
    with out.progress("rehearse", in_bytes=False) as progress:
        if lose is not None:
            _refuse_with_lose(bounds, control, keep_archives)
            report: Report = inshrink_core.training.rehearse_partial(
                task, output, lose=lose, budget=budget, **shared, progress=progress
            )
        else:
            report = inshrink_core.rehearse(
                task,
                output,
                **shared,
                **vars(bounds),
                control=control,
                keep_archives=keep_archives,
                progress=progress,
            )
    out.present(report, _show if lose is None else _show_partial)


def _refuse_with_lose(bounds: BoundOptions, control: bool, keep_archives: bool) -> None:
    """Refuse options that a rehearsal of partial failures has no use for."""
    given = [f"--{name.replace('_', '-')}" for name, value in vars(bounds).items() if value is not None]
    given += [
        option
        for option, is_given in (("--control", control), ("--keep-archives", keep_archives))
        if is_given
    ]
    if given:
        raise InputError(
            f"{given[0]} does not go with --lose",
            remedy="leave one of them out: --lose counts steps, not loss",
        )


def _show_partial(console: Console, report: PartialRehearsal) -> None:
    """Print a row a failure, then what they say together."""
    rows = (
        (str(one.seed), str(one.saved_at), str(one.failed_at), f"{one.share:.0%}", str(one.whole), _lost(one))
        for one in report.failures
    )
    columns = ("seed", "saved at", "failed at", "lost", "steps, all restored", "steps, lost ones restored")
    show_table(console, columns, rows, left=())
    console.print()
    saves = "whole" if report.budget is None else f"{report.budget:.3g} of the bytes, as many times as often"
    by_seed = ", ".join(f"{share:.0%}" for share in report.fewer_by_seed)
    facts = [
        ("task", f"{printable(report.task)}, on {report.device}"),
        ("codec", f"{report.codec}, optimizer {report.optimizer}"),
        ("saves", f"{saves}; {size(report.archive_bytes)} in all"),
        ("steps lost, mean", f"{report.whole:.1f} all restored, {report.partial:.1f} the lost ones alone"),
        ("counted by chance", f"{report.chance:.1f}, where nothing was lost"),
        ("fewer", f"{report.fewer:.0%}  (by seed: {by_seed})"),
        ("fewer, beyond chance", f"{report.fewer_beyond_chance:.0%}"),
    ]
    show_facts(console, facts)


def _lost(failure: PartialFailure) -> str:
    return f"{failure.partial}" if failure.reached else f"≥ {failure.partial}"


def _show(console: Console, report: Rehearsal) -> None:
    """Print a row a seed, then what they say together."""
    document = report.to_json()
    columns = (document[name] for name in ("seeds", "uninterrupted", "restored", "excesses"))
    rows = (
        (str(seed), plain(before), plain(after), percent(excess))
        for seed, before, after, excess in zip(*columns, strict=True)
    )
    show_table(console, ("seed", "uninterrupted", "restored", "excess"), rows, left=())
    console.print()
    sizes = f"{size(document['raw_bytes'])} in {size(document['archive_bytes'])}"
    facts = [
        ("task", f"{printable(document['task'])}, {document['steps']} steps, {document['saves']} saves"),
        ("metric", f"{printable(document['metric'])}, {document['direction']} is better"),
        ("codec", f"{document['codec']}, optimizer {document['optimizer']}"),
        ("restored at", steps_in_short(document["restored_at"])),
        ("excess", _with_half_width(document, "excess")),
        *_beyond_chance(document),
        ("noise of the seeds", percent(document["noise"]).lstrip("+")),
        ("ratio of everything", f"{ratio(document['ratio_total'])}  ({sizes})"),
        ("ratio of the weights", ratio(document["ratio_weights"])),
        *promised_facts(document),
        ("time", _times(document)),
    ]
    show_facts(console, facts)


def _beyond_chance(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the control says, where there is one."""
    if document["chance"] is None:
        return []
    return [
        ("excess by chance", percent(document["chance"])),
        ("beyond chance", _with_half_width(document, "beyond_chance")),
    ]


def _with_half_width(document: Mapping[str, Any], name: str) -> str:
    """Return a mean and how well it is known."""
    width = document[f"{name}_half_width"]
    if width is None:
        return f"{percent(document[name])}  (a single seed says little)"
    return f"{percent(document[name])} ± {percent(width).lstrip('+')}  (95 %)"


def _times(document: Mapping[str, Any]) -> str:
    """Return how long the trainings took, and what saving had of it."""
    uninterrupted, restored = document["train_seconds"], document["restored_seconds"]
    waited = duration(document["save_seconds"])
    return (
        f"{duration(uninterrupted)} uninterrupted, {duration(restored)} restored, {waited} of it saving"
        f" (on {document['device']})"
    )

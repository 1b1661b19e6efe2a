"""``inshrink rehearse``: what repeated restores from the archive do to a training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.options import BoundOptions, Output, Writing, verb
from inshrink_core.cli.showing import promised_facts, show_facts, show_table
from inshrink_core.text import duration, percent, plain, printable, ratio, size, steps_in_short

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.training.rehearsal import Rehearsal

__all__ = ["EXAMPLE", "rehearse"]

EXAMPLE = (
    "$ inshrink rehearse char-gpt --codec inshrinkerator --set bins=32 -o rehearsal\n"
    "$ inshrink rehearse char-gpt --max-drop 0.01 -o rehearsal\n"
    "$ inshrink rehearse char-gpt --scale large --device cuda -o rehearsal\n"
    "$ inshrink rehearse my_task.py:MyTask --codec lossless --restores 4 --seeds 5"
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

    with out.progress("rehearse", in_bytes=False) as progress:
        result = inshrink_core.rehearse(
            task,
            output,
            scale=scale,
            **writing.keywords(),
            restores=restores,
            seeds=seeds,
            saves=saves,
            steps=steps,
            **vars(bounds),
            control=control,
            device=device,
            threads=threads,
            keep_archives=keep_archives,
            progress=progress,
        )
    out.present(result, _show)


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

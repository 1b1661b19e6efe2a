"""``inshrink rehearse``: what repeated restores from the archive do to a training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.formatting import duration, percent, plain, printable, ratio, size, steps_in_short
from inshrink_core.cli.options import (
    ConfigFile,
    Json,
    KeyframeEvery,
    MaxDivergence,
    MaxDrop,
    Optimizer,
    Quiet,
    Settings,
    written_as,
)
from inshrink_core.cli.output import make_table, present, progress_bar, show_facts
from inshrink_core.cli.promised import promised_facts

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.execution.progress import Progress

__all__ = ["EXAMPLE", "rehearse"]

EXAMPLE = (
    "$ inshrink rehearse char-gpt --codec inshrinkerator --set bins=32 -o rehearsal\n"
    "$ inshrink rehearse char-gpt --max-drop 0.01 -o rehearsal\n"
    "$ inshrink rehearse my_task.py:MyTask --codec lossless --restores 4 --seeds 5"
)


def rehearse(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="char-gpt, char-conv, char-conv-adamw, digits-cnn, digits-cnn-sgd, or FILE.py:CLASS, "
            "which is executed.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Where finished trainings are kept: shared by all codecs."
        ),
    ] = Path("rehearsal"),
    codec: Annotated[
        str | None, typer.Option(help="Codec of the weights. (default: as for compress)")
    ] = None,
    settings: Settings = None,
    config: ConfigFile = None,
    optimizer: Optimizer = None,
    keyframe_every: KeyframeEvery = None,
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
    max_drop: MaxDrop = None,
    max_divergence: MaxDivergence = None,
    device: Annotated[
        str,
        typer.Option(metavar="cpu|cuda|auto", help="Where training happens; another one is another result."),
    ] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads that training uses.")] = 1,
    keep_archives: Annotated[
        bool, typer.Option("--keep-archives", help="Keep the archives of the restored trainings.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train with failures restored from the archive, against uninterrupted training."""
    from inshrink_core.training.rehearsal import rehearse as run_rehearsal

    written = written_as(config, settings, codec=codec, optimizer=optimizer, keyframe_every=keyframe_every)
    with progress_bar("rehearse", hidden=as_json or quiet, in_bytes=False) as advance:

        def progress(now: Progress) -> None:
            if advance is not None:
                advance(now.done, now.total, now.step)

        result = run_rehearsal(
            task,
            output,
            codec=written.codec,
            config=written.config,
            optimizer=written.optimizer,
            keyframe_every=written.keyframe_every,
            restores=restores,
            seeds=seeds,
            saves=saves,
            steps=steps,
            max_drop=max_drop,
            max_divergence=max_divergence,
            device=device,
            threads=threads,
            keep_archives=keep_archives,
            progress=None if advance is None else progress,
        )
    document = result.to_json()
    present(document, as_json=as_json, quiet=quiet, text=lambda console: _show(console, document))


def _show(console: Console, document: Mapping[str, Any]) -> None:
    """Print a row a seed, then what they say together."""
    table = make_table("seed", "uninterrupted", "restored", "excess", left=())
    columns = ("seeds", "uninterrupted", "restored", "excesses")
    for seed, before, after, excess in zip(*(document[name] for name in columns), strict=True):
        table.add_row(str(seed), plain(before), plain(after), percent(excess))
    console.print(table)
    console.print()
    sizes = f"{size(document['raw_bytes'])} in {size(document['archive_bytes'])}"
    facts = [
        ("task", f"{printable(document['task'])}, {document['steps']} steps, {document['saves']} saves"),
        ("metric", f"{printable(document['metric'])}, {document['direction']} is better"),
        ("codec", f"{document['codec']}, optimizer {document['optimizer']}"),
        ("restored at", steps_in_short(document["restored_at"])),
        ("excess", _with_half_width(document)),
        ("noise of the seeds", percent(document["noise"]).lstrip("+")),
        ("ratio of everything", f"{ratio(document['ratio_total'])}  ({sizes})"),
        ("ratio of the weights", ratio(document["ratio_weights"])),
        *promised_facts(document),
        ("time", _times(document)),
    ]
    show_facts(console, [fact for fact in facts if fact[1]])


def _with_half_width(document: Mapping[str, Any]) -> str:
    """Return the excess and how well it is known."""
    width = document["excess_half_width"]
    if width is None:
        return f"{percent(document['excess'])}  (a single seed says little)"
    return f"{percent(document['excess'])} ± {percent(width).lstrip('+')}  (95 %)"


def _times(document: Mapping[str, Any]) -> str:
    """Return how long the trainings took, and what saving had of it."""
    uninterrupted, restored = document["train_seconds"], document["restored_seconds"]
    waited = duration(document["save_seconds"])
    return f"{duration(uninterrupted)} uninterrupted, {duration(restored)} restored, {waited} of it saving"

"""``inshrink restore``: write archived steps back as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inshrink_core.cli.options import STEPS_HELP, Based, Computing, Limiting, Output, verb
from inshrink_core.cli.showing import show_originals, stored_text
from inshrink_core.cli.values import choose_steps
from inshrink_core.errors import InputError
from inshrink_core.text import count, duration, printable, size, steps_in_short

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.verbs.restore import RestoreReport

__all__ = ["EXAMPLE", "restore"]

EXAMPLE = (
    "$ inshrink restore digits.inshrink --step 400 -o restored/\n"
    "$ inshrink restore digits.inshrink --all --tensors 'conv*' -o restored/"
)

_MOST_FILES_SHOWN = 10


@verb
def restore(
    archive: Annotated[str, typer.Argument(metavar="ARCHIVE", help="The archive to restore from.")],
    *,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Where the files go; made if it is not there."),
    ],
    step: Annotated[
        list[str] | None,
        typer.Option("--step", "--steps", metavar="STEPS", help=f"{STEPS_HELP} (default: the last step)"),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Restore every step.")] = False,
    layout: Annotated[
        str,
        typer.Option(
            "--format", metavar="same|safetensors|torch", help="The run's own file format, or another."
        ),
    ] = "same",
    tensors: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="Only these tensors, by key; nothing else is read or written."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    branch: Annotated[
        int | None,
        typer.Option(metavar="N", help="Look for the steps in the history of this branch's last frame."),
    ] = None,
    based: Based,
    computing: Computing,
    limiting: Limiting,
    out: Output,
) -> None:
    """Write archived steps back as files, in the run's own format."""
    import inshrink_core
    from inshrink_core.execution import prepare_process
    from inshrink_core.verbs.restore import known_steps

    prepare_process()
    if every and step:
        raise InputError("--step and --all exclude each other", remedy="give one of them")
    opened = based.open(archive)
    known = known_steps(opened, branch)
    with out.progress("restore") as progress:
        report = inshrink_core.restore(
            opened,
            output,
            steps=known if every else choose_steps(step or (), known, archive),
            layout=layout,
            tensors=tensors,
            force=force,
            branch=branch,
            **vars(computing),
            **limiting.keywords(),
            progress=progress,
        )
    out.present(report, _show)


def _show(console: Console, report: RestoreReport) -> None:
    """Print the files written, the first ones by name."""
    for path in report.paths[:_MOST_FILES_SHOWN]:
        console.print(printable(str(path)), soft_wrap=True)
    if len(report.paths) > _MOST_FILES_SHOWN:
        console.print(f"… and {count(len(report.paths) - _MOST_FILES_SHOWN)} more files")
    written = sum(path.stat().st_size for path in report.paths if path.is_file())
    steps = "step" if len(report.steps) == 1 else "steps"
    console.print(
        f"{steps} {steps_in_short(report.steps)}: {size(written)} written in {duration(report.seconds)}, "
        f"{size(report.bytes_read)} read from the archive"
    )
    console.print(stored_text(report.stored), soft_wrap=True)
    show_originals(console, report.originals.text)

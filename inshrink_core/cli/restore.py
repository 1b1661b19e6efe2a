"""``inshrink restore``: write archived steps back as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inshrink_core.cli.formatting import count, duration, printable, size, steps_in_short
from inshrink_core.cli.options import STEPS_HELP, Json, MaxDisk, MaxMemory, Quiet, Threads, choose_steps
from inshrink_core.cli.output import present, progress_bar
from inshrink_core.cli.promised import stored_text
from inshrink_core.errors import InputError
from inshrink_core.execution import parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.execution.progress import Progress
    from inshrink_core.verbs.restore import RestoreReport

__all__ = ["EXAMPLE", "restore"]

EXAMPLE = (
    "$ inshrink restore digits.inshrink --step 400 -o restored/\n"
    "$ inshrink restore digits.inshrink --all --tensors 'conv*' -o restored/"
)

_FORMATS = ("same", "safetensors", "torch")
_MOST_FILES_SHOWN = 10


def restore(
    archive: Annotated[str, typer.Argument(metavar="ARCHIVE", help="The archive to restore from.")],
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
    threads: Threads = None,
    max_memory: MaxMemory = None,
    max_disk: MaxDisk = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write archived steps back as files, in the run's own format."""
    import inshrink_core
    from inshrink_core.chain import Archive

    if layout not in _FORMATS:
        raise InputError(f"--format {layout}", remedy=f"choose one of {', '.join(_FORMATS)}")
    if every and step:
        raise InputError("--step and --all exclude each other", remedy="give one of them")
    opened = Archive.open(archive)
    known = opened.listed_steps
    if branch is not None:
        tips = [frame for frame in opened.reader.listed if frame.branch == branch]
        line = opened.reader.listed_history(tips[-1]) if tips else ()
        known = tuple(sorted({frame.step for frame in line}))
    chosen = known if every else choose_steps(step or [], known, str(opened.path))
    with progress_bar("restore", hidden=as_json or quiet) as advance:

        def progress(now: Progress) -> None:
            if advance is not None:
                advance(now.done, now.total, now.step)

        report = inshrink_core.restore(
            opened,
            output,
            steps=chosen,
            layout=layout,
            tensors=tensors,
            force=force,
            threads=threads,
            branch=branch,
            max_memory=None if max_memory is None else parse_size(max_memory),
            max_disk=None if max_disk is None else parse_size(max_disk),
            progress=None if advance is None else progress,
        )
    present(report.to_json(), as_json=as_json, quiet=quiet, text=lambda console: _show(console, report))


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
    if report.originals.text != "checked":
        console.print(printable(f"checksums of the originals: {report.originals.text}"), soft_wrap=True)

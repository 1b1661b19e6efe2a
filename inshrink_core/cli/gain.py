"""Restore gain and noise on the command line: measured for what a path names, and shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.cli.formatting import UNKNOWN, counted, plain, printable
from inshrink_core.cli.options import open_run
from inshrink_core.cli.output import make_table, progress_bar
from inshrink_core.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.analysis.gain import RestoreGain
    from inshrink_core.chain import Archive
    from inshrink_core.execution.progress import Progress
    from inshrink_core.formats import Run

__all__ = ["measure_gain", "show_gain"]

_FEW_TENSORS = 10
"""Without ``--tensors``, this many are listed: those that would lose most of their movement."""


def measure_gain(
    subject: Run | Archive,
    against: str | None,
    codec: str | None,
    step_pattern: str | None,
    *,
    follow_links: bool = False,
    hidden: bool,
) -> RestoreGain:
    """Measure an archive against its originals, or a run with a codec.

    Parameters
    ----------
    subject
        A run or an archive.
    against
        The original run of an archive.
    codec
        ``NAME:KEY=VALUE,…`` for a run; an archive has its own.
    step_pattern
        How step numbers stand in the file names of `against`.
    hidden
        Show no progress.

    Raises
    ------
    InputError
        An archive without its run, or an option that does not go with the subject.
    """
    from inshrink_core.chain import Archive

    archived = isinstance(subject, Archive)
    if archived and against is None:
        raise InputError(
            "--gain compares an archive with the original run", remedy="give it with --against RUN"
        )
    if archived and codec is not None:
        raise InputError("an archive has its codec already", remedy="leave out --codec")
    if not archived and against is not None:
        raise InputError("--against goes with an archive, and this is a run", remedy="leave it out")
    with progress_bar("gain", hidden=hidden, in_bytes=False) as advance:

        def progress(now: Progress) -> None:
            # Compressing, which comes first for a run, counts bytes.
            if advance is not None and now.stage == "gain":
                advance(now.done, now.total, now.step, now.found)

        from inshrink_core.analysis.gain import restore_gain, restore_gain_of_run

        if isinstance(subject, Archive):
            return restore_gain(
                subject, open_run(against or "", step_pattern, follow_links=follow_links), progress=progress
            )
        from inshrink_core.bench import Variant

        variant = Variant.parse(codec) if codec is not None else None
        return restore_gain_of_run(
            subject,
            codec=variant.codec if variant is not None else None,
            config=variant.config(None) if variant is not None else None,
            progress=progress,
        )


def show_gain(console: Console, measured: RestoreGain, *, with_tensors: bool) -> None:
    """Print gain and noise by step, and by tensor over all steps, the lowest gain first."""
    table = make_table("step", "gain", "noise", left=())
    for step in measured.steps:
        table.add_row(str(step.step), plain(step.gain, 3), plain(step.noise, 3))
    pooled = measured.pooled
    table.add_row("all", plain(pooled.gain, 3), plain(pooled.noise, 3))
    console.print(f"\nrestored at the step before, with the codec {measured.codec}:")
    console.print(table)
    rows = sorted(measured.by_tensor.items(), key=lambda pair: (pair[1].gain is None, pair[1].gain or 0.0))
    shown = rows if with_tensors else rows[:_FEW_TENSORS]
    tensors = make_table("tensor", "gain", "noise")
    for key, row in shown:
        tensors.add_row(printable(key), plain(row.gain, 3), plain(row.noise, 3))
    console.print()
    console.print(tensors)
    if len(rows) > len(shown):
        console.print(f"and {counted(len(rows) - len(shown), 'tensor')} of higher gain (--tensors lists all)")
    if any(row.gain is None for _, row in rows):
        console.print(f"{UNKNOWN} a tensor that did not move")

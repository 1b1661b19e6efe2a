"""``inshrink verify``: prove that an archive is sound."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from inshrink_core.cli.options import Based, Limiting, OnDevice, Output, Reading, verb
from inshrink_core.cli.showing import show_originals, show_table, stored_text
from inshrink_core.errors import CheckFailedError
from inshrink_core.text import count, counted, error_size, printable, steps_in_short

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.chain import StepError, Verification

__all__ = ["EXAMPLE", "verify"]

EXAMPLE = "$ inshrink verify digits.inshrink\n$ inshrink verify digits.inshrink --deep --against runs/digits"

_MOST_WORST = 10
_MOST_PROBLEMS = 50


@verb
def verify(
    archive: Annotated[str, typer.Argument(metavar="ARCHIVE", help="The archive to check.")],
    *,
    deep: Annotated[
        bool, typer.Option("--deep", help="Restore every frame too, without writing a file.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="The original run: measure the error of every tensor against it."),
    ] = None,
    based: Based,
    reading: Reading,
    placed: OnDevice,
    limiting: Limiting,
    out: Output,
) -> None:
    """Check an archive; ends with 1 if anything is wrong."""
    from inshrink_core.chain import verify_archive

    run = reading.open(against) if against is not None else None
    with out.advance("verify") as advance:
        verification = verify_archive(
            archive,
            deep=deep,
            against=run,
            done=advance,
            base=based.base,
            **vars(placed),
            **limiting.keywords(),
        )
    failure = None
    if not verification.ok:
        n_problems = len(verification.problems)
        what = "a problem was found" if n_problems == 1 else f"{n_problems} problems were found"
        failure = CheckFailedError(what, where=archive)
    out.present(verification, _show, failure)


def _show(console: Console, verification: Verification) -> None:
    """Print the problems, then the worst tensors, then the verdict."""
    for problem in verification.problems[:_MOST_PROBLEMS]:
        remedy = f"; {problem.remedy}" if problem.remedy else ""
        console.print(printable(f"{problem.where}: {problem.what}{remedy}"), soft_wrap=True)
    for note in verification.notes[:_MOST_PROBLEMS]:
        console.print(printable(f"note: {note.where}: {note.what}; {note.remedy}"), soft_wrap=True)
    if len(verification.problems) > _MOST_PROBLEMS:
        console.print(f"… and {count(len(verification.problems) - _MOST_PROBLEMS)} more")
    if verification.errors:
        _show_errors(console, verification.errors)
    if any(verification.stored) and verification.ok:
        console.print(stored_text(verification.stored), soft_wrap=True)
    if verification.missing_steps:
        console.print(f"not archived: step {steps_in_short(verification.missing_steps)}")
    show_originals(console, verification.originals.text)
    if verification.ok:
        looked = "checked and restored" if verification.deep else "checked"
        console.print(f"sound: {counted(verification.n_frames, 'frame')} {looked}")


def _show_errors(console: Console, errors: tuple[StepError, ...]) -> None:
    """Print how many tensors are bit-exact, and the others by falling error."""
    lossy = [row for row in errors if not row.error.bit_exact]
    console.print(f"bit-exact: {count(len(errors) - len(lossy))} of {count(len(errors))} tensors, all steps")
    if not lossy:
        return
    _show_roles(console, errors)
    # Moments have a relative error of about one by design: they would fill the list.
    lossy = [row for row in lossy if "@" not in row.key] or lossy
    lossy.sort(key=_badness, reverse=True)
    cells = (
        (
            printable(row.key),
            str(row.step),
            printable(row.codec),
            error_size(row.error.relative_rms),
            error_size(row.error.max_abs),
        )
        for row in lossy[:_MOST_WORST]
    )
    console.print()
    headings = ("worst tensors", "step", "codec", "relative error", "largest error")
    show_table(console, headings, cells, left=(0, 2))
    console.print()


def _show_roles(console: Console, errors: tuple[StepError, ...]) -> None:
    """Print a row a role: how many of its tensors are bit-exact, and the largest error of the others."""
    groups: dict[str, list[StepError]] = {}
    for row in errors:
        groups.setdefault(row.key.partition("@")[2] or "weights, buffers", []).append(row)
    cells = []
    for role, rows in groups.items():
        worst = max(rows, key=_badness).error
        exact = count(sum(row.error.bit_exact for row in rows))
        error = "none" if worst.bit_exact else error_size(worst.relative_rms)
        cells.append((role, count(len(rows)), exact, error))
    console.print()
    show_table(console, ("role", "tensors", "bit-exact", "largest relative error"), cells)


def _badness(row: StepError) -> tuple[float, float]:
    """Order by relative error; where the original is all zero, any error counts as the worst."""
    relative = row.error.relative_rms
    return (math.inf if relative is None else relative, row.error.max_abs)

"""``inshrink prune``: remove archived steps; shows a plan first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inshrink_core.cli.options import STEPS_HELP, Based, OnDevice, Output, verb
from inshrink_core.cli.showing import show_facts
from inshrink_core.cli.values import choose_steps
from inshrink_core.errors import InputError
from inshrink_core.text import duration, size, steps_in_short

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.frame import FrameInfo
    from inshrink_core.verbs.prune import ForgetReport, PruneReport

__all__ = ["EXAMPLE", "prune"]

EXAMPLE = (
    "$ inshrink prune digits.inshrink --keep-every 1000 --keep-last 5\n"
    "$ inshrink prune digits.inshrink --keep-every 1000 --keep-last 5 --apply"
)


@verb
def prune(
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="The archive: a folder.")],
    *,
    keep_every: Annotated[
        int | None, typer.Option(metavar="N", help="Keep steps that are multiples of N.")
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", help="Keep the last N steps of each branch.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option("--keep", metavar="STEPS", help=f"Keep these steps. {STEPS_HELP}")
    ] = None,
    drop_branches: Annotated[
        bool,
        typer.Option("--drop-branches", help="Keep nothing outside the history of the newest branch."),
    ] = False,
    smallest: Annotated[
        bool,
        typer.Option(
            "--smallest", help="Keep further steps where re-keying those that need them would take more."
        ),
    ] = False,
    stand_alone: Annotated[
        bool,
        typer.Option(
            "--stand-alone",
            help="Make keyframes of frames that are told against a base model; by itself, keep every step.",
        ),
    ] = False,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget-missing",
            help="Give up frames whose files are lost, and steps that cannot be decoded without them; "
            "goes alone.",
        ),
    ] = False,
    based: Based,
    apply: Annotated[
        bool, typer.Option("--apply", help="Do it. Without this nothing is changed, and the plan is shown.")
    ] = False,
    placed: OnDevice,
    out: Output,
) -> None:
    """Remove archived steps; what stays keeps every bit. Shows a plan unless told to apply it."""
    import inshrink_core
    from inshrink_core.verbs.prune import forget_missing

    if forget:
        if keep_every or keep_last or keep or drop_branches or smallest or stand_alone:
            raise InputError("--forget-missing goes alone", remedy="prune by rules afterwards")
        out.present(forget_missing(archive, apply=apply), _show_forgotten)
        return
    steps: Sequence[int] | None = None
    if keep:
        frames = inshrink_core.Archive.open(archive).reader.frames
        steps = choose_steps(keep, sorted({frame.step for frame in frames}), str(archive))
    with out.progress("prune", stage="prune") as progress:
        report = inshrink_core.verbs.prune(
            archive,
            keep_every=keep_every,
            keep_last=keep_last,
            keep=steps or (),
            drop_branches=drop_branches,
            smallest=smallest,
            stand_alone=stand_alone,
            base=based.base,
            apply=apply,
            **vars(placed),
            progress=progress,
        )
    out.present(report, _show)


def _show_forgotten(console: Console, report: ForgetReport) -> None:
    """Print what is given up, or would be."""
    if not report.missing:
        console.print("no frame is missing")
        return
    verb = "given up" if report.applied else "would give up"
    facts = [
        (f"{verb}, missing", _steps(report.missing)),
        (f"{verb}, useless without", _steps(report.useless)),
        ("the last step then", "none is left" if report.head is None else _steps([report.head])),
    ]
    show_facts(console, facts)
    if not report.applied:
        console.print("nothing was changed: add --apply to do it; it cannot be undone")


def _show(console: Console, report: PruneReport) -> None:
    """Print what goes and what stays, and what that frees."""
    plan = report.plan
    done = report.applied and bool(plan.removed or plan.rekeyed)
    verbs = ("removed", "re-keyed") if done else ("would remove", "would re-key")
    about = "" if done or not plan.rekeyed else "about "
    facts = [
        ("kept", _steps(plan.kept)),
        ("kept as references", _steps(plan.references)),
        (verbs[0], _steps(plan.removed)),
        (verbs[1], _steps(plan.rekeyed)),
        ("archive", f"{size(report.before)} before, {about}{size(report.after)} after"),
        ("time", duration(report.seconds)),
    ]
    show_facts(console, facts)
    if plan.lost_origins:
        steps = _steps(plan.lost_origins)
        console.print(f"note: what step {steps} was restored from goes; its record of it stays")
    if report.freed < 0:
        console.print(
            f"note: re-keyed steps take {size(-report.freed)} more than what goes; "
            "--smallest keeps steps where that is smaller"
        )
    if not (plan.removed or plan.rekeyed):
        console.print("nothing to remove")
    elif not report.applied:
        console.print("nothing was changed: add --apply to do it")


def _steps(frames: Sequence[FrameInfo]) -> str:
    """Return the steps of some frames, with the branch where there is more than one."""
    by_branch: dict[int, list[int]] = {}
    for frame in frames:
        by_branch.setdefault(frame.branch, []).append(frame.step)
    parts = [
        steps_in_short(sorted(steps)) + (f" on branch {branch}" if branch else "")
        for branch, steps in sorted(by_branch.items())
    ]
    return "; ".join(parts)

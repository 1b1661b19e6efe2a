"""``inshrink prune``: remove archived steps; shows a plan first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inshrink_core.cli.formatting import duration, size, steps_in_short
from inshrink_core.cli.options import STEPS_HELP, Json, Quiet, choose_steps
from inshrink_core.cli.output import present, progress_bar, show_facts
from inshrink_core.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.execution.progress import Progress
    from inshrink_core.frame import FrameInfo
    from inshrink_core.verbs.prune import PruneReport

__all__ = ["EXAMPLE", "prune"]

EXAMPLE = (
    "$ inshrink prune digits.inshrink --keep-every 1000 --keep-last 5\n"
    "$ inshrink prune digits.inshrink --keep-every 1000 --keep-last 5 --apply"
)


def prune(
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="The archive: a folder.")],
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
    forget: Annotated[
        bool,
        typer.Option(
            "--forget-missing",
            help="Give up frames whose files are lost, and steps that cannot be decoded without them; "
            "goes alone.",
        ),
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Do it. Without this nothing is changed, and the plan is shown.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove archived steps; what stays keeps every bit. Shows a plan unless told to apply it."""
    import inshrink_core
    from inshrink_core.chain import Archive

    if forget:
        if keep_every or keep_last or keep or drop_branches or smallest:
            raise InputError("--forget-missing goes alone", remedy="prune by rules afterwards")
        _forget(archive, apply, as_json, quiet)
        return
    steps = None
    if keep:
        every = sorted({frame.step for frame in Archive.open(str(archive)).reader.frames})
        steps = choose_steps(keep, every, str(archive))
    with progress_bar("prune", hidden=as_json or quiet) as advance:

        def progress(now: Progress) -> None:
            if advance is not None and now.stage == "prune":
                advance(now.done, now.total, now.step)

        report = inshrink_core.prune(
            archive,
            keep_every=keep_every,
            keep_last=keep_last,
            keep=steps or (),
            drop_branches=drop_branches,
            smallest=smallest,
            apply=apply,
            progress=progress,
        )
    present(report.to_json(), as_json=as_json, quiet=quiet, text=lambda console: _show(console, report))


def _forget(archive: Path, apply: bool, as_json: bool, quiet: bool) -> None:
    """Give up what is lost, or show what that would be."""
    from inshrink_core.verbs.prune import forget_missing

    report = forget_missing(archive, apply=apply)

    def show(console: Console) -> None:
        if not report.missing:
            console.print("no frame is missing")
            return
        verb = "given up" if report.applied else "would give up"
        last = "none is left" if report.head is None else _steps([report.head])
        facts = [
            (f"{verb}, missing", _steps(report.missing)),
            (f"{verb}, useless without", _steps(report.useless)),
            ("the last step then", last),
        ]
        show_facts(console, [fact for fact in facts if fact[1]])
        if not report.applied:
            console.print("nothing was changed: add --apply to do it; it cannot be undone")

    present(report.to_json(), as_json=as_json, quiet=quiet, text=show)


def _show(console: Console, report: PruneReport) -> None:
    """Print what goes and what stays, and what that frees."""
    plan = report.plan
    done = report.applied and bool(plan.removed)
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
    show_facts(console, [fact for fact in facts if fact[1]])
    if plan.lost_origins:
        steps = _steps(plan.lost_origins)
        console.print(f"note: what step {steps} was restored from goes; its record of it stays")
    if report.freed < 0:
        console.print(
            f"note: re-keyed steps take {size(-report.freed)} more than what goes; "
            "--smallest keeps steps where that is smaller"
        )
    if not plan.removed:
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

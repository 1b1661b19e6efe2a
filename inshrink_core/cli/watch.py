"""``inshrink compress --watch``: archive checkpoints beside a training, as they are finished."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.formatting import counted, duration, printable, ratio, size, steps_in_short
from inshrink_core.cli.output import present, progress_bar, show_facts
from inshrink_core.cli.promised import optimizer_text
from inshrink_core.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.execution.progress import Progress
    from inshrink_core.verbs.watch import WatchEvent, WatchReport

__all__ = ["Idle", "Poll", "Until", "Watch", "require_watch", "watch_run"]

Watch = Annotated[
    bool,
    typer.Option("--watch", help="Stay beside a training: archive each checkpoint as it is finished."),
]
Poll = Annotated[
    float | None,
    typer.Option(min=0.01, metavar="SECONDS", help="With --watch, time between looks. (default: 5)"),
]
Until = Annotated[
    int | None,
    typer.Option(metavar="STEP", help="With --watch, end when this step or a later one is archived."),
]
Idle = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="With --watch, end when nothing new came for so long."),
]

_DEFAULT_POLL = 5.0


def require_watch(poll: float | None, until: int | None, idle: float | None) -> None:
    """Refuse options of the watch without it."""
    if poll is not None or until is not None or idle is not None:
        raise InputError("--poll, --until and --idle go with --watch", remedy="add --watch")


def watch_run(
    run: str,
    output: Path,
    *,
    poll: float | None,
    until: int | None,
    idle: float | None,
    steps: object,
    step_pattern: str | None,
    as_json: bool,
    quiet: bool,
    follow_links: bool,
    options: Mapping[str, Any],
) -> None:
    """Watch a run until it ends or Ctrl-C is pressed, then show what was archived."""
    import inshrink_core

    if steps:
        raise InputError("--watch and --steps exclude each other", remedy="--until STEP ends a watch")
    lines = not (as_json or quiet)
    with progress_bar("compress", hidden=not lines) as advance:

        def progress(now: Progress) -> None:
            if advance is not None:
                advance(now.done, now.total, now.step)

        def tell(event: WatchEvent) -> None:
            if lines and event.kind != "ended":
                detail = f": {event.detail}" if event.detail else ""
                step = "" if event.step is None else f" step {event.step}"
                typer.echo(printable(f"{event.kind}{step}{detail}"), err=True)

        report = inshrink_core.watch(
            run,
            output,
            interval=_DEFAULT_POLL if poll is None else poll,
            until=until,
            idle=idle,
            step_pattern=step_pattern,
            follow_links=follow_links,
            on_event=tell,
            progress=None if advance is None else progress,
            **options,
        )
    present(
        report.to_json(),
        as_json=as_json,
        quiet=quiet,
        text=lambda console: _show(console, report),
        failure=report.failure,
    )


_WHY = {
    "until": "the step asked for is archived",
    "idle": "nothing new came",
    "interrupted": "interrupted; the same command goes on",
}


def _show(console: Console, report: WatchReport) -> None:
    """Print what was archived, and why the watch ended."""
    appended, vanished = report.steps("archived"), report.steps("vanished")
    facts = [
        ("archive", report.archive),
        ("appended", steps_in_short(appended) if appended else "nothing new"),
        ("vanished", steps_in_short(vanished) if vanished else ""),
        ("damaged", counted(len(report.damaged), "checkpoint") if report.damaged else ""),
        ("ended", _WHY.get(report.ended, report.ended)),
        ("time", duration(report.seconds)),
    ]
    if report.size is not None:
        held = f"{counted(len(report.size.frames), 'frame')}, {size(report.size.nbytes)}"
        roles = {row.spec.role.value for frame in report.size.frames for row in frame.tensors}
        facts += [
            ("frames", held),
            (
                "optimizer state",
                optimizer_text(report.reports[-1].optimizer if report.reports else None, roles),
            ),
            ("ratio of everything", ratio(report.size.ratio_total)),
            ("ratio of the weights", ratio(report.size.ratio_weights)),
        ]
    show_facts(console, [fact for fact in facts if fact[1]])

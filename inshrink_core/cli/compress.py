"""``inshrink compress``: write a run into an archive."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.formatting import (
    UNKNOWN,
    count,
    counted,
    duration,
    error_size,
    plain,
    rate,
    ratio,
    size,
    steps_in_short,
)
from inshrink_core.cli.options import (
    AllowDamaged,
    ConfigFile,
    Device,
    Direction,
    EvalMetric,
    EvaluatorFile,
    FollowLinks,
    Json,
    KeyframeEvery,
    MaxDivergence,
    MaxDrop,
    Optimizer,
    Quiet,
    Settings,
    StepPattern,
    Steps,
    Threads,
    Timeout,
    TrustRun,
    choose_steps,
    open_run,
    written_as,
)
from inshrink_core.cli.output import present, progress_bar, show_facts
from inshrink_core.cli.promised import optimizer_text, promised_facts
from inshrink_core.cli.watch import Idle, Poll, Until, Watch, require_watch, watch_run

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.execution.progress import Progress

__all__ = ["EXAMPLE", "compress"]

EXAMPLE = (
    "$ inshrink compress runs/digits -o digits.inshrink --coarseness 4\n"
    "$ inshrink compress runs/digits -o middle.inshrink --steps 100:500 --codec inshrinkerator --bins 16\n"
    "$ inshrink compress runs/digits -o bounded.inshrink --max-drop 0.01 --evaluator judge.py:evaluate"
)


def compress(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run: a directory, a glob or a checkpoint file.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="ARCHIVE", help="The archive to make or to append to.")
    ],
    codec: Annotated[
        str | None,
        typer.Option(help="Codec of the weights. (default: the archive's, else lattice)"),
    ] = None,
    coarseness: Annotated[
        float | None,
        typer.Option(
            help="Of the lattice codec, about 0.5 to 8: more is smaller and less exact. (default: 1)"
        ),
    ] = None,
    bins: Annotated[
        int | None, typer.Option(help="Of the inshrinkerator codec: centroids of each tensor. (default: 32)")
    ] = None,
    prune: Annotated[
        float | None,
        typer.Option(help="Of the inshrinkerator codec: fraction of each layer type set to zero."),
    ] = None,
    protect: Annotated[
        float | None, typer.Option(help="Of the inshrinkerator codec: fraction kept in bfloat16.")
    ] = None,
    settings: Settings = None,
    config: ConfigFile = None,
    optimizer: Optimizer = None,
    keyframe_every: KeyframeEvery = None,
    steps: Steps = None,
    resumed_from: Annotated[
        int | None,
        typer.Option(
            metavar="STEP", help="The archived step that training was restored from: opens a branch there."
        ),
    ] = None,
    max_drop: MaxDrop = None,
    max_divergence: MaxDivergence = None,
    evaluator: EvaluatorFile = None,
    eval_metric: EvalMetric = None,
    direction: Direction = None,
    trust_run: TrustRun = False,
    timeout: Timeout = 600.0,
    device: Device = "cpu",
    threads: Threads = None,
    watch: Watch = False,
    poll: Poll = None,
    until: Until = None,
    idle: Idle = None,
    step_pattern: StepPattern = None,
    follow_links: FollowLinks = False,
    allow_damaged: AllowDamaged = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a run into an archive: the steps it does not hold yet."""
    import inshrink_core

    own = {"coarseness": coarseness, "bins": bins, "prune": prune, "protect": protect}
    written = written_as(
        config, settings, codec=codec, own=own, optimizer=optimizer, keyframe_every=keyframe_every
    )
    if written.codec is None and any(value is not None for value in (bins, prune, protect)):
        written = written._replace(codec="inshrinkerator")
    options: dict[str, Any] = {
        **written._asdict(),
        "resumed_from": resumed_from,
        "max_drop": max_drop,
        "max_divergence": max_divergence,
        "evaluator": evaluator,
        "metric": eval_metric,
        "direction": direction,
        "trust_run": trust_run,
        "timeout": timeout,
        "device": device,
        "threads": threads,
        "allow_damaged": allow_damaged,
    }
    if watch:
        watch_run(
            run,
            output,
            poll=poll,
            until=until,
            idle=idle,
            steps=steps,
            step_pattern=step_pattern,
            as_json=as_json,
            quiet=quiet,
            follow_links=follow_links,
            options={name: value for name, value in options.items() if value is not None},
        )
        return
    require_watch(poll, until, idle)
    opened = open_run(run, step_pattern, follow_links=follow_links)
    with progress_bar("compress", hidden=as_json or quiet) as advance:

        def progress(now: Progress) -> None:
            if advance is not None:
                advance(now.done, now.total, now.step)

        report = inshrink_core.compress(
            opened,
            output,
            steps=choose_steps(steps or [], opened.steps, str(opened.path)),
            progress=None if advance is None else progress,
            **options,
        )
    document = report.to_json()
    present(
        document,
        as_json=as_json,
        quiet=quiet,
        text=lambda console: _show(console, document),
        failure=report.failure,
    )


def _show(console: Console, document: Mapping[str, Any]) -> None:
    """Print what was written now, then what the archive holds altogether."""
    appended, skipped = document["appended"], document["skipped"]
    done = f"{steps_in_short(appended)}" if appended else "nothing new"
    speed = f"{duration(document['seconds'])}, {rate(document['mb_per_s'])}" if appended else ""
    frames = document["frames"]
    keyframes = sum(frame["kind"] == "keyframe" for frame in frames)
    facts = [
        ("archive", str(document["archive"])),
        ("appended", done),
        *(("left out", row) for row in document["left_out"]),
        ("checksums of the originals", str(document["originals"]["text"])),
        ("skipped", f"{steps_in_short(skipped)}, there already" if skipped else ""),
        ("time", speed),
        ("codec", str(document["codec"])),
        ("optimizer state", optimizer_text(document["optimizer"], document["roles"])),
        ("frames", f"{count(len(frames))}  ({counted(keyframes, 'keyframe')})"),
        ("ratio of everything", _total(document)),
        ("ratio of the weights", ratio(document["ratio_weights"])),
        ("bits per weight", plain(document["bits_per_weight"])),
        ("relative error", _error(document)),
        *promised_facts(document),
    ]
    show_facts(console, [fact for fact in facts if fact[1]])


def _total(document: Mapping[str, Any]) -> str:
    """Return the ratio of everything, and the sizes it is made of."""
    sizes = f"{size(document['raw_bytes'])} in {size(document['archive_bytes'])}"
    return f"{ratio(document['ratio_total'])}  ({sizes})"


def _error(document: Mapping[str, Any]) -> str:
    """Return the error of the weights written now; nothing where none were."""
    text = error_size(document["relative_error"])
    return "" if text == UNKNOWN else f"{text}  (of the weights written now, root mean square)"

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
    nats,
    percent,
    plain,
    rate,
    ratio,
    size,
    steps_in_short,
)
from inshrink_core.cli.opening import open_run
from inshrink_core.cli.options import (
    Device,
    Direction,
    EvalMetric,
    EvaluatorFile,
    Json,
    MaxDivergence,
    MaxDrop,
    Quiet,
    StepPattern,
    Threads,
    Timeout,
    TrustRun,
)
from inshrink_core.cli.output import present, show_facts
from inshrink_core.cli.progress import progress_bar
from inshrink_core.cli.settings import given_settings, read_config_file
from inshrink_core.cli.steps import STEPS_HELP, choose_steps
from inshrink_core.cli.watch import Idle, Poll, Until, Watch, require_watch, watch_run

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.session import Progress

__all__ = ["EXAMPLE", "compress"]

EXAMPLE = (
    "$ inshrink compress runs/digits -o digits.inshrink --coarseness 4\n"
    "$ inshrink compress runs/digits -o digits.inshrink --steps 100:500 --codec inshrinkerator --bins 16\n"
    "$ inshrink compress runs/digits -o digits.inshrink --max-drop 0.01 --evaluator judge.py:evaluate"
)

_KEYFRAME_EVERY = 32


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
            help="Of the lattice codec, about 0.5 to 8: more is smaller and less exact. (default: 2.5)"
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
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting of the codec; may be repeated."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings from a TOML or JSON file; options override it."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="lossless|lattice|lattice-ratio|drop",
            help="Keep the optimizer's state bit-exact, to an octave, as rank-one factors, or leave it out."
            " (default: lossless)",
        ),
    ] = None,
    keyframe_every: Annotated[
        int | None, typer.Option(min=1, help="Frames from one keyframe to the next. (default: 32)")
    ] = None,
    steps: Annotated[
        list[str] | None, typer.Option("--steps", "--step", metavar="STEPS", help=STEPS_HELP)
    ] = None,
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
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a run into an archive: the steps it does not hold yet."""
    from inshrink_core import session

    given = read_config_file(config) if config is not None else {}
    own = {"coarseness": coarseness, "bins": bins, "prune": prune, "protect": protect}
    if codec is None and "codec" not in given and any(value is not None for value in (bins, prune, protect)):
        codec = "inshrinkerator"
    chosen: dict[str, Any] = {
        **given_settings(given, settings or []),
        **{name: value for name, value in own.items() if value is not None},
    }
    bounded = {
        "max_drop": max_drop,
        "max_divergence": max_divergence,
        "evaluator": evaluator,
        "metric": eval_metric,
        "direction": direction,
        "trust_run": trust_run,
        "timeout": timeout,
    }
    if watch:
        options = {
            **bounded,
            "codec": codec or given.get("codec"),
            "config": chosen or None,
            "optimizer": optimizer or given.get("optimizer"),
            "keyframe_every": keyframe_every or given.get("keyframe_every", _KEYFRAME_EVERY),
            "resumed_from": resumed_from,
            "device": device,
            "threads": threads,
        }
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
            options={name: value for name, value in options.items() if value is not None},
        )
        return
    require_watch(poll, until, idle)
    opened = open_run(run, step_pattern)
    with progress_bar("compress", hidden=as_json or quiet) as advance:

        def progress(now: Progress) -> None:
            if advance is not None:
                advance(now.done, now.total, now.step)

        report = session.compress(
            opened,
            output,
            codec=codec or given.get("codec"),
            config=chosen or None,
            optimizer=optimizer or given.get("optimizer"),
            keyframe_every=keyframe_every or given.get("keyframe_every", _KEYFRAME_EVERY),
            steps=choose_steps(steps or [], opened.steps, str(opened.path)),
            resumed_from=resumed_from,
            device=device,
            threads=threads,
            progress=None if advance is None else progress,
            **bounded,  # type: ignore[arg-type]
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
        ("skipped", f"{steps_in_short(skipped)}, there already" if skipped else ""),
        ("time", speed),
        ("codec", str(document["codec"])),
        ("frames", f"{count(len(frames))}  ({counted(keyframes, 'keyframe')})"),
        ("ratio of the weights", ratio(document["ratio_weights"])),
        ("ratio of everything", _total(document)),
        ("bits per weight", plain(document["bits_per_weight"])),
        ("relative error", _error(document)),
        *_promised(document),
    ]
    show_facts(console, [fact for fact in facts if fact[1]])


def _promised(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was promised of the steps, and how they keep it; nothing where nothing was."""
    if "bounds" not in document:
        return []
    drop, divergence = document["bounds"]["drop"], document["bounds"]["divergence"]
    frames = document["frames"]
    exact = [frame["step"] for frame in frames if frame["exact"]]
    stale = [frame["step"] for frame in frames if frame["informative"] is False]
    unclear = [frame["step"] for frame in frames if "noise" in str(frame["side"])]
    limits = (
        f"(bound {drop * 100:g} %)" if drop is not None else "",
        f"(bound {divergence:g})" if divergence is not None else "",
    )
    return [
        ("largest drop", f"{percent(document['max_drop'])}  {limits[0]}".strip()),
        ("largest divergence", f"{nats(document['max_divergence'])} nats  {limits[1]}".strip()),
        ("evaluations", count(document["evaluations"])),
        (
            "stored exactly",
            f"{steps_in_short(exact)}, where nothing smaller keeps the bounds" if exact else "",
        ),
        ("says nothing", f"{steps_in_short(stale)}, where the stale copy keeps them too" if stale else ""),
        (
            "within noise",
            f"{steps_in_short(unclear)}, whose metric's noise reaches the bound" if unclear else "",
        ),
    ]


def _total(document: Mapping[str, Any]) -> str:
    """Return the ratio of everything, and the sizes it is made of."""
    sizes = f"{size(document['raw_bytes'])} in {size(document['archive_bytes'])}"
    return f"{ratio(document['ratio_total'])}  ({sizes})"


def _error(document: Mapping[str, Any]) -> str:
    """Return the error of the weights written now; nothing where none were."""
    text = error_size(document["relative_error"])
    return "" if text == UNKNOWN else f"{text}  (of the weights written now, root mean square)"

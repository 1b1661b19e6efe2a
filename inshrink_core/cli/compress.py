"""``inshrink compress``: write a run into an archive, once or beside a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.options import (
    BASE_METAVAR,
    BoundOptions,
    Computing,
    Evaluating,
    Output,
    Reading,
    Steps,
    Writing,
    steps_of,
    verb,
)
from inshrink_core.cli.showing import base_text, named_ratio, optimizer_text, promised_facts, show_facts
from inshrink_core.errors import InputError
from inshrink_core.report import plain_value
from inshrink_core.text import (
    UNKNOWN,
    count,
    counted,
    duration,
    error_size,
    plain,
    printable,
    rate,
    ratio,
    size,
    steps_in_short,
)

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.verbs.compress import CompressReport
    from inshrink_core.verbs.watch import WatchEvent, WatchReport

__all__ = ["EXAMPLE", "compress"]

EXAMPLE = (
    "$ inshrink compress runs/digits -o digits.inshrink --coarseness 4\n"
    "$ inshrink compress runs/digits -o middle.inshrink --steps 100:500 --codec inshrinkerator --bins 16\n"
    "$ inshrink compress runs/digits -o bounded.inshrink --max-drop 0.01 --evaluator judge.py:evaluate\n"
    "$ inshrink compress runs/tuned -o tuned.inshrink --base models/pretrained.safetensors"
)

_WHY = {
    "until": "the step asked for is archived",
    "idle": "nothing new came",
    "interrupted": "interrupted; the same command goes on",
}


@dataclass(frozen=True)
class Shorthands:
    """Settings of codecs that have options of their own."""

    coarseness: Annotated[
        float | None,
        typer.Option(
            help="Of the lattice codec, about 0.25 to 10: more is smaller and less exact. (default: 0.5)"
        ),
    ] = None
    bins: Annotated[
        int | None, typer.Option(help="Of the inshrinkerator codec: centroids of each tensor. (default: 32)")
    ] = None
    prune: Annotated[
        float | None,
        typer.Option(help="Of the inshrinkerator codec: fraction of each layer type set to zero."),
    ] = None
    protect: Annotated[
        float | None, typer.Option(help="Of the inshrinkerator codec: fraction kept in bfloat16.")
    ] = None


@dataclass(frozen=True)
class Watching:
    """Whether to stay beside a training, and until when."""

    watch: Annotated[
        bool,
        typer.Option("--watch", help="Stay beside a training: archive each checkpoint as it is finished."),
    ] = False
    interval: Annotated[
        float | None,
        typer.Option(
            "--poll", min=0.01, metavar="SECONDS", help="With --watch, time between looks. (default: 5)"
        ),
    ] = None
    until: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="With --watch, end when this step or a later one is archived."),
    ] = None
    idle: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="With --watch, end when nothing new came for so long."),
    ] = None

    def keywords(self) -> dict[str, Any]:
        """Return what was given of how to watch."""
        named = {"interval": self.interval, "until": self.until, "idle": self.idle}
        return {name: value for name, value in named.items() if value is not None}


@verb
def compress(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run: a directory, a glob or a checkpoint file.")
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="ARCHIVE", help="The archive to make or to append to.")
    ],
    writing: Writing,
    shorthands: Shorthands,
    steps: Steps = None,
    resumed_from: Annotated[
        int | None,
        typer.Option(
            metavar="STEP", help="The archived step that training was restored from: opens a branch there."
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar=BASE_METAVAR,
            help="Of a fine-tuning, the model it began from: the first frame is told against it, and is "
            "restored with it alone.",
        ),
    ] = None,
    bounds: BoundOptions,
    evaluating: Evaluating,
    computing: Computing,
    watching: Watching,
    reading: Reading,
    allow_damaged: Annotated[
        bool,
        typer.Option(
            "--allow-damaged",
            help="Archive files that do not match their own checksums, too; the archive will always say so.",
        ),
    ] = False,
    out: Output,
) -> None:
    """Write a run into an archive: the steps it does not hold yet."""
    import inshrink_core
    from inshrink_core.codec import codec_with
    from inshrink_core.execution import prepare_process

    prepare_process()
    options = writing.keywords(**vars(shorthands))
    if options["codec"] is None:
        options["codec"] = codec_with(name for name, value in vars(shorthands).items() if value is not None)
    options |= {**vars(bounds), **vars(evaluating), **vars(computing), "allow_damaged": allow_damaged}
    options |= {
        name: value for name, value in (("resumed_from", resumed_from), ("base", base)) if value is not None
    }
    if watching.watch:
        if steps:
            raise InputError("--watch and --steps exclude each other", remedy="--until STEP ends a watch")
        _watch(run, output, out, {**options, **watching.keywords(), **vars(reading)})
        return
    if watching.keywords():
        raise InputError("--poll, --until and --idle go with --watch", remedy="add --watch")
    opened = reading.open(run)
    with out.progress("compress") as progress:
        report = inshrink_core.compress(
            opened, output, steps=steps_of(opened, steps), progress=progress, **options
        )
    out.present(report, _show)


def _watch(run: str, output: Path, out: Output, options: Mapping[str, Any]) -> None:
    """Watch a run until it ends or Ctrl-C is pressed, then show what was archived."""
    import inshrink_core

    def tell(event: WatchEvent) -> None:
        if not out.hidden and event.kind != "ended":
            detail = f": {event.detail}" if event.detail else ""
            step = "" if event.step is None else f" step {event.step}"
            typer.echo(printable(f"{event.kind}{step}{detail}"), err=True)

    with out.progress("compress") as progress:
        report = inshrink_core.verbs.watch(run, output, on_event=tell, progress=progress, **options)
    out.present(report, _show_watch)


def _show(console: Console, report: CompressReport) -> None:
    """Print what was written now, then what the archive holds altogether."""
    document = report.to_json()
    appended, skipped = document["appended"], document["skipped"]
    done = f"{steps_in_short(appended)}" if appended else "nothing new"
    speed = f"{duration(report.seconds)}, {rate(report.mb_per_s)} on {report.device}" if appended else ""
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
        ("base model", base_text(document.get("base"))),
        (named_ratio("ratio of everything", document.get("base")), _total(document)),
        (named_ratio("ratio of the weights", document.get("base")), ratio(document["ratio_weights"])),
        ("bits per weight", plain(document["bits_per_weight"])),
        ("relative error", _error(document)),
        *promised_facts(document),
    ]
    show_facts(console, facts)


def _total(document: Mapping[str, Any]) -> str:
    """Return the ratio of everything, and the sizes it is made of."""
    sizes = f"{size(document['raw_bytes'])} in {size(document['archive_bytes'])}"
    return f"{ratio(document['ratio_total'])}  ({sizes})"


def _error(document: Mapping[str, Any]) -> str:
    """Return the error of the weights written now; nothing where none were."""
    text = error_size(document["relative_error"])
    return "" if text == UNKNOWN else f"{text}  (of the weights written now, root mean square)"


def _show_watch(console: Console, report: WatchReport) -> None:
    """Print what was archived, and why the watch ended."""
    appended, vanished = report.appended, report.vanished
    facts = [
        ("archive", report.archive),
        ("appended", steps_in_short(appended) if appended else "nothing new"),
        ("vanished", steps_in_short(vanished) if vanished else ""),
        ("damaged", counted(len(report.damaged), "checkpoint") if report.damaged else ""),
        ("ended", _WHY.get(report.ended, report.ended)),
        ("time", duration(report.seconds)),
    ]
    if report.size.frames:
        held = f"{counted(len(report.size.frames), 'frame')}, {size(report.size.nbytes)}"
        optimizer = None if report.last is None else report.last.optimizer
        roles = {row.spec.role.value for frame in report.size.frames for row in frame.tensors}
        facts += [
            ("frames", held),
            ("optimizer state", optimizer_text(optimizer, roles)),
            ("base model", base_text(plain_value(report.size.base))),
            (named_ratio("ratio of everything", report.size.base), ratio(report.size.ratio_total)),
            (named_ratio("ratio of the weights", report.size.base), ratio(report.size.ratio_weights)),
        ]
    show_facts(console, facts)

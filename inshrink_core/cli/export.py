"""``inshrink export``: one step, or a whole archive, as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inshrink_core.cli.options import Based, Limiting, OnDevice, Output, verb
from inshrink_core.cli.showing import show_facts
from inshrink_core.errors import InputError
from inshrink_core.text import count, counted, duration, error_size, parse_size, ratio, size, steps_in_short

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.verbs.export import ExportReport
    from inshrink_core.verbs.pack import PackReport

__all__ = ["EXAMPLE", "export"]

EXAMPLE = (
    "$ inshrink export digits.inshrink --step 400 --weights-only -o model.inshrink\n"
    "$ inshrink export digits.inshrink --weights-only --without fc2 --format safetensors -o m.safetensors\n"
    "$ inshrink export digits.inshrink --pack run.inshrink\n"
    "$ inshrink export run.inshrink --unpack again.inshrink"
)


@verb
def export(
    archive: Annotated[
        str, typer.Argument(metavar="ARCHIVE", help="The archive: a folder, a packed file or a URL.")
    ],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file to make of one step.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="STEP", help="Which step. (default: the last)")
    ] = None,
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only",
            help="For transfer learning: without the optimizer and files of the training, weights coarsened.",
        ),
    ] = False,
    least_ratio: Annotated[
        float | None,
        typer.Option(
            "--ratio",
            metavar="RATIO",
            help="With --weights-only, how much smaller than float32 at least. (default: 8)",
        ),
    ] = None,
    size_text: Annotated[
        str | None,
        typer.Option(
            "--size", metavar="SIZE", help="With --weights-only, how large the file may be instead, as 40MB."
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="With --weights-only, keep every bit of the archived weights.")
    ] = False,
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="With --weights-only, keep these layers alone: tensors or modules by name; may be repeated.",
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="With --weights-only, leave these layers out; may be repeated."),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="packed|safetensors",
            help="With --weights-only, a plain file that loads without Inshrink instead.",
        ),
    ] = "packed",
    dtype: Annotated[
        str,
        typer.Option(
            metavar="same|fp32|bf16|fp16", help="With --format safetensors, what the weights become."
        ),
    ] = "same",
    pack: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the whole archive into one file instead.")
    ] = None,
    unpack: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the whole archive into a folder instead.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    based: Based,
    placed: OnDevice,
    limiting: Limiting,
    out: Output,
) -> None:
    """Write one step, or a whole archive, as one file that stands alone."""
    import inshrink_core
    from inshrink_core.verbs.export import DEFAULT_RATIO

    if sum(target is not None for target in (output, pack, unpack)) != 1:
        raise InputError(
            "say what to make", remedy="give one of: -o FILE for a step, --pack FILE, --unpack DIR"
        )
    graded = sum((exact, least_ratio is not None, size_text is not None))
    of_weights = graded or tensors or without or layout != "packed" or dtype != "same"
    if output is None and (weights_only or of_weights or step is not None):
        raise InputError(
            "--pack and --unpack copy the whole archive as it is",
            remedy="for one step give -o FILE; `inshrink prune` thins an archive out",
        )
    if graded > 1:
        raise InputError("--exact, --ratio and --size exclude each other", remedy="give one of them")
    if of_weights and not weights_only:
        raise InputError(
            "--exact, --ratio, --size, --tensors, --without, --format and --dtype go with --weights-only",
            remedy="add --weights-only; without it a step is kept whole and exact",
        )
    if output is not None:
        limits = limiting.limits()
        with out.progress("export") as progress:
            made = inshrink_core.verbs.export(
                based.open(archive),
                output,
                step=step,
                weights_only=weights_only,
                tensors=tensors or (),
                without=without or (),
                ratio=DEFAULT_RATIO if least_ratio is None else least_ratio,
                size=None if size_text is None else parse_size(size_text),
                exact=exact,
                layout=layout,
                dtype=dtype,
                force=force,
                **vars(placed),
                max_memory=limits.max_memory,
                max_disk=limits.max_disk,
                progress=progress,
            )
        out.present(made, _show_export)
        return
    with out.progress("pack" if pack else "unpack") as progress:
        if pack is not None:
            copied = inshrink_core.verbs.pack(archive, pack, force=force, progress=progress)
        else:
            copied = inshrink_core.verbs.unpack(archive, unpack or "", progress=progress)
    out.present(copied, _show_pack)


def _show_export(console: Console, made: ExportReport) -> None:
    """Print what one file holds of the step, and what it lost."""
    lost = "none: every bit as in the archive"
    if not made.exact:
        lost = f"{error_size(made.relative_error)}  (root mean square, against the archive)"
    show_facts(
        console,
        [
            ("step", steps_in_short(made.steps)),
            ("file", f"{made.output}  ({size(made.nbytes)})"),
            ("tensors", count(made.n_tensors)),
            ("ratio of everything", "" if made.size is None else ratio(made.size.ratio_total)),
            ("ratio of the weights", "" if made.size is None else ratio(made.size.ratio_weights)),
            ("ratio to float32", ratio(made.ratio_float32)),
            ("error of the weights", lost),
            ("left out", ", ".join(made.left_out)),
            ("time", duration(made.seconds)),
        ],
    )


def _show_pack(console: Console, copied: PackReport) -> None:
    """Print what was copied."""
    show_facts(
        console,
        [
            ("made", f"{copied.output}  ({size(copied.nbytes)})"),
            ("frames", f"{count(copied.n_frames)}  ({counted(len(copied.steps), 'step')})"),
            ("time", duration(copied.seconds)),
        ],
    )

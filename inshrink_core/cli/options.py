"""Options that more than one verb has, so that they read alike everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Device", "Json", "Quiet", "StepPattern", "Threads"]

Json = Annotated[
    bool, typer.Option("--json", help="Write one JSON document to stdout instead (docs/cli.md).")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
StepPattern = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX",
        help="How the step number stands in file names: a regular expression with one group.",
    ),
]
Device = Annotated[
    str,
    typer.Option(metavar="cpu|cuda|auto", help="Where numbers are crunched; the bytes do not depend on it."),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Tensors worked on at a time. (default: the processors of this machine)"),
]

"""Options that more than one verb has, so that they read alike everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inshrink_core.cli.steps import STEPS_HELP

__all__ = [
    "AllowDamaged",
    "ConfigFile",
    "Device",
    "Direction",
    "EvalMetric",
    "EvaluatorFile",
    "FollowLinks",
    "Json",
    "KeyframeEvery",
    "MaxDisk",
    "MaxDivergence",
    "MaxDrop",
    "MaxMemory",
    "Optimizer",
    "Quiet",
    "Settings",
    "StepPattern",
    "Steps",
    "Threads",
    "Timeout",
    "TrustRun",
]

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
FollowLinks = Annotated[
    bool, typer.Option("--follow-links", help="Follow links of the run that lead out of it.")
]
AllowDamaged = Annotated[
    bool,
    typer.Option(
        "--allow-damaged",
        help="Archive files that do not match their own checksums, too; the archive says so for ever.",
    ),
]
Steps = Annotated[list[str] | None, typer.Option("--steps", "--step", metavar="STEPS", help=STEPS_HELP)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the codec; may be repeated."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Settings from a TOML or JSON file, or a search's result; options override it."
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        metavar="lossless|lattice|lattice-ratio|drop",
        help="Keep the optimizer's state bit-exact, to an octave, as rank-one factors, or leave it out."
        " (default: lattice, to an octave; lossless beside weights that stay exact)",
    ),
]
KeyframeEvery = Annotated[
    int | None, typer.Option(min=1, help="Frames from one keyframe to the next. (default: 32)")
]
Device = Annotated[
    str,
    typer.Option(metavar="cpu|cuda|auto", help="Where numbers are crunched; the bytes do not depend on it."),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Tensors worked on at a time. (default: the processors of this machine)"),
]
EvaluatorFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:FUNCTION",
        help="A function from a state dict to its figures. (default: what the run's inshrink.toml names)",
    ),
]
EvalMetric = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Which of the figures counts. (default: what inshrink.toml names, else loss, else the only one)",
    ),
]
Direction = Annotated[
    str | None, typer.Option(metavar="higher|lower", help="Whether more of it is better or worse.")
]
MaxDrop = Annotated[
    float | None,
    typer.Option(metavar="FRACTION", help="Most that the metric of a restored step may drop: 0.01 is 1 %."),
]
MaxDivergence = Annotated[
    float | None,
    typer.Option(
        metavar="NATS",
        help="Most that a restored step's predictions may diverge; inf: any."
        " (default with --max-drop: 0.003, where the evaluator returns log_probs)",
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Most memory that decoding may take, as 4GB. (default: what is available)"
    ),
]
MaxDisk = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most disk that may be written, as 4GB. (default: what is free)"),
]
TrustRun = Annotated[
    bool, typer.Option("--trust-run", help="Execute the evaluator that lies in the run's directory.")
]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that one evaluation may take.")]

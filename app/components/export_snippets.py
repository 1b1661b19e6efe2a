"""An export as a command and as Python lines."""

from __future__ import annotations

import json
import shlex
from typing import Any

from inshrink_app.export_tables import ExportRequest
from inshrink_app.tables import Subject

__all__ = ["of"]

_SUFFIX = ".inshrink"


def of(shown: Subject, request: ExportRequest, target: str) -> tuple[str, str]:
    """Return the command line and the Python lines that write the same.

    Parameters
    ----------
    shown
        The run or archive on screen.
    request
        What is asked for.
    target
        Where to, as typed.
    """
    if request.kind == "pack":
        command, line = _pack(str(shown.path), target)
        return command, f"import inshrink_core\n\n{line}"
    if request.kind == "step":
        return _step(shown, request, target)
    return _chain(shown, request, target)


def _pack(archive: str, target: str) -> tuple[str, str]:
    """Return how an archive is copied into one file."""
    return (
        f"inshrink export {shlex.quote(archive)} --pack {shlex.quote(target)}",
        f"inshrink_core.pack({archive!r}, {target!r})",
    )


def _chain(shown: Subject, request: ExportRequest, target: str) -> tuple[str, str]:
    """Return how a chain is written; one file is packed from a folder."""
    path = str(shown.path)
    made = f"{target.removesuffix(_SUFFIX)}-folder{_SUFFIX}" if request.packed else target
    optimizer = "" if request.optimizer is None else f"--optimizer {request.optimizer} "
    settings = "".join(f" {_option(name, value)}" for name, value in request.config.items())
    is_whole = request.steps == shown.steps
    chosen = "" if is_whole else f" --steps {','.join(map(str, request.steps))}"
    command = (
        f"inshrink compress {shlex.quote(path)} -o {shlex.quote(made)} --codec {request.codec}{settings} "
        f"{optimizer}--keyframe-every {request.keyframe_every}{chosen}"
    )
    steps = "" if is_whole else f"    steps={list(request.steps)!r},\n"
    python = (
        f"import inshrink_core\n\nreport = inshrink_core.compress(\n    {path!r},\n    {made!r},\n"
        f"    codec={request.codec!r},\n    config={dict(request.config)!r},\n"
        f"    optimizer={request.optimizer!r},\n    keyframe_every={request.keyframe_every},\n{steps})\n"
        "print(report.size.ratio_total)"
    )
    if request.packed:
        packing, line = _pack(made, target)
        command, python = f"{command}\n{packing}", f"{python}\n{line}"
    return command, python


def _option(name: str, value: Any) -> str:
    """Return a setting as an option of the command line."""
    if name in ("coarseness", "bins"):
        return f"--{name} {value}"
    text = value if isinstance(value, str) else json.dumps(value)
    return f"--set {shlex.quote(f'{name}={text}')}"


def _step(shown: Subject, request: ExportRequest, target: str) -> tuple[str, str]:
    """Return how one step is written; from a run, through an archive that keeps every bit of it."""
    step, archive = request.steps[0] if request.steps else 0, str(shown.path)
    command, python = "", "import inshrink_core\n\n"
    if shown.kind == "run":
        archive = f"{target.removesuffix(_SUFFIX)}-exact{_SUFFIX}"
        optimizer = "drop" if request.weights_only else "lossless"
        command = (
            f"inshrink compress {shlex.quote(str(shown.path))} -o {shlex.quote(archive)} --codec lossless "
            f"--optimizer {optimizer} --steps {step}\n"
        )
        python += (
            f"inshrink_core.compress(\n    {str(shown.path)!r},\n    {archive!r},\n    codec='lossless',\n"
            f"    optimizer={optimizer!r},\n    steps=[{step}],\n)\n"
        )
    kept = ""
    if request.weights_only:
        kept = " --weights-only" + (" --exact" if request.exact else f" --ratio {request.ratio:g}")
    command += f"inshrink export {shlex.quote(archive)} --step {step}{kept} -o {shlex.quote(target)}"
    how = f"weights_only={request.weights_only}, exact={request.exact}, ratio={request.ratio:g}"
    python += (
        f"report = inshrink_core.export({archive!r}, {target!r}, step={step}, {how})\nprint(report.nbytes)"
    )
    return command, python

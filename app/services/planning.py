"""The chain that an export would write, and how large it would be: estimated from what is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from inshrink_app.jobs.job import Job
from inshrink_app.pages.archive.tables import Chain
from inshrink_app.pages.export.form import ExportRequest, Plan, PlannedFrame
from inshrink_app.services import running
from inshrink_app.services.archives import archives_of, chain_of
from inshrink_app.services.history import load_json
from inshrink_app.services.opening import opened
from inshrink_app.widgets.tables import Subject

__all__ = ["export_plan", "is_like", "start_trial", "trial_job"]

_N_TRIED = 2
"""A keyframe and the delta after it: the least that tells the sizes of both."""


def export_plan(subject: Subject, request: ExportRequest) -> Plan:
    """Tell which frames would be keyframes, and how large each would be about.

    The estimates are the sizes, by step or in mean by kind of frame, in an archive of this run that was
    written with the same codec, settings and optimizer state, or of two steps that were tried.
    """
    per_step = sum(
        row.nbytes
        for row in subject.tensors
        if row.role in ("weight", "buffer") or request.optimizer != "drop"
    )
    known = _known_sizes(subject, request)
    frames = []
    for position, step in enumerate(request.steps):
        kind = "keyframe" if position % request.keyframe_every == 0 else "delta"
        size = known.by_step.get((step, kind), known.by_kind.get(kind))
        frames.append(PlannedFrame(step, kind, per_step, None if size is None else round(size)))
    return Plan(tuple(frames), known.basis)


class _Known(NamedTuple):
    """Bytes of frames that are there already: of a step, and in mean of a kind; and whose they are."""

    by_step: dict[tuple[int, str], float]
    by_kind: dict[str, float]
    basis: str


def _known_sizes(subject: Subject, request: ExportRequest) -> _Known:
    """Return the sizes of frames that were written with the same settings; nothing where there are none."""
    trial = trial_job(subject, request)
    if trial is not None and trial.state == "finished":
        rows = [(int(row["step"]), str(row["kind"]), int(row["bytes"])) for row in trial.result["frames"]]
        steps = ", ".join(f"{step:,}" for step, _, _ in rows)
        return _known(rows, f"steps {steps}, tried with these settings")
    for one in archives_of(subject) if subject.kind == "run" else ():
        chain = chain_of(str(one.path))
        if is_like(chain, request):
            rows = [(frame.step, frame.kind, frame.nbytes) for frame in chain.frames if frame.on_line]
            return _known(rows, f"{one.name}, written with these settings")
    return _Known({}, {}, "")


def _known(rows: Sequence[tuple[int, str, int]], basis: str) -> _Known:
    """Take the mean by kind; an archive without deltas tells nothing of them."""
    by_step = {(step, kind): float(nbytes) for step, kind, nbytes in rows}
    by_kind = {}
    for kind in ("keyframe", "delta"):
        sizes = [nbytes for _, its_kind, nbytes in rows if its_kind == kind]
        if sizes:
            by_kind[kind] = sum(sizes) / len(sizes)
    return _Known(by_step, by_kind, basis)


def is_like(chain: Chain, request: ExportRequest) -> bool:
    """Return whether an archive was written as the request says, settings not asked for aside."""
    told = dict(text.split("=", 1) for text in chain.settings)
    same = all(_same_value(told.get(name), value) for name, value in request.config.items())
    return (chain.codec, chain.optimizer) == (request.codec, request.optimizer) and same


def _same_value(told: str | None, wanted: Any) -> bool:
    """Compare a setting as text with a value: 2.5 is 2.50, 4 is 4.0."""
    try:
        return float(told or "") == float(wanted)
    except (TypeError, ValueError):
        return told == str(wanted)


def _trial_key(subject: Subject, request: ExportRequest) -> tuple[str, ...]:
    written = json.dumps([request.codec, dict(request.config), request.optimizer], sort_keys=True)
    return ("trial", str(subject.path), opened(str(subject.path)).token, written)


def trial_job(subject: Subject, request: ExportRequest) -> Job | None:
    """Return the trial of these settings on two steps, if there was one."""
    if subject.kind != "run" or request.kind != "chain":
        return None
    return running.jobs().get(_trial_key(subject, request), load_json)


def start_trial(subject: Subject, request: ExportRequest) -> Job:
    """Encode two steps somewhere temporary, to estimate the rest from."""
    middle = max(0, len(request.steps) // 2 - 1)
    values = asdict(request) | {
        "task": "export",
        "kind": "trial",
        "path": str(subject.path),
        "steps": list(request.steps[middle : middle + _N_TRIED]),
        "target": "",
    }
    return running.jobs().start(_trial_key(subject, request), values, load_json)

"""Looking into one tensor: small questions, answered in this process.

Each reads what it says and no more; answers are cached by what the files were when they were asked.
"""

from __future__ import annotations

from typing import Any

import streamlit as st
from inshrink_app.pages.sensitivity.drill_figures import Course, DrillDown, PartRow, ScoreMap
from inshrink_app.services.archives import original_of
from inshrink_app.services.engines import engines
from inshrink_app.services.failures import reported
from inshrink_app.services.opening import engine_of
from inshrink_app.widgets.tables import MODEL_ROLES, Subject

__all__ = [
    "ARCHIVE",
    "CODECS",
    "course",
    "course_steps",
    "drill_cost",
    "drill_down",
    "gain_partner",
    "stored_ways",
]

ARCHIVE = "archive"
"""Stands for "as it lies in the archive" among the codecs."""

CODECS = ("lattice", "inshrinkerator", "uniform", "lossless")
"""Codecs a run's tensor can be tried with on the page: the default, the paper's, the baseline, the exact."""

_READINGS = 6
"""A tensor, its predecessor, and up to two companions of each."""

_COURSE_BYTES = 200_000_000
"""A course reads no more than this unless it is asked to."""


def stored_ways(subject: Subject, step: int) -> tuple[str, ...]:
    """Return the ways a tensor can be shown: as an archive holds it, or as a codec would store it."""
    if subject.kind == "archive":
        return (ARCHIVE,)
    archived = subject.archive is not None and any(frame.step == step for frame in subject.archive.frames)
    return (ARCHIVE, *CODECS) if archived else CODECS


def drill_cost(subject: Subject, tensor: str) -> int:
    """Return the bytes of the tensors that `drill_down` may read."""
    return _READINGS * sum(
        row.nbytes for row in subject.tensors if row.name == tensor and row.role in MODEL_ROLES
    )


def _nbytes_of(subject: Subject, tensor: str) -> int:
    """Return the raw bytes of a weight or buffer; 0 where the last checkpoint has none of this name."""
    return sum(row.nbytes for row in subject.tensors if row.name == tensor and row.role in MODEL_ROLES)


def drill_down(subject: Subject, step: int, tensor: str, way: str, metric: str | None) -> DrillDown:
    """Look into one tensor of one step.

    Parameters
    ----------
    subject
        A run or an archive.
    step, tensor
        Which one.
    way
        One of `stored_ways`.
    metric
        Sensitivity to set against the magnitude; None: the first that is known.

    Raises
    ------
    ServiceError
        It cannot be read.
    """
    _, token = engine_of(subject)
    stamp = ""
    if subject.archive is not None and way == ARCHIVE:
        stamp = str(subject.archive.nbytes)
    return _drill_down(str(subject.path), f"{token}{stamp}", step, tensor, way, metric, subject)


@st.cache_resource(show_spinner=False, max_entries=200)
def _drill_down(
    path: str, stamp: str, step: int, tensor: str, way: str, metric: str | None, _subject: Subject
) -> DrillDown:
    from inshrink_core.analysis.anatomy import anatomy

    with reported():
        engine, _ = engine_of(_subject)
        if way != ARCHIVE:
            return _plain(anatomy(engine, step, tensor, way, metric=metric))
        if _subject.kind == "archive":
            return _plain(anatomy(engine, step, tensor, against=_originals(_subject), metric=metric))
        return _plain(anatomy(_archive_of(_subject), step, tensor, against=engine, metric=metric))  # type: ignore[arg-type]


def _archive_of(subject: Subject) -> Any:
    """Open the archive that lies beside a run."""
    if subject.archive is None:
        return None
    facts = subject.archive
    return engines().get(str(facts.path), f"{facts.nbytes}-{len(facts.frames)}")


def _originals(subject: Subject) -> Any:
    """Open the run an archive was made of, where it is known; None otherwise."""
    original = original_of(subject)
    return None if original is None else engine_of(original)[0]


def gain_partner(subject: Subject) -> str | None:
    """Return the path of a run's archive or of an archive's run, where one is known."""
    if subject.kind == "run":
        return str(subject.archive.path) if subject.archive is not None else None
    original = original_of(subject)
    return None if original is None else str(original.path)


def _plain(seen: Any) -> DrillDown:
    """Copy the engine's answer into plain values."""
    told = seen.sensitivity
    return DrillDown(
        name=seen.spec.key,
        step=seen.step,
        dtype=seen.spec.dtype,
        shape=tuple(seen.spec.shape),
        numel=seen.spec.numel,
        codec=seen.codec,
        config=dict(seen.config),
        estimated=seen.estimated,
        restored=seen.restored,
        kind=seen.kind,
        edges=seen.histogram.edges,
        counts=seen.histogram.counts,
        parts=tuple(PartRow(*part) for part in seen.histogram.parts),
        n_nonfinite=seen.histogram.n_nonfinite,
        rms=seen.histogram.rms,
        level_kind=seen.level_kind,
        points=seen.points,
        spacing=seen.spacing,
        entropy=seen.entropy,
        bits_per_weight=seen.bits_per_weight,
        nbytes=seen.nbytes,
        keyframe_nbytes=seen.keyframe_nbytes,
        sensitivity=None if told is None else ScoreMap(*told),
        document=seen.to_json(),
    )


def course_steps(subject: Subject, tensor: str, *, every: bool) -> tuple[int, ...]:
    """Return the steps that a course reads: all, or evenly many of them that cost at most 200 MB."""
    nbytes = max(1, _nbytes_of(subject, tensor))
    most = max(2, _COURSE_BYTES // nbytes)
    n = len(subject.steps)
    if every or n <= most:
        return subject.steps
    return tuple(subject.steps[round(i * (n - 1) / (most - 1))] for i in range(most))


def course(subject: Subject, tensor: str, *, every: bool = False) -> Course:
    """Follow one tensor over the steps.

    Raises
    ------
    ServiceError
        It cannot be read.
    """
    _, token = engine_of(subject)
    steps = course_steps(subject, tensor, every=every)
    size = subject.archive.nbytes if subject.archive is not None else 0
    return _course(str(subject.path), f"{token}-{size}", tensor, steps, subject)


@st.cache_resource(show_spinner=False, max_entries=200)
def _course(path: str, stamp: str, tensor: str, steps: tuple[int, ...], _subject: Subject) -> Course:
    from inshrink_core.analysis.trajectory import trajectory

    with reported():
        engine, _ = engine_of(_subject)
        archive = _archive_of(_subject) if _subject.kind == "run" else None
        found = trajectory(engine, tensor, steps=steps, archive=archive)
    return Course(
        steps=found.steps,
        rms=found.rms,
        movement=found.movement,
        relative_movement=found.relative_movement,
        bits_per_weight=found.bits_per_weight,
        n_left_out=len(_subject.steps) - len(steps),
    )

"""Looking into one tensor, at two steps, or at a second run: small questions, answered in this process.

Each reads what it says and no more; answers are cached by what the files were when they were asked.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st
from inshrink_app.drill_tables import Course, DrillDown, Moved, MovedRow, PartRow, ScoreMap
from inshrink_app.recent import load_recent
from inshrink_app.roots import list_folder, settings
from inshrink_app.services.archives import original_of
from inshrink_app.services.failures import reported
from inshrink_app.services.opening import opened, samples
from inshrink_app.tables import ServiceError, Subject

if TYPE_CHECKING:
    from inshrink_core import Archive, Run

__all__ = [
    "ARCHIVE",
    "CODECS",
    "course",
    "course_steps",
    "diff_cost",
    "drill_cost",
    "drill_down",
    "gain_partner",
    "moved_between",
    "other_runs",
    "stored_ways",
    "warm_up",
]

_log = logging.getLogger(__name__)

ARCHIVE = "archive"
"""Stands for "as it lies in the archive" among the codecs."""

CODECS = ("lattice", "inshrinkerator", "uniform", "lossless")
"""Codecs a run's tensor can be tried with on the page: the default, the paper's, the baseline, the exact."""

_READINGS = 6
"""A tensor, its predecessor, and up to two companions of each."""

_COURSE_BYTES = 200_000_000
"""A course reads no more than this unless it is asked to."""

_MOST_OTHER_RUNS = 50


@st.cache_resource(show_spinner=False, max_entries=4)
def _engine(path: str, token: str) -> Run | Archive:
    """Return the engine's run or archive; `token` changes when its files do."""
    import inshrink_core

    with reported():
        return inshrink_core.open(path)


def _engine_of(subject: Subject) -> tuple[Run | Archive, str]:
    found = opened(str(subject.path))
    return _engine(str(found.subject.path), found.token), found.token


def stored_ways(subject: Subject, step: int) -> tuple[str, ...]:
    """Return the ways a tensor can be shown: as an archive holds it, or as a codec would store it."""
    if subject.kind == "archive":
        return (ARCHIVE,)
    archived = subject.archive is not None and any(frame.step == step for frame in subject.archive.frames)
    return (ARCHIVE, *CODECS) if archived else CODECS


def drill_cost(subject: Subject, tensor: str) -> int:
    """Return the bytes of the tensors that `drill_down` may read."""
    return _READINGS * sum(
        row.nbytes for row in subject.tensors if row.name == tensor and _is_model(row.role)
    )


def _nbytes_of(subject: Subject, tensor: str) -> int:
    """Return the raw bytes of a weight or buffer; 0 where the last checkpoint has none of this name."""
    return sum(row.nbytes for row in subject.tensors if row.name == tensor and _is_model(row.role))


def _is_model(role: str) -> bool:
    return role in ("weight", "buffer")


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
    _, token = _engine_of(subject)
    stamp = ""
    if subject.archive is not None and way == ARCHIVE:
        stamp = str(subject.archive.nbytes)
    return _drill_down(str(subject.path), f"{token}{stamp}", step, tensor, way, metric, subject)


@st.cache_resource(show_spinner=False, max_entries=200)
def _drill_down(
    path: str, stamp: str, step: int, tensor: str, way: str, metric: str | None, _subject: Subject
) -> DrillDown:
    from inshrink_core.session import anatomy

    with reported():
        engine, _ = _engine_of(_subject)
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
    return _engine(str(facts.path), f"{facts.nbytes}-{len(facts.frames)}")


def _originals(subject: Subject) -> Any:
    """Open the run an archive was made of, where it is known; None otherwise."""
    original = original_of(subject)
    return None if original is None else _engine_of(original)[0]


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
    _, token = _engine_of(subject)
    steps = course_steps(subject, tensor, every=every)
    size = subject.archive.nbytes if subject.archive is not None else 0
    return _course(str(subject.path), f"{token}-{size}", tensor, steps, subject)


@st.cache_resource(show_spinner=False, max_entries=200)
def _course(path: str, stamp: str, tensor: str, steps: tuple[int, ...], _subject: Subject) -> Course:
    from inshrink_core.session import trajectory

    with reported():
        engine, _ = _engine_of(_subject)
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


def diff_cost(subject: Subject) -> int:
    """Return the bytes that `moved_between` reads."""
    return 2 * sum(row.nbytes for row in subject.tensors if _is_model(row.role))


def moved_between(subject: Subject, first: int, second: int) -> Moved:
    """Measure what moved between two steps.

    Raises
    ------
    ServiceError
        They cannot be read.
    """
    _, token = _engine_of(subject)
    return _moved(str(subject.path), token, first, second, subject)


@st.cache_resource(show_spinner=False, max_entries=50)
def _moved(path: str, token: str, first: int, second: int, _subject: Subject) -> Moved:
    from inshrink_core.session.diff import diff

    with reported():
        found = diff(_engine_of(_subject)[0], steps=(first, second))
    rows = tuple(
        MovedRow(
            name=str(row["key"]),
            layer=str(row["layer"] or row["role"]),
            shape=tuple(row["shape"]),
            relative=row["relative"],
            rms=row["rms"],
            max_abs=row["max_abs"],
            cosine=row["cosine"],
            changed=row["changed"],
        )
        for row in found.rows()
    )
    return Moved(rows, tuple(found.added), tuple(found.removed), tuple(found.reshaped))


def other_runs(subject: Subject) -> tuple[Path, ...]:
    """Return runs and archives that a run can be laid over: recent ones, its neighbours, and samples."""
    known: dict[Path, None] = {}
    for recent in load_recent():
        real = Path(os.path.realpath(recent.path))
        if settings().allows(real) and real.exists():
            known[real] = None
    if settings().allows(subject.path.parent):
        try:
            entries = list_folder(subject.path.parent).entries
            known |= {entry.path: None for entry in entries if entry.kind in ("run", "archive")}
        except OSError as error:
            _log.info("the neighbours of a run cannot be listed: %s", error)
    try:
        known |= {sample.path: None for sample in samples()}
    except ServiceError:
        _log.info("there are no samples to lay a run over")
    known.pop(subject.path, None)
    return tuple(known)[:_MOST_OTHER_RUNS]


def warm_up(subject: Subject) -> None:
    """Load the slow parts of the engine in the background, so that a first look inside need not wait."""
    smallest = min(
        (row for row in subject.tensors if row.role == "weight" and len(row.shape) >= 2 and row.numel),
        key=lambda row: row.numel,
        default=None,
    )
    if smallest is not None and smallest.nbytes < _COURSE_BYTES // 100:
        _warm_up(str(subject.path), smallest.name, subject.steps[-1], subject)


@st.cache_resource(show_spinner=False, max_entries=16)
def _warm_up(path: str, tensor: str, step: int, _subject: Subject) -> threading.Thread:
    """Start once for each run."""

    def load() -> None:
        from inshrink_core.errors import InshrinkError

        try:
            import inshrink_core
            from inshrink_core.session import anatomy

            engine = inshrink_core.open(path)
            if _subject.kind == "run":
                anatomy(engine, step, tensor, "inshrinkerator")
                anatomy(engine, step, tensor)
            else:
                anatomy(engine, step, tensor)
        except (InshrinkError, OSError) as error:
            _log.info("nothing was loaded ahead: %s", error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    return thread

"""What the pages ask: the only module of the explorer that imports the engine, and the only that caches.

The engine is imported inside the functions, so that the first page does not wait for it. What comes back
are the plain values of `tables`; what goes wrong is a `ServiceError` that a page can show. Measuring
happens in another process (`worker`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import streamlit as st
from inshrink_app.jobs import Job, JobRegistry
from inshrink_app.recent import remember_recent
from inshrink_app.roots import OutsideRootsError, settings
from inshrink_app.tables import (
    GROUPINGS,
    STATISTICS,
    ArchiveFacts,
    FrameRow,
    HeatRow,
    Problem,
    Sensitivity,
    ServiceError,
    Subject,
    TensorRow,
)
from numpy.typing import NDArray

if TYPE_CHECKING:
    from inshrink_core import Archive, Run

__all__ = [
    "Sample",
    "cancel_sensitivity",
    "forget_sensitivity",
    "load_subject",
    "measuring_cost",
    "refresh",
    "remember",
    "resolve",
    "samples",
    "sensitivity_job",
    "start_sensitivity",
]


class Sample(NamedTuple):
    """A bundled run."""

    name: str
    path: Path


class _Opened(NamedTuple):
    """What the headers of a run or an archive told; `token` changes when its data does."""

    subject: Subject
    token: str


@contextmanager
def _service() -> Iterator[None]:
    """Turn what the engine and the file system raise into a problem that a page can show."""
    from inshrink_core.errors import InshrinkError
    from inshrink_core.formats import NoCheckpointError

    try:
        yield
    except NoCheckpointError as error:
        rows = [(skipped.path, skipped.reason.removeprefix(f"{skipped.path}: ")) for skipped in error.skipped]
        detail = "\n".join(f"{path}: {reason}" for path, reason in rows)
        remedy = "choose a folder of .pt, .pth, .bin, .ckpt or .safetensors files, or of checkpoint folders"
        raise ServiceError(Problem("no readable checkpoint in here", error.where, remedy, detail)) from error
    except InshrinkError as error:
        detail = f"expected {error.expected}, found {error.found}" if error.expected or error.found else ""
        raise ServiceError(Problem(error.what, error.where, error.remedy, detail)) from error
    except OSError as error:
        problem = Problem(
            f"the file system refused: {error.strerror or error}",
            str(error.filename or ""),
            "check that the folder exists and that you may read it",
        )
        raise ServiceError(problem) from error


@st.cache_resource(show_spinner=False)
def _jobs() -> JobRegistry:
    """Return the registry that all sessions share."""
    return JobRegistry()


@st.cache_data(show_spinner=False)
def samples() -> tuple[Sample, ...]:
    """Return the bundled runs; none where the package came without them."""
    from inshrink_core.samples import sample, sample_names

    with _service():
        return tuple(Sample(name, Path(os.path.realpath(sample(name)))) for name in sample_names())


def resolve(text: str) -> Path:
    """Return the real path of untrusted text, inside of the roots or of a bundled sample.

    Raises
    ------
    ServiceError
        The path lies elsewhere, or is none.
    """
    current = settings()
    try:
        return current.resolve(text)
    except OutsideRootsError as error:
        real = Path(os.path.realpath(text)) if "\0" not in text else Path()
        if any(real.is_relative_to(sample.path) for sample in _samples_or_none()):
            return real
        roots = ", ".join(map(str, current.roots))
        raise ServiceError(
            Problem(
                str(error),
                text.replace("\0", "\N{SYMBOL FOR NULL}"),
                "start the explorer with the folder that holds it: inshrink ui --root FOLDER",
                f"The explorer may see: {roots}",
            )
        ) from error


def _samples_or_none() -> tuple[Sample, ...]:
    """Return the samples where there are any; their absence is told where they are offered."""
    try:
        return samples()
    except ServiceError:
        return ()


def load_subject(text: str) -> Subject:
    """Open a run or an archive by its path; reads headers only.

    Raises
    ------
    ServiceError
        There is nothing to open, or it cannot be read.
    """
    return _open(text).subject


def refresh(path: Path) -> None:
    """Forget what is known of a run, so that checkpoints written since are seen."""
    _open_at.clear(str(path), *_stamp(path))


def remember(subject: Subject) -> None:
    """Put a run on top of the recent ones."""
    remember_recent(subject.path, subject.kind)


def _open(text: str) -> _Opened:
    """Return the open run at a path, from the cache unless its folder has changed."""
    path = resolve(text)
    if not path.exists():
        raise ServiceError(
            Problem("there is nothing at this path", str(path), "it may have been moved; open it anew")
        )
    return _open_at(str(path), *_stamp(path))


def _stamp(path: Path) -> tuple[int, int]:
    """Return what changes when a checkpoint is added: the folder's time and size."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


@st.cache_resource(show_spinner=False, max_entries=16)
def _open_at(path: str, mtime_ns: int, size: int) -> _Opened:
    """Open a run or an archive and read its headers; one that cannot be read is not cached."""
    import inshrink_core
    from inshrink_core.chain import Archive

    with _service():
        engine = inshrink_core.open(path)
        if isinstance(engine, Archive):
            return _Opened(_archive_subject(engine), f"{mtime_ns}-{size}")
        # Not the folder's time: measuring writes its cache into the folder.
        files = " ".join(engine.identity(step) for step in engine.steps)
        return _Opened(_run_subject(engine), hashlib.sha256(files.encode()).hexdigest())


def _run_subject(run: Run) -> Subject:
    """Gather what the headers of a run tell."""
    path = Path(os.path.realpath(run.path))
    return Subject(
        path=path,
        name=run.name,
        kind="run",
        format=str(run.format),
        steps=tuple(run.steps),
        tensors=_tensor_rows(run[run.steps[-1]].specs) if run.steps else (),
        total_bytes=sum(run.nbytes_of(step) for step in run.steps),
        bytes_read=run.bytes_read,
        skipped=tuple(_skipped(path, skipped.path, skipped.reason) for skipped in run.skipped),
        notes=tuple(run.notes),
        log={name: tuple(series) for name, series in run.log.items()},
        archive=_archive_of(path, run.steps),
    )


def _skipped(run: Path, path: str, reason: str) -> tuple[str, str]:
    """Name a file that was left out as its reader sees it: within the run, and once."""
    shown = str(Path(path).relative_to(run)) if Path(path).is_relative_to(run) else path
    return (shown, reason.removeprefix(f"{path}: "))


def _archive_subject(archive: Archive) -> Subject:
    """Gather what the indexes of an archive tell."""
    path = Path(os.path.realpath(archive.path))
    facts = _archive_facts(archive)
    return Subject(
        path=path,
        name=path.name,
        kind="archive",
        format="inshrink archive",
        steps=tuple(archive.steps),
        tensors=_tensor_rows(archive[archive.steps[-1]].specs) if archive.steps else (),
        total_bytes=facts.nbytes,
        bytes_read=archive.bytes_read,
        archive=facts,
    )


def _tensor_rows(specs: Sequence[Any]) -> tuple[TensorRow, ...]:
    """Copy specs into plain rows."""
    return tuple(
        TensorRow(
            spec.name,
            spec.role.value,
            spec.layer.value if spec.layer else "",
            spec.dtype,
            tuple(spec.shape),
            spec.numel,
            spec.nbytes,
        )
        for spec in specs
    )


def _archive_facts(archive: Archive) -> ArchiveFacts:
    """Copy an archive's sizes into plain values."""
    from inshrink_core.chain import archive_size

    size = archive_size(archive)
    return ArchiveFacts(
        path=Path(os.path.realpath(archive.path)),
        raw_bytes=size.raw_total,
        nbytes=size.nbytes,
        ratio_weights=size.ratio_weights,
        ratio_total=size.ratio_total,
        frames=tuple(
            FrameRow(row.info.step, row.info.kind.value, row.info.nbytes, row.ratio_weights)
            for row in size.frames
        ),
    )


def _archive_of(run: Path, steps: Sequence[int]) -> ArchiveFacts | None:
    """Look for the run's archive where `inshrink compress` most often puts it, inside of the roots.

    One that is damaged or holds steps the run never had is none of this run's: nothing is claimed.
    """
    from inshrink_core.chain import Archive
    from inshrink_core.errors import InshrinkError

    current = settings()
    for folder in (run.parent, *current.roots):
        real = Path(os.path.realpath(folder / f"{run.name}.inshrink"))
        if not current.allows(real) or not real.exists():
            continue
        try:
            archive = Archive.open(real)
            if archive.steps and set(archive.steps) <= set(steps):
                return _archive_facts(archive)
        except (InshrinkError, OSError):
            continue
    return None


def measuring_cost(subject: Subject, metric: str) -> int:
    """Return the bytes that measuring a metric reads where no measurement is cached, from sizes alone."""
    roles = {
        "magnitude": {"weight"},
        "taylor": {"weight", "gradient", "exp_avg"},
        "fisher": {"exp_avg_sq"},
        "update": {"weight"},
    }[metric]
    readings = 2 if metric == "update" else 1  # each checkpoint, and the one before it
    return readings * len(subject.steps) * sum(row.nbytes for row in subject.tensors if row.role in roles)


def _job_key(text: str, metric: str) -> tuple[str, str, str]:
    """Name the measurement that a page asks for: the same in every tab, another when the run has changed."""
    opened = _open(text)
    return (str(opened.subject.path), opened.token, metric)


def sensitivity_job(text: str, metric: str) -> Job | None:
    """Return the measurement of a metric, if one was started; its result maps groupings to tables."""
    return _jobs().get(_job_key(text, metric))


def start_sensitivity(text: str, metric: str) -> Job:
    """Start measuring a metric in another process, or return the measurement that there is."""
    key = _job_key(text, metric)
    return _jobs().start(key, {"path": key[0], "metric": metric}, _result_loader(metric))


def cancel_sensitivity(text: str, metric: str) -> None:
    """Stop measuring."""
    _jobs().cancel(_job_key(text, metric))


def forget_sensitivity(text: str, metric: str) -> None:
    """Drop a measurement that failed or was cancelled."""
    _jobs().forget(_job_key(text, metric))


def _result_loader(metric: str) -> Callable[[Path], dict[str, Sensitivity]]:
    """Return what reads the worker's file: one table per grouping."""

    def load(path: Path) -> dict[str, Sensitivity]:
        with path.open("rb") as file:
            header = json.loads(file.readline())
            steps = tuple(int(step) for step in header["steps"])
            return {
                by: Sensitivity(
                    metric=metric,
                    by=by,
                    rows=(rows := tuple(_heat_row(row) for row in header["rows"][by])),
                    steps=steps,
                    values={name: _read_values(file, len(rows), len(steps)) for name in STATISTICS},
                    note=str(header["note"]),
                )
                for by in GROUPINGS
            }

    return load


def _read_values(file: BinaryIO, n_rows: int, n_steps: int) -> NDArray[np.float32]:
    """Read one table of values; too few bytes are a ValueError."""
    content = file.read(4 * n_rows * n_steps)
    return np.frombuffer(content, "<f4").reshape(n_rows, n_steps)


def _heat_row(row: list[Any]) -> HeatRow:
    """Rebuild a row from the worker's header."""
    name, layer, n_tensors, numel, shape = row
    return HeatRow(
        str(name), str(layer), int(n_tensors), int(numel), None if shape is None else tuple(map(int, shape))
    )

"""Runs and archives of the engine as the plain values that pages show."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_app.server.roots import settings
from inshrink_app.services.inside import is_inside, require_inside
from inshrink_app.widgets.tables import ArchiveFacts, FrameRow, ServiceError, Subject, TensorRow

if TYPE_CHECKING:
    from inshrink_core import Archive, Run

__all__ = ["archive_facts", "archive_of_run", "archive_subject", "run_subject"]


def run_subject(run: Run) -> Subject:
    """Gather what the headers of a run tell."""
    path = Path(os.path.realpath(run.path))
    # The log of a folder called "checkpoints" may lie beside it, out of the roots.
    logged = run.log if not run.log or is_inside(Path(os.path.realpath(run.log.origin))) else {}
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
        log={name: tuple(series) for name, series in logged.items()},
        archive=archive_of_run(path, run.steps),
    )


def _skipped(run: Path, path: str, reason: str) -> tuple[str, str]:
    """Name a file that was left out as its reader sees it: within the run, and once."""
    shown = str(Path(path).relative_to(run)) if Path(path).is_relative_to(run) else path
    return (shown, reason.removeprefix(f"{path}: "))


def archive_subject(archive: Archive) -> Subject:
    """Gather what the indexes of an archive tell."""
    path = Path(os.path.realpath(archive.path))
    facts = archive_facts(archive)
    return Subject(
        path=path,
        name=path.name,
        kind="archive",
        format="inshrink archive",
        steps=tuple(archive.steps),
        tensors=_tensor_rows(archive[archive.steps[-1]].specs) if archive.steps else (),
        total_bytes=facts.nbytes,
        bytes_read=archive.bytes_read,
        notes=("steps come from the archive", _originals(archive)) if archive.steps else (),
        archive=facts,
    )


def _originals(archive: Archive) -> str:
    """Say what vouched for the files when they were archived."""
    from inshrink_core.chain import original_checks

    return f"checksums of the originals: {original_checks(archive, archive.frames).text}"


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


def archive_facts(archive: Archive) -> ArchiveFacts:
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
            FrameRow(row.info.step, row.info.kind.value, row.info.nbytes, row.ratio_total, row.ratio_weights)
            for row in size.frames
        ),
    )


def archive_of_run(run: Path, steps: Sequence[int]) -> ArchiveFacts | None:
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
            require_inside(real)
            archive = Archive.open(real)
            if archive.steps and set(archive.steps) <= set(steps):
                return archive_facts(archive)
        except (InshrinkError, ServiceError, OSError):
            continue
    return None

"""Writing an archive to hand on: a chain of steps, one step, or a copy as one file.

The result is one JSON document: ``target``, ``nbytes``, ``is_packed``, ``digest``, ``steps``,
``ratio_total``, ``ratio_weights``, ``raw_bytes``, ``frames`` (``step``, ``kind``, ``bytes``),
``relative_error``, ``left_out``, ``weights_only`` and ``kind``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_app.jobs.report import Report

if TYPE_CHECKING:
    from inshrink_core.execution.progress import Progress

__all__ = ["building_path", "run"]

_MANIFEST = "inshrink-manifest"
_STAGES = {"compress": "encoding", "pack": "packing", "export": "writing", "coarsen": "coarsening"}


def run(request: Mapping[str, Any], report: Report) -> None:
    """Write what is asked for.

    Parameters
    ----------
    request
        ``kind``: ``chain`` encodes ``steps`` of the run ``path`` with ``codec``, ``config``, ``optimizer``
        and ``keyframe_every``; ``trial`` does so somewhere temporary, to tell the sizes; ``step`` writes
        one step (``steps``) of the run or archive ``path``, with ``weights_only``, ``exact`` and
        ``ratio``; ``pack`` copies the archive ``path`` into one file. ``target`` is what to make,
        ``packed`` whether as one file, ``replace`` whether a file there may go. ``output`` takes the
        result.
    report
        Told after each tensor.
    """
    kinds = {"chain": _chain, "trial": _trial, "step": _step, "pack": _pack}
    document = kinds[request["kind"]](request, _Teller(report))
    Path(request["output"]).write_text(json.dumps(document), encoding="utf-8")


class _Teller:
    """Passes the engine's progress on, with a line in the log for each step and stage."""

    def __init__(self, report: Report) -> None:
        self._report, self._last = report, ("", -1)

    def __call__(self, now: Progress) -> None:
        stage = _STAGES.get(now.stage, now.stage)
        if (stage, now.step) != self._last:
            self._last = (stage, now.step)
            self._report.log(f"{stage} step {now.step:,}")
        self._report.progress(now.done, now.total, f"{stage} step {now.step:,}")

    def log(self, text: str) -> None:
        """Add a line to the log."""
        self._report.log(text)


def building_path(request: Mapping[str, Any]) -> Path:
    """Return the hidden folder in which a chain grows that is to become one file.

    Its name tells its settings, so that an export that was cut off goes on, and another begins anew.
    """
    names = ("path", "steps", "codec", "config", "optimizer", "keyframe_every")
    text = json.dumps([request.get(name) for name in names], sort_keys=True)
    target = Path(request["target"])
    return target.with_name(f".{target.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.building")


def _chain(request: Mapping[str, Any], teller: _Teller) -> dict[str, Any]:
    """Encode steps of a run into a folder, and pack that where one file is wanted."""
    target = Path(request["target"])
    if not request["packed"]:
        error = _compress(request, target, teller)
        return _describe("chain", target, relative_error=error)
    _require_free(target, replace=bool(request["replace"]))
    building = building_path(request)
    error = _compress(request, building, teller)
    _pack_into(building, target, bool(request["replace"]), teller)
    shutil.rmtree(building, ignore_errors=True)
    return _describe("chain", target, relative_error=error)


def _trial(request: Mapping[str, Any], teller: _Teller) -> dict[str, Any]:
    """Encode the steps somewhere temporary and tell their sizes."""
    with tempfile.TemporaryDirectory(prefix="trial-", dir=Path(request["output"]).parent) as folder:
        target = Path(folder) / "trial.inshrink"
        error = _compress(request, target, teller)
        return _describe("trial", target, relative_error=error)


def _compress(request: Mapping[str, Any], target: Path, teller: _Teller) -> float | None:
    """Append what is not there yet; return the relative error of what was written now."""
    import inshrink_core

    made = inshrink_core.compress(
        request["path"],
        target,
        codec=request["codec"],
        config=request["config"],
        optimizer=request["optimizer"],
        keyframe_every=int(request["keyframe_every"]),
        steps=request["steps"],
        progress=teller,
    )
    teller.log(f"{len(made.appended)} steps written, {len(made.skipped)} were there already")
    return made.relative_error


def _step(request: Mapping[str, Any], teller: _Teller) -> dict[str, Any]:
    """Write one step as one file; from a run, its bits go through a lossless archive."""
    import inshrink_core
    from inshrink_core.chain import Archive
    from inshrink_core.verbs.export import export

    target, step = Path(request["target"]), int(request["steps"][0])
    weights_only = bool(request["weights_only"])
    _require_free(target, replace=bool(request["replace"]))
    source = inshrink_core.open(request["path"])
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", suffix=".tmp", dir=target.parent) as folder:
        if not isinstance(source, Archive):
            exact = Path(folder) / "exact.inshrink"
            optimizer = "drop" if weights_only else "exact"
            inshrink_core.compress(
                source, exact, codec="lossless", optimizer=optimizer, steps=[step], progress=teller
            )
            source = Archive.open(exact)
        made = export(
            source,
            target,
            step=step,
            weights_only=weights_only,
            exact=bool(request["exact"]),
            ratio=float(request["ratio"]),
            force=bool(request["replace"]),
            progress=teller,
        )
    document = _describe("step", target, relative_error=made.relative_error)
    document |= {"left_out": list(made.left_out), "weights_only": made.weights_only}
    return document | {"ratio_float32": made.ratio_float32}


def _pack(request: Mapping[str, Any], teller: _Teller) -> dict[str, Any]:
    """Copy an archive into one file."""
    target = Path(request["target"])
    _pack_into(Path(request["path"]), target, bool(request["replace"]), teller)
    return _describe("pack", target, relative_error=None)


def _pack_into(source: Path, target: Path, replace: bool, teller: _Teller) -> None:
    from inshrink_core.verbs.pack import pack

    teller.log(f"packing into {target.name}")
    pack(source, target, force=replace, progress=teller)


def _require_free(target: Path, *, replace: bool) -> None:
    """Refuse before the work what would be refused after it."""
    from inshrink_core.errors import ExistsError

    if target.is_dir():
        raise ExistsError("a folder is there already", where=str(target), remedy="choose another name")
    if target.exists() and not replace:
        raise ExistsError(
            "the file exists already", where=str(target), remedy="choose another name, or let it be replaced"
        )


def _describe(kind: str, target: Path, *, relative_error: float | None) -> dict[str, Any]:
    """Return what was made, with a digest by which a copy is known."""
    from inshrink_core.chain import Archive, archive_size

    archive = Archive.open(target)
    size = archive_size(archive)
    is_packed = target.is_file()
    return {
        "kind": kind,
        "target": str(target),
        "is_packed": is_packed,
        "nbytes": target.stat().st_size if is_packed else archive.reader.nbytes,
        "digest": _sha256(target if is_packed else target / _MANIFEST),
        "steps": list(archive.steps),
        "raw_bytes": size.raw_total,
        "ratio_total": size.ratio_total,
        "ratio_weights": size.ratio_weights,
        "relative_error": relative_error,
        "weights_only": False,
        "left_out": [],
        "frames": [
            {"step": row.info.step, "kind": row.info.kind.value, "bytes": row.info.nbytes}
            for row in size.frames
        ],
    }


def _sha256(path: Path) -> str:
    """Return the digest of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Verifying archives as jobs: structure, every tensor decoded, errors against the original run."""

from __future__ import annotations

import math
from typing import Any

from inshrink_app.jobs.job import Job
from inshrink_app.pages.archive.tables import Chain, Finding, TensorErrorRow, Verdict
from inshrink_app.services import running
from inshrink_app.services.history import load_json
from inshrink_app.services.opening import opened

__all__ = ["start_errors", "start_verify", "verdict", "verify_job"]


def _key(chain: Chain, kind: str) -> tuple[str, ...]:
    """Name a verification: another one once frames have come or gone."""
    newest = chain.frames[-1].digest if chain.frames else ""
    return ("verify", str(chain.path), str(len(chain.frames)), newest, kind)


def _error_key(chain: Chain, run: str) -> tuple[str, ...]:
    return _key(chain, f"against {opened(run).token}")


def verify_job(chain: Chain, *, deep: bool = False, run: str = "") -> Job | None:
    """Return a verification of an archive as it is now, if one was started."""
    key = _error_key(chain, run) if run else _key(chain, "deep" if deep else "shallow")
    return running.jobs().get(key, load_json)


def start_verify(chain: Chain, *, deep: bool) -> Job:
    """Check an archive's structure and checksums; decode every tensor too if `deep`."""
    request = {"task": "verify", "path": str(chain.path), "deep": deep}
    key = _key(chain, "deep" if deep else "shallow")
    return running.jobs().start(key, request, load_json, again=True)


def start_errors(chain: Chain, run: str, shown: str) -> Job:
    """Measure the error of every tensor of every step against the original run.

    Parameters
    ----------
    chain
        The archive.
    run
        The original run.
    shown
        What the page is about, to come back to.
    """
    path = str(opened(run).subject.path)
    request = {"task": "verify", "path": str(chain.path), "deep": False, "run": path, "shown": shown}
    return running.jobs().start(_error_key(chain, run), request, load_json, again=True)


def verdict(document: Any) -> Verdict:
    """Turn the document of a verification into plain values."""
    return Verdict(
        ok=bool(document["ok"]),
        deep=bool(document["deep"]),
        n_frames=int(document["frames"]),
        problems=tuple(_finding(row) for row in document["problems"]),
        notes=tuple(_finding(row) for row in document["notes"]),
        missing_steps=tuple(int(step) for step in document["missing_steps"]),
        errors=tuple(sorted((_error(row) for row in document["errors"]), key=_badness, reverse=True)),
    )


def _finding(row: Any) -> Finding:
    return Finding(str(row["where"]), str(row["what"]), str(row["remedy"]))


def _error(row: Any) -> TensorErrorRow:
    relative = row["relative_rms"]
    return TensorErrorRow(
        int(row["step"]),
        str(row["tensor"]),
        str(row["codec"]),
        float(row["max_abs"]),
        None if relative is None else float(relative),
        bool(row["bit_exact"]),
    )


def _badness(row: TensorErrorRow) -> tuple[bool, float, float]:
    """Order by relative error; where the original is all zero, any error counts as the worst."""
    relative = math.inf if row.relative_rms is None else row.relative_rms
    return (not row.bit_exact, relative, row.max_abs)

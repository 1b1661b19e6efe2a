"""Comparing restored steps with the original ones by a run's own metric, one row at a time.

The result is one JSON document: ``archives`` maps each path to the document of ``inshrink compare --json``,
and ``n`` is the number of samples that the evaluator judged by, where its predictions tell.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_app.jobs.report import Report

if TYPE_CHECKING:
    from inshrink_core import Archive, Evaluator, Run
    from inshrink_core.evaluate import EvaluatedStep, Evaluation

__all__ = ["run", "trusted_evaluator"]

_KEPT_NAME = "rows.jsonl"


def run(request: Mapping[str, Any], report: Report) -> None:
    """Evaluate every chosen step as trained, as restored from each archive, and as the stale copy.

    Parameters
    ----------
    request
        ``path`` of the run, ``archives``, ``steps``, ``evaluator`` (``FILE.py:FUNCTION``, or empty for the
        run's own), ``trusted`` (SHA-256 of the evaluator's file as its reader saw it, or empty), and
        ``output``. Rows that are kept beside `output` are not measured again.
    report
        Told each row as soon as it is known.
    """
    from inshrink_core.formats import open_run

    series = open_run(request["path"])
    with _judge(request, series) as judge:
        comparing = _Comparing(series, request, judge, report)
        comparing.run_all()
    Path(request["output"]).write_text(json.dumps(comparing.document()), encoding="utf-8")


def trusted_evaluator(request: Mapping[str, Any], series: Run) -> tuple[str | None, bool]:
    """Return the evaluator asked for, None for the run's own, and whether the run's may be executed.

    Raises
    ------
    UntrustedCodeError
        The code has changed since it was shown to the reader.
    """
    from inshrink_core.errors import UntrustedCodeError

    given = str(request.get("evaluator") or "")
    trusted = str(request.get("trusted") or "")
    file = given.rpartition(":")[0] or str(Path(series.directory) / (series.settings.file or ""))
    if trusted or given:
        found = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        if found != trusted:
            raise UntrustedCodeError(
                "the evaluator is not the one that was trusted",
                where=file,
                remedy="read it again, and say again that you trust it",
            )
    return given or None, bool(trusted)


def _judge(request: Mapping[str, Any], series: Run) -> Evaluator:
    """Return the evaluator; one that has changed since it was shown to the reader is not executed."""
    from inshrink_core.evaluate import EvaluatorRequest

    given, trust_run = trusted_evaluator(request, series)
    asked = EvaluatorRequest(evaluator=given, trust_run=trust_run)
    return asked.resolve(series.settings, series.directory)


class _Comparing:
    """Walks the steps with all archives side by side, so that every original is evaluated once."""

    def __init__(self, series: Run, request: Mapping[str, Any], judge: Evaluator, report: Report) -> None:
        from inshrink_core.chain import Archive

        self._series, self._judge, self._report = series, judge, report
        self._steps = [int(step) for step in request["steps"]]
        self._archives = {path: Archive.open(path).sequential() for path in request["archives"]}
        self._code = str(request.get("trusted") or "")
        self._kept_path = Path(request["output"]).with_name(_KEPT_NAME)
        self._kept = self._read_kept()
        self._originals: dict[int, Evaluation] = {}
        self._rows: dict[str, list[dict[str, Any]]] = {path: [] for path in self._archives}
        self._n: int | None = None
        self._metric = self._direction = ""

    def run_all(self) -> None:
        """Measure every row that is not kept, and tell each."""
        pairs = [(step, path) for step in self._steps for path, one in self._archives.items() if step in one]
        for position, (step, path) in enumerate(pairs):
            key = self._key(path, step)
            row = self._kept.get(key)
            if row is None:
                row = self._measure(self._archives[path], step)
                with self._kept_path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "row": row}) + "\n")
            self._metric, self._direction, self._n = row["metric"], row["direction"], row["n"]
            self._rows[path].append(row)
            self._report.row(archive=path, **row)
            self._report.log(f"{Path(path).name}, step {step:,}: {row['restored']:.6g}")
            self._report.progress(position + 1, len(pairs), f"step {step:,}")

    def _measure(self, archive: Archive, step: int) -> dict[str, Any]:
        """Evaluate one step; the original, and the one before it, only where they are not at hand."""
        from inshrink_core.evaluate import EvaluatedStep, compare_steps

        found = compare_steps(
            self._series, archive, self._judge, steps=[step], known=lambda wanted: self._original(wanted)
        )
        one: EvaluatedStep = found.steps[0]
        original = self._original(step)
        fields = {name: getattr(one, name) for name in EvaluatedStep.__slots__}
        return fields | {
            "metric": found.metric,
            "direction": found.direction.value,
            "standard_error": original.standard_errors.get(found.metric),
            "n": None if original.log_probs is None else len(original.log_probs),
        }

    def _original(self, step: int) -> Evaluation:
        """Evaluate an original once; two are held, as predictions of many samples are large."""
        if step not in self._originals:
            self._originals = dict(list(self._originals.items())[-1:])
            self._originals[step] = self._judge.evaluate(self._series[step])
        return self._originals[step]

    def _key(self, path: str, step: int) -> str:
        """Name a row by what it depends on: original, frame and code."""
        archive = self._archives[path]
        frame = archive.reader.find(step)
        parts = (self._series.identity(step), path, frame.frame_id.hex(), frame.digest.hex(), self._code)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _read_kept(self) -> dict[str, dict[str, Any]]:
        """Return the rows of an attempt that was cut off."""
        kept = {}
        with suppress(OSError):
            for line in self._kept_path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    one = json.loads(line)
                    kept[str(one["key"])] = dict(one["row"])
        return kept

    def document(self) -> dict[str, Any]:
        """Return the result; each archive's part as the command line has it."""
        return {"n": self._n, "archives": {path: self._summary(rows) for path, rows in self._rows.items()}}

    def _summary(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        drops = [row["drop"] for row in rows if row["drop"] is not None]
        divergences = [row["divergence"] for row in rows if row["divergence"] is not None]
        return {
            "metric": self._metric,
            "direction": self._direction,
            "max_drop": max(drops, default=None),
            "max_divergence": max(divergences, default=None),
            "mean_divergence": math.fsum(divergences) / len(divergences) if divergences else None,
            "steps": rows,
        }

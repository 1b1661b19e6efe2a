"""Searching the coarsest configuration that keeps a bound, and measuring what it is compared with.

The result is one JSON document: that of ``inshrink search --json`` with whole trials; of baselines,
``trials`` and ``steps`` alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_app.actions import estimates
from inshrink_app.actions.compare import trusted_evaluator
from inshrink_app.jobs.report import Report

if TYPE_CHECKING:
    from inshrink_core import Run
    from inshrink_core.search.search import SearchProgress
    from inshrink_core.search.trials import Trial

__all__ = ["BASELINES", "run"]

_KEPT_NAME = "trials.jsonl"
_OWN_NAME = "search.json"

_KEYFRAME_EVERY = 32
"""As a search has it by default, so that the chains are of the same kind."""

BASELINES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("Lossless", "lossless", {}),
    ("Uniform, 8 bit", "uniform", {"bits": 8}),
    ("Uniform, 4 bit", "uniform", {"bits": 4}),
    ("Inshrinkerator", "inshrinkerator", {}),
    ("QD", "qd", {}),
    ("LC-Checkpoint", "lc-checkpoint", {}),
    ("ExCP", "excp", {}),
    ("Context", "context", {}),
)
"""What a search is compared with: name, codec and settings; the others are the codecs' own, as published."""


def run(request: Mapping[str, Any], report: Report) -> None:
    """Search, or measure the baselines.

    Parameters
    ----------
    request
        ``kind``: ``search``, ``baselines`` or ``estimates``; ``path`` of the run, ``steps``, ``evaluator``
        and ``trusted`` as `inshrink_app.actions.compare` takes them, ``output``. Of a search also
        ``max_drop``, ``max_divergence`` or ``target_ratio``, ``codec``, ``strategy`` and ``budget``. Trials
        of an attempt that was cut off are in the log beside the run, or beside `output`, and are not
        measured again.
    report
        Told each trial.
    """
    from inshrink_core.formats import open_run

    series = open_run(request["path"])
    if request["kind"] == "estimates":
        document = estimates.estimate_all(series, request, report)
        Path(request["output"]).write_text(json.dumps(document), encoding="utf-8")
        return
    evaluator, trust = trusted_evaluator(request, series)
    teller = _Teller(request, report)
    found = _baselines if request["kind"] == "baselines" else _search
    document = found(series, request, evaluator, trust, teller)
    Path(request["output"]).write_text(json.dumps(document), encoding="utf-8")


class _Teller:
    """Passes trials on, and keeps them, so that those of an attempt that was cut off are shown again."""

    def __init__(self, request: Mapping[str, Any], report: Report) -> None:
        self._report = report
        self._path = Path(request["output"]).with_name(_KEPT_NAME)
        with suppress(OSError):
            for line in self._path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):
                    report.row(**json.loads(line))

    def __call__(self, now: SearchProgress) -> None:
        best = "" if now.best_ratio is None else f" · best {now.best_ratio:.1f}×"
        self.tell(now.trial, now.evaluations, now.evaluations + now.left, best)

    def tell(self, trial: Trial, done: int, total: int, more: str = "") -> None:
        """Tell of one trial, and how far it all is."""
        row = trial.to_json()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._report.row(**row)
        self._report.log(f"step {trial.step:,}, {json.dumps(trial.config)}: {trial.ratio_weights:.2f}×")
        self._report.progress(done, max(done + 1, total), f"trial {done:,}, step {trial.step:,}{more}")


def _search(
    series: Run, request: Mapping[str, Any], evaluator: str | None, trust: bool, teller: _Teller
) -> dict[str, Any]:
    """Search as ``inshrink search`` does."""
    from inshrink_core.search.search import search, trial_log_of

    kept_in_run = trial_log_of(series, None) is not None
    found = search(
        series,
        max_drop=request.get("max_drop"),
        max_divergence=_limit(request.get("max_divergence")),
        target_ratio=request.get("target_ratio"),
        codec=request["codec"],
        strategy=request["strategy"],
        budget=request["budget"],
        steps=request["steps"],
        evaluator=evaluator,
        trust_run=trust,
        output=None if kept_in_run else Path(request["output"]).with_name(_OWN_NAME),
        progress=teller,
    )
    return found.to_json() | {"trials": [trial.to_json() for trial in found.trials]}


def _limit(value: Any) -> float | None:
    """Return a bound; JSON has no number for one that is waived."""
    return None if value is None else float(value)


def _baselines(
    series: Run, request: Mapping[str, Any], evaluator: str | None, trust: bool, teller: _Teller
) -> dict[str, Any]:
    """Write the chain of every baseline in memory, and judge each of its steps."""
    from inshrink_core.chain.defaults import make_chain_config
    from inshrink_core.evaluate import EvaluatorRequest
    from inshrink_core.search.bounds import Bounds
    from inshrink_core.search.judge import Judge
    from inshrink_core.search.search import trial_log_of
    from inshrink_core.search.space import Candidate
    from inshrink_core.search.trials import TrialLog, checkpoint_digest
    from inshrink_core.search.walk import TrialRunner

    steps = tuple(int(step) for step in request["steps"])
    output = Path(request["output"]).with_name(_OWN_NAME)
    path = trial_log_of(series, None) or trial_log_of(series, output)
    log = TrialLog(path, checkpoint_digest(series[series.steps[0]]))
    request_ = EvaluatorRequest(evaluator=evaluator, trust_run=trust)
    asked = request_.resolve(series.settings, series.directory)
    trials: list[Trial] = []
    with Judge([asked], series.__getitem__, Bounds()) as judge:
        for _, codec, settings in BASELINES:
            base = make_chain_config("", codec, settings, None, _KEYFRAME_EVERY, "cpu", None)
            runner = TrialRunner(checkpoints=series.__getitem__, steps=steps, base=base, judge=judge, log=log)

            def keep_on(trial: Trial) -> bool:
                trials.append(trial)
                teller.tell(trial, len(trials), len(steps) * len(BASELINES))
                return True

            runner.walk(Candidate(codec=codec, settings=settings), keep_on)
    return {"steps": list(steps), "trials": [trial.to_json() for trial in trials]}

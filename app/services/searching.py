"""Searching a configuration: the job, and what it found, or has found so far, as points."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from inshrink_app.actions.search import BASELINES
from inshrink_app.jobs.job import Job
from inshrink_app.pages.search.config import config_words
from inshrink_app.pages.search.tables import Searched, SearchPoint, SearchRequest
from inshrink_app.services import running
from inshrink_app.services.comparing import EvaluatorCode
from inshrink_app.services.history import load_json, read_result
from inshrink_app.services.opening import opened
from inshrink_app.widgets.tables import Subject

__all__ = [
    "BASELINE_NAMES",
    "baselines",
    "baselines_job",
    "estimates",
    "estimates_job",
    "newest_search",
    "searched",
    "start_baselines",
    "start_estimates",
    "start_search",
]

BASELINE_NAMES = tuple(name for name, _, _ in BASELINES)


def newest_search(subject: Subject) -> Job | None:
    """Return the last search on a run."""
    return running.jobs().get(("search", str(subject.path)), load_json)


def start_search(subject: Subject, request: SearchRequest, judge: EvaluatorCode) -> Job:
    """Search; called only after the reader has said that the code may run, or where it is ours."""
    values = _asked(subject, "search", request.steps, judge) | _as_json(request.limits())
    values |= {"codec": request.codec, "strategy": request.strategy, "budget": request.budget}
    return running.jobs().start(("search", str(subject.path)), values, load_json, again=True)


def _as_json(limits: Mapping[str, float]) -> dict[str, float | str]:
    """Return bounds as JSON has them: an infinite one, which waives, as text."""
    return {name: limit if math.isfinite(limit) else "inf" for name, limit in limits.items()}


def _asked(subject: Subject, kind: str, steps: Sequence[int], judge: EvaluatorCode) -> dict[str, Any]:
    """Return what both kinds of work are told."""
    return {
        "task": "search",
        "kind": kind,
        "path": str(subject.path),
        "steps": list(steps),
        "evaluator": judge.spec,
        "trusted": "" if judge.is_bundled else judge.digest,
    }


def _baselines_key(subject: Subject, steps: Sequence[int], judge: EvaluatorCode) -> tuple[str, ...]:
    token = opened(str(subject.path)).token
    return ("baselines", str(subject.path), token, judge.digest, ",".join(map(str, steps)))


def baselines_job(subject: Subject, steps: Sequence[int], judge: EvaluatorCode) -> Job | None:
    """Return the measuring of the baselines on these steps, if it was started."""
    return running.jobs().get(_baselines_key(subject, steps, judge), load_json)


def start_baselines(subject: Subject, steps: Sequence[int], judge: EvaluatorCode) -> Job:
    """Measure the baselines; under the same consent as a search."""
    key = _baselines_key(subject, steps, judge)
    return running.jobs().start(key, _asked(subject, "baselines", steps, judge), load_json)


def baselines(job: Job | None) -> tuple[SearchPoint, ...]:
    """Return the baselines as points, those measured so far; nothing is promised of them."""
    if job is None:
        return ()
    names = {json.dumps([codec, dict(settings)]): name for name, codec, settings in BASELINES}
    points = _points(_rows(job), len(job.request.get("steps", ())), {})
    named = [(names.get(json.dumps([p.config.get("codec"), p.config.get("settings")])), p) for p in points]
    return tuple(p._replace(baseline=name, label=name, keeps=False) for name, p in named if name)


def _estimates_key(subject: Subject, steps: Sequence[int], codec: str) -> tuple[str, ...]:
    token = opened(str(subject.path)).token
    return ("estimates", str(subject.path), token, codec, ",".join(map(str, steps)))


def estimates_job(subject: Subject, steps: Sequence[int], codec: str) -> Job | None:
    """Return the estimating of a codec from fine to coarse, if it was started."""
    return running.jobs().get(_estimates_key(subject, steps, codec), load_json)


def start_estimates(subject: Subject, steps: Sequence[int], codec: str) -> Job:
    """Estimate a codec from fine to coarse; no evaluator is asked, so that no consent is needed."""
    request = {
        "task": "search",
        "kind": "estimates",
        "path": str(subject.path),
        "steps": list(steps),
        "codec": codec,
    }
    return running.jobs().start(_estimates_key(subject, steps, codec), request, load_json, again=True)


def estimates(job: Job | None) -> tuple[SearchPoint, ...]:
    """Return what was estimated, or has been so far, as points; nothing is promised of them."""
    if job is None:
        return ()
    told = read_result(job) if job.state == "finished" else None
    rows = told["rows"] if isinstance(told, dict) else list(job.rows)
    return tuple(
        SearchPoint(
            label=config_words(row["config"]),
            config=row["config"],
            ratio=float(row["ratio"]),
            drop=row["drop"],
            divergence=row["divergence"],
            n_steps=int(row["n_steps"]),
            whole=True,
            keeps=False,
            is_estimated=True,
        )
        for row in rows
    )


def searched(job: Job) -> Searched:
    """Return what a search has found, or has found so far."""
    told = read_result(job) if job.state == "finished" else None
    told = told if isinstance(told, dict) else {}
    rows = _rows(job)
    limits = _limits(job.request, told, rows)
    steps = tuple(told.get("steps") or job.request.get("steps") or ())
    points = _points(rows, len(steps), limits)
    target = job.request.get("target_ratio")
    if target is not None:
        points = [point._replace(keeps=point.keeps and point.ratio >= target) for point in points]
    best = told.get("best")
    if best:
        key = _key(best["config"])
        points = [point._replace(is_best=_key(point.config) == key) for point in points]
    return Searched(
        points=tuple(points),
        max_drop=limits.get("drop"),
        max_divergence=limits.get("divergence"),
        target_ratio=target,
        metric=str(told.get("metric", "")),
        direction=str(told.get("direction", "")),
        strategy=str(told.get("strategy", "")),
        steps=steps,
        uninformative=tuple(told.get("uninformative", ())),
        evaluations=int(told.get("evaluations", job.done)),
        rank_correlation=told.get("rank_correlation"),
        seconds=float(told.get("seconds", 0.0)),
        notes=tuple(map(str, told.get("notes", ()))),
    )


def _rows(job: Job) -> list[dict[str, Any]]:
    """Return the trials of a job: of its result, else those told so far."""
    told = read_result(job) if job.state == "finished" else None
    return list(told["trials"]) if isinstance(told, dict) else list(job.rows)


def _limits(
    request: Mapping[str, Any], told: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return the bounds; until the search has told its own, a divergence joins a drop as it will then."""
    if "bounds" in told:
        bounds = {name: float(limit) for name, limit in told["bounds"].items() if limit is not None}
        return {name: limit for name, limit in bounds.items() if math.isfinite(limit)}
    limits = {"drop": request.get("max_drop"), "divergence": request.get("max_divergence")}
    known = {name: float(limit) for name, limit in limits.items() if limit is not None}
    if math.isinf(known.get("divergence", 0.0)):
        return {"drop": known["drop"]} if "drop" in known else {}
    if "drop" in known and "divergence" not in known and any(row["divergence"] is not None for row in rows):
        from inshrink_core.search.bounds import DEFAULT_MAX_DIVERGENCE

        known["divergence"] = DEFAULT_MAX_DIVERGENCE
    return known


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _points(
    rows: Iterable[Mapping[str, Any]], n_steps: int, limits: Mapping[str, float]
) -> list[SearchPoint]:
    """Put the trials of each configuration together."""
    chains: dict[str, dict[int, Mapping[str, Any]]] = {}
    config, key = None, ""
    for row in rows:
        if row["config"] != config:  # Trials of a chain follow each other, and a key costs more.
            config, key = row["config"], _key(row["config"])
        chains.setdefault(key, {})[int(row["step"])] = row
    return [_point(list(chain.values()), n_steps, limits) for chain in chains.values()]


def _point(chain: Sequence[Mapping[str, Any]], n_steps: int, limits: Mapping[str, float]) -> SearchPoint:
    """Return one configuration over its steps."""
    config = chain[0]["config"]
    nbytes = sum(int(row["weights_nbytes"]) for row in chain)
    return SearchPoint(
        label=config_words(config),
        config=config,
        ratio=sum(int(row["raw_weights"]) for row in chain) / nbytes if nbytes else 0.0,
        drop=max(_known(chain, "drop"), default=None),
        divergence=max(_known(chain, "divergence"), default=None),
        n_steps=len(chain),
        whole=len(chain) >= n_steps,
        keeps=all(_keeps(row, limits) for row in chain),
        gain=_mean(_known(chain, "restore_gain")),
        noise=_mean(_known(chain, "restore_noise")),
    )


def _known(chain: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in chain if row.get(name) is not None]


def _keeps(row: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """Return whether one step keeps every bound."""
    return not row.get("failure") and all(
        row[name] is not None and row[name] <= limit for name, limit in limits.items()
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None

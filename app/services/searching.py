"""Searches for a configuration: requests, and their results so far as points."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

import streamlit as st
from inshrink_app.jobs import Job, Work
from inshrink_app.model import Subject, config_words, engine_settings, known_of
from inshrink_app.services.archives import archives_of
from inshrink_app.services.comparing import compared
from inshrink_app.services.evaluating import EvaluatorCode
from inshrink_app.services.exporting import chosen_steps
from inshrink_app.services.inside import reported
from inshrink_app.services.jobs import (
    all_jobs,
    documents_of,
    newest_job,
    read_result,
    scratch_path,
    start_job,
    stop_job,
)
from inshrink_app.services.opening import opened

from inshrink_core.chain import default_optimizer as of_engine
from inshrink_core.chain.defaults import make_configs
from inshrink_core.codec import make_codec
from inshrink_core.codecs.variants import compared_variants
from inshrink_core.request import request_from_json
from inshrink_core.search.bounds import DEFAULT_MAX_DIVERGENCE
from inshrink_core.search.space import space_of
from inshrink_core.text import percentage
from inshrink_core.text import ratio as ratio_text
from inshrink_core.verbs.compare import CompareArchives
from inshrink_core.verbs.compress import Compress
from inshrink_core.verbs.estimate import Estimate
from inshrink_core.verbs.search import Search
from inshrink_core.verbs.shared.measured import Known

_MEASURED = "measured.inshrink"
"""The temporary archive of one measured configuration."""

_BY_STEP = "Settings by step"
_LEVELS = 7
"""Number of estimated configurations, enough to show the shape of a curve."""


class SearchPoint(NamedTuple):
    """One configuration over the steps measured with it.

    Parameters
    ----------
    label
        Its settings in a few words. Untrusted text.
    config
        ``codec``, ``settings`` and, if any, ``override``, as in a configuration file.
    ratio, drop, divergence, restore_cost
        The ratio of the weights of these steps together; the figures of the worst step, None without values.
    n_steps, is_complete
        Number of measured steps, and whether all steps were measured.
    keeps
        Whether every measured step keeps the bounds; in a search for a ratio, whether it is reached.
    is_best
        Whether the search chose it.
    baseline, archive
        Name of a published codec or of an archive; empty for a trial of the search.
    is_estimated
        Whether no figure was measured.
    """

    label: str
    config: Mapping[str, Any]
    ratio: float
    drop: float | None
    divergence: float | None
    n_steps: int
    is_complete: bool = True
    keeps: bool = False
    restore_cost: float | None = None
    is_best: bool = False
    baseline: str = ""
    archive: str = ""
    is_estimated: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], figures: Mapping[str, Any], **more: Any) -> SearchPoint:
        """Return a point from figures under the engine's names; of several steps, the worst counts."""
        worst = {name: figures[name] for name in ("drop", "divergence", "restore_cost") if name in figures}
        words = {"label": config_words(config), **worst, **more}
        return cls(config=config, ratio=float(figures["ratio_weights"] or 0.0), **words)

    @property
    def name(self) -> str:
        """The name of a baseline or archive; empty for a trial. Untrusted text."""
        return self.baseline or self.archive

    @property
    def basis(self) -> str:
        """Return whether the figures are estimated or measured."""
        return "estimated" if self.is_estimated else "measured"

    def figure(self, name: str) -> float | None:
        """Return the drop, divergence or restore cost; None if it is not a number."""
        value: float | None = getattr(self, name, None)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """The results of a search so far.

    Parameters
    ----------
    points
        In the order of their start.
    limits
        Bounds by figure, including a default bound of the divergence beside a drop.
    target_ratio
        The ratio of the weights to reach; None for bounds.
    default_ratio
        Ratio of the weights with the codec's default settings; None before the report.
    metric
        The measured metric; empty before the report.
    steps, uninformative
        Steps of the chain, and those at which the bounds do not discriminate.
    evaluations
        Trials measured by this search; others come from its log.
    seconds
        Wall time.
    notes
        Remarks for the user.
    """

    points: tuple[SearchPoint, ...]
    limits: Mapping[str, float] = field(default_factory=dict)
    target_ratio: float | None = None
    default_ratio: float | None = None
    metric: str = ""
    steps: tuple[int, ...] = ()
    uninformative: tuple[int, ...] = ()
    evaluations: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def best(self) -> SearchPoint | None:
        """Return the chosen point, or the largest ratio so far that keeps the bounds."""
        settled = [point for point in self.points if point.is_best]
        keeping = [point for point in self.points if point.keeps and point.is_complete and point.config]
        return settled[0] if settled else max(keeping, key=lambda point: point.ratio, default=None)

    def verdict(self, point: SearchPoint) -> str:
        """Return whether a point meets the request, in words."""
        if self.target_ratio is not None:
            return "reaches the ratio" if point.keeps else "below the ratio"
        return "keeps the bounds" if point.keeps else "breaks a bound"


def searched_before(shown: Subject, job: Job) -> Searched | None:
    """Return the results of the last finished search if the latest search is unfinished; else None."""
    if job.is_running or job.state == "finished":
        return None
    earlier = newest_job("run", "search", shown.path, "finished")
    return None if earlier is None else searched(earlier, steps_of(earlier, shown), more=job.told())


def steps_of(job: Job, shown: Subject) -> tuple[int, ...]:
    """Return the requested steps of a job."""
    return getattr(job.requests[-1], "steps", None) or shown.steps


def searched(job: Job, steps: Sequence[int], *, more: Iterable[Mapping[str, Any]] = ()) -> Searched:
    """Return the results of a search so far.

    Parameters
    ----------
    job, steps
        The search and its steps; a point of fewer steps is incomplete.
    more
        Trials of a later, unfinished search.
    """
    result = read_result(job) if job.state == "finished" else None
    report: Mapping[str, Any] = result if isinstance(result, dict) else {}
    rows = [*(report["trials"] if "trials" in report else job.told()), *more]
    asked: Any = job.requests[-1]
    limits = limits_of(asked, report, rows)
    steps = tuple(report.get("steps") or steps)
    points = _points(rows, len(steps), limits)
    ratio = asked.target_ratio
    if ratio is not None:
        points = [point._replace(keeps=point.keeps and point.ratio >= ratio) for point in points]
    if by_step := report.get("by_step"):
        words = {"label": "settings found for each step", "archive": _BY_STEP}
        points.append(SearchPoint.of({}, by_step, n_steps=len(steps), keeps=True, **words))
    best = report.get("best")
    if best:
        key = _text(best["config"])
        points = [point._replace(is_best=_text(point.config) == key) for point in points]
    return Searched(
        points=tuple(points),
        limits=limits,
        target_ratio=ratio,
        default_ratio=report["default"]["ratio_weights"] if "default" in report else None,
        metric=str(report.get("metric", "")),
        steps=steps,
        uninformative=tuple(report.get("uninformative", ())),
        evaluations=int(report.get("evaluations", job.done)),
        seconds=float(report.get("seconds", 0.0)),
        notes=(*_decided(report), *map(str, report.get("notes", ()))),
    )


def _decided(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes: the step with the least slack, and the default's size beside the result."""
    if binding := report.get("binding"):
        figure, usage = str(binding["figure"]).replace("_", " "), percentage(binding["usage"])
        yield f"step {binding['step']} decides: its {figure} takes {usage} of the bound"
    if (default := report.get("default")) and report.get("target_ratio") is None:
        verdict = "keeps the bounds" if default["keeps"] else "breaks them"
        yield f"the default stores {ratio_text(default['ratio_weights'])} of the weights, and {verdict}"


def limits_of(
    asked: Search, report: Mapping[str, Any] = MappingProxyType({}), rows: Sequence[Mapping[str, Any]] = ()
) -> dict[str, float]:
    """Return the bounds by figure; a drop gains a bound of the divergence, as in the search.

    Parameters
    ----------
    asked, report, rows
        The request, its report and its trials, as far as available.
    """
    if "bounds" in report:
        bounds = {name: float(limit) for name, limit in report["bounds"].items() if limit is not None}
        return {name: limit for name, limit in bounds.items() if math.isfinite(limit)}
    limits = asked.bounds.limits
    if set(limits) == {"drop"} and asked.max_divergence is None:
        has_any = any(row["divergence"] is not None for row in rows)
        return limits | ({"divergence": DEFAULT_MAX_DIVERGENCE} if has_any or not rows else {})
    return limits


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _points(
    rows: Iterable[Mapping[str, Any]], n_steps: int, limits: Mapping[str, float]
) -> list[SearchPoint]:
    """Group the trials of each configuration into a point."""
    chains: dict[str, dict[int, Mapping[str, Any]]] = {}
    config, key = None, ""
    for row in rows:
        if row["config"] != config:  # Trials of a chain are consecutive, and computing a key costs more.
            config, key = row["config"], _text(row["config"])
        chains.setdefault(key, {})[int(row["step"])] = row
    return [_point(list(chain.values()), n_steps, limits) for chain in chains.values()]


def _point(chain: Sequence[Mapping[str, Any]], n_steps: int, limits: Mapping[str, float]) -> SearchPoint:
    """Return one configuration over its steps, whose raw weights have equal sizes."""
    stored = [1 / row["ratio_weights"] for row in chain if row["ratio_weights"]]
    figures = {
        name: max(_known(chain, name), default=None) for name in ("drop", "divergence", "restore_cost")
    }
    return SearchPoint.of(
        chain[0]["config"],
        figures | {"ratio_weights": len(stored) / math.fsum(stored) if stored else 0.0},
        n_steps=len(chain),
        is_complete=len(chain) >= n_steps,
        keeps=all(not row.get("failure") and _keeps(row, limits) for row in chain),
    )


def _known(chain: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in chain if row.get(name) is not None]


def _keeps(figures: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    return all(figures[name] is not None and figures[name] <= limit for name, limit in limits.items())


def baselines_work(shown: Subject, steps: Sequence[int], judge: EvaluatorCode) -> Work:
    """Return the measurement of the baselines: a benchmark of codecs with all optimizer state stored."""
    # The lab's verb is found by its name, like every verb that another package registers.
    codecs = ",".join(variant.label for variant in compared_variants().values())
    fields = {"run": str(shown.path), "codecs": codecs, "steps": list(steps), **judge.fields}
    output = scratch_path("bench")
    bench = request_from_json({"verb": "bench", "fields": {**fields, "output": output}})
    more: dict[str, Any] = {"of": _measured_on(shown, judge), "scratch": (output,)}
    return Work.asking([bench], shown.path, "run", "baselines", trusted=judge.trusted, **more)


def baselines(job: Job | None) -> tuple[SearchPoint, ...]:
    """Return the measured baselines as points, without bounds."""
    rows = {row["codec"]: row for row in (() if job is None else job.told())}
    names = {variant.label: name for name, variant in compared_variants().items()}
    points = [
        SearchPoint.of(
            {"codec": codec.partition(":")[0], "settings": dict(row["config"])},
            row | {"drop": row["max_drop"], "divergence": row["max_divergence"]},
            label=names[codec],
            n_steps=len(row["drops"]),
            baseline=names[codec],
        )
        for codec, row in rows.items()
        if codec in names
    ]
    order = list(names.values())
    return tuple(sorted(points, key=lambda point: order.index(point.baseline)))


def measuring_work(
    shown: Subject, steps: Sequence[int], judge: EvaluatorCode, config: Mapping[str, Any]
) -> Work:
    """Return the measurement of one configuration: it writes an archive and compares it."""
    target, chosen, path = scratch_path(_MEASURED), tuple(steps) or None, str(shown.path)
    given, codec = engine_settings(config), str(config["codec"])
    requests = (
        Compress(path, target, codec=codec, config=given or None, optimizer="drop", steps=chosen),
        CompareArchives((target,), path, steps=chosen, **judge.fields),
    )
    more: dict[str, Any] = {"of": _measured_on(shown, judge), "scratch": (target,)}
    return Work.asking(requests, path, "run", "measured", trusted=judge.trusted, **more)


def _measured_on(shown: Subject, judge: EvaluatorCode) -> tuple[str, ...]:
    return (opened(str(shown.path)).token, judge.digest)


def start_measuring(work: Work) -> Job:
    """Start the measurement of one configuration, under the same consent as a search.

    A running measurement of another configuration of the run is cancelled.
    """
    for job in all_jobs():
        is_other = job.work.topic == work.topic and job.work.key != work.key
        if is_other and job.is_running and not job.is_elsewhere:
            stop_job(job)
    return start_job(work, again=False)


def measured_configs(
    shown: Subject, steps: Sequence[int], judge: EvaluatorCode, found: Searched | None
) -> tuple[SearchPoint, ...]:
    """Return the configurations that were measured one by one on these steps.

    Parameters
    ----------
    shown, steps, judge
        The run, its steps and the evaluator.
    found
        A search whose limits apply.
    """
    asked = ("measured", str(shown.path), _measured_on(shown, judge))
    points = []
    for job in all_jobs():
        is_of = (job.work.topic, job.shown, job.work.of) == asked and steps_of(job, shown) == tuple(steps)
        if is_of and job.state == "finished":
            points += _measured(job.job_id, len(steps), job)
    if found is None:
        return tuple(points)
    least = found.target_ratio or 0.0
    return tuple(
        point._replace(keeps=point.ratio >= least and _keeps(point._asdict(), found.limits))
        for point in points
    )


@st.cache_resource(show_spinner=False, max_entries=64)
def _measured(job_id: str, n_steps: int, _job: Job) -> list[SearchPoint]:
    """Return the points of a finished job; empty if its reports are missing."""
    documents = documents_of(_job)
    if len(documents) < 2:
        return []
    (found,), written = compared(_job), _job.requests[0]
    settings = dict(getattr(written, "config", None) or {})
    overrides = {"override": settings.pop("overrides")} if "overrides" in settings else {}
    config = {"codec": getattr(written, "codec", ""), "settings": settings, **overrides}
    return [_compared_point(found, config, float(documents[0]["ratio_weights"]), n_steps)]


def _compared_point(found: Known, config: Mapping[str, Any], ratio: float, n_steps: int) -> SearchPoint:
    worst = {
        name: getattr(found.comparison, f"max_{name}") for name in ("drop", "divergence", "restore_cost")
    }
    n_known = len(found.comparison.steps)
    return SearchPoint.of(
        config, worst | {"ratio_weights": ratio}, n_steps=n_known, is_complete=n_known >= n_steps
    )


def measured_archives(
    shown: Subject, judge: EvaluatorCode | None, steps: Sequence[int]
) -> tuple[SearchPoint, ...]:
    """Return the archives of a run that were compared with it.

    Parameters
    ----------
    shown, judge
        The run, and the evaluator; None for any evaluator.
    steps
        The expected steps; an archive of other steps is incomplete.
    """
    points: list[SearchPoint] = []
    for chain in archives_of(shown) if shown.kind == "run" else ():
        found = known_of(chain)
        if found is None or not found.is_current or not found.comparison.steps:
            continue
        if judge is not None and found.evaluator.name != f"{judge.path}:{judge.function}":
            continue
        config: dict[str, Any] = {}
        if chain.is_uniform:  # Without uniform settings, no single configuration describes the archive.
            config = {"codec": chain.codec, "settings": dict(chain.config)}
            config |= (
                {"override": [dict(override) for override in chain.overrides]} if chain.overrides else {}
            )
        seen = _compared_point(found, config, chain.ratio_weights or 0.0, len(found.comparison.steps))
        points.append(seen._replace(archive=chain.path.name, is_complete=chain.steps == tuple(steps)))
    return tuple(points)


def estimating_work(shown: Subject, steps: Sequence[int], codec: str, *, is_calibrated: bool) -> Work:
    """Return the estimation of a codec from fine to coarse; it runs no evaluator and needs no consent.

    Parameters
    ----------
    shown, steps, codec
        The run, its steps and the codec.
    is_calibrated
        Whether trials calibrate the cost of an error; calibrated estimates are a new question.
    """
    of = (opened(str(shown.path)).token, "calibrated" if is_calibrated else "uncalibrated")
    request = estimate_levels(shown, steps, codec)
    return Work.asking([request], shown.path, "run", "estimates", of=of)


def estimate_levels(shown: Subject, steps: Sequence[int], codec: str) -> Estimate:
    """Return the request that estimates a codec from fine to coarse, tensor by tensor."""
    layers = frozenset(row.layer for row in shown.model_tensors)
    with reported():
        first, *others = (level.settings for level in space_of(codec, layers).levels(_LEVELS))
    texts = [
        ",".join(
            f"{name}={value if isinstance(value, str) else json.dumps(value)}"
            for name, value in level.items()
        )
        for level in others
    ]
    asked: dict[str, Any] = {"codec": codec, "settings": first, "each": texts, "by_tensor": True}
    return Estimate(str(shown.path), **asked, steps=chosen_steps(steps, shown.steps))


def estimates(job: Job | None) -> tuple[SearchPoint, ...]:
    """Return the estimates so far as points, without bounds."""
    rows = {} if job is None else {_text(row["set"]): row for row in job.told()}
    return tuple(
        SearchPoint.of(row["set"], row, n_steps=int(row["n_steps"]), is_estimated=True)
        for row in rows.values()
    )


def codec_settings(codec: str) -> dict[str, Any]:
    """Return the settings of a codec with their defaults."""
    with reported():
        return make_codec(codec, None).settings()


def default_optimizer(codec: str, config: Mapping[str, Any]) -> str:
    """Return the engine's default codec of optimizer state beside weights of this configuration."""
    with reported():
        return of_engine(codec, config)


def check_config(config: Mapping[str, Any]) -> None:
    """Check a configuration with the engine.

    Raises
    ------
    ServiceError
        The codec does not have a setting, or a value is out of range.
    """
    with reported():
        make_configs(str(config["codec"]), engine_settings(config))


def unmatched_overrides(shown: Subject, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return overrides that match no weight of a run; the engine refuses to write with them."""
    rows = shown.model_tensors
    found = []
    for override in config.get("override", ()):
        layer, match = override.get("layer_type"), str(override.get("match", "*"))
        if not any(layer in (None, row.layer) and fnmatchcase(row.name, match) for row in rows):
            found.append(f"{layer or ''} {match}".strip())
    return tuple(found)

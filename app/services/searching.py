"""Searches for a configuration: requests, and their results so far as points."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from inshrink_app.jobs import Job, Work
from inshrink_app.model import ServiceError, Subject, config_words, engine_settings, known_of, loaded
from inshrink_app.services.archives import archives_of
from inshrink_app.services.evaluating import EvaluatorCode
from inshrink_app.services.exporting import chosen_steps
from inshrink_app.services.inside import reported
from inshrink_app.services.jobs import newest_job, read_result, scratch_path
from inshrink_app.services.opening import opened

from inshrink_core.chain.config import default_optimizer as of_engine
from inshrink_core.chain.defaults import make_configs
from inshrink_core.codec import make_codec
from inshrink_core.codecs.variants import compared_variants
from inshrink_core.request import request_from_json
from inshrink_core.search.bounds import DEFAULT_MAX_DIVERGENCE
from inshrink_core.search.space import space_of
from inshrink_core.verbs.estimate import Estimate
from inshrink_core.verbs.search import Search

_COSTS = ("drop", "divergence", "restore_cost")
_MAX_NAMED = 5
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
        ``codec``, ``settings`` and, if any, ``override``, as in a configuration file; empty if the settings
        differ by step.
    ratio, drop, divergence, restore_cost
        The ratio of the weights of these steps together; the figures of the worst step, None without values.
    n_steps, is_complete
        Number of measured steps, and whether all steps were measured.
    keeps
        Whether every measured step keeps the bounds.
    is_best
        Whether the search chose it.
    kind
        ``trial``, ``codec`` (a published one), ``archive`` or ``estimate``. All but estimates are measured.
    name
        Name of the published codec or archive. Untrusted text.
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
    kind: Literal["trial", "codec", "archive", "estimate"] = "trial"
    name: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any], figures: Mapping[str, Any], **more: Any) -> SearchPoint:
        """Return a point from figures under the engine's names; of several steps, the worst counts."""
        worst = {name: figures[name] for name in _COSTS if name in figures}
        words = {"label": config_words(config), **worst, **more}
        return cls(config=config, ratio=float(figures["ratio_weights"] or 0.0), **words)

    @property
    def basis(self) -> str:
        """Return whether the figures are estimated or measured."""
        return "estimated" if self.kind == "estimate" else "measured"

    def figure(self, name: str) -> float | None:
        """Return the drop, divergence or restore cost; None if it is not a number."""
        value: float | None = getattr(self, name)
        return value if value is not None and math.isfinite(value) else None


class Searched(NamedTuple):
    """The results of a search so far.

    Parameters
    ----------
    points
        In the order of their start.
    limits
        Bounds by figure, including a default bound of the divergence beside a drop.
    steps
        Steps of the chain.
    report
        The document of ``inshrink search``; empty before its end.
    """

    points: tuple[SearchPoint, ...] = ()
    limits: Mapping[str, float] = MappingProxyType({})
    steps: tuple[int, ...] = ()
    report: Mapping[str, Any] = MappingProxyType({})

    @property
    def best(self) -> SearchPoint | None:
        """Return the chosen point, or the largest ratio so far that keeps the bounds."""
        settled = [point for point in self.points if point.is_best]
        keeping = [point for point in self.points if point.keeps and point.is_complete and point.config]
        return settled[0] if settled else max(keeping, key=lambda point: point.ratio, default=None)


def steps_of(job: Job, shown: Subject) -> tuple[int, ...]:
    """Return the requested steps of a job."""
    return getattr(job.requests[-1], "steps", None) or shown.steps


def searched(shown: Subject, job: Job) -> Searched:
    """Return the results of a search so far; of an unfinished one, with those of the last finished one."""
    if not job.is_running and job.state != "finished":
        earlier = newest_job("run", "search", shown.path, "finished")
        if earlier is not None:
            return _searched(earlier, steps_of(earlier, shown), job.partial_rows())
    return _searched(job, steps_of(job, shown))


def _searched(job: Job, steps: tuple[int, ...], more: Sequence[Mapping[str, Any]] = ()) -> Searched:
    """Return the results of a search with the trials of a later one; points of fewer steps are incomplete."""
    report: Mapping[str, Any] = read_result(job) or {}
    rows = [*(report["trials"] if "trials" in report else job.partial_rows()), *more]
    asked: Any = job.requests[-1]
    limits = _limits(asked, report, rows)
    steps = tuple(report.get("steps") or steps)
    chains: dict[str, dict[int, Mapping[str, Any]]] = {}
    config, key = None, ""
    for row in rows:
        if row["config"] != config:  # Trials of a chain are consecutive, and computing a key costs more.
            config, key = row["config"], _text(row["config"])
        chains.setdefault(key, {})[int(row["step"])] = row
    best = _text(report["best"]["config"]) if report.get("best") else None
    points = [
        _point(list(chain.values()), len(steps), limits)._replace(is_best=key == best)
        for key, chain in chains.items()
    ]
    if by_step := report.get("by_step"):
        words: Any = {"label": "settings found for each step", "name": _BY_STEP, "kind": "archive"}
        points.append(SearchPoint.of({}, by_step, n_steps=len(steps), keeps=True, **words))
    return Searched(tuple(points), limits, steps, report)


def _limits(
    asked: Search, report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> Mapping[str, float]:
    """Return the bounds by figure; a drop gains a bound of the divergence, as in the search."""
    if "bounds" in report:
        return {name: float(limit) for name, limit in report["bounds"].items() if limit is not None}
    limits = asked.bounds.limits
    is_completed = set(limits) == {"drop"} and any(row["divergence"] is not None for row in rows)
    return {"divergence": DEFAULT_MAX_DIVERGENCE, **limits} if is_completed else limits


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _point(chain: Sequence[Mapping[str, Any]], n_steps: int, limits: Mapping[str, float]) -> SearchPoint:
    """Return one configuration over its steps, whose raw weights have equal sizes."""
    stored = [1 / row["ratio_weights"] for row in chain if row["ratio_weights"]]
    ratio = len(stored) / math.fsum(stored) if stored else 0.0
    known = {name: [row[name] for row in chain if row.get(name) is not None] for name in _COSTS}
    figures = {name: max(values, default=None) for name, values in known.items()}
    return SearchPoint.of(
        chain[0]["config"],
        figures | {"ratio_weights": ratio},
        n_steps=len(chain),
        is_complete=len(chain) >= n_steps,
        keeps=not any(row.get("failure") for row in chain)
        and all(row[name] is not None and row[name] <= limits[name] for row in chain for name in limits),
    )


def baselines_work(shown: Subject, steps: Sequence[int], evaluator: EvaluatorCode) -> Work:
    """Return the measurement of the baselines: a benchmark of codecs with all optimizer state stored."""
    # The lab's verb is found by its name, like every verb that another package registers.
    codecs = ",".join(variant.label for variant in compared_variants().values())
    fields = {"run": str(shown.path), "codecs": codecs, "steps": list(steps), **evaluator.fields}
    output = scratch_path("bench")
    bench = request_from_json({"verb": "bench", "fields": {**fields, "output": output}})
    more: dict[str, Any] = {"of": (opened(str(shown.path)).token, evaluator.digest), "scratch": (output,)}
    return Work.asking([bench], shown.path, "run", "baselines", trusted=evaluator.trusted, **more)


def baselines(job: Job | None) -> tuple[SearchPoint, ...]:
    """Return the measured baselines as points, without bounds."""
    rows = {row["codec"]: row for row in (() if job is None else job.partial_rows())}
    return tuple(
        SearchPoint.of(
            {"codec": row["codec"].partition(":")[0], "settings": dict(row["config"])},
            row | {"drop": row["max_drop"], "divergence": row["max_divergence"]},
            label=name,
            n_steps=len(row["drops"]),
            kind="codec",
            name=name,
        )
        for name, variant in compared_variants().items()
        if (row := rows.get(variant.label)) is not None
    )


def measured_archives(
    shown: Subject, evaluator: EvaluatorCode | None, steps: Sequence[int]
) -> list[SearchPoint]:
    """Return the archives of a run that were compared with it.

    Parameters
    ----------
    shown, evaluator
        The run, and the evaluator; None for any evaluator.
    steps
        The expected steps; an archive of other steps is incomplete.
    """
    points = []
    for chain in archives_of(shown):
        found = known_of(chain)
        if found is None or not found.is_current or not found.comparison.steps:
            continue
        if evaluator is not None and found.evaluator.name != f"{evaluator.path}:{evaluator.function}":
            continue
        config: dict[str, Any] = {}
        if chain.is_uniform:  # Without uniform settings, no single configuration describes the archive.
            config = {"codec": chain.codec, "settings": dict(chain.config)}
            config |= {"override": [dict(row) for row in chain.overrides]} if chain.overrides else {}
        figures = {name: getattr(found.comparison, f"max_{name}") for name in _COSTS}
        points.append(
            SearchPoint.of(
                config,
                figures | {"ratio_weights": chain.ratio_weights},
                n_steps=len(found.comparison.steps),
                is_complete=chain.steps == tuple(steps),
                kind="archive",
                name=chain.path.name,
            )
        )
    return points


def estimating_work(shown: Subject, steps: Sequence[int], codec: str) -> Work:
    """Return the estimation of a codec from fine to coarse, tensor by tensor.

    It runs no evaluator and needs no consent.
    """
    layers = frozenset(row.layer for row in shown.model_tensors)
    with reported():
        first, *others = space_of(codec, layers).levels(_LEVELS)
    words = [
        [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in level.items()]
        for level in others
    ]
    each = [",".join(parts) for parts in words]
    asked: dict[str, Any] = {"codec": codec, "settings": first, "each": each, "by_tensor": True}
    request = Estimate(str(shown.path), **asked, steps=chosen_steps(steps, shown.steps))
    return Work.asking([request], shown.path, "run", "estimates", of=(opened(str(shown.path)).token,))


def estimate_rows(job: Job | None) -> list[Any]:
    """Return the estimates of a job so far; estimates that the engine knew already come all at once."""
    if job is None or (rows := job.partial_rows()) or not (result := read_result(job)):
        return [] if job is None else rows
    return [row for row in (result, *result["each"]) if "tensors" in row]


def estimates(job: Job | None) -> list[SearchPoint]:
    """Return the estimates so far as points, without bounds."""
    rows = {_text(row["set"]): row for row in estimate_rows(job)}.values()
    return [SearchPoint.of(row["set"], row, n_steps=int(row["n_steps"]), kind="estimate") for row in rows]


def codec_settings(codec: str) -> dict[str, Any]:
    """Return the settings of a codec with their defaults."""
    with reported():
        return make_codec(codec, None).settings()


def default_optimizer(codec: str, config: Mapping[str, Any]) -> str:
    """Return the engine's default codec of optimizer state beside weights of this configuration."""
    with reported():
        return of_engine(codec, config)


def loaded_config(shown: Subject, text: str) -> dict[str, Any]:
    """Return the configuration in an untrusted text.

    Raises
    ------
    ServiceError
        It is no configuration, its codec lacks a setting, or an override matches no weight of the run; the
        engine would refuse to write it.
    """
    try:
        config = loaded(text)
    except ValueError as error:
        raise ServiceError(str(error), remedy="the button JSON shows the form") from error
    with reported():
        _, overrides = make_configs(str(config["codec"]), engine_settings(config))
    unmatched = [
        f"{override.layer_type or ''} {override.match}".strip()[:40]
        for override in overrides
        if not any(map(override.matches, shown.model_tensors))
    ]
    if unmatched:
        names = ", ".join(unmatched[:_MAX_NAMED])
        raise ServiceError(
            f"no tensor of this run matches {names}", remedy="change or delete these overrides"
        )
    return config

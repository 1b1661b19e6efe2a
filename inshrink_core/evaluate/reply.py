"""What the child answers, checked before anybody relies on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inshrink_core.errors import EvaluatorError, InputError, NotFiniteError
from inshrink_core.evaluate.evaluation import Evaluation, PartialEvaluation
from inshrink_core.metrics import Direction, known_direction

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["UnusableReplyError", "choose_direction", "read_partial_reply", "read_reply"]


class UnusableReplyError(Exception):
    """The evaluator answered something that cannot be used.

    Parameters
    ----------
    what
        What is wrong with it.
    remedy
        What to do about it.
    kind
        The error that the user sees.
    """

    def __init__(self, what: str, *, remedy: str = "", kind: type[EvaluatorError] = EvaluatorError) -> None:
        super().__init__(what)
        self.what, self.remedy, self.kind = what, remedy, kind


def read_reply(
    reply: Mapping[str, Any], spec: str, metric: str | None, direction: Direction | None
) -> Evaluation:
    """Return a full result.

    Parameters
    ----------
    reply
        The child's, an `error` none.
    spec
        Name of the evaluator, for messages.
    metric, direction
        What was asked for; None leaves it to the rules.

    Raises
    ------
    UnusableReplyError
        The metric is not there or not finite, or predictions have the wrong shape.
    InputError
        The direction of the metric is not known.
    """
    arrays = _arrays(reply)
    metrics: dict[str, float] = reply["metrics"]
    chosen = _choose_metric(metrics, metric)
    if not math.isfinite(metrics[chosen]):
        raise UnusableReplyError(f"its '{chosen}' is {metrics[chosen]}", kind=NotFiniteError)
    return Evaluation(
        metric=chosen,
        direction=choose_direction(chosen, direction, spec),
        value=metrics[chosen],
        metrics=metrics,
        log_probs=arrays.get("log_probs"),
        predictions=arrays.get("predictions"),
        standard_errors=reply["standard_errors"],
        seconds=reply["seconds"],
    )


def read_partial_reply(
    reply: Mapping[str, Any], spec: str, metric: str | None, direction: Direction | None
) -> PartialEvaluation:
    """Return a partial result; one without the metric has no value.

    Raises
    ------
    UnusableReplyError
        A mean outside of what one sample can score, or predictions of the wrong shape.
    InputError
        The direction of the metric is not known.
    """
    metrics: dict[str, float] = reply["metrics"]
    chosen = _choose_metric(metrics, metric) if metrics and (metric is None or metric in metrics) else None
    far = reply["partial"]
    least, most = far["range"].get(chosen, (None, None))
    value = metrics[chosen] if chosen is not None else None
    if value is not None and ((least is not None and value < least) or (most is not None and value > most)):
        raise UnusableReplyError(f"its '{chosen}' is {value:g} so far, outside of the range that it gives")
    return PartialEvaluation(
        metric=chosen or "",
        direction=Direction.LOWER if chosen is None else choose_direction(chosen, direction, spec),
        value=value,
        n=far["n"],
        of=far["of"],
        limits=(least, most),
        standard_error=None if chosen is None else reply["standard_errors"].get(chosen),
        log_probs=_arrays(reply).get("log_probs"),
    )


def _arrays(reply: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Read arrays from their files; predictions of classes have two axes."""
    import numpy as np

    arrays = {name: np.load(path, allow_pickle=False) for name, path in reply["arrays"].items()}
    log_probs = arrays.get("log_probs")
    if log_probs is not None and (log_probs.ndim != 2 or log_probs.size == 0):
        raise UnusableReplyError(
            f"its 'log_probs' has the shape {tuple(log_probs.shape)}",
            remedy="return (n, classes), for a sequence model log_probs.flatten(0, -2)",
        )
    return arrays


def _choose_metric(metrics: Mapping[str, float], asked: str | None) -> str:
    """Apply the order: what was asked for, else ``loss``, else the only scalar."""
    there = ", ".join(metrics) or "none"
    if asked is not None:
        if asked not in metrics:
            raise UnusableReplyError(
                f"it returned no '{asked}' (its scalars: {there})", remedy="name one with --eval-metric"
            )
        return asked
    if "loss" in metrics:
        return "loss"
    if len(metrics) != 1:
        raise UnusableReplyError(
            f"it is not clear which scalar to compare by (its scalars: {there})",
            remedy="name one with --eval-metric" if metrics else "return at least one number by name",
        )
    return next(iter(metrics))


def choose_direction(metric: str, said: Direction | None, spec: str) -> Direction:
    """Prefer what was said over what the name tells; guess nothing.

    Raises
    ------
    InputError
        Neither says it.
    """
    direction = said or known_direction(metric)
    if direction is None:
        raise InputError(
            f"it is not known whether '{metric}' is better higher or lower",
            where=spec,
            remedy=f'give it with --direction, or as direction = "higher" with metric = "{metric}"'
            " under [evaluator] in inshrink.toml",
        )
    return direction

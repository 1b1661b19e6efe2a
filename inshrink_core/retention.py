"""Retention policy of an archive: the steps to keep, and the steps whose optimizer state to keep."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

from inshrink_core.errors import InputError, clipped
from inshrink_core.metrics import Direction, known_direction
from inshrink_core.request import Option, check_fields

_BEST: Final = re.compile(r"(?P<metric>.+?):(?P<n>\d{1,9})(?::(?P<direction>higher|lower))?")


class Best(NamedTuple):
    """Rule that keeps the steps with the best values of a metric.

    Parameters
    ----------
    metric, n, direction
        The metric, the number of steps, and the better direction.
    """

    metric: str
    n: int
    direction: Direction


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Retention policy: the steps of an archive to keep, and the steps whose optimizer state to keep.

    Parameters
    ----------
    keep_last
        Keep the last N steps of each branch.
    keep_every
        Keep the steps that are multiples of N.
    keep_best
        Keep the N steps with the best metric: val_loss:3, or score:3:higher if its name implies no direction;
        may be repeated.
    optimizer_last
        Keep the optimizer state of only the last N steps of each branch.

    Examples
    --------
    >>> Retention(keep_last=5, keep_every=1000, keep_best="val_loss:3", optimizer_last=2).best
    (Best(metric='val_loss', n=3, direction=<Direction.LOWER: 'lower'>),)
    """

    keep_last: Annotated[int | None, Option(metavar="N", least=1)] = None
    keep_every: Annotated[int | None, Option(metavar="N", least=1)] = None
    keep_best: Annotated[str | Sequence[str], Option(metavar="METRIC:N", many=True)] = ()
    optimizer_last: Annotated[int | None, Option(metavar="N", least=1)] = None

    def __post_init__(self) -> None:
        check_fields(self)
        for value in (self.keep_last, self.keep_every, self.optimizer_last):
            if value is not None and type(value) is not int:
                raise InputError("the number to keep is not a whole number", found=repr(value)[:40])
        _ = self.best

    @property
    def best(self) -> tuple[Best, ...]:
        """The parsed rules of `keep_best`.

        Raises
        ------
        InputError
            A text is not METRIC:N, or the better direction of its metric is unknown.
        """
        given = (self.keep_best,) if isinstance(self.keep_best, str) else tuple(self.keep_best)
        return tuple(map(_best, given))

    @property
    def thins(self) -> bool:
        """Whether a rule selects the steps to keep."""
        return self.keep_every is not None or self.keep_last is not None or bool(self.best)


def _best(text: str) -> Best:
    found = _BEST.fullmatch(text) if isinstance(text, str) else None
    if found is None or not int(found["n"]):
        raise InputError(
            "--keep-best takes a metric and a number",
            expected="METRIC:N, such as val_loss:3",
            found=repr(text)[:60],
        )
    direction = Direction(found["direction"]) if found["direction"] else known_direction(found["metric"])
    if direction is None:
        raise InputError(
            f"which way is '{clipped(found['metric'])}' better?",
            remedy=f"say it: --keep-best {clipped(text)}:higher, or :lower",
        )
    return Best(found["metric"], int(found["n"]), direction)


def metrics_of(policy: Retention | None, given: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the measured values of a policy's metrics as floats; tensors of one element are converted."""
    found: dict[str, float] = {}
    if policy is None or given is None:
        return found
    for metric in {item.metric for item in policy.best} & given.keys():
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            found[metric] = float(given[metric])
    return found

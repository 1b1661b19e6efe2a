"""What stays of an archive: which steps, and of which of them the optimizer's state."""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from inshrink_core.errors import InputError, clipped, named
from inshrink_core.metrics import Direction, known_direction
from inshrink_core.request import Option, check_fields

if TYPE_CHECKING:
    from inshrink_core.chain import Archive
    from inshrink_core.frame import FrameInfo
    from inshrink_core.verbs.shared.groups import AnyLog

_BEST: Final = re.compile(r"(?P<metric>.+?):(?P<n>\d{1,9})(?::(?P<direction>higher|lower))?")

_TRAINER_STATE: Final = "trainer_state.json"


class Best(NamedTuple):
    """Keep the steps with the best values of a metric.

    Parameters
    ----------
    metric, n, direction
        Of which, how many, and which way it is better.
    """

    metric: str
    n: int
    direction: Direction


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which steps of an archive stay, and of which of them the optimizer's state.

    Parameters
    ----------
    keep_last
        Keep that many steps at the end of each branch.
    keep_every
        Keep steps that are multiples of this.
    keep_best
        Keep that many steps with the best values of a metric, as val_loss:3; score:3:higher says which way
        it is better, where its name does not. May be repeated.
    optimizer_last
        Keep the optimizer's state of that many steps at the end of each branch, and of the others everything
        but that. Without another rule every step stays.

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
                raise InputError("how many to keep is a whole number", found=repr(value)[:40])
        _ = self.best

    @property
    def best(self) -> tuple[Best, ...]:
        """What `keep_best` says.

        Raises
        ------
        InputError
            It says no metric and number, or not which way the metric is better.
        """
        given = (self.keep_best,) if isinstance(self.keep_best, str) else tuple(self.keep_best)
        return tuple(map(_best, given))

    @property
    def thins(self) -> bool:
        """Whether a rule says which steps to keep."""
        return self.keep_every is not None or self.keep_last is not None or bool(self.best)

    @property
    def says_nothing(self) -> bool:
        """Whether everything stays."""
        return not self.thins and self.optimizer_last is None


def _best(text: str) -> Best:
    found = _BEST.fullmatch(text) if isinstance(text, str) else None
    if found is None or not int(found["n"]):
        raise InputError(
            "--keep-best says a metric and a number",
            expected="METRIC:N, as val_loss:3",
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
    """Return the numbers that a policy goes by, of what a training measured; tensors of one value, too."""
    found: dict[str, float] = {}
    if policy is None or given is None:
        return found
    for metric in {one.metric for one in policy.best} & given.keys():
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            found[metric] = float(given[metric])
    return found


def measured(
    archive: Archive, line: Sequence[FrameInfo], metrics: Sequence[str], log: AnyLog | None = None
) -> dict[str, dict[bytes, float]]:
    """Return what was measured at each frame of a line of training, by metric and the frame's id.

    Parameters
    ----------
    archive
        The archive.
    line
        Its frames, in order.
    metrics
        What is wanted.
    log
        What the training logged, its file, or the run; by default what the frames themselves carry: what a
        saver was given, and the log that a trainer's state has.

    Raises
    ------
    InputError
        No step has a value of some metric.

    Notes
    -----
    The value of a step is the last one that was logged at it or before, and after the step before it.
    """
    known: set[str] = set()
    found: dict[str, dict[bytes, float]] = {name: {} for name in metrics}
    logged: Mapping[str, list[tuple[int, float]]] = {}
    if log is not None:
        logged = log if isinstance(log, Mapping) else _read(log)
    else:
        _from_frames(archive, line, found, known)
        logged = {} if all(found.values()) else _logged(archive, line)
    known |= logged.keys()
    for name in metrics:
        pairs = [pair for pair in logged.get(name, ()) if not math.isnan(pair[1])]
        steps = [step for step, _ in pairs]
        before = -1
        for frame in line:
            at = bisect.bisect_right(steps, frame.step) - 1
            if at >= 0 and steps[at] > before:
                found[name].setdefault(frame.frame_id, pairs[at][1])
            before = frame.step
        if not found[name]:
            raise InputError(
                f"no step has a value of '{clipped(name)}'",
                where=archive.reader.path,
                found=named(sorted(known)) if known else "no metrics",
                remedy="give what the training logged, or its run: --log FILE",
            )
    return found


def _from_frames(
    archive: Archive, line: Iterable[FrameInfo], found: dict[str, dict[bytes, float]], known: set[str]
) -> None:
    """Take what savers were given."""
    from inshrink_core.chain.meta import METRICS

    for frame in line:
        said = archive.frame(frame).meta.get(METRICS, {})
        known |= said.keys()
        for name in found.keys() & said.keys():
            if not math.isnan(said[name]):
                found[name][frame.frame_id] = said[name]


def _logged(archive: Archive, line: Sequence[FrameInfo]) -> Mapping[str, list[tuple[int, float]]]:
    """Return the log of the newest state of a trainer, which has the whole history."""
    from inshrink_core.formats.logs.log import log_of_trainer

    for frame in reversed(line):
        for entry in archive.frame(frame).entries:
            if entry.attachment and entry.key.rpartition("/")[2] == _TRAINER_STATE:
                return log_of_trainer(archive.attachment(frame, entry.key), archive.where(frame))
    return {}


def _read(log: str | os.PathLike[str]) -> Mapping[str, list[tuple[int, float]]]:
    """Return what a file has, or what lies in a run."""
    from inshrink_core.formats import open_run, read_metrics

    path = Path(log)
    return open_run(path).log if path.is_dir() else read_metrics(path).log()

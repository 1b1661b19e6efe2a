"""Which checkpoints of a run that is being written are finished, by what was seen of them."""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Final, NamedTuple

from inshrink_core.formats import Run

__all__ = ["Sights"]

_PATIENCE: Final = 12
"""Intervals to wait for files that the checkpoint before had and this one lacks, as trainers write the
optimizer and their own state last."""


class _Sight(NamedTuple):
    """A checkpoint as it was seen: what it is, its files, and how long it has been so."""

    identity: str
    names: frozenset[str]
    since: float


class Sights:
    """What was seen of each checkpoint, and which are done.

    Parameters
    ----------
    interval
        Seconds between looks.

    Attributes
    ----------
    last
        The last step that was finished; -1 for none.
    """

    def __init__(self, interval: float) -> None:
        self.last = -1
        self._interval = interval
        self._seen: dict[int, _Sight] = {}
        self._done: dict[int, str] = {}
        self._names: frozenset[str] = frozenset()

    def is_ready(self, run: Run, step: int) -> bool:
        """Whether a checkpoint is finished and not archived: it was the same at the look before."""
        identity, now = run.identity(step), time.monotonic()
        if self.is_done(step, identity):
            return False
        before = self._seen.get(step)
        if before is None or before.identity != identity:
            names = frozenset(file.path for file in run[step].files)
            self._seen[step] = _Sight(identity, names, now)
            return False
        earlier = max((other for other in self._seen if other < step), default=None)
        expected = self._names if earlier is None else self._seen[earlier].names
        lacks = run.path_of(step).is_dir() and bool(expected - before.names)
        return not lacks or now - before.since >= _PATIENCE * self._interval

    def is_done(self, step: int, identity: str | None = None) -> bool:
        """Whether a step is done; with an identity, as the checkpoint that this is of."""
        return step in self._done and identity in (None, self._done[step])

    def finish(self, step: int, identity: str) -> None:
        """Take a step as done; the next ones are expected to have files of the same names."""
        self.pass_over(step, identity)
        self.last = max(self.last, step)
        if step in self._seen:
            self._names = self._seen[step].names

    def pass_over(self, step: int, identity: str) -> None:
        """Take a step as done that was never looked for."""
        self._done[step] = identity

    def forget(self, step: int) -> None:
        """Forget what was seen of a step."""
        self._seen.pop(step, None)

    def gone(self, steps: Set[int]) -> list[int]:
        """Forget steps that are not among these, and return those of them that were not done."""
        missing = sorted(self._seen.keys() - steps)
        for step in missing:
            del self._seen[step]
        return [step for step in missing if step not in self._done]

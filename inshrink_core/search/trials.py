"""Trials: what was measured of one configuration at one step, and the log that a search resumes from.

One JSON object a line. The first line says which run the log is of; every other is a trial under the key of
all it depends on. What a crash leaves of the last line is dropped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Final

from inshrink_core.chain import tensor_digest
from inshrink_core.checkpoint import Checkpoint
from inshrink_core.errors import DamagedError, InputError, StorageError
from inshrink_core.search.bounds import Figures, Partial

__all__ = ["Trial", "TrialLog", "checkpoint_digest", "trial_key"]

_VERSION: Final = 1
_HEAD: Final = "inshrink_trials"

_MAX_NBYTES: Final = 1 << 28
"""A trial takes half a kilobyte: half a million of them is another file by mistake."""

_logger = logging.getLogger(__name__)

_OPTIONAL: Final = ("drop", "divergence", "drop_error", "restore_gain", "restore_noise", "damage")
_NUMBERS: Final = ("ratio_weights", "seconds")
_COUNTS: Final = ("step", "raw_weights", "weights_nbytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration at one step, in a chain that led there.

    Parameters
    ----------
    step
        Training step.
    config
        The configuration, as a config file says it.
    raw_weights, weights_nbytes
        Raw bytes of weights and buffers, and the bytes of the frame that hold them.
    drop, divergence, drop_error
        Against the step's original (`inshrink_core.search.bounds.Figures`); None where not known.
    restore_gain, restore_noise
        Had training been restored at the step before; None where not measured.
    damage
        ½ Σ h·e², what the quadratic model predicts from, uncalibrated; None where nothing tells h.
    seconds
        Time of encoding and evaluating.
    failure
        Why the evaluator could not judge it; empty where it could.
    partial
        How far it was judged before it was given up; None for a trial measured in full. A partial trial
        keeps no bound, and its figures are those of the samples so far.
    """

    step: int
    config: Mapping[str, Any]
    raw_weights: int
    weights_nbytes: int
    drop: float | None = None
    divergence: float | None = None
    drop_error: float | None = None
    restore_gain: float | None = None
    restore_noise: float | None = None
    damage: float | None = None
    seconds: float = 0.0
    failure: str = ""
    partial: Partial | None = None
    cached: bool = field(default=False, compare=False)

    @property
    def ratio_weights(self) -> float:
        """Raw bytes of the weights over the bytes that hold them."""
        return self.raw_weights / self.weights_nbytes if self.weights_nbytes else 0.0

    @property
    def figures(self) -> Figures:
        """What the evaluator made of it."""
        return Figures(
            drop=self.drop,
            divergence=self.divergence,
            drop_error=self.drop_error,
            failure=self.failure,
            partial=self.partial,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the trial as JSON values."""
        names = [name for name in self.__dataclass_fields__ if name != "cached"]
        values = {name: getattr(self, name) for name in names}
        values["partial"] = None if self.partial is None else asdict(self.partial)
        return {**values, "ratio_weights": self.ratio_weights}


def _parse_trial(values: Mapping[str, Any]) -> Trial:
    """Return a trial from its JSON; raises ValueError, TypeError or KeyError where it is none."""
    names = [name for name in Trial.__dataclass_fields__ if name not in ("cached", "partial")]
    fields = {name: values[name] for name in names}
    for name in (*_OPTIONAL, "seconds"):
        number = fields[name]
        if number is None and name in _OPTIONAL:
            continue
        if isinstance(number, bool) or not isinstance(number, int | float) or math.isnan(number):
            raise ValueError(f"'{name}' is no number")
    for name in _COUNTS:
        if isinstance(fields[name], bool) or not isinstance(fields[name], int) or fields[name] < 0:
            raise ValueError(f"'{name}' is no count")
    if not isinstance(fields["config"], dict) or not isinstance(fields["failure"], str):
        raise TypeError("a field has the wrong type")
    # Logs of earlier versions know no partial trials.
    return Trial(**fields, partial=_parse_partial(values.get("partial")), cached=True)


def _parse_partial(values: Any) -> Partial | None:
    """Return how far a trial was judged; raises ValueError, TypeError or KeyError where that is not said."""
    if values is None:
        return None
    partial = Partial(**values)
    numbers = [one for one in (partial.least_drop, partial.least_divergence) if one is not None]
    if any(isinstance(one, bool) or not isinstance(one, int | float) or math.isnan(one) for one in numbers):
        raise ValueError("a figure of a partial trial is no number")
    if not isinstance(partial.rule, str) or type(partial.n) is not int or type(partial.of) is not int:
        raise TypeError("a field of a partial trial has the wrong type")
    return partial


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """Return 32 hexadecimal digits over every tensor of a checkpoint and its learning rates.

    Notes
    -----
    Reads the whole checkpoint: optimizer state decides how coarse a step is.
    """
    total = hashlib.sha256()
    for spec in checkpoint.specs:
        total.update(f"{spec.key}\0{spec.dtype}\0{spec.shape}\0".encode())
        total.update(tensor_digest(checkpoint.source.read(spec)))
    rates = sorted((name, sorted(group.items())) for name, group in checkpoint.hyperparameters.items())
    total.update(json.dumps(rates).encode())
    return total.hexdigest()[:32]


def trial_key(checkpoint: str, history: str, config: str, evaluator: str) -> str:
    """Return the key of a trial: checkpoint, everything its chain was made of before, config, evaluator."""
    return hashlib.sha256("\0".join((checkpoint, history, config, evaluator)).encode()).hexdigest()[:32]


class TrialLog:
    """Trials by key, in memory and, with a path, in a file that every new trial is added to at once.

    Parameters
    ----------
    path
        The file; None keeps trials in memory alone.
    run
        What tells the run from others: the digest of its first checkpoint.

    Raises
    ------
    InputError
        The file is no trial log, or one of another run.
    DamagedError
        It is of a newer version.
    StorageError
        It cannot be read or written.
    """

    def __init__(self, path: Path | None, run: str) -> None:
        self.path = path
        self._trials: dict[str, Trial] = {}
        self._run = run
        self._lock = Lock()
        if path is not None:
            self._load(path)

    def __len__(self) -> int:
        return len(self._trials)

    def trials(self) -> tuple[Trial, ...]:
        """Return every trial, in the order they were measured."""
        return tuple(self._trials.values())

    def get(self, key: str) -> Trial | None:
        """Return the trial of a key; None if it was not measured."""
        return self._trials.get(key)

    def add(self, key: str, trial: Trial) -> None:
        """Keep a trial: on disk when this returns.

        Raises
        ------
        StorageError
            The disk is full, or refuses.
        """
        with self._lock:
            self._trials[key] = trial
            self._write(json.dumps({"key": key, **trial.to_json()}))

    def _load(self, path: Path) -> None:
        if not path.exists() or path.stat().st_size == 0:
            self._write(json.dumps({_HEAD: _VERSION, "run": self._run}))
            return
        try:
            if path.stat().st_size > _MAX_NBYTES:
                raise _not_a_log(path, "it is too large")
            text = path.read_bytes()
        except OSError as error:
            raise StorageError(f"the trial log cannot be read: {error.strerror}", where=str(path)) from error
        whole = text[: text.rfind(b"\n") + 1]
        lines = whole.splitlines()
        self._check_head(path, lines[0] if lines else text)
        for number, line in enumerate(lines[1:], start=2):
            try:
                values = json.loads(line)
                self._trials[str(values["key"])] = _parse_trial(values)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                _logger.warning("%s, line %d is no trial (%s): it is measured again", path, number, error)
        if len(whole) < len(text):
            self._cut(path, len(whole))

    def _check_head(self, path: Path, line: bytes) -> None:
        try:
            head = json.loads(line)
            version, run = head[_HEAD], head["run"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise _not_a_log(path, "its first line does not say so") from error
        if version != _VERSION:
            raise DamagedError(
                "the trial log is of another version",
                where=str(path),
                expected=str(_VERSION),
                found=str(version),
            )
        if run != self._run:
            raise InputError(
                "this is the trial log of another run",
                where=str(path),
                remedy="write to another file with -o, or remove the log",
            )

    def _cut(self, path: Path, nbytes: int) -> None:
        """Drop what a crash left of a line, so that the next trial begins on a line of its own."""
        try:
            with path.open("r+b") as file:
                file.truncate(nbytes)
        except OSError as error:
            raise StorageError(
                f"the trial log cannot be mended: {error.strerror}", where=str(path)
            ) from error

    def _write(self, line: str) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise StorageError(
                f"the trial log cannot be written: {error.strerror}", where=str(self.path)
            ) from error


def _not_a_log(path: Path, why: str) -> InputError:
    return InputError(
        f"this file is no trial log: {why}", where=str(path), remedy="write to another file with -o"
    )

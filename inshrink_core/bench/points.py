"""One measured configuration, and a folder of them from which a bench goes on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inshrink_core.execution import keep_result, key_digest, load_result

__all__ = ["Point", "PointStore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one configuration of a codec does to a run. None is not known.

    Parameters
    ----------
    codec
        Label of the variant; ``repeat`` for the stale copy.
    config
        Every setting of the codec.
    knob
        Value of the knob that was swept; None where nothing is.
    metric, direction
        What `max_drop` is of.
    ratio_weights, ratio_total
        Of the whole chain, keyframes included; None for the stale copy, which stores nothing.
    max_drop, max_divergence, mean_divergence
        Over all steps.
    restore_gain, restore_noise
        Over all weights and steps (`inshrink_core.analysis.restore_gain`).
    encode_mb_per_s, decode_mb_per_s
        10^6 raw bytes a second, reading and writing files included.
    restore_seconds
        Time to open the archive and decode its last step into memory.
    peak_memory_bytes
        What compressing and decoding took above what the process held before.
    drops, divergences
        A value a step.
    failure
        Why a restored state could not be evaluated; empty where it could.
    """

    codec: str
    config: Mapping[str, Any] = field(default_factory=dict)
    knob: float | None = None
    metric: str
    direction: str
    ratio_weights: float | None = None
    ratio_total: float | None = None
    max_drop: float | None = None
    max_divergence: float | None = None
    mean_divergence: float | None = None
    restore_gain: float | None = None
    restore_noise: float | None = None
    encode_mb_per_s: float | None = None
    decode_mb_per_s: float | None = None
    restore_seconds: float | None = None
    peak_memory_bytes: int | None = None
    drops: tuple[float | None, ...] = ()
    divergences: tuple[float | None, ...] = ()
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the point as JSON values."""
        return {**dataclasses.asdict(self), "config": dict(self.config)}


_NUMBERS = frozenset(
    item.name for item in dataclasses.fields(Point) if item.type in ("float | None", "int | None")
)
_WORDS = frozenset(item.name for item in dataclasses.fields(Point) if item.type == "str")


def parse_point(values: Mapping[str, Any]) -> Point:
    """Return a point from its JSON; raises ValueError, TypeError or KeyError where it is none."""
    known = {item.name for item in dataclasses.fields(Point)}
    if set(values) != known:
        raise ValueError("it has other keys")
    for name in _NUMBERS:
        if values[name] is not None and (
            isinstance(values[name], bool) or not isinstance(values[name], int | float)
        ):
            raise ValueError(f"'{name}' is no number")
    for name in _WORDS:
        if not isinstance(values[name], str):
            raise TypeError(f"'{name}' is no text")
    lists = {name: tuple(_number(value) for value in values[name]) for name in ("drops", "divergences")}
    return Point(**{**values, "config": dict(values["config"]), **lists})


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


class PointStore:
    """Measured points by everything they depend on; keeps nothing without a folder.

    Parameters
    ----------
    folder
        Made when the first point is kept; None keeps points in memory alone.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def _path(self, label: str, key: Mapping[str, Any]) -> Path | None:
        if self.folder is None:
            return None
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", label)[:80]
        return self.folder / f"{name}-{key_digest(key)}.json"

    def load(self, label: str, key: Mapping[str, Any]) -> Point | None:
        """Return a point; None where there is none, or none that can be read."""
        path = self._path(label, key)
        return None if path is None else load_result(path, key, "point", parse_point)

    def keep(self, label: str, key: Mapping[str, Any], point: Point) -> None:
        """Write a point: whole, or not at all.

        Raises
        ------
        StorageError
            The disk is full, or refuses.
        """
        path = self._path(label, key)
        if path is not None:
            keep_result(path, key, "point", point.to_json())

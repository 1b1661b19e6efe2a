"""What a user asks of the lattice codec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import CodecConfig
from inshrink_core.errors import ConfigError

__all__ = ["LatticeConfig", "can_have_lattice", "is_matrix", "on_lattice"]

_DTYPES = frozenset({"float32", "bfloat16", "float16"})

_WEIGHTS = frozenset({TensorRole.WEIGHT, TensorRole.MASTER})

_WORDS = {
    "gain_per": ("tensor", "row", "none"),
    "contexts": ("history", "none"),
    "one_dimensional": ("lattice", "exact"),
}
"""The words a field takes."""

_RANGES: Mapping[str, tuple[float, float]] = {
    "coarseness": (1e-4, 1e4),
    "gamma": (0.0, 2.0),
    "sensitivity": (0.0, 1.0),
}
"""The closed range of a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatticeConfig(CodecConfig):
    """Settings of the lattice codec; every one may change from frame to frame.

    Parameters
    ----------
    coarseness
        The step between representable values, in units of how far weights move (root mean square) from
        one checkpoint to the next at the run's first learning rate; .0001..10000. Larger makes smaller
        frames and larger errors: on a GPT of 5 M parameters 1 gave 17×, 2.5 gave 28× and 4 gave 38×.
    gamma
        Power of the learning rate that the step follows, 0..2: 0 keeps the step while learning slows
        down, 1 keeps it in proportion to the movement, which spends most bytes on the last frames.
    sensitivity
        Power of the mean squared gradient (Adam's second moment) by which tensors have finer or coarser
        steps, 0..1; 0, or a run without second moments: all have the same.
    gain_per
        After a restore, whether the rounding that keeps the movement is matched for each ``tensor`` or
        for each ``row``, its outermost dimension, which costs a little more time; ``none``: rounded as
        without a restore, which rolls small movements back.
    contexts
        ``history``: a change is coded in the context of the last one's sign and age, which makes frames
        up to 8 % smaller and costs a byte of memory a weight. ``none``: faster.
    one_dimensional
        Weights of at most one dimension (biases, norms): on a fine ``lattice``, or ``exact``.
    exact
        Whether weights come back bit for bit: a residual stands beside the lattice points, and the frames
        after it go on from the points as if it were not there.

    Raises
    ------
    ConfigError
        A value is out of its range or of the wrong type.

    Examples
    --------
    >>> LatticeConfig(coarseness=4).gamma
    0.5
    """

    coarseness: float = 1.0
    gamma: float = 0.5
    sensitivity: float = 0.25
    gain_per: str = "tensor"
    contexts: str = "history"
    one_dimensional: str = "lattice"
    exact: bool = False

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value not in words:
                raise ConfigError(
                    f"'{name}' takes one of a few words", expected=" or ".join(words), found=repr(value)
                )
        for name, (low, high) in _RANGES.items():
            _check_number(name, getattr(self, name), low, high)
        if not isinstance(self.exact, bool):
            raise ConfigError("'exact' is a switch", expected="true or false", found=repr(self.exact))


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    """Refuse what is no number, a bool among them, and NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(
            f"'{name}' is out of range", expected=f"a number {low:g}..{high:g}", found=repr(value)
        )


def can_have_lattice(spec: TensorSpec) -> bool:
    """Whether a lattice block can be that of a tensor: a float of at most four bytes, not empty."""
    return spec.dtype in _DTYPES and spec.numel > 0


def is_matrix(spec: TensorSpec) -> bool:
    """Whether a tensor has a step by the rule; vectors have a fine one of their own."""
    return len(spec.shape) >= 2


def on_lattice(spec: TensorSpec, config: LatticeConfig) -> bool:
    """Whether the lossy rule covers a tensor: weights, and master weights, that may be changed."""
    if spec.role not in _WEIGHTS or spec.exact or not can_have_lattice(spec):
        return False
    return is_matrix(spec) or config.one_dimensional == "lattice"

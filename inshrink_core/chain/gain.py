"""Restore gain and restore noise: the effect of a restore at every step on training progress.

The measurement needs neither an evaluator nor training. It simulates a restore at the previous step, adds the
run's actual movement to the decoded weights, encodes and decodes. The *gain* is the share of the movement
that the result contains, and the *noise* is the remainder of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inshrink_core.chain.config import ChainConfig
from inshrink_core.chain.encoder import ChainState, FramePlan
from inshrink_core.checkpoint import Checkpoint, FileLayout, TensorRole, TensorSpec
from inshrink_core.codec import TensorReference
from inshrink_core.formats.source import peek

if TYPE_CHECKING:
    from torch import Tensor


_SLICE = 1 << 20
"""Values to convert to float64 at a time (8 MB)."""


@dataclass(frozen=True, slots=True)
class TensorGain:
    """Sums over one tensor at one step, of x (restored), Δ (the run's movement) and x' (decoded again).

    Parameters
    ----------
    key
        Key of the tensor.
    projected
        Σ (x' − x)·Δ.
    residual
        Σ (x' − x − Δ)².
    movement
        Σ Δ².

    Examples
    --------
    >>> TensorGain("w", projected=3.0, residual=1.0, movement=4.0).gain
    0.75
    """

    key: str
    projected: float
    residual: float
    movement: float

    @property
    def gain(self) -> float | None:
        """Share of the movement that survives: 0 undoes training, 1 preserves it; None without movement."""
        return _quotient(self.projected, self.movement)

    @property
    def noise(self) -> float | None:
        """Squared error of the surviving movement over the squared movement; None without movement."""
        return _quotient(self.residual, self.movement)


@dataclass(frozen=True, slots=True)
class StepGain:
    """Gain and noise of the weights of one step, by tensor and pooled.

    Parameters
    ----------
    step
        Training step.
    tensors
        All floating weights that have the same shape in this step and the previous one.
    """

    step: int
    tensors: tuple[TensorGain, ...]

    @property
    def gain(self) -> float | None:
        """Gain over all weights of the step."""
        return pool(self.tensors).gain

    @property
    def noise(self) -> float | None:
        """Noise over all weights of the step."""
        return pool(self.tensors).noise


def pool(tensors: Iterable[TensorGain]) -> TensorGain:
    """Return the sums over several tensors or steps, under an empty key.

    Examples
    --------
    >>> pool([TensorGain("a", 1.0, 0.0, 1.0), TensorGain("b", 0.0, 3.0, 3.0)]).gain
    0.25
    """
    rows = tuple(tensors)
    return TensorGain(
        "",
        math.fsum(row.projected for row in rows),
        math.fsum(row.residual for row in rows),
        math.fsum(row.movement for row in rows),
    )


def step_gain(chain: ChainConfig, before: Checkpoint, after: Checkpoint, state: ChainState) -> StepGain:
    """Return gain and noise of a step after a simulated restore at the previous step.

    Parameters
    ----------
    chain
        Configuration for encoding the step.
    before, after
        The original checkpoints of the previous step and of this one.
    state
        The chain state to encode against; it is marked as following a restore.

    Notes
    -----
    gain = Σ (x' − x)·Δ / Σ Δ², noise = Σ (x' − x − Δ)² / Σ Δ². The simulated weights x + Δ are rounded to
    the stored dtype, as in training. The computation takes two passes, like encoding a frame, and the memory
    of a few copies of the largest tensor. Non-finite values are ignored.
    """
    states = state.references
    specs = [spec for spec in after.specs if spec.key in states and _moves(spec, before)]
    moving = {spec.key: states[spec.key] for spec in specs}
    simulated = replace(after, source=_SimulatedUpdate(before, after, moving))
    restored = replace(state, restored=lambda spec: states[spec.key].decoded(), after_restore=True)
    results = FramePlan(chain, simulated, restored, specs).encode(specs)
    rows = []
    for result in results:
        key, movement = result.spec.key, _movement(result.spec, before, after)
        rows.append(_sums(key, states[key].decoded(), movement, result.reference.decoded()))
    return StepGain(after.step, tuple(rows))


def _moves(spec: TensorSpec, before: Checkpoint) -> bool:
    """Whether a tensor is a floating weight with the same shape and dtype in the previous step."""
    floating = spec.dtype.startswith(("float", "bfloat"))
    if spec.role is not TensorRole.WEIGHT or not floating or spec.key not in before:
        return False
    old = before.spec(spec.key)
    return (old.shape, old.dtype) == (spec.shape, spec.dtype)


def _movement(spec: TensorSpec, before: Checkpoint, after: Checkpoint) -> Tensor:
    return after.source.read(spec).double() - before[spec.key].double()


@dataclass(frozen=True)
class _SimulatedUpdate:
    """A `TensorSource` of simulated weights: restored ones plus the run's movement."""

    before: Checkpoint
    after: Checkpoint
    states: Mapping[str, TensorReference]

    def read(self, spec: TensorSpec) -> Tensor:
        """Return x + Δ for a weight, and other tensors unchanged."""
        import torch

        if spec.key not in self.states:
            return peek(self.after.source, spec)
        restored, movement = self.states[spec.key].decoded(), _movement(spec, self.before, self.after)
        moved = (restored.double() + movement).to(restored.dtype)
        return torch.where(movement == 0, restored, moved)  # x + 0 would turn −0.0 into 0.0

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the bytes of a file outside its tensors."""
        return self.after.source.skeleton(layout)


def _sums(key: str, restored: Tensor, movement: Tensor, again: Tensor) -> TensorGain:
    """Return the sums, computed in slices to limit the size of float64 copies."""
    rows = []
    flat, moves, news = restored.reshape(-1), movement.reshape(-1), again.reshape(-1)
    for start in range(0, flat.numel(), _SLICE):
        part = slice(start, start + _SLICE)
        delta, arrived = moves[part], news[part].double() - flat[part].double()
        finite = delta.isfinite() & arrived.isfinite()
        delta, arrived = delta[finite], arrived[finite]
        sums = (arrived * delta).sum(), (arrived - delta).square().sum(), delta.square().sum()
        rows.append(TensorGain(key, *map(float, sums)))
    return replace(pool(rows), key=key)


def _quotient(numerator: float, movement: float) -> float | None:
    return numerator / movement if movement > 0 else None

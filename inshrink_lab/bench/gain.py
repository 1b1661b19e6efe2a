"""Restore gain and restore noise: the effect of a restore at every step on training progress.

The measurement needs neither an evaluator nor training. It simulates a restore at the previous step, adds the
run's actual movement to the decoded weights, encodes and decodes. The *gain* is the share of the movement
that the result contains, and the *noise* is the remainder of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from inshrink_core.analysis.movement import Movement, movement
from inshrink_core.chain import Archive, ChainConfig, ChainState, FramePlan, stored_view
from inshrink_core.chain.defaults import chain_config_of
from inshrink_core.checkpoint import Checkpoint, FileLayout, TensorRole, TensorSpec
from inshrink_core.codec import TensorReference
from inshrink_core.errors import InputError
from inshrink_core.formats import Run
from inshrink_core.formats.source import peek
from inshrink_core.frame import FrameInfo

if TYPE_CHECKING:
    from torch import Tensor


class RestoreGain(NamedTuple):
    """Restore gain and noise of some weights; None if nothing moved.

    Parameters
    ----------
    gain
        Share of the movement that a restore keeps: 0 undoes training, 1 keeps it.
    noise
        Squared error of the kept movement over the squared movement.
    """

    gain: float | None
    noise: float | None

    @classmethod
    def of(cls, movements: Iterable[Movement]) -> RestoreGain:
        """Return the gain of all weights together, from the result of `step_gain`."""
        total = sum(movements, Movement())
        if not total.squared_before > 0:
            return cls(None, None)
        return cls(total.product / total.squared_before, total.squared / total.squared_before)


def restore_gain(archive: Archive, run: Run, device: str = "cpu") -> dict[int, dict[str, Movement]]:
    """Measure how much of the run's movement each step would keep after a restore at the previous step.

    Parameters
    ----------
    archive
        The archive. Each step uses the codec and the config that encoded it.
    run
        The original run.
    device
        Device that encodes the steps; it does not affect the result.

    Returns
    -------
    dict
        The result of `step_gain` for each step whose previous step is archived too.

    Raises
    ------
    InputError
        Archive and run have no two consecutive steps in common.

    Notes
    -----
    A high gain is necessary for training to survive restores, but not sufficient; only a rehearsal can test
    that. The cost is about that of encoding every step once more.
    """
    view = archive.on("cpu").sequential()
    gains = {info.step: _gain_after(view, run, before, info, device) for before, info in _pairs(archive, run)}
    if not gains:
        raise InputError(
            "the archive and the run have no two consecutive steps in common",
            where=f"{archive.path} and {run.path}",
            remedy="a gain needs the movement from one archived step to the next",
        )
    return gains


def _pairs(archive: Archive, run: Run) -> Iterator[tuple[FrameInfo, FrameInfo]]:
    """Yield each frame with its previous one, if the run has the originals of both."""
    known = {frame.frame_id: frame for frame in archive.frames if frame.step in run.steps}
    for frame in known.values():
        before = known.get(frame.parent_id or b"")
        if before is not None:
            yield before, frame


def _gain_after(
    archive: Archive, run: Run, before: FrameInfo, info: FrameInfo, device: str
) -> dict[str, Movement]:
    """Encode one step again, from the decoded state of the previous step."""
    chain = replace(chain_config_of(archive.frame(info).meta), device=device)
    old_meta = archive.frame(before).meta
    decoded = archive.checkpoint(before)
    after = stored_view(run.as_archived(info.step, archive.checkpoint(info)), chain.optimizer)
    weights = [spec for spec in after.specs if spec.role is TensorRole.WEIGHT and spec.key in decoded]
    specs = (*weights, *chain.first_moments(decoded, weights))
    state = ChainState(
        references={spec.key: archive.recalled(chain, before, spec) for spec in specs},
        memory=old_meta.get("memory") if old_meta.get("codec") == chain.codec else None,
    )
    return step_gain(chain, run.as_archived(before.step, decoded), after, state)


def step_gain(
    chain: ChainConfig, before: Checkpoint, after: Checkpoint, state: ChainState
) -> dict[str, Movement]:
    """Return the movement of each weight that a restore at the previous step keeps, beside the run's.

    Parameters
    ----------
    chain
        Configuration for encoding the step.
    before, after
        The original checkpoints of the previous step and of this one.
    state
        The chain state to encode against; it is marked as following a restore.

    Returns
    -------
    dict
        The sums of the run's movement Δ (before) and of the kept one x' − x (after), for restored weights x
        and decoded weights x'. `RestoreGain` has the gain, Σ (x' − x)·Δ / Σ Δ², and the noise,
        Σ (x' − x − Δ)² / Σ Δ².

    Notes
    -----
    The simulated weights x + Δ are rounded to the stored dtype, as in training. The computation takes two
    passes, like encoding a frame, and the memory of a few copies of the largest tensor. Non-finite values are
    ignored.
    """
    states = state.references
    specs = [spec for spec in after.specs if spec.key in states and _moves(spec, before)]
    moving = {spec.key: states[spec.key] for spec in specs}
    simulated = replace(after, source=_SimulatedUpdate(before, after, moving))
    restored = replace(state, restored=lambda spec: states[spec.key].decoded(), after_restore=True)
    gains = {}
    for result in FramePlan(chain, simulated, restored, specs).encode(specs):
        kept = result.reference.decoded().double() - states[result.spec.key].decoded().double()
        gains[result.spec.key] = movement(_movement(result.spec, before, after), kept)
    return gains


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

"""How a delta frame rounds one tensor: its step, held or new, and matched gain after a restore."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inshrink_core.checkpoint import TensorSpec
from inshrink_core.codecs.lattice_block import refined, snapped
from inshrink_core.codecs.lattice_plan import LatticePlan
from inshrink_core.codecs.lattice_state import LatticeReference
from inshrink_core.ops.lattice import Gain, gain_grades
from inshrink_core.quantization.lattice import MIN_EXPONENT, Spacing, grid_of, held, spacing_of

__all__ = ["Chosen", "choose_gain", "choose_spacing"]

_MIN_STEP = 16
"""Units in a step below which the unit is refined, where the integers leave room."""

_MAX_HALVINGS = 12
"""Steps of a movement 4096 times smaller than the rule's are not worth more tries."""


class Chosen(NamedTuple):
    """The step of a frame: the unit's refinement in bits, the spacing, and the integers in that unit.

    Where `snap` is true, the integers were moved to multiples of a step that has grown.
    """

    shift: int
    spacing: Spacing
    integers: Tensor
    snap: bool = False


def choose_spacing(plan: LatticePlan, spec: TensorSpec, state: LatticeReference) -> Chosen:
    """Return the step the plan asks for: held but for powers of two, or free after a restore.

    Where it grows, the integers are snapped first. Left where they are, all values would sit near the
    middle of their larger cells and stay there: the movement of that frame would be lost as a whole.
    After a restore they are left, for matched gain shows the movement.
    """
    width = plan.widths.get(spec.key, state.spacing.width)
    if plan.after_restore:
        return _at_width(width, spec, state)
    width = held(width, state.spacing)
    chosen = _at_width(width, spec, state)
    if width > state.spacing.width:
        moved = snapped(chosen.integers, grid_of(chosen.spacing, spec.dtype))
        if moved is not None:
            return chosen._replace(integers=moved, snap=True)
    return chosen


def _at_width(width: float, spec: TensorSpec, state: LatticeReference) -> Chosen:
    """Express a step in units of the state, refined where the step would have too few."""
    exponent = state.spacing.exponent
    shift = 0
    while width < _MIN_STEP * 2.0 ** (exponent - shift) and exponent - shift > MIN_EXPONENT and shift < 24:
        shift += 1
    while True:
        spacing = spacing_of(width, exponent - shift)
        integers = refined(state, shift, grid_of(spacing, spec.dtype))
        if integers is not None:
            return Chosen(shift, spacing, integers)
        shift -= 1


def choose_gain(
    values: Tensor, base: Tensor, chosen: Chosen, plan: LatticePlan, spec: TensorSpec, state: LatticeReference
) -> tuple[Gain | None, Chosen]:
    """Return the thresholds of matched gain, with a finer step where the movement needs one.

    None where nothing moved: no step would be fine enough to show it.
    """
    if torch.equal(values, base):
        return None, chosen
    for _ in range(_MAX_HALVINGS):
        grid = grid_of(chosen.spacing, spec.dtype)
        grades = gain_grades(values, base, chosen.integers, grid, 1)
        if int(grades[0]) >= 0:
            break
        finer = _at_width(chosen.spacing.width / 2, spec, state)
        if finer.spacing.width >= chosen.spacing.width:
            break
        chosen = finer
    grid = grid_of(chosen.spacing, spec.dtype)
    rows = spec.shape[0] if plan.config.gain_per == "row" else 1
    return Gain(base, gain_grades(values, base, chosen.integers, grid, rows).abs()), chosen

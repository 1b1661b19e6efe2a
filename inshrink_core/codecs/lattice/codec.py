"""The lattice codec: integers on a uniform lattice, with changes coded by context rANS.

Each tensor is a set of int32 multiples of a power of two, and each frame adds multiples of the step size to
them. No value is quantized twice, so a chain cannot drift. The step size follows the learning rate and the
squared gradients. After a restore, rounding preserves the movement of the weights (*matched gain*). See
``docs/design.md`` for the derivation and the measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import (
    BaseReference,
    Encoded,
    PastFrame,
    TensorInput,
    TensorReference,
    Tunable,
    Tuning,
    state_as,
)
from inshrink_core.codecs.exact import worst_case_exact_bytes
from inshrink_core.codecs.fallback import LOSSY_DTYPES, TINY, FallbackCodec
from inshrink_core.codecs.lattice.block import (
    UNCHANGED,
    LatticeReference,
    base_points,
    is_matrix,
    is_statistic,
    make_exact,
    no_exact,
    pack_delta,
    pack_standalone,
    pack_state,
    parse,
    points_moved,
    words_of,
)
from inshrink_core.codecs.lattice.look_ahead import LookAhead
from inshrink_core.codecs.lattice.plan import (
    LatticePlan,
    TensorPlan,
    choose_gain,
    choose_step_size,
    first_width,
)
from inshrink_core.codecs.lattice.step_size import StepSize, lattice_of, new_step_size
from inshrink_core.codecs.shaping import Feedback, Shaping, can_be_shaped, grown, known_of, shaped_changes
from inshrink_core.errors import ConfigError
from inshrink_core.frame import Block
from inshrink_core.ops.flat import as_float32, flattened
from inshrink_core.ops.lattice import EXACT, FIRST_LARGE, Rounded, matched_changes, round_to_lattice

__all__ = ["LatticeCodec", "LatticePlan", "LatticeReference"]

_WEIGHTS = frozenset({TensorRole.WEIGHT, TensorRole.MASTER})

_DIVERGENCE = 4.3e-4
"""Divergence in nats of a chain's worst step over the squared `coarseness`, which is in units of the run's
movement: geometric mean over three runs, coarseness 0.5 to 8.5; the range is 1.5e-4 to 6.3e-4."""

_PERSISTENCE = 1.4
"""Error persistence with error feedback: the remaining cost after 20 training steps over that of plain
rounding errors with the same initial cost. Geometric mean of five, 1.1 to 2.1 (``docs/design.md``)."""

_MAX_EXACT_SHARE = 8
"""A tensor with more than an eighth of exact values is stored exactly as a whole."""


_FINER = 16
"""Points for each 16-bit number from which exact deltas are smaller: 8 to 30 on random walks and fine-tunes.
On these the first delta from lattice points to exact values costs as much as the first frame saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatticeCodec(LookAhead):
    """Weights and running statistics on lattices; other buffers and non-finite tensors exact.

    All settings may change from frame to frame.

    Parameters
    ----------
    coarseness
        Step size between representable values, 0.0001..10000, in units of the weights' movement from one
        checkpoint to the next (root mean square). The movement is measured over the whole run if it can be
        inspected before the first frame, else over the first interval. Larger values make smaller frames and
        larger errors: on a CNN of 0.36 M parameters, 0.5 gave 21×, 3 gave 61× and 4.5 gave 80×.
    gamma
        Exponent of the learning rate in the step size, 0..2. 0 keeps the step size while the learning rate
        decays. With 1 it follows the movement, which spends most bytes on the last frames.
    sensitivity
        Exponent of the mean squared gradient (Adam's second moment) by which the step sizes of tensors
        differ, 0..1; 0 gives all tensors the same. Without second moments, momentum is used; without both,
        the movement, if the run can be inspected.
    shaping
        ``auto``: error feedback. Rounding errors of a matrix are fed forward along its rows and down its
        columns, so that errors are placed where the loss is flat according to first moments (Adam's or
        momentum). The step size grows accordingly. The feedback of each matrix minimizes the predicted rate
        at equal cost; it may be none. ``off``: no feedback.
    exact
        Whether weights are stored bit for bit. A residual is stored beside the lattice points, and later
        frames continue from the points without it.

    Raises
    ------
    ConfigError
        A value is out of range or of the wrong type.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> codec = LatticeCodec(coarseness=4)
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(64, 64))
    >>> item = TensorInput(spec=spec, tensor=torch.linspace(-1, 1, 4096).view(64, 64))
    >>> plan = codec.plan([spec], [codec.observe(item, None)])
    >>> block, reference = codec.encode(item, plan, None)
    >>> restored = codec.decode(spec, block, None).decoded()
    >>> bool((restored - item.tensor).abs().max() < 0.05)
    True
    """

    name = "lattice"
    bitstream = "lattice/1"
    words: ClassVar = {"shaping": ("off", "auto")}
    ranges: ClassVar = {"coarseness": (1e-4, 1e4), "gamma": (0.0, 2.0), "sensitivity": (0.0, 1.0)}
    constants: ClassVar = {"gain_per": "tensor", "contexts": "history", "one_dimensional": "lattice"}
    uses_base = True
    covers_masters = True
    shortest_payload = 0  # `parse` checks the length, because it also reads blocks within blocks
    label = "Lattice"
    tuning = Tuning(
        tunable=Tunable(
            settings=("coarseness",),
            values=(0.25, 0.5, 1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 16.0, 25.0),
            label="Coarseness",
            unit="movement between checkpoints",
            within=(1 / 16, 64.0),
        )
    )

    coarseness: float = 0.5
    gamma: float = 0.0
    sensitivity: float = 0.33
    shaping: str = "auto"
    exact: bool = False

    def __post_init__(self) -> None:
        FallbackCodec.__post_init__(self)
        if not isinstance(self.exact, bool):
            raise ConfigError("'exact' is a switch", expected="true or false", found=repr(self.exact))

    def covers(self, spec: TensorSpec) -> bool:
        """Whether the lossy rule covers a tensor: a weight, master weight or running statistic."""
        if spec.exact or spec.dtype not in LOSSY_DTYPES or spec.numel == 0:
            return False
        return spec.role in _WEIGHTS or is_statistic(spec)

    @classmethod
    def is_exact(cls, settings: Mapping[str, Any]) -> bool:
        """Whether the settings ask for exact weights."""
        return bool(settings.get("exact"))

    def made_exact(self) -> LatticeCodec:
        """Return the same settings with a residual beside the lattice points."""
        return replace(self, exact=True)

    @property
    def uses_past(self) -> bool:
        """Whether error feedback is on, which uses the first moments of all earlier frames."""
        return self.shaping != "off"

    def shaped(self, states: Iterable[TensorReference]) -> tuple[int, int]:
        """Return the number of weights with error feedback, and of all weights with known first moments."""
        rows = [
            (state.integers.numel(), state.shaping.has_feedback)
            for state in states
            if isinstance(state, LatticeReference) and state.shaping is not None
        ]
        return sum(numel for numel, feedback in rows if feedback), sum(numel for numel, _ in rows)

    def error_persistence(self, shaped: int, known: int) -> float:
        """Return the error persistence: errors where the loss is flat affect training longer.

        It depends on the share of weights with error feedback; if no share is known, all weights count.
        """
        if not self.uses_past:
            return 1.0
        return 1.0 + (shaped / known if known else 1.0) * (_PERSISTENCE - 1.0)

    def recall(self, reference: TensorReference, past: Iterable[PastFrame]) -> TensorReference:
        """Return a state with the encoder state of its chain restored from first moments."""
        if not isinstance(reference, LatticeReference) or not can_be_shaped(reference.shape):
            return reference
        known: Shaping | None = None
        for frame in past:
            is_lattice = frame.block.codec == self.bitstream
            moved = not is_lattice or points_moved(frame.block.payload)
            if not is_lattice or (moved and frame.settings.get("shaping", "off") == "off"):
                known = None
            elif moved and frame.moment_before is not None:
                known = grown(known, frame.moment_before, reference.shape)
        return replace(reference, shaping=known)

    def expected_divergence(self, relative_error: float) -> float:
        """Return a multiple of the squared coarseness: errors are placed where they change the loss least."""
        return _DIVERGENCE * float(self.coarseness) ** 2 if relative_error > 0 else 0.0

    def exact_below(self, spec: TensorSpec, nbytes: int) -> int:
        """Return the size below which an exact block replaces one of `nbytes`; 0 if none is tried."""
        # With a residual, the points are needed: later frames continue from them.
        wide = self.exact or spec.nbytes > 2 * spec.numel
        return 0 if wide and (spec.numel > TINY or 2 * nbytes <= spec.nbytes) else nbytes

    def encode_lossy(
        self, item: TensorInput, plan: LatticePlan, reference: TensorReference | None
    ) -> Encoded | None:
        """Return a block of lattice points; None if exact values are required or smaller."""
        spec, state, found = item.spec, state_as(LatticeReference, reference, item.spec), None
        known = plan.tensors.get(spec.key)
        if known is not None and known.rms == 0 and bool(item.tensor.any()):
            pass  # its squares underflow float32, or its sample contains only zeros
        elif state is not None:
            found = self._moved(item, plan, state)
        elif known is not None and (self.exact or not _is_finer(spec, known)):
            found = self._first(item, plan, reference if isinstance(reference, BaseReference) else None)
        if found is None:
            return None
        block, after = make_exact(spec, item.tensor, *found, state) if self.exact else found
        return Encoded(block, after) if len(block.payload) <= worst_case_exact_bytes(spec) else None

    def decode_lossy(
        self, spec: TensorSpec, payload: memoryview, reference: TensorReference | None, device: str
    ) -> LatticeReference:
        """Return the state after a block of lattice points."""
        base = reference if isinstance(reference, BaseReference) else None
        return parse(spec, payload, state_as(LatticeReference, reference, spec), base, device)

    def rekey(self, spec: TensorSpec, reference: TensorReference, *, unchanged: bool = False) -> Block:
        """Return a standalone block of the state, or a block without changes; exact for other states."""
        state = state_as(LatticeReference, reference, spec)
        if state is None or (unchanged and state.exact is not None):
            return FallbackCodec.rekey(self, spec, reference, unchanged=unchanged)
        return Block(self.bitstream, UNCHANGED if unchanged else pack_state(spec, state))

    def _first(
        self, item: TensorInput, plan: LatticePlan, base: BaseReference | None
    ) -> tuple[Block, LatticeReference] | None:
        """Return the first block of a chain, coded against a base model if that is smaller."""
        spec = item.spec
        known, feedback = self._known(item, plan, None) if self.uses_past else (None, None)
        step_size = new_step_size(first_width(plan, spec.key, feedback), plan.tensors[spec.key].rms)
        if step_size is None:
            return None
        lattice = lattice_of(step_size, spec.dtype)
        values, changes = as_float32(item.tensor), None
        if feedback is not None:
            zeros = torch.zeros_like(values, dtype=torch.int32)
            changes = shaped_changes(values, zeros, lattice, None, feedback)
        rounded = round_to_lattice(values, None, None, lattice, changes)
        after = _state_after(item, rounded, step_size, None, known)
        if after is None:
            return None
        alone = Block(self.bitstream, pack_standalone(rounded, after))
        if base is None:
            return alone, after
        # Code the same points as without the base, so that no restored bit depends on it.
        points = rounded.integers.to(torch.float32).mul_(lattice.unit)
        points[after.exact_at] = torch.nan
        before = base_points(base, lattice)
        moved = round_to_lattice(points, before, None, lattice)
        if not torch.equal(moved.integers, rounded.integers):
            return alone, after
        onward = replace(after, context_state=moved.context_state)
        against = Block(self.bitstream, pack_standalone(moved, onward, before))
        return (against, onward) if len(against.payload) < len(alone.payload) else (alone, after)

    def _moved(
        self, item: TensorInput, plan: LatticePlan, state: LatticeReference
    ) -> tuple[Block, LatticeReference] | None:
        """Return the block of a change and the state after it; None if too many values would be exact."""
        spec, values = item.spec, as_float32(item.tensor)
        known, feedback = self._known(item, plan, state) if self.uses_past else (None, None)
        chosen = choose_step_size(plan, item, state, feedback)
        base, grade = None, None
        restored = item.restored if is_matrix(spec) else None
        if restored is not None:
            spec.check(restored)
            base = as_float32(restored)
            if bool(torch.isfinite(base).all()):
                grade, chosen = choose_gain(values, base, chosen, spec, state)
        before, lattice = chosen.integers, chosen.lattice
        changes = None
        if feedback is not None:
            changes = shaped_changes(values, before, lattice, None if grade is None else base, feedback)
        elif base is not None and grade is not None:
            changes = matched_changes(values, before, lattice, base, grade)
        rounded = round_to_lattice(values, before, state.context_state, lattice, changes)
        after = _state_after(item, rounded, chosen.step_size, rounded.context_state, known)
        if after is None:
            return None
        if _same(rounded, after, state, chosen.shift > 0 or chosen.snap):
            return Block(self.bitstream, UNCHANGED), replace(state, exact=None)
        payload = pack_delta(rounded, after, before, state.context_state, chosen.shift, chosen.snap)
        return Block(self.bitstream, payload), after

    def _known(
        self, item: TensorInput, plan: LatticePlan, state: LatticeReference | None
    ) -> tuple[Shaping | None, Feedback | None]:
        """Return the encoder state of a tensor including this frame, and the feedback to apply."""
        planned = plan.tensors.get(item.spec.key)
        # Until a movement is observed, step sizes are estimates of it.
        seen = plan.memory.get("movement", 0.0)
        movement = seen / planned.width if seen and planned else 1.0 / self.coarseness
        return known_of(item, None if state is None else state.shaping, movement)


def _is_finer(spec: TensorSpec, known: TensorPlan) -> bool:
    """Whether points would be so much denser than 16-bit numbers that exact values take less."""
    if spec.nbytes > 2 * spec.numel:
        return False
    return _FINER * known.width <= torch.finfo(getattr(torch, spec.dtype)).eps * known.rms


def _same(rounded: Rounded, after: LatticeReference, before: LatticeReference, moved: bool) -> bool:
    """Whether no element changed, so that the block can be empty of changes."""
    # The largest token usually decides; compare exact elements and moved integers explicitly.
    if rounded.n_large > rounded.n_exact or 0 < rounded.largest < FIRST_LARGE:
        return False
    if (moved or rounded.n_exact) and not torch.equal(after.integers, before.integers):
        return False
    return torch.equal(after.exact_at, before.exact_at) and torch.equal(
        words_of(after.exact_values), words_of(before.exact_values)
    )


def _state_after(
    item: TensorInput, rounded: Rounded, step_size: StepSize, contexts: Tensor | None, known: Shaping | None
) -> LatticeReference | None:
    """Return the state that decoding yields; None if too many values would be exact."""
    spec, tensor = item.spec, item.tensor
    home = rounded.integers.device
    at, exact_values = no_exact(spec.dtype, home)
    if rounded.n_exact:
        if rounded.n_exact * _MAX_EXACT_SHARE > spec.numel or not bool(torch.isfinite(tensor).all()):
            return None
        at = (rounded.tokens == EXACT).nonzero().view(-1)
        exact_values = flattened(tensor)[at.to(tensor.device)].to(home)
    return LatticeReference(
        dtype=spec.dtype,
        shape=spec.shape,
        step_size=step_size,
        integers=rounded.integers,
        context_state=contexts,
        exact_at=at,
        exact_values=exact_values,
        shaping=known,
    )

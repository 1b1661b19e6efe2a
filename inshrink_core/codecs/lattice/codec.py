"""The lattice codec: integers on a uniform lattice, the change of integers, context rANS.

Each tensor is int32 multiples of a power of two, each frame adds whole spacings to them, so nothing is ever
quantized twice and a chain cannot drift. How wide the spacing is follows the learning rate and the squared
gradients; after a restore, rounding keeps the movement of the weights (*matched gain*). ``docs/design.md``
has the derivation and the measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import (
    BaseReference,
    Codec,
    Decoded,
    Encoded,
    FrameContext,
    Knob,
    Seen,
    Sight,
    TensorInput,
    TensorReference,
    Tuning,
    within_memory,
)
from inshrink_core.codecs.exact import decode_exact, encode_exact, worst_case_exact_bytes
from inshrink_core.codecs.fallback import EXACT as EXACT_BITSTREAM
from inshrink_core.codecs.fallback import TINY
from inshrink_core.codecs.lattice.ahead import Course, course_of, foreseen, sights_of
from inshrink_core.codecs.lattice.block import (
    UNCHANGED,
    Frame,
    LatticeReference,
    base_points,
    can_have_lattice,
    is_matrix,
    is_statistic,
    make_exact,
    no_exact,
    pack_delta,
    pack_standalone,
    pack_state,
    parse,
)
from inshrink_core.codecs.lattice.plan import (
    LatticePlan,
    Observation,
    choose_gain,
    choose_spacing,
    make_plan,
    observe_statistic,
    observe_tensor,
)
from inshrink_core.codecs.lattice.spacing import Spacing, grid_of, new_spacing
from inshrink_core.errors import ConfigError, DamagedError
from inshrink_core.frame import Block
from inshrink_core.ops.lattice import EXACT, FIRST_LARGE, Rounded, round_to_grid
from inshrink_core.ops.reference.quantize import as_float32, flattened

__all__ = ["LatticeCodec", "LatticePlan", "LatticeReference"]

_WEIGHTS = frozenset({TensorRole.WEIGHT, TensorRole.MASTER})

_DIVERGENCE = 4.3e-4
"""Nats that the worst step of a chain diverges by, over the square of `coarseness`, which is in units of the
run's own movement: geometric mean over three runs, coarseness .5 to 8.5; 1.5e-4 to 6.3e-4."""

_BASED_BITSTREAM = "lattice/2"
"""Of blocks upon a base model's points alone; all others are those of ``lattice/1``."""

_MAX_EXACT_SHARE = 8
"""A tensor of which more than an eighth would be exact values is stored exactly as a whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatticeCodec(Codec[LatticePlan, LatticeReference]):
    """Weights and running statistics on lattices; other buffers, and what is not finite, exact.

    Every setting may change from frame to frame.

    Parameters
    ----------
    coarseness
        The spacing between representable values, in units of how far weights move (root mean square) from
        one checkpoint to the next, .0001..10000: over the whole run where it can be looked at before the
        first frame, else over its first interval. Larger makes smaller frames and larger errors: on a CNN
        of .36 M parameters .5 gave 21×, 3 gave 61× and 4.5 gave 80×.
    gamma
        Power of the learning rate that the spacing follows, 0..2: 0 keeps the spacing while learning slows
        down, 1 keeps it in proportion to the movement, which spends most bytes on the last frames.
    sensitivity
        Power of the mean squared gradient (Adam's second moment) by which tensors have finer or coarser
        spacings, 0..1; 0: all have the same. Momentum stands for it where there is none, and movement where
        there is neither, if the run can be looked at.
    gain_per
        After a restore, whether the rounding that keeps the movement is matched for each ``tensor`` or
        for each ``row``, its outermost dimension, which costs a little more time; ``none``: rounded as
        without a restore, which rolls small movements back.
    contexts
        ``history``: a change is coded in the context of the last one's sign and age, which makes frames
        up to 8 % smaller and costs a byte of memory a weight. ``none``: faster.
    one_dimensional
        Weights of at most one dimension (biases, norms), and running means and variances of normalisation
        layers from when they move: on a fine ``lattice``, or ``exact``.
    exact
        Whether weights come back bit for bit: a residual stands beside the lattice points, and the frames
        after it go on from the points as if it were not there.

    Raises
    ------
    ConfigError
        A value is out of its range or of the wrong type.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> codec = LatticeCodec(coarseness=4)
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(64, 64))
    >>> item = TensorInput(spec=spec, tensor=torch.linspace(-1, 1, 4096).view(64, 64))
    >>> plan = codec.plan([spec], [codec.observe(item, None)])
    >>> block, reference = codec.encode(item, plan, None)
    >>> restored = codec.decode(spec, block, None).tensor
    >>> bool((restored - item.tensor).abs().max() < 0.05)
    True
    """

    name = "lattice"
    bitstream = "lattice/1"
    reads = frozenset({"lattice/1", _BASED_BITSTREAM, EXACT_BITSTREAM})
    state = LatticeReference
    words: ClassVar = {
        "gain_per": ("tensor", "row", "none"),
        "contexts": ("history", "none"),
        "one_dimensional": ("lattice", "exact"),
    }
    ranges: ClassVar = {"coarseness": (1e-4, 1e4), "gamma": (0.0, 2.0), "sensitivity": (0.0, 1.0)}
    uses_restored = True
    uses_base = True
    covers_masters = True
    label = "Lattice"
    tuning = Tuning(
        knob=Knob(
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
    gain_per: str = "tensor"
    contexts: str = "history"
    one_dimensional: str = "lattice"
    exact: bool = False

    def __post_init__(self) -> None:
        Codec.__post_init__(self)
        if not isinstance(self.exact, bool):
            raise ConfigError("'exact' is a switch", expected="true or false", found=repr(self.exact))

    def covers(self, spec: TensorSpec) -> bool:
        """Whether the lossy rule covers a tensor: weights, master weights and running statistics."""
        if spec.exact or not can_have_lattice(spec):
            return False
        if spec.role in _WEIGHTS:
            return is_matrix(spec) or self.one_dimensional == "lattice"
        return is_statistic(spec) and self.one_dimensional == "lattice"

    @classmethod
    def is_exact(cls, settings: Mapping[str, Any]) -> bool:
        """Whether the settings say so."""
        return bool(settings.get("exact"))

    def made_exact(self) -> LatticeCodec:
        """Return the same settings with a residual beside the points."""
        return replace(self, exact=True)

    def companions(self) -> frozenset[TensorRole]:
        """Return the roles that tell sensitivity: Adam's second moment, SGD's momentum."""
        return frozenset({TensorRole.EXP_AVG_SQ, TensorRole.MOMENTUM})

    def encoding_companions(self) -> frozenset[TensorRole]:
        """Return no role: the plan says what they told."""
        return frozenset()

    def observe(self, item: TensorInput, reference: TensorReference | None) -> Observation | None:
        """Return mean squares of a tensor that may lie on a lattice; None for the others."""
        if not self.covers(item.spec):
            return None
        if is_statistic(item.spec):
            return observe_statistic(item, None if _base_of(reference) else reference)
        return observe_tensor(item, self.own(reference, item.spec))

    def looks_at_sample(self, spec: TensorSpec) -> bool:
        """Whether a sample is enough: of all but running statistics, of which the least value counts."""
        return not is_statistic(spec)

    def plan(
        self, specs: Sequence[TensorSpec], statistics: Sequence[Any], context: FrameContext | None = None
    ) -> LatticePlan:
        """Return the spacing of every tensor, and what the next frames need to plan theirs."""
        return make_plan(self, specs, statistics, context or FrameContext())

    def sights(self, n_steps: int) -> tuple[Sight, ...]:
        """Return spread pairs of neighbouring steps: one spacing suits a whole chain best."""
        return sights_of(n_steps)

    def look_ahead(self, spec: TensorSpec, seen: Iterator[Seen]) -> Course | None:
        """Return how a tensor moves, and its squared gradients."""
        return course_of(spec, seen) if self.covers(spec) else None

    def foresee(
        self, specs: Sequence[TensorSpec], told: Sequence[Any], rates: Sequence[Mapping[str, float]]
    ) -> Any:
        """Return the movement along the run, and how tensors differ in sensitivity."""
        return foreseen(specs, told, rates)

    def expected_divergence(self, relative_error: float) -> float:
        """Return a share of the squared coarseness: errors lie where the loss does not mind them."""
        return _DIVERGENCE * float(self.coarseness) ** 2 if relative_error > 0 else 0.0

    def spacing(self, plan: LatticePlan, spec: TensorSpec) -> float | None:
        """Return the width of its cells; None where it is stored exactly."""
        return None if self.exact else plan.widths.get(spec.key)

    def remember(self, plan: LatticePlan) -> Any:
        """Return the movement and the learning rate the chain began with, and probes of the weights."""
        return dict(plan.memory)

    def encode(self, item: TensorInput, plan: LatticePlan, reference: TensorReference | None) -> Encoded:
        """Encode one tensor; what is not finite or has no spacing becomes an exact block."""
        spec, state = item.spec, self.own(reference, item.spec)
        if self.covers(spec) and (state is not None or spec.key in plan.widths):
            spec.check(item.tensor)
            found = self._on_lattice(item, plan, state, _base_of(reference))
            if found is not None:
                encoded = Encoded(*found)
                if self.exact:
                    encoded = make_exact(spec, item.tensor, encoded, found[1], state)
                size = len(encoded.block.payload)
                if size <= worst_case_exact_bytes(spec):
                    if spec.numel > TINY or 2 * size <= spec.nbytes:
                        return encoded
                    exact = encode_exact(spec, item.tensor, reference)
                    return min(encoded, exact, key=lambda one: len(one.block.payload))
        return encode_exact(spec, item.tensor, reference)

    @within_memory
    def decode(
        self, spec: TensorSpec, block: Block, reference: TensorReference | None, device: str = "cpu"
    ) -> Decoded:
        """Decode one block of the bitstreams in `reads`."""
        if block.codec == EXACT_BITSTREAM:
            return decode_exact(spec, block.payload, reference)
        state = self._state_after(spec, block, reference, device)
        return Decoded(state.decoded_anew(), state)

    @within_memory
    def follow(
        self, spec: TensorSpec, block: Block, reference: TensorReference | None, device: str = "cpu"
    ) -> TensorReference:
        """Return the state after a block."""
        if block.codec == EXACT_BITSTREAM:
            return decode_exact(spec, block.payload, reference).reference
        return self._state_after(spec, block, reference, device)

    def _state_after(
        self, spec: TensorSpec, block: Block, reference: TensorReference | None, device: str
    ) -> LatticeReference:
        """Return the state after a block of lattice points."""
        if not can_have_lattice(spec):
            raise DamagedError("a tensor of this kind has no lattice", where=spec.key)
        base = _base_of(reference) if block.codec == _BASED_BITSTREAM else None
        return parse(spec, memoryview(block.payload), self.own(reference, spec), base, device)

    def unchanged(self, spec: TensorSpec, reference: TensorReference) -> Encoded:
        """Return that no point moved; a state with a residual is said exactly."""
        state = self.own(reference, spec)
        if state is None or state.exact is not None:
            return Codec.unchanged(self, spec, reference)
        return Encoded(Block(self.bitstream, UNCHANGED), state)

    def rekey(self, spec: TensorSpec, reference: TensorReference) -> Block:
        """Return a block that stands alone; references of other codecs become exact blocks."""
        state = self.own(reference, spec)
        if state is not None:
            return Block(self.bitstream, pack_state(spec, state))
        return encode_exact(spec, reference.decoded(), None).block

    def worst_case_bytes(self, spec: TensorSpec) -> int:
        """Return a bound on what `encode` writes: the size of the exact block, its escape."""
        return worst_case_exact_bytes(spec)

    def _first_on_lattice(
        self, item: TensorInput, plan: LatticePlan, base: BaseReference | None
    ) -> tuple[Block, LatticeReference] | None:
        """Return the block that a chain begins with: upon a base model's points, where that is smaller."""
        spec = item.spec
        values = as_float32(item.tensor)
        spacing = new_spacing(plan.widths[spec.key], plan.rms[spec.key])
        if spacing is None:
            return None
        grid = grid_of(spacing, spec.dtype)
        zeros = torch.zeros(spec.numel, dtype=torch.int32)
        rounded = round_to_grid(values, zeros, None, grid)
        after = _state_after(item, rounded, spacing, None)
        if after is None:
            return None
        alone = Block(self.bitstream, pack_standalone(Frame(rounded, zeros, None, after)))
        if base is None:
            return alone, after
        # To the very points that it has without the base: no restored bit depends on there being one.
        points = rounded.integers.to(torch.float32).mul_(grid.delta)
        points[after.exact_at] = torch.nan
        before = base_points(base, grid)
        moved = round_to_grid(points, before, None, grid)
        if not torch.equal(moved.integers, rounded.integers):
            return alone, after
        onward = replace(after, history=moved.history if self.contexts == "history" else None)
        payload = pack_standalone(Frame(moved, before, None, onward), based=True)
        if len(payload) >= len(alone.payload):
            return alone, after
        return Block(_BASED_BITSTREAM, payload), onward

    def _on_lattice(
        self,
        item: TensorInput,
        plan: LatticePlan,
        state: LatticeReference | None,
        base: BaseReference | None,
    ) -> tuple[Block, LatticeReference] | None:
        """Return the block of lattice points and the state after it; None where they do not suit."""
        if state is None:
            return self._first_on_lattice(item, plan, base)
        spec = item.spec
        values = as_float32(item.tensor)
        chosen = choose_spacing(plan, spec, state)
        restored = _restored(item) if self.gain_per != "none" else None
        gain = None
        if restored is not None:
            gain, chosen = choose_gain(values, restored, chosen, self.gain_per, spec, state)
        before, grid = chosen.integers, grid_of(chosen.spacing, spec.dtype)
        tracked = self.contexts == "history"
        history = state.history if tracked else None
        rounded = round_to_grid(values, before, history, grid, gain)
        after_history = rounded.history if tracked else None
        after = _state_after(item, rounded, chosen.spacing, after_history)
        if after is None:
            return None
        if _same(rounded, after, state, chosen.shift > 0 or chosen.snap):
            return Block(self.bitstream, UNCHANGED), replace(state, exact=None)
        payload = pack_delta(Frame(rounded, before, history, after), chosen.shift, chosen.snap)
        return Block(self.bitstream, payload), after


def _base_of(reference: TensorReference | None) -> BaseReference | None:
    return reference if isinstance(reference, BaseReference) else None


def _restored(item: TensorInput) -> Tensor | None:
    """Values that training continued from, in float32; None where there are none to match."""
    if item.restored is None or not is_matrix(item.spec):
        return None
    item.spec.check(item.restored)
    base = as_float32(item.restored)
    return base if bool(torch.isfinite(base).all()) else None


def _same(rounded: Rounded, after: LatticeReference, before: LatticeReference, moved: bool) -> bool:
    """Whether no element changed, so that the block can say just that."""
    # The largest token tells mostly; exact elements, and integers that were moved, have to be looked at.
    if rounded.n_large > rounded.n_exact or 0 < rounded.largest < FIRST_LARGE:
        return False
    if (moved or rounded.n_exact) and not torch.equal(after.integers, before.integers):
        return False
    return torch.equal(after.exact_at, before.exact_at) and torch.equal(
        _bits(after.exact_values), _bits(before.exact_values)
    )


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


def _state_after(
    item: TensorInput, rounded: Rounded, spacing: Spacing, history: Tensor | None
) -> LatticeReference | None:
    """Return the state that decoding will reach; None where too much would be exact."""
    spec, tensor = item.spec, item.tensor
    home = rounded.integers.device
    at, kept = no_exact(spec.dtype, home)
    if rounded.n_exact:
        if rounded.n_exact * _MAX_EXACT_SHARE > spec.numel or not bool(torch.isfinite(tensor).all()):
            return None
        at = (rounded.tokens == EXACT).nonzero().view(-1)
        kept = flattened(tensor)[at.to(tensor.device)].to(home)
    return LatticeReference(
        dtype=spec.dtype,
        shape=spec.shape,
        spacing=spacing,
        integers=rounded.integers,
        history=history,
        exact_at=at,
        exact_values=kept,
    )

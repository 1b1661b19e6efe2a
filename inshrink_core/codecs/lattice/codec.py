"""The lattice codec: integers on a uniform lattice, the change of integers, context rANS.

Each tensor is int32 multiples of a power of two, each frame adds whole steps to them, so nothing is ever
quantized twice and a chain cannot drift. How coarse a step is follows the learning rate and the squared
gradients; after a restore, rounding keeps the movement of the weights (*matched gain*). ``docs/design.md``
has the derivation and the measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import (
    Codec,
    CodecConfig,
    Decoded,
    Encoded,
    FrameContext,
    Knob,
    TensorInput,
    TensorReference,
    Tuning,
    within_memory,
)
from inshrink_core.codecs.exact import BITSTREAM as EXACT_BITSTREAM
from inshrink_core.codecs.exact import decode_exact, encode_exact, worst_case_exact_bytes
from inshrink_core.codecs.lattice.block import (
    UNCHANGED,
    Frame,
    LatticeReference,
    fits,
    no_exact,
    pack_delta,
    pack_standalone,
)
from inshrink_core.codecs.lattice.config import LatticeConfig, can_have_lattice, is_matrix, on_lattice
from inshrink_core.codecs.lattice.exact import make_exact, pack_state, parse_block
from inshrink_core.codecs.lattice.plan import (
    LatticePlan,
    Observation,
    choose_gain,
    choose_spacing,
    make_plan,
    observe_tensor,
)
from inshrink_core.codecs.lattice.spacing import Spacing, grid_of, new_spacing
from inshrink_core.errors import ConfigError, DamagedError, IncompatibleError
from inshrink_core.frame import Block
from inshrink_core.ops.lattice import EXACT, FIRST_LARGE, Rounded, round_to_grid
from inshrink_core.ops.reference.quantize import as_float32, flattened

__all__ = ["LatticeCodec", "LatticeConfig", "LatticePlan", "LatticeReference"]

_DIVERGENCE = 1.4e-4
"""Nats that the worst step of a chain diverges by, over the square of `coarseness`, which is in units of the
run's own movement: geometric mean over four runs, coarseness 1.5 to 6; .7e-4 to 2.9e-4."""

_TINY = 64
"""Elements up to which the exact block is tried too, where the lattice does not save half of the bytes."""

_MAX_EXACT_SHARE = 8
"""A tensor of which more than an eighth would be exact values is stored exactly as a whole."""


class LatticeCodec(Codec):
    """Weights on lattices; buffers, optimizer state and what is not finite exact.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> codec, config = LatticeCodec(), LatticeConfig(coarseness=4)
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(64, 64))
    >>> item = TensorInput(spec=spec, tensor=torch.linspace(-1, 1, 4096).view(64, 64))
    >>> plan = codec.plan([spec], [codec.observe(item, None, config)], config)
    >>> block, reference = codec.encode(item, plan, None)
    >>> restored = codec.decode(spec, block, None).tensor
    >>> bool((restored - item.tensor).abs().max() < 0.05)
    True
    """

    name = "lattice"
    bitstream = "lattice/1"
    reads = frozenset({"lattice/1", EXACT_BITSTREAM})
    config_type: ClassVar[type[CodecConfig]] = LatticeConfig
    uses_restored = True
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

    def companions(self, config: CodecConfig) -> frozenset[TensorRole]:
        """Return the roles that tell sensitivity: Adam's second moment, SGD's momentum."""
        self.checked(config)
        return frozenset({TensorRole.EXP_AVG_SQ, TensorRole.MOMENTUM})

    def observe(
        self, item: TensorInput, reference: TensorReference | None, config: CodecConfig
    ) -> Observation | None:
        """Return mean squares of a tensor that may lie on a lattice; None for the others."""
        if not on_lattice(item.spec, self.checked(config)):
            return None
        return observe_tensor(item, fits(reference, item.spec))

    def plan(
        self,
        specs: Sequence[TensorSpec],
        statistics: Sequence[Any],
        config: CodecConfig,
        context: FrameContext | None = None,
    ) -> LatticePlan:
        """Return the step of every tensor, and what the next frames need to plan theirs."""
        return make_plan(specs, statistics, self.checked(config), context or FrameContext())

    def expected_divergence(self, config: CodecConfig, relative_error: float) -> float:
        """Return a share of the squared coarseness: errors lie where the loss does not mind them."""
        return _DIVERGENCE * float(self.checked(config).coarseness) ** 2 if relative_error > 0 else 0.0

    def remember(self, plan: Any) -> Any:
        """Return the movement and the learning rate the chain began with, and probes of the weights."""
        return dict(plan.memory) if isinstance(plan, LatticePlan) else None

    def encode(self, item: TensorInput, plan: Any, reference: TensorReference | None) -> Encoded:
        """Encode one tensor; what is not finite or has no step becomes an exact block."""
        if not isinstance(plan, LatticePlan):
            raise ConfigError("this plan is not one of the codec 'lattice'", where=item.spec.key)
        spec = item.spec
        state = fits(reference, spec)
        if on_lattice(spec, plan.config) and (state is not None or spec.key in plan.widths):
            spec.check(item.tensor)
            encoded = _encode_lattice(item, plan, state)
            if encoded is not None and plan.config.exact:
                encoded = make_exact(spec, item.tensor, encoded, state)
            if encoded is not None and len(encoded.block.payload) <= worst_case_exact_bytes(spec):
                if spec.numel > _TINY or 2 * len(encoded.block.payload) <= spec.nbytes:
                    return encoded
                exact = encode_exact(spec, item.tensor, reference)
                return min(encoded, exact, key=lambda one: len(one.block.payload))
        return encode_exact(spec, item.tensor, reference)

    @within_memory
    def decode(self, spec: TensorSpec, block: Block, reference: TensorReference | None) -> Decoded:
        """Decode one block of the bitstreams in `reads`."""
        payload = memoryview(block.payload)
        if block.codec == EXACT_BITSTREAM:
            return decode_exact(spec, payload, reference)
        if block.codec not in self.reads:
            raise IncompatibleError(
                "the codec 'lattice' does not read this bitstream",
                where=spec.key,
                expected=self.bitstream,
                found=block.codec,
            )
        if not can_have_lattice(spec):
            raise DamagedError("a tensor of this kind has no lattice", where=spec.key)
        return Decoded(*parse_block(spec, payload, reference))

    def rekey(self, spec: TensorSpec, reference: TensorReference) -> Block:
        """Return a block that stands alone; references of other codecs become exact blocks."""
        state = fits(reference, spec)
        if state is not None:
            return Block(self.bitstream, pack_state(spec, state))
        return encode_exact(spec, reference.decoded(), None).block

    def worst_case_bytes(self, spec: TensorSpec) -> int:
        """Return a bound on what `encode` writes: the size of the exact block, its escape."""
        return worst_case_exact_bytes(spec)


def _encode_lattice(item: TensorInput, plan: LatticePlan, state: LatticeReference | None) -> Encoded | None:
    """Encode on the lattice; None where it does not suit the values."""
    spec = item.spec
    values = as_float32(item.tensor)
    if state is None:
        spacing = new_spacing(plan.widths[spec.key], plan.rms[spec.key])
        if spacing is None:
            return None
        zeros = torch.zeros(spec.numel, dtype=torch.int32)
        rounded = round_to_grid(values, zeros, None, grid_of(spacing, spec.dtype))
        after = _state_after(item, rounded, spacing, None)
        if after is None:
            return None
        payload = pack_standalone(Frame(rounded, zeros, None, after))
        return Encoded(Block(LatticeCodec.bitstream, payload), after)
    chosen = choose_spacing(plan, spec, state)
    restored = _restored(item) if plan.config.gain_per != "none" else None
    gain = None
    if restored is not None:
        gain, chosen = choose_gain(values, restored, chosen, plan, spec, state)
    before, grid = chosen.integers, grid_of(chosen.spacing, spec.dtype)
    tracked = plan.config.contexts == "history"
    history = state.history if tracked else None
    rounded = round_to_grid(values, before, history, grid, gain)
    after_history = rounded.history if tracked else None
    after = _state_after(item, rounded, chosen.spacing, after_history)
    if after is None:
        return None
    if _same(rounded, after, state, chosen.shift > 0 or chosen.snap):
        return Encoded(Block(LatticeCodec.bitstream, UNCHANGED), replace(state, exact=None))
    payload = pack_delta(Frame(rounded, before, history, after), chosen.shift, chosen.snap)
    return Encoded(Block(LatticeCodec.bitstream, payload), after)


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

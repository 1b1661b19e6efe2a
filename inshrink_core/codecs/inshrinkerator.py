"""The Inshrinkerator codec: non-uniform quantization with pruning, protection and a delta of symbols.

Agrawal et al., "Inshrinkerator: Compressing Deep Learning Training Checkpoints via Dynamic
Quantization" (SoCC'24). What the paper leaves open is decided in `InshrinkeratorConfig`; the default
codebook fit is the exact one of `inshrink_core.quantization`, the paper's own is ``fit="published"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import (
    Codec,
    CodecConfig,
    Decoded,
    Encoded,
    FrameContext,
    TensorInput,
    TensorReference,
    within_memory,
)
from inshrink_core.codecs.exact import BITSTREAM as EXACT
from inshrink_core.codecs.exact import decode_exact, encode_exact, worst_case_exact_bytes
from inshrink_core.codecs.inshrinkerator_block import (
    ROUNDED,
    pack_quantized,
    pack_rounded,
    parse_quantized,
    parse_rounded,
    worst_case_payload_bytes,
)
from inshrink_core.codecs.inshrinkerator_config import (
    InshrinkeratorConfig,
    InshrinkeratorPlan,
    has_symbols,
    is_quantized,
)
from inshrink_core.codecs.inshrinkerator_quantizer import Observation, is_finite, known_gradient, quantize
from inshrink_core.codecs.inshrinkerator_state import InshrinkeratorReference, RoundedReference, fits
from inshrink_core.errors import ConfigError, DamagedError, IncompatibleError
from inshrink_core.frame import Block
from inshrink_core.ops.quantize import MAGNITUDE_KEYS, histogram16, sensitivity_histogram
from inshrink_core.partition import KeyCounts, Thresholds, merge, thresholds

__all__ = ["InshrinkeratorCodec", "InshrinkeratorConfig", "InshrinkeratorPlan", "InshrinkeratorReference"]

_TINY = 64
"""Elements up to which the exact block is tried too: above, symbols and codebook are always smaller."""


class InshrinkeratorCodec(Codec):
    """Weights of two or more dimensions in symbols; everything else exact, or rounded if asked.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> codec, config = InshrinkeratorCodec(), InshrinkeratorConfig(bins=4, protect=0.0)
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(64, 64))
    >>> item = TensorInput(spec=spec, tensor=torch.linspace(-1, 1, 4096).view(64, 64))
    >>> plan = codec.plan([spec], [codec.observe(item, None, config)], config)
    >>> block, reference = codec.encode(item, plan, None)
    >>> codec.decode(spec, block, None).tensor.unique()
    tensor([-0.7500, -0.2500,  0.2500,  0.7500])
    """

    name = "inshrinkerator"
    bitstream = "inshrinkerator/1"
    reads = frozenset({"inshrinkerator/1", EXACT})
    config_type: ClassVar[type[CodecConfig]] = InshrinkeratorConfig

    def companions(self, config: CodecConfig) -> frozenset[TensorRole]:
        """Return the gradient's role where sensitivity decides anything."""
        return frozenset({TensorRole.GRADIENT}) if self.checked(config).wants_gradients else frozenset()

    def observe(
        self, item: TensorInput, reference: TensorReference | None, config: CodecConfig
    ) -> Observation | None:
        """Return histograms of abs(w) and abs(g·w) over integer keys; None if no threshold needs them."""
        asked = self.checked(config)
        if not (asked.partitions and is_quantized(item.spec)):
            return None
        dense = histogram16(item.tensor).numpy()
        if not is_finite(dense):
            return None
        gradient = known_gradient(item) if asked.wants_gradients else None
        sensitivity = None if gradient is None else sensitivity_histogram(item.tensor, gradient).numpy()
        return Observation(
            KeyCounts.from_dense(dense.reshape(2, MAGNITUDE_KEYS).sum(0)),
            None if sensitivity is None else KeyCounts.from_dense(sensitivity),
        )

    def plan(
        self,
        specs: Sequence[TensorSpec],
        statistics: Sequence[Any],
        config: CodecConfig,
        context: FrameContext | None = None,
    ) -> InshrinkeratorPlan:
        """Return thresholds per group, pooled over its tensors in their order."""
        asked = self.checked(config)
        groups: dict[str, list[tuple[TensorSpec, Observation]]] = {}
        for spec, observation in zip(specs, statistics, strict=True):
            if isinstance(observation, Observation):
                groups.setdefault(asked.group_of(spec), []).append((spec, observation))
        cuts: dict[str, Thresholds] = {}
        for group, members in groups.items():
            known = [seen.sensitivity for _, seen in members if seen.sensitivity is not None]
            cuts[group] = thresholds(
                merge(seen.magnitude for _, seen in members),
                merge(known) if known else None,
                prune=asked.prune_of(members[0][0]),
                protect=asked.protect,
                by_sensitivity=asked.prune_metric == "sensitivity",
            )
        blind = [s.key for members in groups.values() for s, seen in members if seen.sensitivity is None]
        return InshrinkeratorPlan(
            config=asked,
            thresholds=cuts,
            without_gradient=tuple(sorted(blind)) if asked.wants_gradients else (),
        )

    def encode(self, item: TensorInput, plan: Any, reference: TensorReference | None) -> Encoded:
        """Encode one tensor; what is not finite or not covered by the config becomes an exact block."""
        if not isinstance(plan, InshrinkeratorPlan):
            raise ConfigError("this plan is not one of the codec 'inshrinkerator'", where=item.spec.key)
        if is_quantized(item.spec):
            item.spec.check(item.tensor)
            return self._encode_quantized(item, plan, reference)
        if _is_rounded(item.spec, plan.config) and bool(torch.isfinite(item.tensor).all()):
            payload, state = pack_rounded(item.spec, item.tensor, reference)
            return Encoded(Block(self.bitstream, payload), state)
        return encode_exact(item.spec, item.tensor, reference)

    def _encode_quantized(
        self, item: TensorInput, plan: InshrinkeratorPlan, reference: TensorReference | None
    ) -> Encoded:
        state = quantize(item, plan, fits(reference, item.spec))
        if state is None:
            return encode_exact(item.spec, item.tensor, reference)
        rans = plan.config.entropy == "rans"
        payload = pack_quantized(item.spec, state, fits(reference, item.spec), rans=rans)
        if item.spec.numel <= _TINY:
            exact = encode_exact(item.spec, item.tensor, reference)
            if len(exact.block.payload) <= len(payload):
                return exact
        return Encoded(Block(self.bitstream, payload), state)

    @within_memory
    def decode(self, spec: TensorSpec, block: Block, reference: TensorReference | None) -> Decoded:
        """Decode one block of the bitstreams in `reads`."""
        payload = memoryview(block.payload)
        if block.codec == EXACT:
            return decode_exact(spec, payload, reference)
        if block.codec not in self.reads:
            raise IncompatibleError(
                "the codec 'inshrinkerator' does not read this bitstream",
                where=spec.key,
                expected=self.bitstream,
                found=block.codec,
            )
        if len(payload) < 2:
            raise DamagedError("the block is cut short")
        state: TensorReference
        if payload[0] & ROUNDED:
            state = parse_rounded(spec, payload, reference)
        elif has_symbols(spec):
            state = parse_quantized(spec, payload, reference)
        else:
            raise DamagedError("a tensor of this kind has no symbols")
        return Decoded(state.decoded(), state)

    def rekey(self, spec: TensorSpec, reference: TensorReference) -> Block:
        """Return a block that stands alone; references of other codecs become exact blocks."""
        state = fits(reference, spec)
        if state is not None:
            return Block(self.bitstream, pack_quantized(spec, state, None))
        if isinstance(reference, RoundedReference):
            return Block(self.bitstream, pack_rounded(spec, reference.decoded(), None)[0])
        return encode_exact(spec, reference.decoded(), None).block

    def worst_case_bytes(self, spec: TensorSpec) -> int:
        """Return a bound on payloads of every kind this codec writes."""
        return max(worst_case_exact_bytes(spec), worst_case_payload_bytes(spec))


def _is_rounded(spec: TensorSpec, config: InshrinkeratorConfig) -> bool:
    """Whether the config lets a tensor outside the quantized ones be kept in bfloat16."""
    if spec.exact or spec.dtype != "float32" or spec.numel == 0:
        return False
    if spec.role is TensorRole.BUFFER:
        return config.buffers == "bfloat16"
    return spec.role is TensorRole.WEIGHT and len(spec.shape) <= 1 and config.vectors == "bfloat16"

"""Restore gain and noise of one trial: the figures of `inshrink_core.evaluate.gain`, overrides included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from inshrink_core.chain import ChainConfig, Standing
from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
from inshrink_core.codec import (
    Codec,
    CodecConfig,
    Encoded,
    FrameContext,
    TensorInput,
    TensorReference,
    get_codec,
)
from inshrink_core.evaluate import step_gain
from inshrink_core.frame import Block

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["trial_gain"]


def trial_gain(
    chain: ChainConfig, before: Checkpoint, after: Checkpoint, standing: Standing
) -> tuple[float | None, float | None]:
    """Return (gain, noise) of a step had training been restored at the step before; None in a keyframe.

    Parameters
    ----------
    chain
        How the step would be encoded.
    before, after
        The originals of the step before and of this one.
    standing
        What this one is encoded against.
    """
    states = standing.references
    held = replace(before, specs=tuple(spec for spec in before.specs if spec.key in states))
    if not held.specs:
        return None, None

    def decode(spec: TensorSpec) -> tuple[Tensor, TensorReference]:
        return states[spec.key].decoded().clone(), states[spec.key]

    codec = cast(Codec, _Overridden(chain))
    found = step_gain(codec, chain.config, held, after, decode, standing.context)
    return found.gain, found.noise


class _Overridden:
    """A codec that looks its config up tensor by tensor, as a chain with overrides has it."""

    def __init__(self, chain: ChainConfig) -> None:
        self._chain, self._codec = chain, get_codec(chain.codec)

    def companions(self, config: CodecConfig) -> frozenset[TensorRole]:
        return self._codec.companions(config)

    def observe(self, item: TensorInput, reference: TensorReference | None, config: CodecConfig) -> Any:
        return self._codec.observe(item, reference, self._chain.config_of(item.spec))

    def plan(
        self,
        specs: Sequence[TensorSpec],
        statistics: Sequence[Any],
        config: CodecConfig,
        context: FrameContext,
    ) -> list[tuple[CodecConfig, Any]]:
        plans: list[tuple[CodecConfig, Any]] = []
        for spec in specs:
            own = self._chain.config_of(spec)
            if all(known != own for known, _ in plans):
                plans.append((own, self._codec.plan(specs, statistics, own, context)))
        return plans

    def encode(
        self, item: TensorInput, plan: list[tuple[CodecConfig, Any]], reference: TensorReference | None
    ) -> Encoded:
        own = self._chain.config_of(item.spec)
        chosen = next(made for config, made in plan if config == own)
        return self._codec.encode(item, chosen, reference)

    def decode(self, spec: TensorSpec, block: Block, reference: TensorReference | None) -> Any:
        return self._codec.decode(spec, block, reference)

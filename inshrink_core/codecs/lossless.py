"""The lossless codec: every tensor bit for bit, as a delta where that is smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from inshrink_core.checkpoint import TensorSpec
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
from inshrink_core.codecs.exact import (
    BITSTREAM,
    DEFAULT_LEVEL,
    LosslessReference,
    decode_exact,
    encode_exact,
    worst_case_exact_bytes,
)
from inshrink_core.errors import ConfigError, IncompatibleError
from inshrink_core.frame import Block

__all__ = ["LosslessCodec", "LosslessConfig", "LosslessReference", "decode_exact", "encode_exact"]

_LEVELS = range(1, 20)
"""zstd's levels but those that need more memory to decode (20 to 22) and the negative ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LosslessConfig(CodecConfig):
    """What a user asks of the lossless codec.

    Parameters
    ----------
    level
        zstd's level, 1 to 19. Higher is slower to write; reading takes the same time.
    """

    level: int = DEFAULT_LEVEL

    def __post_init__(self) -> None:
        if self.level not in _LEVELS:
            raise ConfigError("level out of range", expected="1 to 19", found=str(self.level))


class LosslessCodec(Codec):
    """Order-preserving integer delta, byte planes, zstd; bit-exact for every dtype.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorRole
    >>> spec = TensorSpec(name="w", role=TensorRole.WEIGHT, dtype="float32", shape=(1000,))
    >>> codec, tensor = LosslessCodec(), torch.linspace(0, 1, 1000)
    >>> first = codec.encode(TensorInput(spec=spec, tensor=tensor), LosslessConfig(), None)
    >>> again = codec.encode(TensorInput(spec=spec, tensor=tensor), LosslessConfig(), first.reference)
    >>> len(again.block.payload)
    1
    >>> torch.equal(codec.decode(spec, again.block, first.reference).tensor, tensor)
    True
    """

    name: ClassVar[str] = "lossless"
    bitstream: ClassVar[str] = BITSTREAM
    reads: ClassVar[frozenset[str]] = frozenset({BITSTREAM})
    config_type: ClassVar[type[CodecConfig]] = LosslessConfig
    lossy: ClassVar[bool] = False
    label = "Lossless"
    compared = (("Lossless", {}),)

    def observe(self, item: TensorInput, reference: TensorReference | None, config: CodecConfig) -> Any:
        """Return None: nothing is decided for all tensors together."""
        return

    def plan(
        self,
        specs: Sequence[TensorSpec],
        statistics: Sequence[Any],
        config: CodecConfig,
        context: FrameContext | None = None,
    ) -> Any:
        """Return the config."""
        return self.checked(config)

    def encode(self, item: TensorInput, plan: Any, reference: TensorReference | None) -> Encoded:
        """Encode one tensor bit for bit; see `encode_exact`."""
        level = plan.level if isinstance(plan, LosslessConfig) else DEFAULT_LEVEL
        return encode_exact(item.spec, item.tensor, reference, level, owned=item.owned)

    @within_memory
    def decode(self, spec: TensorSpec, block: Block, reference: TensorReference | None) -> Decoded:
        """Decode one block; see `decode_exact`."""
        if block.codec not in self.reads:
            raise IncompatibleError(
                "the lossless codec does not read this bitstream",
                where=spec.key,
                expected=BITSTREAM,
                found=block.codec,
            )
        return decode_exact(spec, block.payload, reference)

    def rekey(self, spec: TensorSpec, reference: TensorReference) -> Block:
        """Return a block of the reference's tensor that stands alone."""
        return encode_exact(spec, reference.decoded(), None).block

    def worst_case_bytes(self, spec: TensorSpec) -> int:
        """Return one byte more than the tensor."""
        return worst_case_exact_bytes(spec)

"""The lossless codec: every tensor bit for bit, as a delta if that is smaller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from inshrink_core.checkpoint import TensorSpec
from inshrink_core.codec import Codec, Encoded, TensorInput, TensorReference
from inshrink_core.codecs.exact import (
    BITSTREAM,
    DEFAULT_LEVEL,
    decode_exact,
    encode_exact,
    rekey_exact,
)
from inshrink_core.frame import Block


@dataclass(frozen=True, kw_only=True, slots=True)
class LosslessCodec(Codec[None]):
    """Order-preserving integer delta in contexts, byte planes, zstd and rANS; bit-exact for every dtype.

    Parameters
    ----------
    level
        Compression level of zstd, 1 to 19 (20 to 22 need more memory to decode). Higher levels write more
        slowly, but read at the same speed.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorRole
    >>> spec = TensorSpec(name="w", role=TensorRole.WEIGHT, dtype="float32", shape=(1000,))
    >>> codec, tensor = LosslessCodec(), torch.linspace(0, 1, 1000)
    >>> first = codec.encode(TensorInput(spec=spec, tensor=tensor), None, None)
    >>> again = codec.encode(TensorInput(spec=spec, tensor=tensor), None, first.reference)
    >>> len(again.block.payload)
    1
    >>> torch.equal(codec.decode(spec, again.block, first.reference).decoded(), tensor)
    True
    """

    name = "lossless"
    bitstream = BITSTREAM
    ranges: ClassVar = {"level": (1, 19)}
    uses_base = True
    label = "Lossless"
    compared = (("Lossless", {}),)

    level: int = DEFAULT_LEVEL

    @classmethod
    def is_exact(cls, settings: Mapping[str, Any]) -> bool:
        """Return True."""
        return True

    def encode(self, item: TensorInput, plan: None, reference: TensorReference | None) -> Encoded:
        """Encode one tensor bit for bit; see `encode_exact`."""
        return encode_exact(item.spec, item.tensor, reference, self.level, owned=item.owned)

    def decode(
        self, spec: TensorSpec, block: Block, reference: TensorReference | None, device: str = "cpu"
    ) -> TensorReference:
        """Decode one block; see `decode_exact`."""
        return decode_exact(spec, block.payload, reference)

    def rekey(self, spec: TensorSpec, reference: TensorReference, *, unchanged: bool = False) -> Block:
        """Return a standalone block of the reference's tensor, or a block without changes."""
        return rekey_exact(spec, reference, unchanged=unchanged)

"""What the published rivals share: a lossy rule for some tensors, exact coding for all others.

They work in host memory throughout: their coders do, and they are here to be compared in size and
fidelity. So the same input gives the same bytes wherever it lies.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
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
from inshrink_core.errors import ConfigError, DamagedError, IncompatibleError
from inshrink_core.frame import Block

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LOSSY_DTYPES", "FallbackCodec", "check_number", "check_word", "host_values", "ordered_mean"]

LOSSY_DTYPES = frozenset({"float32", "bfloat16", "float16"})

_TINY = 64
"""Elements up to which the exact block is tried too: above, symbols are always smaller."""


class FallbackCodec(Codec):
    """A codec that is lossy where `covers` says so, and exact elsewhere.

    Subclasses say how one covered tensor becomes a payload and a state, and back.
    """

    lossy_roles: ClassVar[frozenset[TensorRole]] = frozenset({TensorRole.WEIGHT})

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

    @abstractmethod
    def _config_of(self, plan: Any) -> CodecConfig:
        """Return the config a plan was made from; ConfigError for another codec's plan."""

    @abstractmethod
    def _encode_lossy(
        self, item: TensorInput, plan: Any, reference: TensorReference | None
    ) -> Encoded | None:
        """Encode a covered tensor of finite values; None where it has to be exact."""

    @abstractmethod
    def _decode_lossy(
        self, spec: TensorSpec, payload: memoryview, reference: TensorReference | None
    ) -> TensorReference:
        """Return the state of a payload of this codec's own bitstream; DamagedError if it is none."""

    @abstractmethod
    def _worst_case_lossy_bytes(self, spec: TensorSpec) -> int:
        """Bound the payload of a covered tensor."""

    def covers(self, spec: TensorSpec, config: CodecConfig) -> bool:
        """Whether the lossy rule applies to a tensor."""
        if spec.role not in self.lossy_roles or spec.exact or spec.numel == 0:
            return False
        quantized = getattr(config, "vectors", "quantized") == "quantized" or len(spec.shape) > 1
        return spec.dtype in LOSSY_DTYPES and quantized

    def encode(self, item: TensorInput, plan: Any, reference: TensorReference | None) -> Encoded:
        """Encode one tensor; what is not finite or not covered becomes an exact block."""
        config = self._config_of(plan)
        spec, tensor = item.spec, item.tensor
        if not self.covers(spec, config):
            return encode_exact(spec, tensor, reference)
        item.spec.check(item.tensor)
        if not bool(torch.isfinite(tensor).all()):
            return encode_exact(spec, tensor, reference)
        encoded = self._encode_lossy(item, plan, reference)
        if encoded is None or spec.numel <= _TINY:
            exact = encode_exact(spec, tensor, reference)
            if encoded is None or len(exact.block.payload) <= len(encoded.block.payload):
                return exact
        return encoded

    @within_memory
    def decode(self, spec: TensorSpec, block: Block, reference: TensorReference | None) -> Decoded:
        """Decode one block of the bitstreams in `reads`."""
        payload = memoryview(block.payload)
        if block.codec == EXACT:
            return decode_exact(spec, payload, reference)
        if block.codec not in self.reads:
            raise IncompatibleError(
                f"the codec '{self.name}' does not read this bitstream",
                where=spec.key,
                expected=self.bitstream,
                found=block.codec,
            )
        if spec.dtype not in LOSSY_DTYPES or spec.numel == 0:
            raise DamagedError("a tensor of this kind has no symbols", where=spec.key)
        if len(payload) < 2:
            raise DamagedError("the block is cut short", where=spec.key)
        state = self._decode_lossy(spec, payload, reference)
        return Decoded(state.decoded().clone(), state)

    def rekey(self, spec: TensorSpec, reference: TensorReference) -> Block:
        """Return an exact block of what the reference decodes to."""
        return encode_exact(spec, reference.decoded(), None).block

    def worst_case_bytes(self, spec: TensorSpec) -> int:
        """Return a bound on payloads of every kind this codec writes."""
        return max(worst_case_exact_bytes(spec), self._worst_case_lossy_bytes(spec))


def host_values(tensor: torch.Tensor) -> NDArray[np.float32]:
    """Return the values in row-major order, in float32, which holds every covered dtype exactly."""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").to(torch.float32)
    values: NDArray[np.float32] = plain.contiguous().reshape(-1).numpy()
    return values


def ordered_mean(values: NDArray[np.float32]) -> float:
    """Add from first to last in float64: `np.mean` pairs terms in a way that depends on the processor."""
    return float(np.cumsum(values, dtype=np.float64)[-1]) / values.size


def check_word(name: str, value: Any, words: Sequence[str]) -> None:
    """Raise ConfigError unless a setting is one of a few words."""
    if value not in words:
        raise ConfigError(
            f"'{name}' takes one of a few words", expected=" or ".join(words), found=repr(value)
        )


def check_number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    """Raise ConfigError unless a setting is a number (no bool, no NaN) of a closed range."""
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(
            f"'{name}' is out of range", expected=f"{kind} {low:g}..{high:g}", found=repr(value)
        )

"""Base class of lossy codecs: a lossy rule for some tensors, and exact coding for all others."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np
import torch

from inshrink_core.checkpoint import MODEL_ROLES, TensorRole, TensorSpec
from inshrink_core.codec import Codec, Encoded, TensorInput, TensorReference
from inshrink_core.codecs.exact import BITSTREAM as EXACT
from inshrink_core.codecs.exact import decode_exact, encode_exact, rekey_exact
from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block

if TYPE_CHECKING:
    from numpy.typing import NDArray


LOSSY_DTYPES = frozenset({"float32", "bfloat16", "float16"})

TINY = 64
"""Elements up to which the exact block is tried too; for larger tensors symbols are usually smaller."""

_Plan = TypeVar("_Plan")


class FallbackCodec(Codec[_Plan]):
    """A codec that is lossy for the tensors that `covers` selects, and exact for all others.

    Subclasses implement the encoding and decoding of one covered tensor.
    """

    __slots__ = ()

    lossy_roles: ClassVar[frozenset[TensorRole]] = frozenset({TensorRole.WEIGHT})

    shortest_payload: ClassVar[int] = 2
    """Least size of a payload in the codec's bitstream, in bytes."""

    @abstractmethod
    def encode_lossy(
        self, item: TensorInput, plan: _Plan, reference: TensorReference | None
    ) -> Encoded | None:
        """Encode a covered tensor; None if it must be stored exactly."""

    @abstractmethod
    def decode_lossy(
        self, spec: TensorSpec, payload: memoryview, reference: TensorReference | None, device: str
    ) -> TensorReference:
        """Return the state after a payload of this codec's bitstream; raise DamagedError if it is invalid.

        The tensor has one of `LOSSY_DTYPES` and is not empty, and the payload has at least
        `shortest_payload` bytes. A codec without kernels for the device works in host memory.
        """

    def exact_below(self, spec: TensorSpec, nbytes: int) -> int:
        """Return the size below which an exact block replaces a lossy one of `nbytes`; 0 to try none."""
        return nbytes + 1 if spec.numel <= TINY else 0

    def takes(self) -> frozenset[TensorRole]:
        """Return the roles of the model, or the codec's roles if they are only optimizer state."""
        return MODEL_ROLES if self.lossy_roles & MODEL_ROLES else self.lossy_roles

    def covers(self, spec: TensorSpec) -> bool:
        """Whether the lossy rule covers a tensor; the setting ``vectors`` may exclude vectors."""
        if spec.role not in self.lossy_roles or spec.exact or spec.numel == 0:
            return False
        quantized = getattr(self, "vectors", "quantized") == "quantized" or len(spec.shape) > 1
        return spec.dtype in LOSSY_DTYPES and quantized

    def encode(self, item: TensorInput, plan: _Plan, reference: TensorReference | None) -> Encoded:
        """Encode one tensor; a tensor that is not covered becomes an exact block."""
        spec = item.spec
        if not self.covers(spec):
            return encode_exact(spec, item.tensor, reference)
        spec.check(item.tensor)
        encoded = self.encode_lossy(item, plan, reference)
        below = 0 if encoded is None else self.exact_below(spec, len(encoded.block.payload))
        if encoded is not None and not below:
            return encoded
        exact = encode_exact(spec, item.tensor, reference)
        return exact if encoded is None or len(exact.block.payload) < below else encoded

    def decode(
        self, spec: TensorSpec, block: Block, reference: TensorReference | None, device: str = "cpu"
    ) -> TensorReference:
        """Return the state after a block of the codec's bitstream, or of `EXACT`."""
        if block.codec == EXACT:
            return decode_exact(spec, block.payload, reference)
        payload = memoryview(block.payload)
        if spec.dtype not in LOSSY_DTYPES or spec.numel == 0:
            raise DamagedError(f"a tensor of this kind has no {self.name} blocks")
        if len(payload) < self.shortest_payload:
            raise DamagedError("the block is cut short")
        return self.decode_lossy(spec, payload, reference, device)

    def rekey(self, spec: TensorSpec, reference: TensorReference, *, unchanged: bool = False) -> Block:
        """Return an exact block of the reference's decoded tensor."""
        return rekey_exact(spec, reference, unchanged=unchanged)


def host_values(tensor: torch.Tensor) -> NDArray[np.float32]:
    """Return the values in row-major order as float32, which represents all covered dtypes exactly."""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").to(torch.float32)
    return plain.contiguous().reshape(-1).numpy()

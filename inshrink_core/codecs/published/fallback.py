"""What the published rivals share: a lossy rule for some tensors, exact coding for all others.

They work in host memory throughout: their coders do, and they are here to be compared in size and
fidelity. So the same input gives the same bytes wherever it lies.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

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
from inshrink_core.codecs.exact import BITSTREAM as EXACT
from inshrink_core.codecs.exact import decode_exact, encode_exact, worst_case_exact_bytes
from inshrink_core.coding.huffman import HuffmanCoder
from inshrink_core.coding.lzma2 import lzma_compress, lzma_decompress
from inshrink_core.coding.rans import decode_rans, encode_rans
from inshrink_core.coding.raw import bits_per_symbol, pack_bits, packed_bytes, unpack_bits
from inshrink_core.coding.zstd import zstd_compress, zstd_decompress
from inshrink_core.errors import ConfigError, DamagedError, IncompatibleError
from inshrink_core.frame import Block

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BITS",
    "FLAT_CODERS",
    "LOSSY_DTYPES",
    "FallbackCodec",
    "check_number",
    "check_word",
    "decode_flat",
    "encode_flat",
    "host_values",
    "ordered_mean",
    "worst_case_flat_bytes",
]

BITS = Tuning(
    knob=Knob(settings=("bits",), values=(8, 7, 6, 5, 4, 3, 2, 1), label="Bits", unit="bits a symbol")
)
"""The knob of codecs whose symbols have a width."""

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


_Symbols = NDArray[np.uint8]

_ZSTD_LEVEL = 19
"""The highest level that needs no more memory to decode than the others."""


class _Mode(IntEnum):
    """First byte of coded symbols."""

    PACKED = 0
    CONSTANT = 1
    HUFFMAN = 2
    LZMA = 3
    RANS = 4
    ZSTD = 5


FLAT_CODERS: Mapping[str, _Mode] = {
    "huffman": _Mode.HUFFMAN,
    "lzma": _Mode.LZMA,
    "rans": _Mode.RANS,
    "zstd": _Mode.ZSTD,
}
"""Coders a config may name."""


def worst_case_flat_bytes(n: int, n_symbols: int) -> int:
    """Return the largest payload `encode_flat` produces: a mode and packed bits, or a constant."""
    return 1 + max(packed_bytes(n, n_symbols), 1)


def _byte_alphabet(n_symbols: int) -> int:
    """Widen symbols to 1, 2, 4 or 8 bits: byte-wise coders see nothing across bytes."""
    width = max(bits_per_symbol(n_symbols), 1)
    return 1 << (1 << (width - 1).bit_length())


def encode_flat(symbols: _Symbols, n_symbols: int, coder: str) -> bytes:
    """Return symbols coded, packed where that is smaller, or as a constant.

    Parameters
    ----------
    symbols
        UInt8[n], values below `n_symbols`.
    n_symbols
        Size of the alphabet, 1 to 256.
    coder
        A key of `FLAT_CODERS`.

    Returns
    -------
    bytes
        At most `worst_case_flat_bytes`.

    Examples
    --------
    >>> import numpy as np
    >>> encode_flat(np.array([2, 2, 2], np.uint8), 4, "huffman").hex()
    '0102'
    """
    if symbols.size and int(symbols.min()) == int(symbols.max()):
        return bytes((_Mode.CONSTANT, int(symbols[0])))
    body = _ENCODERS[coder](symbols, n_symbols)
    if len(body) < packed_bytes(symbols.size, n_symbols):
        return bytes((FLAT_CODERS[coder],)) + body
    return bytes((_Mode.PACKED,)) + pack_bits(symbols, n_symbols)


def decode_flat(payload: bytes | memoryview, n: int, n_symbols: int) -> _Symbols:
    """Return the `n` symbols that `encode_flat` coded.

    Raises
    ------
    DamagedError
        The payload is not the code of `n` symbols of this alphabet.
    """
    if len(payload) == 0 or payload[0] > max(_Mode):
        raise DamagedError("coded symbols have no known mode", expected=f"0 to {max(_Mode)}", found="another")
    mode, body = _Mode(payload[0]), memoryview(payload)[1:]
    if mode is _Mode.PACKED:
        return unpack_bits(body, n, n_symbols)
    if mode is _Mode.CONSTANT:
        if len(body) != 1 or body[0] >= n_symbols:
            raise DamagedError("a constant symbol is not one of the alphabet")
        return np.full(n, body[0], np.uint8)
    symbols = _DECODERS[mode](body, n, n_symbols)
    if n and int(symbols.max()) >= n_symbols:
        raise DamagedError(
            "a symbol is outside the alphabet", expected=f"below {n_symbols}", found=str(int(symbols.max()))
        )
    return symbols


def _packed_for_bytes(symbols: _Symbols, n_symbols: int) -> bytes:
    return pack_bits(symbols, _byte_alphabet(n_symbols))


def _encode_rans(symbols: _Symbols, n_symbols: int) -> bytes:
    return encode_rans(torch.from_numpy(np.ascontiguousarray(symbols)), None, n_symbols)


def _decode_rans(body: memoryview, n: int, n_symbols: int) -> _Symbols:
    symbols: _Symbols = decode_rans(body, n, n_symbols).numpy()
    return symbols


def _decode_lzma(body: memoryview, n: int, n_symbols: int) -> _Symbols:
    alphabet = _byte_alphabet(n_symbols)
    return unpack_bits(lzma_decompress(body, packed_bytes(n, alphabet)), n, alphabet)


def _decode_zstd(body: memoryview, n: int, n_symbols: int) -> _Symbols:
    alphabet = _byte_alphabet(n_symbols)
    return unpack_bits(zstd_decompress(body, packed_bytes(n, alphabet)), n, alphabet)


_ENCODERS: Mapping[str, Callable[[_Symbols, int], bytes]] = {
    "huffman": lambda symbols, _: HuffmanCoder().encode(np.ascontiguousarray(symbols)),
    "lzma": lambda symbols, n_symbols: lzma_compress(_packed_for_bytes(symbols, n_symbols)),
    "rans": _encode_rans,
    "zstd": lambda symbols, n_symbols: zstd_compress(_packed_for_bytes(symbols, n_symbols), _ZSTD_LEVEL),
}

_DECODERS: Mapping[_Mode, Callable[[memoryview, int, int], _Symbols]] = {
    _Mode.HUFFMAN: lambda body, n, _: HuffmanCoder().decode(body, n),
    _Mode.LZMA: _decode_lzma,
    _Mode.RANS: _decode_rans,
    _Mode.ZSTD: _decode_zstd,
}

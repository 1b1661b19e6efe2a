"""Order-0 Huffman codes of bytes, as published codecs have them; tables and codes are those of the engine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inshrink_core.coding.huffman import (
    code_entries,
    decode_symbols_with,
    parse_lengths,
    serialize_lengths,
    stream_bytes,
)
from inshrink_core.ops.symbols import MAX_CODE_BITS, code_lengths, count_groups, pack_symbols


class HuffmanCoder:
    """Order-0 Huffman code of bytes: the table, then the codes; a lone value takes its table only."""

    name = "huffman"

    def encode(self, values: NDArray[np.uint8]) -> bytes:
        """Return the table and the codes."""
        if values.size == 0:
            return b""
        lengths = code_lengths(count_groups(values))
        table = serialize_lengths(lengths)
        if np.count_nonzero(lengths) == 1:
            return table
        return table + stream_bytes(*pack_symbols(values, code_entries(lengths)))

    def decode(self, payload: bytes | memoryview, n: int) -> NDArray[np.uint8]:
        """Return the `n` values; DamagedError if the table or the codes are not theirs."""
        if n == 0 and len(payload) == 0:
            return np.zeros(0, np.uint8)
        lengths, offset = parse_lengths(payload, 0, 256)
        return decode_symbols_with(lengths, payload[offset:], n)

    def worst_case_bytes(self, n: int) -> int:
        """Return the largest table and 12 bits a value, though 8 bits is the optimum of any input."""
        return (256 + 2) + (n * MAX_CODE_BITS + 7) // 8

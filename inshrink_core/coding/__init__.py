"""Entropy coders: bytes in the fewest bits, and back."""

from __future__ import annotations

from inshrink_core.coding.coder import Coder
from inshrink_core.coding.huffman import HuffmanCoder
from inshrink_core.coding.raw import RawCoder
from inshrink_core.coding.run_length import RunLengthCoder
from inshrink_core.coding.zstd import ZstdCoder

__all__ = ["Coder", "HuffmanCoder", "RawCoder", "RunLengthCoder", "ZstdCoder"]

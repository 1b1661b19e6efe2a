"""Entropy coders: bytes in the fewest bits, and back."""

from inshrink_core.entropy.coder import Coder
from inshrink_core.entropy.huffman import HuffmanCoder
from inshrink_core.entropy.raw import RawCoder
from inshrink_core.entropy.run_length import RunLengthCoder
from inshrink_core.entropy.zstd import ZstdCoder

__all__ = ["Coder", "HuffmanCoder", "RawCoder", "RunLengthCoder", "ZstdCoder"]

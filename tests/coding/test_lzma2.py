"""LZMA2 without container: bytes come back, and nothing a stream says is trusted."""

import lzma

import pytest

from inshrink_core.errors import DamagedError
from inshrink_lab.published.lzma2 import lzma_decompress


def test_a_stream_that_grows_without_end_is_stopped_at_the_size_that_is_known():
    bomb = lzma.compress(
        bytes(10**7), format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 4096}]
    )
    with pytest.raises(DamagedError):
        lzma_decompress(bomb, 100)

"""Measured points on disk, and the memory a measurement takes."""

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a high-water mark that can be reset")
def test_the_peak_is_of_what_was_taken_even_if_given_back():
    """In a process of its own: threads of other tests give back memory when they like."""
    program = """
from inshrink_lab.bench.measure import PeakMemory

before = bytearray(48 << 20)
del before
with PeakMemory() as first:
    block = bytearray(b"x") * (32 << 20)
    del block
with PeakMemory() as second:
    pass
print(first.nbytes, second.nbytes)
"""
    reported = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, check=True, text=True
    )
    first, second = map(int, reported.stdout.split())
    assert 31 << 20 < first < 40 << 20
    assert second < 4 << 20

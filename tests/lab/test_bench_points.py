"""Measured points on disk, and the memory a measurement takes."""

import subprocess
import sys
from functools import partial

import pytest

from inshrink_core.execution import ResultStore, parse_record
from inshrink_lab.bench.report import Point

POINT = Point(
    codec="uniform:bits=4",
    config={"bits": 4, "grid": "held"},
    knob=4,
    metric="loss",
    direction="lower",
    ratio_weights=8.5,
    drops=(None, 0.25),
    divergences=(0.0, 1e-3),
    peak_memory_bytes=1 << 20,
)


def points_in(folder):
    return ResultStore(folder, "point", partial(parse_record, Point))


KEY = {"run": ["a", "b"], "config": {"bits": 4}}


def test_a_kept_point_is_the_same_when_loaded(tmp_path):
    store = points_in(tmp_path / "points")
    assert store.load("u", KEY) is None
    store.keep("uniform:bits=4", KEY, POINT.to_json())
    assert store.load("uniform:bits=4", KEY) == POINT
    assert store.load("uniform:bits=4", KEY | {"run": ["a", "c"]}) is None
    assert [path.suffix for path in (tmp_path / "points").iterdir()] == [".json"]


def test_a_label_never_leaves_the_folder(tmp_path):
    store = points_in(tmp_path / "points")
    store.keep("../../x:/etc=1", KEY, POINT.to_json())
    assert [path.name for path in tmp_path.iterdir()] == ["points"]
    assert len(list((tmp_path / "points").iterdir())) == 1


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
    told = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=True, text=True)
    first, second = map(int, told.stdout.split())
    assert 31 << 20 < first < 40 << 20
    assert second < 4 << 20

"""Measured points on disk, and the memory a measurement takes."""

import json
import sys

import pytest

from inshrink_core.bench.memory import PeakMemory
from inshrink_core.bench.points import Point, PointStore
from inshrink_core.errors import StorageError

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
KEY = {"run": ["a", "b"], "config": {"bits": 4}}


def test_a_kept_point_is_the_same_when_loaded(tmp_path):
    store = PointStore(tmp_path / "points")
    assert store.load("u", KEY) is None
    store.keep("uniform:bits=4", KEY, POINT)
    assert store.load("uniform:bits=4", KEY) == POINT
    assert store.load("uniform:bits=4", KEY | {"run": ["a", "c"]}) is None
    assert [path.suffix for path in (tmp_path / "points").iterdir()] == [".json"]


def test_without_a_folder_nothing_is_kept():
    store = PointStore(None)
    store.keep("u", KEY, POINT)
    assert store.load("u", KEY) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: "not json",
        lambda d: "[" * 100_000,
        lambda d: json.dumps(d | {"key": {}}),
        lambda d: json.dumps(d | {"point": {"codec": "u"}}),
        lambda d: json.dumps(d | {"point": d["point"] | {"more": 1}}),
        lambda d: json.dumps(d | {"point": d["point"] | {"ratio_weights": "8"}}),
        lambda d: json.dumps(d | {"point": d["point"] | {"metric": None}}),
        lambda d: json.dumps(d | {"point": d["point"] | {"drops": 3}}),
        lambda d: json.dumps([1]),
    ],
)
def test_what_is_no_point_is_measured_again(tmp_path, damage):
    store = PointStore(tmp_path)
    store.keep("u", KEY, POINT)
    path = next(tmp_path.iterdir())
    path.write_text(damage(json.loads(path.read_text())))
    assert store.load("u", KEY) is None


def test_a_label_never_leaves_the_folder(tmp_path):
    store = PointStore(tmp_path / "points")
    store.keep("../../x:/etc=1", KEY, POINT)
    assert [path.name for path in tmp_path.iterdir()] == ["points"]
    assert len(list((tmp_path / "points").iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "points").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written"):
        PointStore(tmp_path / "points").keep("u", KEY, POINT)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a high-water mark that can be reset")
def test_the_peak_is_of_what_was_taken_even_if_given_back():
    before = bytearray(48 << 20)
    del before
    with PeakMemory() as first:
        block = bytearray(b"x") * (32 << 20)
        del block
    with PeakMemory() as second:
        pass
    assert 31 << 20 < first.nbytes < 40 << 20
    assert second.nbytes < 4 << 20

"""Measured points on disk, and the memory a measurement takes."""

import contextlib
import hashlib
import json
import subprocess
import sys
from functools import partial

import pytest

from inshrink_core.errors import StorageError
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


def test_without_a_folder_nothing_is_kept():
    store = points_in(None)
    store.keep("u", KEY, POINT.to_json())
    assert store.load("u", KEY) is None


def signed(text, before):
    """Return a document whose point was changed with the digest of what it is now, so that that is read."""
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(text)
        if isinstance(document, dict) and document["point"] != before:
            digest = hashlib.sha256(json.dumps(document["point"], sort_keys=True).encode()).hexdigest()
            return json.dumps(document | {"sha256": digest})
    return text


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: "not json",
        lambda d: "[" * 100_000,
        lambda d: json.dumps(d | {"key": {}}),
        lambda d: json.dumps(d | {"sha256": "0"}),
        lambda d: json.dumps(d | {"point": {"codec": "u"}}),
        lambda d: json.dumps(d | {"point": d["point"] | {"more": 1}}),
        lambda d: json.dumps(d | {"point": d["point"] | {"ratio_weights": "8"}}),
        lambda d: json.dumps(d | {"point": d["point"] | {"metric": None}}),
        lambda d: json.dumps(d | {"point": d["point"] | {"drops": 3}}),
        lambda d: json.dumps([1]),
    ],
)
def test_what_is_no_point_is_measured_again(tmp_path, damage):
    store = points_in(tmp_path)
    store.keep("u", KEY, POINT.to_json())
    path = next(tmp_path.iterdir())
    document = json.loads(path.read_text())
    assert store.load("u", KEY) == POINT
    path.write_text(signed(damage(document), document["point"]))
    assert store.load("u", KEY) is None


def test_a_label_never_leaves_the_folder(tmp_path):
    store = points_in(tmp_path / "points")
    store.keep("../../x:/etc=1", KEY, POINT.to_json())
    assert [path.name for path in tmp_path.iterdir()] == ["points"]
    assert len(list((tmp_path / "points").iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "points").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written"):
        points_in(tmp_path / "points").keep("u", KEY, POINT.to_json())


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

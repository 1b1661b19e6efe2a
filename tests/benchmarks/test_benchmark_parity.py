"""The record of bytes: it is the same twice, and it notices a change."""

from benchmarks import parity


def test_the_same_code_leaves_the_same_digests():
    assert parity.measure(["trainings"]) == parity.measure(["trainings"])


def test_a_document_is_the_same_wherever_and_however_fast_it_was_made(tmp_path):
    record = parity.Parity(tmp_path)
    slow = {"seconds": 2.0, "archive": f"{tmp_path}/a.inshrink", "ratio": 1 / 3}
    fast = {"seconds": 1.0, "archive": "SCRATCH/a.inshrink", "ratio": 0.3333333}
    assert record._plain(slow) == record._plain(fast)
    assert record._plain(slow) != record._plain({**fast, "ratio": 0.3334})


def test_every_kind_of_difference_is_named():
    before, after = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}
    assert parity.differences(before, after) == ["differs: b", "gone: c", "new: d"]
    assert parity.differences(before, before) == []


def test_what_archives_hold_is_told_from_how_it_is_written():
    held = {"a archive 1-100 blocks": "1", "a archive 1-100 values": "2", "a restored step.pt": "3"}
    written = {"a archive frames/00000001-100.frame": "4", "a compress document": "5"}
    assert parity._content(held | written) == held

"""The record of bytes: it is the same twice, and it notices a change."""

from benchmarks import parity


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


def test_a_bucket_has_the_same_digests_twice_and_refusals_say_their_exit_codes():
    found = parity.measure(["bucket"])
    assert found == parity.measure(["bucket"])
    assert any(name.startswith("bucket: written runs/a.inshrink/") for name in found)
    refused = [name for name in parity.measure(["refusals"]) if "exit-" in name]
    assert {name.rpartition("exit-")[2] for name in refused} == {"1", "2", "3"}

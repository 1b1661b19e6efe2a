"""The benchmark of a second thread times every call on the same tensors, and the control."""

from benchmarks.two_threads import gpt, measure


def test_every_call_and_the_control_have_a_row():
    rows = measure("tiny", gpt(width=16, n_layers=1, n_tokens=40), repetitions=1)
    assert [row["call"] for row in rows] == ["sha-256", "encode", "decode", "compress", "restore"]
    assert all(row["tensors"] == 10 and float(str(row["gain"])) > 0 for row in rows)

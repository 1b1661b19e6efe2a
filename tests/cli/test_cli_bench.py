"""``inshrink bench`` from the outside, with the sample's own evaluator."""

import re

KEYS = {
    *("codec", "bound_kind", "bound", "ratio_weights", "ratio_total", "max_drop", "mean_divergence"),
    *("config", "encode_mb_per_s", "decode_mb_per_s", "restore_seconds", "peak_memory_bytes"),
}


def test_rows_have_the_promised_keys_and_out_of_reach_is_null(cli, small_run, tmp_path):
    words = ("bench", small_run, "--codecs", "uniform:bits=8,uniform:bits=2", "-o", tmp_path / "out")
    outcome = cli(*words, "--bounds", "divergence=0.001", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    rows = outcome.document["rows"]
    assert [row["codec"] for row in rows] == ["repeat", "uniform:bits=8", "uniform:bits=2"]
    assert all(set(row) >= KEYS for row in rows)
    assert [row["ratio_weights"] is None for row in rows] == [True, False, True]
    assert rows[1]["mean_divergence"] <= 0.001 < rows[2]["mean_divergence"]

    text = cli(*words, "--bounds", "divergence=0.001,drop=9")
    assert text.code == 0
    assert re.search(r"repeat +– +≈\s", text.out)
    assert re.search(r"uniform:bits=2 +≤ 0.001 nats +– ", text.out)
    assert "3 were there already" in text.out
    assert "previous checkpoint" in text.out
    assert "--optimizer drop" in text.out
    assert str(tmp_path / "out" / "points.json") in text.out.replace("\n", "")

"""The benchmark of engines compares the same work, and counts what is there."""

import inshrink_core
from benchmarks.engines import N_STEPS, Bench, commits


def test_the_ceiling_and_the_engines_compress_the_same_columns(tmp_path):
    bench = Bench(tmp_path, 16, 1, 40)
    whole, *halves = (inshrink_core.open(path) for path in (bench.run, *bench.halves))
    assert len(whole.steps) == N_STEPS
    for step in whole.steps:
        keys = [set(half[step]) for half in halves]
        assert not keys[0] & keys[1]
        assert keys[0] | keys[1] == set(whole[step])
        assert all((half[step][key] == whole[step][key]).all() for half in halves for key in half[step])
    assert whole[1].raw_bytes() <= bench.nbytes // N_STEPS + 4 * len(whole[1])
    assert abs(halves[0][1].raw_bytes() - halves[1][1].raw_bytes()) <= bench.largest


def test_a_manifest_has_32_bytes_a_part_and_little_else(tmp_path):
    rows = commits(tmp_path, (2, 6))
    sizes = {row["workers"]: row["bytes"] for row in rows if row["what"] == "their manifest"}
    assert 32 * 2 <= (sizes[6] - sizes[2]) / 4 <= 40 * 2
    assert all(row["seconds"] >= 0 for row in rows if "seconds" in row)

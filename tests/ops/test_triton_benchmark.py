"""The benchmark of GPU speed checks what it times, and writes nothing where there is no GPU."""

import pytest
import torch

from benchmarks import gpu, results


def test_every_way_decodes_to_what_was_encoded(monkeypatch):
    monkeypatch.setattr(gpu, "REPETITIONS", 1)
    rows = gpu.rows_of(0.25, "cpu")
    moments = ["moments, exp_avg", "moments, exp_avg_sq"]
    assert [row["codec"] for row in rows] == ["lattice", "inshrinkerator", *moments]
    assert all(row["ratio"] > 8 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure")
def test_without_a_gpu_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert "no CUDA device" in str(gpu.main())
    assert not list(tmp_path.iterdir())

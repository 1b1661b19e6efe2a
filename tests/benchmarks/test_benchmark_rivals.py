import numpy as np
import pytest
import torch

from benchmarks import matrix, rival_lossless, rivals


def _floats(seed):
    generator = np.random.default_rng(seed)
    return generator.standard_normal(4096).astype(np.float32).view(np.uint8)


@pytest.mark.parametrize("make", [lambda: rival_lossless.zstd(1), lambda: rival_lossless.zstd(3)])
def test_a_lossless_rival_returns_what_it_was_given(make):
    raw = _floats(0)
    coder = make()
    assert np.array_equal(coder.decompress(coder.compress(raw)), raw)


def test_transforms_of_equal_bytes_are_zeros():
    raw = _floats(1)
    assert not rival_lossless.xor(raw, raw).any()
    assert not rival_lossless.difference(raw, raw).any()


def test_transforms_can_be_undone():
    raw, before = _floats(2), _floats(3)
    assert np.array_equal(rival_lossless.xor(rival_lossless.xor(raw, before), before), raw)
    assert np.array_equal(rival_lossless.difference(raw, before) + before, raw)


def test_a_rival_that_is_not_installed_is_a_row_that_says_so():
    def missing():
        raise ImportError("No module named 'zipnn'")

    rows = rivals.lossless_rows("digits-cnn", "zipnn", missing)
    assert rows == [
        {"run": "digits-cnn", "rival": "zipnn", "skipped": "not installed (No module named 'zipnn')"}
    ]


def test_only_float32_tensors_go_to_lossless_rivals():
    state = {"a": torch.zeros(3), "steps": torch.zeros(2, dtype=torch.int64), "b": torch.ones(2, 2)}
    assert rivals._raw_bytes(state).size == 4 * (3 + 4)


def test_what_is_compared_most_is_measured_first():
    plans = {
        "small": matrix.Plan(("lattice", "uniform")),
        "large": matrix.Plan(("lattice", "inshrinkerator")),
    }
    assert matrix.in_order(plans) == [
        ("small", "lattice"),
        ("large", "lattice"),
        ("large", "inshrinkerator"),
        ("small", "uniform"),
    ]


def test_a_lead_is_taken_at_equal_divergence():
    common = {"run": "r", "steps": 3, "date": "d", "machine": "m", "version": "v"}
    rows = [
        {**common, "codec": "lattice", "points": [[0.001, 20.0], [0.1, 80.0]]},
        {**common, "codec": "uniform", "points": [[0.001, 10.0], [0.1, 40.0]]},
        {**common, "codec": "lattice:gamma=0.5", "points": [[0.001, 30.0], [0.1, 120.0]]},
        {**common, "codec": "repeat", "points": []},
    ]
    found = {
        (row["codec"], row["divergence"]): (row["lattice_over_this"], row["best_lattice_over_this"])
        for row in matrix.leads(rows)
    }
    assert found["uniform", 0.01] == pytest.approx((2.0, 3.0), rel=1e-3)
    assert found["lattice", 0.01] == pytest.approx((1.0, 1.5))
    assert ("repeat", 0.01) not in found

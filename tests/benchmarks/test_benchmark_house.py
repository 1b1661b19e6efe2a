"""What tools count: lines of code, ratios at an excess that no setting hits exactly, the record of bytes."""

import pytest

from benchmarks import house, parity
from benchmarks.published import frontier, ratio_at_excess

SOURCE = '''"""A module
with a docstring."""

__all__ = ["One", "two"]  # of names


class One:
    """Documented."""

    def many(self):
        return (
            self  # beside code
        )


def two(): ...
'''


def test_lines_of_code_have_neither_comments_nor_docstrings(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    assert house.code_lines(path) == 7
    assert house.n_public(path) == 2


def test_a_point_that_another_beats_in_both_is_not_on_the_frontier():
    points = [(0.02, 30.0), (0.01, 20.0), (0.03, 25.0), (0.01, 15.0)]
    assert frontier(points) == [(0.01, 20.0), (0.02, 30.0)]


def test_an_excess_may_be_negative_and_nothing_is_extrapolated():
    assert ratio_at_excess([(-0.001, 10.0), (0.003, 40.0)], 0.001) == pytest.approx(20.0)
    assert ratio_at_excess([(-0.001, 10.0), (0.003, 40.0)], 0.004) is None


def test_a_bucket_has_the_same_digests_twice_and_refusals_say_their_exit_codes():
    found = parity.measure(["bucket"])
    assert found == parity.measure(["bucket"])
    assert any(name.startswith("bucket: written runs/a.inshrink/") for name in found)
    refused = [name for name in parity.measure(["refusals"]) if "exit-" in name]
    assert {name.rpartition("exit-")[2] for name in refused} == {"1", "2", "3"}


def test_a_figure_above_its_limit_and_one_without_a_limit_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(house, "LIMITS", tmp_path / "house.toml")
    monkeypatch.setattr(house, "figures", lambda: {"files": 2})

    def main(lines, *options):
        monkeypatch.setattr(house, "lines", lambda: lines)
        return house.main([*options])

    assert main({"app": 10}, "--write") == 1  # without limits, every figure is above
    assert main({"app": 10}) == main({"app": 7}) == 0
    assert main({"app": 11}) == main({"app": 1, "app/new": 1}) == 1

"""What tools count: lines of code, ratios at an excess that no setting hits exactly, the record of bytes."""

import ast

import pytest

from benchmarks import house, parity
from benchmarks.published import frontier, ratio_at_excess

SOURCE = '''"""A module
with a docstring."""

__all__ = ["One", "two"]  # of names


class One:
    """Documented."""

    def many(self, a, b, c, d, /, e, *, f, g):
        return (
            a  # beside code
        )


def two(a, b, c, d, e, f, g, *, h): ...
'''


def test_lines_of_code_have_neither_comments_nor_docstrings(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    assert house.code_lines(path) == 7
    assert house.n_public(path) == 2


def test_parameters_are_counted_without_the_object():
    functions = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.FunctionDef)]
    assert {node.name: house.n_parameters(node) for node in functions} == {"many": 7, "two": 8}


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Fixed figures, with limits in a file of the test's own."""
    monkeypatch.setattr(house, "LIMITS", tmp_path / "house.toml")
    monkeypatch.setattr(house, "lines", lambda: {"app": 10})
    monkeypatch.setattr(house, "figures", lambda: {"files": 2})


def test_a_figure_above_its_limit_fails(counted, monkeypatch):
    assert house.main(["--write"]) == 1  # without limits, every figure is above
    assert house.main([]) == 0
    monkeypatch.setattr(house, "lines", lambda: {"app": 11})
    assert house.main([]) == 1


def test_a_new_package_fails_until_it_has_a_limit(counted, monkeypatch):
    house.main(["--write"])
    monkeypatch.setattr(house, "lines", lambda: {"app": 1, "app/new": 1})
    assert house.main([]) == 1


def test_a_lower_figure_is_printed_with_what_its_limit_may_lose(counted, monkeypatch, capsys):
    house.main(["--write"])
    monkeypatch.setattr(house, "lines", lambda: {"app": 7})
    assert house.main([]) == 0
    assert "may be lowered by 3" in capsys.readouterr().out


def test_lines_are_counted_by_package(tmp_path, monkeypatch):
    monkeypatch.setattr(house, "ROOT", tmp_path)
    for name in ("inshrink_core/a", "inshrink_core/verbs/b", "inshrink_core/verbs/deep/c", "tests/cli/d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text(SOURCE)
    assert house.lines() == {"inshrink_core": 7, "inshrink_core/verbs": 14, "tests": 7}


def test_an_exercise_counts_where_a_guide_and_its_test_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(house, "ROOT", tmp_path)
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    (tmp_path / "tests" / "codecs").mkdir(parents=True)
    guide = '```toml\n[project.entry-points."inshrink.codecs"]\ncut = "cut:Cut"\n```\n'
    for name in ("codec", "verb"):
        (tmp_path / "docs" / "guides" / f"{name}.md").write_text(guide)
    (tmp_path / "tests" / "codecs" / "test_codec_guide.py").write_text("")
    assert house.guides() == {"codec": 1}


def test_a_point_that_another_beats_in_both_is_not_on_the_frontier():
    points = [(0.02, 30.0), (0.01, 20.0), (0.03, 25.0), (0.01, 15.0)]
    assert frontier(points) == [(0.01, 20.0), (0.02, 30.0)]


def test_an_excess_may_be_negative_and_nothing_is_extrapolated():
    assert ratio_at_excess([(-0.001, 10.0), (0.003, 40.0)], 0.001) == pytest.approx(20.0)
    assert ratio_at_excess([(-0.001, 10.0), (0.003, 40.0)], 0.004) is None


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

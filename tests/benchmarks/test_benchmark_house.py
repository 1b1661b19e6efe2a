"""What `make house` counts."""

import ast

import pytest

from benchmarks import house

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

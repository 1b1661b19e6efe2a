"""What `make house` counts."""

import ast

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
    functions = [one for one in ast.walk(ast.parse(SOURCE)) if isinstance(one, ast.FunctionDef)]
    assert {one.name: house.n_parameters(one) for one in functions} == {"many": 7, "two": 8}


def test_every_target_has_a_figure_and_the_parts_of_the_house_are_apart():
    found = house.figures()
    assert found.keys() == house.TARGETS.keys()
    lines = {name: lines for name, (_, lines) in house.by_package(house.ROOT / "inshrink_core").items()}
    assert found["lines of the laboratory"] == lines.pop("inshrink_core/lab")
    assert found["lines of the command line"] == lines["inshrink_core/cli"]
    del lines["inshrink_core/testing"]
    assert found["lines of the engine"] == sum(lines.values())


def test_an_exercise_counts_where_a_guide_and_its_test_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(house, "ROOT", tmp_path)
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    (tmp_path / "tests" / "codecs").mkdir(parents=True)
    guide = '```toml\n[project.entry-points."inshrink.codecs"]\ncut = "cut:Cut"\n```\n'
    for name in ("codec", "verb"):
        (tmp_path / "docs" / "guides" / f"{name}.md").write_text(guide)
    (tmp_path / "tests" / "codecs" / "test_codec_guide.py").write_text("")
    assert house.guides() == {"codec": 1}


def test_functions_that_only_return_are_told_from_others(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        'def one():\n    """Documented."""\n    return 1\n\n\ndef two():\n    a = 1\n    return a\n'
    )
    assert [
        house._only_returns(house.Place(str(path), line, name)) for line, name in [(1, "one"), (6, "two")]
    ] == [
        True,
        False,
    ]


def test_the_files_from_a_request_to_its_verb_are_those_of_the_command_line():
    names = {place.file.removeprefix(f"{house.ROOT}/inshrink_core/") for place in house._request_to_verb()}
    assert {"cli/application.py", "cli/derived.py", "request.py"} <= names


def test_what_runs_in_the_lattice_is_counted_from_its_encode():
    names = {place.name for place in house._encoding()}
    assert "FallbackCodec.encode" in names
    assert "Archive.append" not in names

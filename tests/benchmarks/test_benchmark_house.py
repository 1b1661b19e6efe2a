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

"""What `make release` refuses, and what it tries."""

import importlib.util
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
release = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(release)

DATED = "# Changelog\n\n## 1.2.0 (2031-04-05)\n\n- new\n\n## 1.1.0 (2030-01-01)\n"


def test_a_version_that_is_new_and_dated_may_be_released():
    assert release.problems("1.2.0", DATED, {"v1.1.0"}, "") == []


def test_what_keeps_a_version_from_being_released_is_said():
    for number, changelog, tags, changed, output in [
        ("1.2", DATED, set(), "", "no MAJOR.MINOR.PATCH"),
        ("1.3.0", DATED, set(), "", "expected '1.3.0 (YYYY-MM-DD)'"),
        (
            "1.2.0",
            DATED.replace("(2031-04-05)", "(unreleased)"),
            set(),
            "",
            "begins with '1.2.0 (unreleased)'",
        ),
        ("1.2.0", DATED, {"v1.2.0"}, "", "the tag v1.2.0 is there"),
        ("1.2.0", DATED, set(), " M README.md", "M README.md"),
    ]:
        found = release.problems(number, changelog, tags, changed)
        assert any(output in row for row in found), (output, found)


def test_a_release_is_tried_with_the_commands_that_readme_begins_with():
    commands = release.first_commands((ROOT / "README.md").read_text())
    assert [words[:2] for words in commands] == [
        ["inshrink", "compress"],
        ["inshrink", "verify"],
        ["inshrink", "restore"],
    ]
    assert "range(1000, 5000, 1000)" in release.TRAINING, "README restores step 4000"


def test_every_package_of_the_tree_is_in_the_wheel():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        ".".join((package, *file.relative_to(ROOT / folder).parts[:-1]))
        for package, folder in setup["package-dir"].items()
        for file in (ROOT / folder).rglob("__init__.py")
    }
    assert folders == set(setup["packages"])

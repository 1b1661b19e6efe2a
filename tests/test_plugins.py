"""Entry points: ours are found without asking every installed distribution."""

import sys
from importlib.metadata import EntryPoint

import pytest

import inshrink_core
import inshrink_lab
from inshrink_core import plugins
from inshrink_core.cli import application
from inshrink_core.errors import InputError
from tests.processes import ran


@pytest.fixture
def unscanned(monkeypatch):
    """Refuse to scan what is installed."""

    def refuse(group):
        raise AssertionError(f"{group} was looked for everywhere")

    monkeypatch.setattr(plugins, "entry_points", refuse)
    plugins.plugins.cache_clear()
    yield
    plugins.plugins.cache_clear()


@pytest.mark.parametrize(
    ("group", "name"),
    [("inshrink.codecs", "lattice"), ("inshrink.readers", "file"), ("inshrink.tasks", "char-gpt")]
    + [("inshrink.verbs", name) for name in ("average", "bench", "rehearse")],
)
def test_what_comes_with_the_project_is_found_without_a_scan(unscanned, group, name):
    point = plugins.plugin(group, name)
    assert point.name == name
    assert callable(point.load())


def test_registered_verbs_are_called_from_python_under_their_names():
    for name in ("average", "bench", "rehearse"):
        assert getattr(inshrink_core.verbs, name) is getattr(inshrink_lab, name)
    with pytest.raises(AttributeError, match="none_such"):
        _ = inshrink_core.verbs.none_such


@pytest.fixture
def registered(monkeypatch):
    """Register other verbs than those there are: a good one, ones that are none, and one with ours' names."""
    values = {
        "pet": "tests.pet_verb:Pet",
        "broken": "tests.no_such_module:Broken",
        "stray": "tests.pet_verb:stray",
        "inspect": "tests.pet_verb:Pet",
        "restore": "tests.pet_verb:Pet",
    }
    points = [EntryPoint(name, value, "inshrink.verbs") for name, value in values.items()]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == "inshrink.verbs" else [])
    plugins.plugins.cache_clear()
    yield
    plugins.plugins.cache_clear()


def test_a_verb_of_another_package_is_one_of_the_command_line_and_of_python(registered, capsys):
    assert application.main(["pet", "--name", "Rex"]) == 0
    assert capsys.readouterr().out.split() == ["name", "Rex"]
    assert application.main(["pet", "--help"]) == 0
    assert "$ inshrink pet --name Rex" in capsys.readouterr().out
    assert application.main(["inspect", str(inshrink_core.sample("digits-cnn")), "--json"]) == 0
    assert '"kind": "run"' in capsys.readouterr().out
    assert plugins.plugin("inshrink.verbs", "restore").attr == "Restore"
    try:
        assert inshrink_core.verbs.pet(name="Rex").name == "Rex"
    finally:
        vars(inshrink_core.verbs).pop("pet", None)


def test_a_verb_that_was_interrupted_says_what_it_leaves_behind(registered, capsys):
    assert application.main(["pet", "--name", ""]) == 130
    assert "interrupted; nobody was petted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "why"),
    [
        ("broken", "cannot be loaded (ModuleNotFoundError: No module named 'tests.no_such_module')"),
        ("stray", "is no request"),
    ],
)
def test_a_verb_that_cannot_be_loaded_says_so_and_harms_no_other(registered, capsys, verb, why):
    assert application.main(["--help"]) == 0
    reported = capsys.readouterr().out
    assert "pet         Pet somebody." in reported
    assert f"{verb:<11} Cannot be loaded." in reported
    assert application.main([verb]) == 2
    error = capsys.readouterr().err
    assert f"the verb '{verb}' {why}" in error
    assert plugins.plugin("inshrink.verbs", verb).value in error
    with pytest.raises(InputError, match=verb):
        getattr(inshrink_core.verbs, verb)


def test_a_verb_that_is_nobodys_names_the_one_that_was_meant(capsys):
    assert application.main(["averge", "run"]) == 2
    assert "there is no verb 'averge'; did you mean 'average'?" in capsys.readouterr().err
    assert application.main(["--nonsense"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_every_verb_of_the_engine_works_without_the_lab(tmp_path):
    program = """
import sys
sys.modules["inshrink_lab"] = None  # an import raises ImportError
import inshrink_core
from inshrink_core.cli import main
run, archive, restored = str(inshrink_core.sample()), *sys.argv[1:]
assert main(["compress", run, "-o", archive, "--steps", "100,200"]) == 0
assert main(["verify", archive, "--deep"]) == main(["restore", archive, "--all", "-o", restored]) == 0
assert main(["inspect", archive]) == main(["compare", archive, "--against", run]) == main(["--help"]) == 0
assert main(["search", run, "--trust-run", "--max-drop", "0.05", "--steps", "100,200", "--budget", "2"]) == 0
assert main(["rehearse", "char-gpt"]) == main(["compress", run, "-o", archive + "2", "--codec", "qd"]) == 2
"""
    done = ran(sys.executable, "-c", program, str(tmp_path / "a.inshrink"), str(tmp_path / "restored"))
    assert done.returncode == 0, done.stderr
    assert "there is no verb 'rehearse'" in done.stderr
    assert "there is no codec 'qd'; choose one of inshrinkerator, lattice, lossless, moments" in done.stderr

"""The public index: every name resolves lazily, is documented, and its example runs."""

import doctest
import inspect
import pickle
from collections.abc import Mapping
from importlib import import_module

import pytest

import inshrink_core

pytestmark = pytest.mark.usefixtures("evaluators_here")

PACKAGES = (
    *("inshrink_core", "inshrink_core.verbs", "inshrink_core.analysis", "inshrink_core.training"),
    "inshrink_lab",
)
NAMES = [
    (package, name)
    for package in PACKAGES
    for name in import_module(package).__all__
    if not inspect.ismodule(getattr(import_module(package), name))
]
REPORTS = ("Comparison", "Moved", "Profile", "TrainingResult", "Verification")
"""Beside those whose names end in what they are."""

VERBS = [
    (package, name)
    for package, name in NAMES
    if not name.endswith(("Report", "Event", "Inventory", "Bounds", "Rehearsal", *REPORTS))
    and name not in ("Task", "task_names")
]


def test_what_most_people_need_is_about_a_dozen_names():
    assert len([name for package, name in NAMES if package == "inshrink_core"]) <= 13


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_every_public_name_is_what_it_says_and_documented(package, name):
    value = getattr(import_module(package), name)
    assert inspect.getdoc(value)
    assert not inspect.ismodule(value)


@pytest.mark.parametrize(("package", "name"), VERBS)
def test_every_public_verb_has_an_example_that_runs(package, name):
    value = getattr(import_module(package), name)
    documented = inspect.getdoc(value) or ""
    assert ">>>" in documented, f"{package}.{name} shows no example"
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    namespace = dict(vars(import_module(value.__module__)))
    runner.run(parser.get_doctest(documented, namespace, name, None, 0), out=report.append)
    assert not report, "".join(report)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = inshrink_core.no_such_name


def test_dir_lists_the_public_names():
    assert set(dir(inshrink_core)) == set(inshrink_core.__all__)


def test_a_run_and_its_archive_are_mappings_from_step_to_checkpoint(tmp_path):
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    inshrink_core.compress(run, tmp_path / "a.inshrink", steps=run.steps[:2], codec="lossless")
    archive = inshrink_core.open(tmp_path / "a.inshrink")
    for opened, steps in ((run, run.steps), (archive, run.steps[:2])):
        assert isinstance(opened, Mapping)
        assert tuple(opened) == tuple(opened.keys()) == opened.steps == steps
        assert [checkpoint.step for checkpoint in opened.values()] == list(steps)
        assert (steps[0] in opened, 7 in opened, len(opened)) == (True, False, len(steps))
        assert opened.get(7) is None
        with pytest.raises(KeyError, match=r"no .*step"):
            _ = opened[7]


def test_a_function_that_names_the_package_can_be_sent_to_another_process():
    assert pickle.loads(pickle.dumps(inshrink_core)) is inshrink_core
    assert pickle.loads(pickle.dumps(inshrink_core.training)) is inshrink_core.training

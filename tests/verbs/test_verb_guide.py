"""The guide's module, as a package of its own, is a command and a function; see docs/guides/verb.md."""

import json

import pytest

import inshrink_core
from tests.guides import blocks, install, python

RUN = str(inshrink_core.sample("digits-cnn"))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return install("verb", tmp_path_factory.mktemp("installed"), "inshrink_zeros.py")


def inshrink(package, *words):
    return python(package, "-m", "inshrink_core.cli", *words)


@pytest.mark.documentation
def test_the_verb_of_the_guide_is_one_of_the_command_line(package):
    assert "Show which tensors have zeros." in inshrink(package, "--help").stdout
    shown = " ".join(inshrink(package, "zeros", "--help").stdout.split())
    for reported in ("--least", "--follow-links", "inshrink zeros runs/digits --least 0.5"):
        assert reported in shown
    document = json.loads(inshrink(package, "zeros", RUN, "--json").stdout)
    assert document["step"] == inshrink_core.open(RUN).steps[-1]
    assert all(0 <= share <= 1 for share in document["shares"].values())
    assert inshrink(package, "zeros", RUN, "--least", "2").returncode == 2
    wrong = inshrink(package, "zeros", RUN, "--step", "3", "--json")
    assert (wrong.returncode, json.loads(wrong.stdout)["error"]["remedy"]) == (2, "name one that is there")


@pytest.mark.documentation
def test_the_verb_of_the_guide_is_a_function(package):
    code = blocks("verb", "python")[1].replace("runs/digits", RUN)
    done = python(package, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2000 {")

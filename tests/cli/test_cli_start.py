"""How little is loaded before anything is done: help and refusals come at once."""

import json
import subprocess
import sys

import pytest

from inshrink_core.cli.application import known_verbs

ENGINE = {
    "archive",
    "chain",
    "codecs",
    "coding",
    "formats",
    "lab",
    "ops",
    "quantization",
    "search",
    "training",
}
OUTSIDE = {"numba", "numpy", "streamlit", "torch"}


def loaded(*words):
    """Return the code, and the modules of a process that ran the command line."""
    program = (
        "import json, sys; from inshrink_core.cli import main; code = main(json.loads(sys.argv[1])); "
        "sys.stdout.flush(); print(json.dumps([code, list(sys.modules)]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(words)], capture_output=True, text=True, check=True
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    return code, set(modules)


def rooms(modules):
    """Return the packages of the engine among modules."""
    return {name.split(".")[1] for name in modules if name.startswith("inshrink_core.")}


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["--version"], 0), (["restor"], 2)])
def test_what_names_no_verb_loads_no_verb(words, code):
    found, modules = loaded(*words)
    assert found == code
    assert not rooms(modules) & (ENGINE | {"analysis", "evaluate", "execution", "verbs"})
    assert not modules & (OUTSIDE | {"cyclopts", "rich"})


@pytest.mark.parametrize(
    "verb", [verb for verb in known_verbs() if verb not in ("average", "bench", "rehearse")]
)
def test_help_of_a_verb_loads_its_request_and_no_engine(verb):
    code, modules = loaded(verb, "--help")
    assert code == 0
    assert not rooms(modules) & ENGINE
    assert not modules & OUTSIDE


@pytest.mark.parametrize(
    "words",
    [["restore", "a.inshrink"], ["verify", "a.inshrink", "--nope"], ["compress", "a", "--threads", "0"]],
)
def test_wrong_words_are_refused_before_the_engine_is_loaded(words):
    code, modules = loaded(*words)
    assert code == 2
    assert not rooms(modules) & ENGINE
    assert not modules & OUTSIDE


def test_another_verb_is_not_loaded():
    """Modes are of the same verb; the base class of a request may be of its room."""
    _, modules = loaded("restore", "--help")
    verbs = {name.removeprefix("inshrink_core.verbs.") for name in modules if ".verbs." in name}
    assert verbs.isdisjoint({verb for verb in known_verbs() if verb != "restore"})

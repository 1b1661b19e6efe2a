"""How little is loaded before anything is done: help and refusals come at once."""

import json
import sys

from inshrink_core.cli.application import known_verbs
from tests.processes import ran

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


def loaded(*lines):
    """Return the exit codes of command lines, and the modules of the process that ran them all."""
    program = (
        "import json, sys; from inshrink_core.cli import main; "
        "codes = [main(words) for words in json.loads(sys.argv[1])]; "
        "sys.stdout.flush(); print(json.dumps([codes, list(sys.modules)]), file=sys.stderr)"
    )
    done = ran(sys.executable, "-c", program, json.dumps(lines))
    codes, modules = json.loads(done.stderr.splitlines()[-1])
    return codes, set(modules)


def rooms(modules):
    """Return the packages of the engine among modules."""
    return {name.split(".")[1] for name in modules if name.startswith("inshrink_core.")}


def test_what_names_no_verb_loads_no_verb():
    codes, modules = loaded(["--help"], ["--version"], ["restor"])
    assert codes == [0, 0, 2]
    assert not rooms(modules) & (ENGINE | {"analysis", "evaluate", "execution", "verbs"})
    assert not modules & (OUTSIDE | {"cyclopts", "rich"})


def test_another_verb_is_not_loaded():
    _, modules = loaded(["restore", "--help"])
    verbs = {name.removeprefix("inshrink_core.verbs.") for name in modules if ".verbs." in name}
    assert verbs.isdisjoint({verb for verb in known_verbs() if verb != "restore"})


def test_help_of_verbs_and_wrong_words_load_requests_and_no_engine():
    verbs = [verb for verb in known_verbs() if verb not in ("average", "bench", "rehearse")]
    wrong = [
        ["restore", "a.inshrink"],
        ["verify", "a.inshrink", "--nope"],
        ["compress", "a", "--threads", "0"],
    ]
    codes, modules = loaded(*([verb, "--help"] for verb in verbs), *wrong)
    assert codes == [0] * len(verbs) + [2] * len(wrong)
    assert not rooms(modules) & ENGINE
    assert not modules & OUTSIDE

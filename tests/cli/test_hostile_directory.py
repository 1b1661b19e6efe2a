"""Whoever stands in a downloaded folder executes nothing of it."""

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import inshrink_core
from inshrink_core.execution.process import (
    empty_directory,
    minimal_environment,
    start_python,
    user_environment,
)
from inshrink_core.samples import sample
from tests.hostile import BEFORE_US, executed, lay_traps
from tests.processes import ran

INSHRINK = str(Path(sys.executable).with_name("inshrink"))
MODULE = (sys.executable, "-m", "inshrink_core.cli")


@pytest.fixture
def downloaded(tmp_path):
    """Return a run among traps."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for step in (100, 200):
        shutil.copy(Path(sample("digits-cnn")) / f"step_{step:06}.pt", folder)
    return folder


def stand_in(folder, *command, **environment):
    """Run a command as somebody does who has changed into a folder."""
    return ran(*command, cwd=folder, env=os.environ | environment, timeout=280)


COMPRESS = (INSHRINK, "compress", ".", "-o", "{tmp_path}/a.inshrink")


@pytest.mark.parametrize(
    ("command", "spare", "environment", "told"),
    [
        ((INSHRINK, "inspect", "."), frozenset(), {}, ""),
        ((*MODULE, "inspect", "."), BEFORE_US, {}, "inshrink_core is imported from"),
        ((INSHRINK, "inspect", "."), BEFORE_US, {"PYTHONPATH": f"{os.pathsep}/nowhere"}, "PYTHONPATH"),
        ((sys.executable, "-P", *MODULE[1:], "inspect", "."), frozenset(), {}, ""),
        (COMPRESS, frozenset(), {}, ".numba_config.yaml of the working directory is ignored"),
    ],
    ids=["inspect", "as a module", "an empty entry of PYTHONPATH", "a safe path", "settings of Numba"],
)
def test_a_command_in_the_folder_executes_nothing_of_it(
    downloaded, tmp_path, command, spare, environment, told
):
    lay_traps(downloaded, tmp_path / "traces", spare=spare)
    done = stand_in(downloaded, *(word.format(tmp_path=tmp_path) for word in command), **environment)
    assert (done.returncode, executed(tmp_path / "traces")) == (0, []), done.stderr
    assert told in done.stderr
    assert told or "imported from" not in done.stderr


def test_an_evaluator_of_ours_imports_nothing_of_the_folder(tmp_path):
    run = tmp_path / "digits-cnn"
    shutil.copytree(sample("digits-cnn"), run, ignore=shutil.ignore_patterns(".inshrink"))
    archive = str(tmp_path / "a.inshrink")
    inshrink_core.compress(run, archive, steps=[100, 200])
    lay_traps(run, tmp_path / "traces", spare=frozenset({"evaluator"}))
    (run / "__pycache__").mkdir(exist_ok=True)
    cached = Path(importlib.util.cache_from_source(str(run / "evaluator.py")))
    cached.write_bytes(b"not the bytecode of this file")
    done = stand_in(run, INSHRINK, "compare", archive, "--against", ".")
    assert (done.returncode, executed(tmp_path / "traces")) == (0, []), done.stderr


JUDGE = """
import os, sys
assert "{downloaded}" not in sys.path and "" not in sys.path, sys.path
assert os.getcwd() == os.path.dirname(os.path.abspath(__file__)), os.getcwd()
assert os.environ["MY_DATA"] == "kept"


def evaluate(state):
    import torch, numpy, json
    return {{"loss": float(sum(t.float().abs().sum() for t in state.values()))}}
"""


def test_an_evaluator_of_the_users_has_their_environment_and_works_where_it_lies(downloaded, tmp_path):
    archive = str(tmp_path / "a.inshrink")
    inshrink_core.compress(downloaded, archive)
    lay_traps(downloaded, tmp_path / "traces")
    judge = tmp_path / "mine" / "judge.py"
    judge.parent.mkdir()
    judge.write_text(JUDGE.format(downloaded=downloaded))
    words = ("compare", archive, "--against", ".", "--evaluator", f"{judge}:evaluate")
    done = stand_in(downloaded, INSHRINK, *words, MY_DATA="kept")
    assert (done.returncode, executed(tmp_path / "traces")) == (0, []), done.stderr


def test_a_child_is_given_no_secrets_and_no_way_into_the_working_directory():
    given = {
        "HOME": "/home/me",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0",
        "INSHRINK_TRACEBACK": "1",
        "PATH": ":/usr/bin:.:bin",
        "PYTHONPATH": ":/mine:.:src",
        "PYTHONSTARTUP": "/home/me/start.py",
        "PYTHONINSPECT": "1",
        "NUMBA_CACHE_DIR": "cache",
        "LD_PRELOAD": "libjemalloc.so:./evil.so",
        "AWS_SECRET_ACCESS_KEY": "x",
        "HF_TOKEN": "x",
        "https_proxy": "http://me:x@proxy",
    }
    names = ("HOME", "LC_ALL", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "INSHRINK_TRACEBACK")
    remaining = {name: given[name] for name in names}
    remaining |= {"PATH": "/usr/bin", "PYTHONPATH": "/mine", "LD_PRELOAD": "libjemalloc.so"}
    assert minimal_environment(given) == remaining
    secrets = {name: given[name] for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "https_proxy")}
    assert user_environment(given) == remaining | secrets
    assert user_environment({"PYTHONPATH": "."}) == {}


def test_a_child_works_in_an_empty_folder_which_is_made_anew_where_somebody_tidied_it_away(tmp_path):
    shutil.rmtree(empty_directory())
    with (tmp_path / "errors").open("wb") as errors:
        program = "import os, sys; print(os.listdir(), sys.flags.safe_path)"
        child = start_python(["-c", program], errors=errors, environment=minimal_environment())
        assert child.communicate(timeout=60)[0].split() == ["[]", "True"]
    assert empty_directory().stat().st_mode & 0o077 == 0


def test_no_other_place_starts_processes():
    root = Path(__file__).parents[2]
    starts = re.compile(
        r"subprocess\.(Popen|run)\(|subprocess\.(check|call)|os\.(system|spawn|exec|fork|popen)"
        r"|multiprocessing|ProcessPool"
    )
    paths = (
        path for folder in ("inshrink_core", "inshrink_lab", "app") for path in (root / folder).rglob("*.py")
    )
    named = [str(path.relative_to(root)) for path in paths if starts.search(path.read_text())]
    assert named == ["inshrink_core/execution/process.py"]

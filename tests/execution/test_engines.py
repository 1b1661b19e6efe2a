"""Engines: tasks are done whatever becomes of workers, and nobody is left when it is over."""

import inspect
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inshrink_core import errors
from inshrink_core.errors import (
    ChecksumError,
    EngineError,
    InshrinkError,
    MissingExtraError,
    TooLargeError,
    UnsafePickleError,
)
from inshrink_core.execution.engines import ENGINES, Task, Work
from tests.processes import until

ROOT = Path(__file__).parents[2]
PROCESSES = ENGINES["processes"]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def work(function, arguments, folder="/", **options):
    tasks = [Task(f"tests.execution.engine_tasks:{function}", each, str(folder)) for each in arguments]
    return Work(lambda about, threads: tasks, **{"workers": 2, **options})


def test_results_are_in_order_and_progress_is_of_all_tasks():
    heard = []
    assert PROCESSES(work("square", range(5), progress=heard.append)) == [0, 1, 4, 9, 16]
    assert [now.done for now in heard] == sorted(now.done for now in heard)
    assert (heard[-1].done, heard[-1].total, heard[-1].stage) == (15, 15, "square")


def test_a_worker_stands_where_its_task_says(tmp_path):
    assert PROCESSES(work("place", [0], tmp_path)) == [os.path.realpath(tmp_path)]


def test_a_worker_that_dies_is_replaced_and_its_task_begun_again(tmp_path):
    assert PROCESSES(work("die_once", [str(tmp_path)])) == ["done"]


def test_a_task_that_ends_every_worker_is_given_up():
    with pytest.raises(EngineError, match=r"part 1 ended 3 times.*--workers"):
        PROCESSES(work("die", [0]))


def test_the_first_error_ends_all_and_is_raised_as_it_was():
    begun = time.monotonic()
    with pytest.raises(TooLargeError, match="here: too much; less") as caught:
        PROCESSES(work("refuse", [1, 0]))
    assert (caught.value.where, caught.value.remedy) == ("here", "less")
    assert time.monotonic() - begun < 30
    with pytest.raises(RuntimeError, match="OwnError: not foreseen"):
        PROCESSES(work("bug", [0]))


def test_an_interruption_ends_every_worker_which_tidies_up(tmp_path):
    def interrupt(now):
        if len(list(tmp_path.iterdir())) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PROCESSES(work("sleep", [str(tmp_path)] * 3, progress=interrupt))
    found = sorted(tmp_path.iterdir())
    assert [file.suffix for file in found] == [".tidy"] * 2
    for file in found:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.stem), 0)


def test_workers_end_when_the_process_that_started_them_is_killed(tmp_path):
    asked = f"PROCESSES(work('sleep', [{str(tmp_path)!r}] * 2))"
    script = f"from tests.execution.test_engines import PROCESSES, work; {asked}"
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as started:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        started.kill()
    until(lambda: all(file.suffix == ".tidy" for file in tmp_path.iterdir()))


def test_every_error_comes_back_from_a_worker_as_it_was():
    made = [
        MissingExtraError("ray", "ray"),
        ChecksumError("rotten", path=Path("x"), offset=3, tensors=("a",)),
        UnsafePickleError("unsafe", wanted=("os.system",)),
    ]
    special = {MissingExtraError, ChecksumError, UnsafePickleError}
    classes = [each for _, each in inspect.getmembers(errors, inspect.isclass)]
    classes = [each for each in classes if issubclass(each, InshrinkError) and each not in special]
    made += [each("what", where="where", expected="1", found="2", remedy="do") for each in classes]
    for error in made:
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


# ---- Ray, as far as one can tell without it ------------------------------------------------------


def test_without_ray_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"inshrink\[ray\]"):
        ENGINES["ray"](work("square", [1]))

"""Machine code that was made before is taken where it fits, and never where it does not."""

import os
import subprocess
import sys

import pytest

KERNEL = """
from inshrink_core.ops.cpu.compiled import kernel


@kernel
def add(a, b):
    return a + b + {number}
"""

PROGRAM = """
import sys
from pathlib import Path

from inshrink_core.ops.cpu import machine

machine._OPS = Path(sys.argv[1]) / "ops"
sys.path.insert(0, sys.argv[1])
from numba.core import event

from ops.cpu.tiny import add

with event.install_recorder("numba:compile") as compiled:
    value = add(1, 2)
names = [one.data["dispatcher"].py_func.__name__ for _, one in compiled.buffer if one.is_start]
print(value, names.count("add"))
"""


@pytest.fixture
def run(tmp_path):
    """Return what adds two numbers in new processes: the sums, and how often each compiled."""
    (tmp_path / "ops" / "cpu").mkdir(parents=True)

    def added(number, cache, n_processes=1, **variables):
        (tmp_path / "ops" / "cpu" / "tiny.py").write_text(KERNEL.format(number=number))
        # Python's own cache takes two sources of one size and one second for the same.
        variables = {"NUMBA_CACHE_DIR": str(tmp_path / cache), "PYTHONDONTWRITEBYTECODE": "1", **variables}
        words, environment = [sys.executable, "-c", PROGRAM, str(tmp_path)], {**os.environ, **variables}
        started = [
            subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(n_processes)
        ]
        found = [tuple(map(int, process.communicate()[0].split())) for process in started]
        return found if n_processes > 1 else found[0]

    return added


def test_processes_that_start_together_compile_a_kernel_once(run):
    assert sorted(run(0, "first", 2)) == [(3, 0), (3, 1)]


def test_machine_code_is_taken_in_the_place_of_compiling_but_not_that_of_other_sources(run, tmp_path):
    assert run(0, "first", INSHRINK_WRITE_KERNELS="1") == (3, 1)
    made = sorted((tmp_path / "ops" / "machine").rglob("*.nb?"))
    assert len(made) == 2
    assert run(0, "second") == (3, 0)
    assert run(7, "third") == (10, 1), "the source is another one"
    assert sorted((tmp_path / "ops" / "machine").rglob("*.nb?")) == made


def test_machine_code_of_another_processor_is_not_taken(run):
    run(0, "first", INSHRINK_WRITE_KERNELS="1", NUMBA_CPU_NAME="x86-64", NUMBA_CPU_FEATURES="")
    assert run(0, "second", NUMBA_CPU_NAME="x86-64-v2", NUMBA_CPU_FEATURES="") == (3, 1)

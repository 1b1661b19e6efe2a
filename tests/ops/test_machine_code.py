"""Ops are found by device, machine code that fits is taken, and who waits for it is told so."""

import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch

from inshrink_core.ops import Backend, force_backend, lattice
from inshrink_core.ops.cpu import compiled
from inshrink_core.ops.quantize import sensitivity_histogram

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


def test_machine_code_is_taken_unless_it_is_of_another_source_or_processor(run, tmp_path):
    here, elsewhere = ({"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ""} for name in ("x86-64", "x86-64-v2"))
    assert run(0, "first", INSHRINK_WRITE_KERNELS="1", **here) == (3, 1)
    made = sorted((tmp_path / "ops" / "machine").rglob("*.nb?"))
    assert len(made) == 2
    assert run(0, "second", **here) == (3, 0)
    assert run(0, "third", **elsewhere) == (3, 1), "the processor is another one"
    assert run(7, "fourth", **here) == (10, 1), "the source is another one"
    assert sorted((tmp_path / "ops" / "machine").rglob("*.nb?")) == made


def test_compiling_is_told_once_a_second_has_passed_and_never_again(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "inshrink_core.ops.cpu.compiled")
    listener, times = compiled._Compiling(), iter((1.0, 1.6, 2.2))
    monkeypatch.setattr(compiled.time, "perf_counter", lambda: next(times))
    for n_told in (0, 1, 1):
        listener.on_start(None)
        listener.on_end(None)
        assert caplog.messages == ["compiling kernels, once after an installation"] * n_told


def runs(context):
    """The modules of the functions that `sensitivity_histogram`, which Triton lacks, calls in a context."""
    calls = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_name == "sensitivity_histogram":
            calls.append(frame.f_globals["__name__"])

    with context:
        sys.setprofile(profile)
        try:
            sensitivity_histogram(torch.ones(4), torch.ones(4))
        finally:
            sys.setprofile(None)
    return calls


def test_a_back_end_runs_its_kernel_and_one_without_runs_plain_torch():
    for backend in (Backend.REFERENCE, Backend.CUDA):
        assert runs(force_backend(backend)) == ["inshrink_core.ops.quantize"]
    assert runs(force_backend(Backend.CPU)) == ["inshrink_core.ops.cpu.quantize"]
    assert runs(nullcontext()) == ["inshrink_core.ops.cpu.quantize"]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_no_kernel_is_launched_for_no_elements():
    grid = lattice.Lattice(1.0, 1, 1.0, 2**24 - 1)
    with force_backend(Backend.CUDA):
        assert lattice.round_to_lattice(torch.zeros(0), None, None, grid).largest == 0


def test_importing_ops_imports_no_compiler():
    code = "import sys, inshrink_core.ops; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

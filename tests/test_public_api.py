"""The public index: every name resolves lazily, is documented, and its example runs."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from importlib import import_module

import pytest

import inshrink_core

NAMES = [name for name in inshrink_core.__all__ if name != "errors"]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    value = getattr(inshrink_core, name)
    documented = inspect.getdoc(value) or ""
    assert ">>>" in documented, f"inshrink_core.{name} shows no example"
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    namespace = dict(vars(import_module(value.__module__)))
    runner.run(parser.get_doctest(documented, namespace, name, None, 0), out=report.append)
    assert not report, "".join(report)


def test_importing_the_package_and_opening_a_run_imports_neither_torch_nor_numba() -> None:
    script = (
        "import sys, inshrink_core; run = inshrink_core.open(inshrink_core.sample('digits-cnn'));"
        "assert run.steps; print([m for m in ('torch', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = inshrink_core.no_such_name


def test_dir_lists_the_public_names() -> None:
    assert set(dir(inshrink_core)) == set(inshrink_core.__all__)

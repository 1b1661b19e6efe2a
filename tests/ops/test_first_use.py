"""Whoever waits for kernels to be compiled is told so, once."""

import io
import logging

from rich.console import Console

from inshrink_core.cli.output import _printed_above
from inshrink_core.ops.cpu import compiled


def test_compiling_is_told_once_a_second_has_passed_and_never_again(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "inshrink_core.ops.cpu.compiled")
    listener, times = compiled._Compiling(), iter((1.0, 1.6, 2.2))
    monkeypatch.setattr(compiled.time, "perf_counter", lambda: next(times))
    for n_told in (0, 1, 1):
        listener.on_start(None)
        listener.on_end(None)
        assert caplog.messages == ["compiling kernels, once after an installation"] * n_told


def test_the_line_stands_above_the_bar_and_nowhere_after_it():
    shown, logger = io.StringIO(), logging.getLogger("inshrink_core.ops.cpu.compiled")
    before = logger.level
    with _printed_above(Console(file=shown)):
        logger.info("compiling kernels")
    logger.info("compiling more")
    assert shown.getvalue() == "compiling kernels\n"
    assert (logger.level, logger.handlers) == (before, [])

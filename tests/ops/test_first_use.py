"""Whoever waits for kernels to be compiled is told so, once."""

import io
import logging

from rich.console import Console

from inshrink_core.cli.output import _told_above
from inshrink_core.ops.cpu import compiled


def compile_for(listener, monkeypatch, *seconds):
    for duration in seconds:
        times = iter((0.0, duration))
        monkeypatch.setattr(compiled.time, "perf_counter", lambda times=times: next(times))
        listener.on_start(None)
        listener.on_end(None)


def test_compiling_is_told_once_it_has_taken_a_second_and_never_again(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "inshrink_core.ops.cpu.compiled")
    listener = compiled._Compiling()
    compile_for(listener, monkeypatch, 0.6)
    assert caplog.messages == []
    compile_for(listener, monkeypatch, 0.6, 5.0)
    assert caplog.messages == ["compiling kernels, once after an installation"]


def test_a_kernel_that_another_needs_counts_once(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "inshrink_core.ops.cpu.compiled")
    listener = compiled._Compiling()
    times = iter((0.0, 0.6, 0.9))
    monkeypatch.setattr(compiled.time, "perf_counter", lambda: next(times))
    listener.on_start(None)
    listener.on_start(None)
    listener.on_end(None)
    listener.on_end(None)
    assert caplog.messages == []


def test_the_line_stands_above_the_bar_and_nowhere_after_it():
    shown, logger = io.StringIO(), logging.getLogger("inshrink_core.ops.cpu.compiled")
    before = logger.level
    with _told_above(Console(file=shown)):
        logger.info("compiling kernels")
    logger.info("compiling more")
    assert shown.getvalue() == "compiling kernels\n"
    assert (logger.level, logger.handlers) == (before, [])

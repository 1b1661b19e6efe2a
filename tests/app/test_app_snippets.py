"""What pages show under "Do this without the explorer" does what it says."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import inshrink_core
from inshrink_core.cli import main
from tests.app.builders import archives, judged, open_panel
from tests.app.job_stubs import STEPS


def snippets(app: Any) -> tuple[list[list[str]], str]:
    """Take the last panel of a page apart: its commands as words, and its Python lines."""
    open_panel(app)
    panel = next(found for found in app.expander if found.label == "Do this without the explorer")
    commands, python = (code.value for code in panel.code)
    lines = [shlex.split(line) for line in commands.splitlines()]
    assert all(words[0] == "inshrink" for words in lines)
    return [words[1:] for words in lines], python


def run_both(app: Any, folder: Path) -> None:
    """Run the commands, and then the Python lines where the commands wrote nothing."""
    commands, python = snippets(app)
    before = set(folder.iterdir())
    for words in commands:
        assert main(words) == 0, words
    for path in set(folder.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    exec(compile(python, "snippet", "exec"), {})


@pytest.mark.parametrize(
    ("panel", "query", "packed"),
    [("write", {"what": "all"}, True), ("pack", {}, False), ("write", {"what": "range"}, False)],
)
def test_the_export_of_a_run(archived, jobs, panel, query, packed, monkeypatch):
    monkeypatch.chdir(archived.parent)
    app = archives(panel, archived, codec="uniform", **query)
    if packed:
        app.toggle(key="export.packed").set_value(True).run()
    target = Path(next(box for box in app.text_input if box.label == "Write to").value)
    run_both(app, archived.parent)
    made = inshrink_core.open(target)
    assert made.steps == ((40,) if panel == "pack" else STEPS)
    assert target.is_file() == (packed or panel == "pack")


def test_verifying_and_a_dry_run_of_pruning(archived, jobs, monkeypatch, capsys):
    monkeypatch.chdir(archived.parent)
    run_both(archives("verify", archived), archived.parent)
    app = archives("prune", archived)
    app.number_input(key="prune.last").set_value(1).run()
    app.multiselect(key="prune.keep").set_value([20]).run()
    run_both(app, archived.parent)
    assert "'ok': True" in capsys.readouterr().out
    assert inshrink_core.open(archived.with_name("run.inshrink")).steps == STEPS


def test_comparing_and_restoring(archived, jobs, monkeypatch, capsys):
    judged(archived)
    monkeypatch.chdir(archived.parent)
    for panel in ("compare", "tensors", "restore"):
        run_both(archives(panel, archived), archived.parent)
    assert "'original': 2.0, 'restored': 2.0, 'drop': 0.0" in capsys.readouterr().out

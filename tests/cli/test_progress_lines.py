"""``--progress jsonl``: messages of a verb for another program, and what ends the verb."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from inshrink_core.cli import main
from inshrink_core.cli.output import shown_progress
from inshrink_core.execution.progress import Progress
from inshrink_core.verbs.search import Search

COMMAND = (sys.executable, "-P", "-m", "inshrink_core.cli")


@pytest.fixture
def run(tmp_path):
    """Write a small run of four steps, with an evaluator."""
    folder = tmp_path / "run"
    folder.mkdir()
    weights = {"w": torch.randn(32, 16, generator=torch.Generator().manual_seed(0))}
    for step in (10, 20, 30, 40):
        weights["w"][0, step % 16] += 0.5
        torch.save({"model": weights, "step": step}, folder / f"step_{step:06}.pt")
    (folder / "judge.py").write_text(
        "def evaluate(state):\n    return {'loss': float(state['w'].abs().sum())}\n"
    )
    return folder


def reported(words, capsys):
    """Run a verb; return its exit code, its document and its messages."""
    capsys.readouterr()
    code = main([*words, "--json", "--progress", "jsonl"])
    output = capsys.readouterr()
    return code, json.loads(output.out), [json.loads(line) for line in output.err.splitlines()]


def test_a_comparison_tells_each_step_as_soon_as_it_is_known(run, capsys):
    archive = f"{run}.inshrink"
    assert main(["compress", str(run), "-o", archive, "--codec", "lossless", "--quiet"]) == 0
    words = ["compare", archive, "--against", str(run), "--evaluator", f"{run}/judge.py:evaluate"]
    code, document, messages = reported(words, capsys)
    assert code == 0
    names = set(document["steps"][0])
    assert [{k: v for k, v in message["found"].items() if k in names} for message in messages] == document[
        "steps"
    ]
    assert {message["found"]["metric"] for message in messages} == {"loss"}


def test_an_error_is_the_document_of_always_and_a_form_that_is_none_is_refused(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "none"), "--json", "--progress", "jsonl"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 2
    assert main(["verify", str(tmp_path / "none"), "--progress", "loud"]) == 2
    assert "choose one of bar, jsonl" in capsys.readouterr().err


def begin(task, run):
    """Start a rehearsal, which takes long, and wait for its first word."""
    words = ["rehearse", task, "-o", f"{run.parent}/rehearsal", "--steps", "100000"]
    process = subprocess.Popen(
        [*COMMAND, *words, "--json", "--progress", "jsonl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "rehearse" in process.stderr.readline()
    return process


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_verb_that_is_told_to_end_is_interrupted_and_says_so(task, run):
    process = begin(task, run)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(output)["error"]["type"] == "Interrupted"


@pytest.mark.skipif(not hasattr(__import__("select"), "poll"), reason="this system has no poll")
def test_a_verb_ends_when_nobody_reads_its_progress_any_more(task, run):
    process = begin(task, run)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(30) != 0
    assert process.stdout is not None
    process.stdout.close()


def test_a_bar_is_shown_where_somebody_watches(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with shown_progress(Search("run", max_drop=0.1), "bar", hidden=False) as tell:
        tell(Progress("search", 3, 8, 100, "best so far 7.00×"))
    assert "best so far 7.00×" in sys.stderr.getvalue()
    with shown_progress(Search("run", max_drop=0.1), "bar", hidden=True) as tell:
        assert tell is None

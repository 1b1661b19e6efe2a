"""``--progress jsonl``: messages of a verb for another program, and what ends the verb."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest

from inshrink_core.cli.output import shown_progress
from inshrink_core.execution.progress import Progress
from inshrink_core.verbs.search import Search

COMMAND = (sys.executable, "-P", "-m", "inshrink_core.cli")


def test_a_comparison_tells_each_step_as_soon_as_it_is_known(small_run, made_archive, cli):
    words = ("compare", made_archive, "--against", small_run, "--trust-run", "--json", "--progress", "jsonl")
    outcome = cli(*words)
    rows = outcome.document["steps"]
    found = [json.loads(line)["found"] for line in outcome.err.splitlines()]
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    assert {row["metric"] for row in found} == {"accuracy"}


def begin(task, folder):
    """Start a rehearsal, which takes long, and wait for its first word."""
    words = ["rehearse", task, "-o", f"{folder}/rehearsal", "--steps", "100000"]
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
def test_a_verb_that_is_told_to_end_is_interrupted_and_says_so(task, tmp_path):
    process = begin(task, tmp_path)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(output)["error"]["type"] == "Interrupted"


@pytest.mark.skipif(not hasattr(__import__("select"), "poll"), reason="this system has no poll")
def test_a_verb_ends_when_nobody_reads_its_progress_any_more(task, tmp_path):
    process = begin(task, tmp_path)
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

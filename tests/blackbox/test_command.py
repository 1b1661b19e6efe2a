"""The command itself: help, errors, exit codes, progress, and what is never executed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.blackbox.conftest import contents, document, inshrink

VERBS = (
    "commit", "compare", "compress", "estimate", "evaluate", "export", "inspect", "prune", "release",
    "restore", "run", "search", "sensitivity", "ui", "verify",
)  # fmt: skip

FROZEN = Path(__file__).with_name("frozen.sha256")


def test_these_tests_are_the_frozen_ones() -> None:
    """After a change on purpose: ``cd tests/blackbox && sha256sum *.py > frozen.sha256``."""
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FROZEN.parent.glob("*.py")}
    assert found == {
        name: digest for digest, name in (line.split() for line in FROZEN.read_text().splitlines())
    }


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_listed_and_explains_itself_with_an_example(verb: str) -> None:
    assert f"  {verb} " in inshrink("--help").out
    outcome = inshrink(verb, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith("Usage: inshrink ")
    assert f"$ inshrink {verb}" in outcome.out.split("Example:")[1]


def test_the_program_has_a_version_and_passes_on_exit_codes(tmp_path: Path) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-W", "ignore", "-m", "inshrink_core", *words]
        return subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, check=False)

    done = command("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "inshrink")
    failed = command("inspect", str(tmp_path / "nothing"), "--json")
    assert failed.returncode == 2
    assert json.loads(failed.stdout)["error"]["exit_code"] == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("compres", "{run}", "-o", "{out}"), "compress"),
        (("compress", "{run}", "-o", "{out}", "--colour", "red"), "--colour"),
        (("compress", "{run}"), "--output"),
        (("compress", "{out}/nothing", "-o", "{out}"), "nothing"),
        (("compress", "{run}", "-o", "{out}", "--steps", "11"), "11"),
        (("compress", "{run}", "-o", "{out}", "--codec", "lattise"), "lattise"),
        (("compress", "{run}", "-o", "{out}", "--set", "coarsness=1"), "coarsness"),
        (("compress", "{run}", "-o", "{out}", "--set", "coarseness=-1"), "coarseness"),
        (("compress", "{run}", "-o", "{out}", "--keyframe-every", "0"), "--keyframe-every"),
        (("compress", "{run}", "-o", "{out}", "--max-drop", "0.1"), "evaluator"),
        (("compress", "{run}", "-o", "{out}", "--optimizer", "none"), "none"),
        (("restore", "{run}", "-o", "{out}"), "archive"),
        (("restore", "{archive}", "-o", "{out}", "--step", "11"), "11"),
        (("restore", "{archive}", "-o", "{out}", "--format", "zip"), "zip"),
        (("export", "{archive}"), "--pack"),
        (("prune", "{archive}"), "keep"),
        (("compare", "{archive}", "--against", "{run}"), "evaluator"),
        (("sensitivity", "{run}", "--metric", "size"), "size"),
        (("run", "{out}/request.json"), "request.json"),
    ],
)
def test_words_that_cannot_be_used_are_one_line_a_document_and_exit_code_2(
    run: Path, made_exact: Path, tmp_path: Path, words: tuple[str, ...], named: str
) -> None:
    places = {"run": run, "archive": made_exact, "out": tmp_path / "out"}
    outcome = inshrink(*(word.format(**places) for word in words), "--json")
    assert outcome.code == 2
    error = outcome.document["error"]
    assert outcome.document.keys() == {"error"}
    assert error.keys() == {"type", "message", "where", "remedy", "exit_code"}
    assert error["exit_code"] == 2
    assert named in error["message"]
    assert outcome.err == f"inshrink: {error['message']}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"verb": "compress", "fields": {"run": "r", "archive": "a", "colour": "red"}}, "colour"),
        ({"verb": "compress", "fields": {"run": 3, "archive": "a"}}, "run"),
        ({"verb": "compress", "fields": {"run": "r"}}, "archive"),
        ({"verb": "delete", "fields": {}}, "delete"),
    ],
)
def test_a_request_that_is_none_is_refused_with_the_name_of_its_field(
    tmp_path: Path, request_: dict, named: str
) -> None:
    (tmp_path / "request.json").write_text(json.dumps(request_))
    outcome = inshrink("run", tmp_path / "request.json", "--json")
    assert outcome.code == 2
    assert named in outcome.document["error"]["message"]


class Payload:
    """A pickle that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_never_executed(run: Path, tmp_path: Path) -> None:
    folder, made = tmp_path / "run", tmp_path / "executed"
    shutil.copytree(run, folder)
    torch.save({"model": Payload(made), "step": 50}, folder / "step_0050.pt")
    for words in (("inspect", folder), ("compress", folder, "-o", tmp_path / "a.inshrink")):
        outcome = inshrink(*words, "--json")
        assert outcome.code == 1 or "step_0050.pt" in outcome.out
    assert not made.exists()
    assert document("inspect", tmp_path / "a.inshrink")["steps"] == [10, 20, 30, 40]


def test_text_is_for_people_and_quiet_says_nothing(run: Path, made_exact: Path) -> None:
    for path in (run, made_exact):
        outcome = inshrink("inspect", path)
        assert (outcome.code, outcome.err) == (0, "")
        assert "10, 20, 30, 40" in outcome.out
        assert "\x1b" not in outcome.out
        assert inshrink("inspect", path, "--quiet") == (0, "", "")


def test_progress_is_one_object_a_line_and_the_document_is_alone_on_stdout(run: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-W", "ignore", "-m", "inshrink_core", "compress", str(run)]
    words = ["-o", str(tmp_path / "a.inshrink"), "--codec", "lossless", "--json", "--progress", "jsonl"]
    done = subprocess.run([*program, *words], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["appended"] == [10, 20, 30, 40]
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines
    assert all(line.keys() >= {"verb", "done", "total", "unit", "step"} for line in lines)
    assert lines[-1]["done"] == lines[-1]["total"]


def test_reading_verbs_change_nothing_of_a_run_or_an_archive(run: Path, exact: Path) -> None:
    before = contents(run), contents(exact)
    for words in (("inspect", exact), ("verify", exact, "--deep"), ("prune", exact, "--keep-last", "1")):
        document(*words)
    document("release", run, exact)
    document("sensitivity", exact, "--metric", "update")
    assert (contents(run), contents(exact)) == before

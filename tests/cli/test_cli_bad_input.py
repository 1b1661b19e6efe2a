"""Bad input gets one line that says what, where and what to do, its exit code, and nothing is lost."""

import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from inshrink_core.cli import main
from tests.cli.conftest import one_line
from tests.processes import ran
from tests.signals import interrupted


def test_a_directory_without_a_readable_checkpoint_lists_what_it_skipped(cli, tmp_path):
    (tmp_path / "half.pt").write_bytes(b"PK\x03\x04 cut off")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    outcome = cli("inspect", tmp_path, "--json")
    assert outcome.code == 2
    document = outcome.document
    assert document["steps"] == []
    assert {Path(row["path"]).name for row in document["skipped"]} == {"half.pt", "empty.safetensors"}
    assert document["error"]["exit_code"] == 2
    text = cli("inspect", tmp_path)
    assert "half.pt" in text.out
    one_line(text)


@pytest.mark.parametrize(
    ("words", "clue"),
    [
        (("--codec", "moments"), "--optimizer"),
        (("--set", "bins"), "KEY=VALUE"),
        (("--set", "bins=many"), "bins"),
        (("--steps", "1:5"), "1:5"),
        (("--steps", "x"), "'x'"),
        (("--steps",), "see inshrink compress --help"),
        (("--device", "abacus"), "--device abacus is not a device"),
        (("--config", "nowhere.toml"), "nowhere.toml"),
        (("--resumed-from", "10"), ""),
        (("--step-pattern", "("), "("),
        (("--watch", "--steps", "10"), "--watch and --steps exclude"),
        (("--watch", "--poll", "0"), "--poll 0"),
        (("--idle", "3"), "--idle goes with --watch"),
        (("--progress", "loud"), "choose one of bar, jsonl"),
        (("--max-drop", "-1"), "--max-drop -1"),
        (("--coarseness", "nan"), "--coarseness nan is no number"),
        (("--max-drop", "0.01", "--evaluator", "{judge}", "--eval-metric", "loss"), "no such luck"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_option_leaves_no_archive(cli, small_run, tmp_path, words, clue):
    target, judge = tmp_path / "a.inshrink", tmp_path / "judge.py"
    judge.write_text("def evaluate(state):\n    raise ValueError('no such luck')\n")
    outcome = cli(
        "compress", small_run, "-o", target, *(word.format(judge=f"{judge}:evaluate") for word in words)
    )
    assert clue in one_line(outcome)
    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "clue"),
    [
        ("bins = ", "TOML"),
        ("bins = 4", "bins"),
        ("settings = 4", "settings"),
        ("optimizer = 4", "$.optimizer"),
        ("codec = []", "codec"),
        ('keyframe_every = "x"', "keyframe_every"),
    ],
)
def test_a_wrong_config_file_is_explained(cli, small_run, tmp_path, text, clue):
    config = tmp_path / "config.toml"
    config.write_text(text)
    outcome = cli("compress", small_run, "-o", tmp_path / "a.inshrink", "--config", config)
    assert clue in one_line(outcome)


@pytest.mark.parametrize(
    ("words", "clue"),
    [
        (("export", "{archive}", "-o", "{out}", "--pack", "{out}"), "say what to make"),
        (("export", "{archive}", "--pack", "{out}", "--weights-only"), "copy the whole archive"),
        (("export", "{archive}", "-o", "{out}", "--exact"), "--weights-only"),
        (("export", "{archive}", "-o", "{out}", "--weights-only", "--exact", "--ratio", "9"), "exclude"),
        (("export", "{archive}", "-o", "{out}", "--step", "11"), "no frame of step 11"),
        (("export", "{run}", "-o", "{out}"), "not an Inshrink archive"),
        (("export", "{archive}", "--unpack", "{archive}"), "already exists"),
        (("prune", "{archive}", "--keep", "11"), "no frame of step 11"),
        (("prune", "{run}", "--keep-last", "1"), "not an Inshrink archive"),
        (("compress", "{archive}", "-o", "{out}"), "this is an archive"),
        (("compare", "{archive}", "--against", "{archive}"), "this is an archive"),
        (("verify", "{archive}", "--against", "{archive}"), "this is an archive"),
        (("restore", "{archive}", "--tensors", "nothing*", "-o", "{out}"), "nothing*"),
        (("inspect", "file://{out}"), "{out}"),
        (("inspect", "nowhere://bucket/x"), "no object storage of the name 'nowhere'"),
        (("search", "{run}", "--max-drop", "nan"), "--max-drop nan"),
        (("search", "{run}", "--max-drop", "0.01", "--config", "{none}"), "found no configuration"),
        (("estimate", "{run}", "--max-restore-cost", "0.1"), "bounds go with --try"),
        (("estimate", "{run}", "--each", "bits"), "--set bits"),
        (("estimate", "{run}", "--try", "0"), "--try 0 (expected ≥ 1"),
    ],
)
def test_what_cannot_be_done_is_one_line(cli, archive, small_run, tmp_path, words, clue):
    none = tmp_path / "none.json"
    none.write_text('{"best": null, "trials": []}')
    places = {"run": small_run, "archive": archive, "out": tmp_path / "out", "none": none}
    outcome = cli(*(word.format(**places) for word in words))
    assert outcome.out == ""
    assert clue.format(**places) in one_line(outcome)
    assert not (tmp_path / "out").exists()


def test_a_target_that_is_something_else_is_left_alone(cli, small_run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    outcome = cli("compress", small_run, "-o", tmp_path)
    assert str(tmp_path) in one_line(outcome)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_unforeseen_error_is_owned_up_to(cli, tmp_path, monkeypatch):
    fail = Mock(side_effect=ZeroDivisionError("seven"))
    monkeypatch.setattr(import_module("inshrink_core.chain.archive"), "is_archive", fail)
    outcome = cli("inspect", tmp_path)
    assert "this is a bug" in one_line(outcome, 70)
    monkeypatch.setenv("INSHRINK_TRACEBACK", "1")
    assert "Traceback" in cli("inspect", tmp_path).err


def test_a_missing_extra_is_named(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "streamlit", None)
    outcome = cli("ui")
    assert "inshrink[app]" in one_line(outcome)


def test_a_reader_that_goes_away_is_no_error(made_archive):
    command = f"{sys.executable} -P -m inshrink_core.cli inspect {made_archive} --tensors"
    done = ran("bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named(small_run):
    command = f"{sys.executable} -P -m inshrink_core.cli inspect {small_run} > /dev/full"
    done = ran("bash", "-c", command)
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert done.stderr.count("\n") == 1


def test_names_cannot_command_the_terminal(cli, tmp_path):
    from safetensors.torch import save_file

    save_file({"w\x1b[31mred": torch.ones(3)}, tmp_path / "step_1.safetensors")
    outcome = cli("inspect", tmp_path, "--tensors")
    assert "\x1b" not in outcome.out
    assert r"\x1b[31m" in outcome.out


def test_ctrl_c_keeps_committed_steps_and_the_same_command_continues(longer_run, tmp_path):
    target = tmp_path / "a.inshrink"
    words = ["compress", str(longer_run), "-o", str(target)]
    frames = target / "frames"
    code, _, err = interrupted(lambda: len([*frames.glob("*.frame")]) >= 2, *words)
    assert code == 130, err
    assert "the same command continues" in err
    assert err.count("\n") == 1
    assert main(["verify", str(target), "--deep", "-q"]) == 0
    assert len(list(frames.iterdir())) < 16
    assert main([*words, "-q"]) == 0
    assert main(["verify", str(target), "--deep", "--against", str(longer_run), "-q"]) == 0

import os
import shutil
from pathlib import Path

import pytest
import torch

import inshrink_core
from inshrink_core.cli import main
from inshrink_core.errors import NotFoundError
from inshrink_core.execution.results import results_folder
from inshrink_core.samples import (
    TRUSTED_DIGESTS,
    TRUSTED_FILES,
    evaluator_digest,
    is_trusted_sample,
    sample,
    sample_names,
)

pytestmark = pytest.mark.usefixtures("evaluators_here")

RUN = sample("digits-cnn")
CHECKPOINTS = sorted(RUN.glob("step_*.pt"))
SEARCH = ("--max-drop", "0.5", "--steps", "1700,1800", "--budget", "2", "--quiet")


def content_of(folder):
    """Every file but compiled ones: its bytes and when it was written."""
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_the_digest_of_the_bundled_evaluator_is_the_one_that_is_trusted():
    assert {evaluator_digest(sample(name)) for name in sample_names()} == TRUSTED_DIGESTS


def test_an_unknown_sample_is_refused_with_the_names_there_are():
    assert sample_names() == ("digits-cnn",)
    with pytest.raises(NotFoundError, match="digits-cnn"):
        sample("mnist")
    with pytest.raises(NotFoundError):
        sample("../digits-cnn")


@pytest.mark.parametrize("name", TRUSTED_FILES)
def test_trust_ends_with_any_changed_or_missing_file_and_not_with_the_path(tmp_path, name):
    for each in TRUSTED_FILES:
        shutil.copy(RUN / each, tmp_path / each)
    assert is_trusted_sample(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert not is_trusted_sample(tmp_path)
    (tmp_path / name).unlink()
    assert not is_trusted_sample(tmp_path)


def test_the_sample_takes_at_most_eighteen_megabytes():
    assert sum(path.stat().st_size for path in RUN.iterdir() if path.is_file()) <= 18_000_000


@pytest.mark.parametrize("path", [CHECKPOINTS[0], CHECKPOINTS[-1]], ids=["first", "last"])
def test_a_checkpoint_holds_everything_a_training_needs(path):
    state = torch.load(path, weights_only=True)
    assert set(state) == {"model", "ema", "optimizer", "scheduler", "step", "rng"}
    assert state["step"] == int(path.stem.removeprefix("step_"))
    assert state["model"]["conv1.weight"].shape == (16, 1, 3, 3)
    assert all(set(s) == {"step", "exp_avg", "exp_avg_sq"} for s in state["optimizer"]["state"].values())
    assert sum(tensor.numel() for name, tensor in state["model"].items() if "running" not in name) < 45_000


def test_a_search_and_a_comparison_leave_the_sample_as_it_is(tmp_path):
    before = content_of(RUN.parent)
    run, archive = str(RUN), str(tmp_path / "digits.inshrink")
    assert main(["search", run, *SEARCH]) in (0, 1)
    assert main(["sensitivity", run, "--quiet"]) == 0
    assert main(["compress", run, "-o", archive, "--steps", "1700,1800", "--quiet"]) == 0
    assert main(["compare", archive, "--against", run, "--quiet"]) == 0
    assert content_of(RUN.parent) == before
    remaining = results_folder(RUN, make=False)
    assert remaining.is_relative_to(os.environ["XDG_CACHE_HOME"])
    assert (remaining / "search.jsonl").is_file()
    assert list((remaining / "cache").iterdir())
    # They are found again there.
    reported = inshrink_core.verbs.estimate(inshrink_core.open(RUN), steps=(1700, 1800))
    assert reported.basis == "trials"


def test_results_of_a_run_that_cannot_be_written_are_found_until_there_are_ones_of_the_reader(
    tmp_path, monkeypatch
):
    own = tmp_path / "run" / ".inshrink"
    own.mkdir(parents=True)
    allowed = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: not Path(path).is_relative_to(own.parent) and allowed(path, mode)
    )
    assert results_folder(own.parent, make=False) == own
    users = results_folder(own.parent)
    assert users.is_relative_to(os.environ["XDG_CACHE_HOME"])
    assert results_folder(own.parent, make=False) == users

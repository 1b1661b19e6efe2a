"""What verbs are asked for and say: steps, what no reader sees into, and hints."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import inshrink_core
from inshrink_core.cli import main
from inshrink_core.errors import InputError
from inshrink_core.formats import open_run
from tests.runs import write_run


@pytest.fixture(scope="module")
def archive(run_path):
    inshrink_core.compress(run_path, run_path.parent / "run.inshrink", codec="lossless", steps=":20")
    return run_path.parent / "run.inshrink"


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        (5, (5,)),
        (np.int64(10), (10,)),
        ([np.int32(5), 10], (5, 10)),
        (range(5, 11, 5), (5, 10)),
        ("5,15", (5, 15)),
        ([5, "15:"], (5, 15, 20)),
    ],
)
def test_one_step_is_given_as_several_are(archive, tmp_path, steps, chosen):
    assert inshrink_core.restore(archive, tmp_path / "out", steps=steps).steps == chosen


@pytest.mark.parametrize("steps", [1.5, [2.0], [None], b"5", np.array(0.5)])
def test_what_is_no_step_is_refused(archive, tmp_path, steps):
    with pytest.raises(InputError, match="a step is a whole number, or a text"):
        inshrink_core.restore(archive, tmp_path / "out", steps=steps)


@pytest.fixture
def bulky(tmp_path):
    """A run whose folders hold more bytes in files of an unknown layout than in tensors."""
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        (folder / "state").mkdir(parents=True)
        save_file({"fc.weight": torch.full((64, 64), float(step))}, folder / "model.safetensors")
        for rank, nbytes in enumerate((3 << 20, 2 << 20, 1000)):
            (folder / "state" / f"rank{rank}.bin").write_bytes(os.urandom(nbytes))
    return tmp_path / "run"


@pytest.mark.parametrize("verb", ["inspect", "estimate", "compress"])
def test_a_verb_says_what_share_of_the_bytes_it_cannot_see_into(verb, bulky, tmp_path, capsys):
    target = ["-o", str(tmp_path / "a.inshrink")] if verb == "compress" else []
    assert main([verb, str(bulky), *target, "--json"]) == 0
    unseen = json.loads(capsys.readouterr().out)["unseen"]
    outside = sum(p.stat().st_size for p in bulky.glob("checkpoint-*/**/*") if p.is_file()) - 2 * 64 * 64 * 4
    assert unseen["bytes"] == outside
    assert unseen["share"] == pytest.approx(outside / (outside + 2 * 64 * 64 * 4))
    assert unseen["files"][:2] == [
        {"path": "state/rank0.bin", "bytes": 3 << 20},
        {"path": "state/rank1.bin", "bytes": 2 << 20},
    ]


def test_a_run_that_is_all_tensors_says_nothing_of_it(tmp_path):
    torch.save({"model": {"fc.weight": torch.ones(64, 64)}, "step": 1}, tmp_path / "step_1.pt")
    assert open_run(tmp_path).notes == ("steps come from the key 'step'",)


def test_compress_ends_with_a_hint_where_the_run_shows_what_could_judge_it(tmp_path, capfd):
    run = write_run(tmp_path / "run", n_steps=2)

    def hints(name, *words):
        assert main(["compress", str(run), "-o", str(tmp_path / name), *words]) == 0
        return [row for row in capfd.readouterr().out.splitlines() if row.startswith("hint")]

    assert hints("nothing") == []
    (run / "evaluator.py").write_text("raise SystemExit('this is never executed')")
    (hint,) = hints("beside")
    assert f"--evaluator {run}/evaluator.py:evaluate" in "".join(hint.split("\n"))
    (run / "inshrink.toml").write_text('[evaluator]\nfile = "evaluator.py"\n')
    (hint,) = hints("named")
    assert "--trust-run" in hint
    assert hints("chosen", "--codec", "lossless") == []

"""The programs and commands of pages that are followed from beginning to end, in an empty folder."""

import pytest
import torch

import inshrink_core
from tests.docs.pages import blocks, run_in_order

pytestmark = [pytest.mark.documentation, pytest.mark.timeout(600)]

DCP = "docs/integrations/dcp.md"


def test_every_command_of_the_tutorial_runs_in_order(tmp_path):
    output = run_in_order("docs/tutorial.md", tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {"train.py", "evaluator.py", "script.py"}
    first, resumed = (
        float(output[f"python train.py{rest}"].rsplit(maxsplit=1)[1])
        for rest in ("", " resumed restored/step-600.pt")
    )
    assert resumed == pytest.approx(first, rel=0.05)
    assert "(128, 2)" in output["python script.py"].replace("[", "(").replace("]", ")")


def _losses(text):
    """Return what ``step 40 on 2 ranks: held-out loss 0.0068`` tells, by step."""
    return {int(line.split()[1]): float(line.split()[-1]) for line in text.splitlines()}


@pytest.mark.filterwarnings("ignore")
def test_every_command_of_the_page_on_distributed_checkpoints_runs_in_order(tmp_path, monkeypatch):
    output = run_in_order(DCP, tmp_path)
    torchrun = "torchrun --standalone --nproc-per-node"
    saved = _losses(output[f"{torchrun} 2 train.py"])
    assert sorted(saved) == [20, 40, 60]
    for ranks in (1, 3):
        resumed = _losses(output[f"{torchrun} {ranks} train.py restored"])
        assert sorted(resumed) == [40, 60]
        assert resumed[40] == pytest.approx(saved[40], rel=0.05)
        assert resumed[60] == pytest.approx(saved[60], rel=0.2)
        assert resumed[60] < resumed[40]
    assert not any((tmp_path / "restored" / f"__{rank}_0.distcp").exists() for rank in (2, 3))

    inside = _losses(output[f"{torchrun} 2 inside.py"])
    resumed = _losses(output[f"{torchrun} 3 inside.py 40"])
    assert inside == pytest.approx(saved, rel=1e-3)
    assert sorted(resumed) == [40, 60]
    assert resumed[40] == pytest.approx(saved[40], rel=0.05)
    frames = inshrink_core.open(tmp_path / "inside.inshrink").reader.frames
    assert [(frame.step, frame.branch, frame.n_parts) for frame in frames] == [
        *[(step, 0, 2) for step in (20, 40, 60)],
        (60, 1, 3),
    ]

    monkeypatch.chdir(tmp_path)
    (snippet,) = [block for block in blocks(DCP) if block.is_python and block.title is None]
    exec(snippet.text, {})
    archive, made = inshrink_core.open("run.inshrink"), torch.load("step-40.pt", weights_only=True)
    assert made["step"] == 40
    assert all(torch.equal(tensor, archive[40][name]) for name, tensor in made["model"].items())
    inshrink_core.restore("exact.inshrink", "again", steps=[40])
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (tmp_path / "run" / "step-40" / path.name).read_bytes()

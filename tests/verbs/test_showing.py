"""What the reports of several verbs say in the same words."""

import pytest
import torch

from inshrink_core.chain import Archive
from inshrink_core.checkpoint import OPTIMIZER_ROLES
from inshrink_core.cli import main
from inshrink_core.training import Saver
from inshrink_core.verbs.shared.showing import optimizer_text
from tests.runs import write_run


@pytest.mark.parametrize("role", sorted(OPTIMIZER_ROLES))
def test_every_role_of_an_optimizer_has_a_line(role):
    assert optimizer_text("compressed", ["weight", role.value])
    assert optimizer_text("exact", ["weight", role.value]) == "bit-exact"
    assert optimizer_text("compressed", ["weight", "buffer", "gradient"]) == ""


def test_state_of_no_known_kind_is_called_what_it_is(tmp_path, capfd):
    """Adafactor's rows and columns are exact, and so its line says."""
    model = torch.nn.Linear(12, 8)
    optimizer = torch.optim.Adafactor(model.parameters())
    target = tmp_path / "run.inshrink"
    with Saver(target, model, optimizer) as saver:
        for step in (1, 2):
            model(torch.ones(3, 12)).square().sum().backward()
            optimizer.step()
            saver.save(step)
    archive = Archive.open(target)
    assert "state" in {spec.role.value for spec in archive.checkpoint(archive.last).specs}
    capfd.readouterr()
    assert main(["inspect", str(target)]) == 0
    line = next(row for row in capfd.readouterr().out.splitlines() if row.startswith("optimizer state"))
    assert line.removeprefix("optimizer state").strip() == "bit-exact"


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

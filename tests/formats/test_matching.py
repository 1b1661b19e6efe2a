"""Whose optimizer state it is: right for every parameter, or nobody's, never a guess."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import inshrink_core
from inshrink_core.chain import Archive
from inshrink_core.checkpoint import TensorRole
from inshrink_core.formats import open_run
from inshrink_core.formats.matching.laws import Slot, by_order
from tests.formats.matching_runs import PLAIN, measure


@pytest.mark.parametrize("kind", PLAIN)
def test_state_is_matched_right_or_not_at_all(tmp_path, kind):
    headers, matched = measure(kind, tmp_path)
    assert headers.wrong == matched.wrong == 0
    assert matched.right >= max(0.7 * matched.tensors, headers.right)


def sorted_run(folder, steps, *, seed=0):
    """Write a run whose weights are sorted by name and whose state is numbered; return whose it is."""
    torch.manual_seed(seed)
    names = ["z_in", "mid", "a_out"]
    model = nn.ModuleDict({name: nn.Linear(48, 48, bias=False) for name in names})
    model["head"] = nn.Linear(48, 48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mixing = torch.randn(48, 48) / 7
    for step in range(1, 20 * steps + 1):
        x = torch.randn(32, 48)
        hidden = x
        for name in names:
            hidden = torch.tanh(model[name](hidden))
        optimizer.zero_grad()
        (model["head"](hidden) - torch.sin(x @ mixing)).square().mean().backward()
        optimizer.step()
        if step % 20 == 0:
            place = folder / f"checkpoint-{step}"
            place.mkdir(parents=True)
            save_file(dict(model.state_dict()), place / "model.safetensors")
            torch.save(optimizer.state_dict(), place / "optimizer.pt")
            (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return dict(enumerate(name for name, _ in model.named_parameters()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of six checkpoints whose weights are sorted by name, and whose state it is."""
    folder = tmp_path_factory.mktemp("sorted")
    return folder, sorted_run(folder, 6)


@pytest.fixture
def sorted_copy(trained, tmp_path):
    """The run as a folder of its own, and whose state it is."""
    shutil.copytree(trained[0], tmp_path / "run")
    return trained[1]


def moments(checkpoint):
    return {spec.name for spec in checkpoint.specs if spec.role is TensorRole.EXP_AVG}


def test_headers_alone_leave_equal_shapes_unattributed_and_say_so(tmp_path):
    sorted_run(tmp_path / "run", 1)
    run = open_run(tmp_path / "run")
    assert moments(run[20]) == {f"optimizer.state.{i}" for i in range(4)} | {"head.bias"}
    assert "optimizer state of 4 of 5 parameters is unattributed" in run.notes[1]
    # Its learning rates are kept with it.
    assert run[20].hyperparameters["optimizer.state.0"]["lr"] == 3e-3
    # One checkpoint tells no movement.
    assert moments(run.matched()[20]) == moments(run[20])


def test_values_tell_what_names_do_not(tmp_path, sorted_copy):
    truth = sorted_copy
    run = open_run(tmp_path / "run").matched()
    assert moments(run[120]) == set(truth.values())
    assert len(run.notes) == 1
    saved = torch.load(tmp_path / "run/checkpoint-120/optimizer.pt", weights_only=True)["state"]
    for number, name in truth.items():
        assert torch.equal(run[120][f"{name}@exp_avg_sq"], saved[number]["exp_avg_sq"])
    fisher = inshrink_core.analysis.sensitivity(open_run(tmp_path / "run"), "fisher", steps=(120,)).by(
        "tensor"
    )
    for name, mean in zip(fisher.rows, fisher.mean[:, 0], strict=True):
        number = next(number for number, owner in truth.items() if owner == name)
        state = saved[number]
        expected = state["exp_avg_sq"].mean() / (1 - 0.999 ** float(state["step"]))
        assert mean == pytest.approx(float(expected), rel=0.02)


def test_a_checkpoint_that_goes_while_it_is_looked_at_tells_nothing(tmp_path, sorted_copy):
    truth = sorted_copy
    run = open_run(tmp_path / "run")
    (tmp_path / "run/checkpoint-40/model.safetensors").unlink()
    assert moments(run.matched()[120]) == set(truth.values())


def test_an_archive_written_step_by_step_has_the_matching_of_one_written_at_once(tmp_path, sorted_copy):
    truth = sorted_copy
    steps = open_run(tmp_path / "run").steps
    inshrink_core.compress(open_run(tmp_path / "run"), tmp_path / "once.inshrink")
    kept = tmp_path / "growing"
    kept.mkdir()
    for step in steps:
        (kept / f"checkpoint-{step}").symlink_to(tmp_path / "run" / f"checkpoint-{step}")
        run = open_run(kept, follow_links=True)
        inshrink_core.compress(run, tmp_path / "grown.inshrink")
        # What is there already is known to be there, whatever it was called then.
        assert inshrink_core.compress(run, tmp_path / "grown.inshrink").appended == ()
    once, grown = (Archive.open(tmp_path / f"{name}.inshrink") for name in ("once", "grown"))
    assert moments(once[steps[-1]]) == moments(grown[steps[-1]]) == set(truth.values())
    for name in ("once", "grown"):
        assert inshrink_core.verify(tmp_path / f"{name}.inshrink", against=open_run(tmp_path / "run")).ok


def test_what_an_archive_says_holds_on_where_the_run_tells_nothing(tmp_path, sorted_copy):
    truth = sorted_copy
    steps = open_run(tmp_path / "run").steps
    inshrink_core.compress(open_run(tmp_path / "run"), tmp_path / "a.inshrink", steps=steps[:-1])
    alone = open_run(tmp_path / "run" / f"checkpoint-{steps[-1]}")
    inshrink_core.compress(alone, tmp_path / "a.inshrink")
    assert moments(Archive.open(tmp_path / "a.inshrink")[steps[-1]]) == set(truth.values())


def test_a_saver_archives_whose_state_it_is_by_truth(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW([*reversed(list(model.parameters()))])
    with inshrink_core.Saver(tmp_path / "a.inshrink", model, optimizer, codec="lossless") as saver:
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        saver.save(1)
        saved = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
        assert sorted(saver.read(1)["optimizer"]["param_groups"][0]["params"]) == list(range(8))
    checkpoint = Archive.open(tmp_path / "a.inshrink")[1]
    assert [file.path for file in checkpoint.files] == ["step_000001.pt"]
    for name, value in saved.items():
        assert torch.equal(checkpoint[f"{name}@exp_avg"], value)


@pytest.mark.parametrize(
    "phases", [("all", "matrices"), ("last", "all"), ("first", "last"), ("all", "groups")]
)
def test_an_optimizer_made_anew_over_other_parameters_has_its_own_state(tmp_path, phases):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4))
    named = dict(model.named_parameters())
    matrices, vectors = ([name for name in named if named[name].ndim == n] for n in (2, 1))
    choices = {"all": [[*named]], "matrices": [matrices], "groups": [matrices, vectors]}
    choices |= {"first": [[*named][:4]], "last": [[*named][4:]]}
    truth = {}
    for step in range(1, 7):
        groups = choices[phases[step > 3]]
        if step in (1, 4):
            optimizer = torch.optim.AdamW([{"params": [named[name] for name in group]} for group in groups])
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        names = [name for group in groups for name in group]
        truth[step] = {
            f"{name}@exp_avg": state["state"][i]["exp_avg"].clone() for i, name in enumerate(names)
        }
        torch.save({"model": model.state_dict(), "optimizer": state, "step": step}, tmp_path / f"{step}.pt")
    run = inshrink_core.open(tmp_path).matched()
    for step, moments in truth.items():
        found = {key: run[step][key] for key in run[step] if key.endswith("@exp_avg")}
        assert found.keys() == moments.keys()
        assert all(torch.equal(found[key], moment) for key, moment in moments.items())


def test_tensors_are_listed_in_the_order_of_the_model(tmp_path):
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    names = [f"h.{i}.{leaf}" for i in (0, 2, 10) for leaf in ("weight", "bias")]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "run/checkpoint-1/model.safetensors")
    shown = inshrink_core.verbs.inspect(tmp_path / "run").facts["tensors"]
    assert [row["key"] for row in shown] == names


def slots(*groups):
    return [
        Slot(f"optimizer.state.{number}", 0, at, shape)
        for number, (at, shape) in enumerate(
            (at, shape) for at, group in enumerate(groups) for shape in group
        )
    ]


def test_an_order_claims_decay_groups_and_whole_parts_of_a_model():
    weights = {"a.weight": (4, 4), "a.bias": (4,), "b.weight": (4, 4), "b.bias": (4,)}
    two, _ = by_order(slots([(4, 4), (4, 4)], [(4,), (4,)]), weights)
    assert list(two.values()) == ["a.weight", "b.weight", "a.bias", "b.bias"]
    # Which of two equal parts an optimizer trains, no order tells.
    assert by_order(slots([(4, 4), (4,)]), weights)[0] == {}

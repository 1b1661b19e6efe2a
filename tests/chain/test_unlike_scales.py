"""Tensors far smaller or slower than the others of their model come back as what they are, by default."""

import json

import pytest
import torch

import inshrink_core
from inshrink_core.chain import Archive
from inshrink_core.cli import main

SAVES = (1, 2, 3, 4, 5)
BODY = ((64, 64), 0.5, 1e-2)

# Of each model: tensors by name, with shape, root mean square at the start (0: zeros) and learning rate,
# which may differ by save.
MODELS = {
    "splats": {"xyz": ((500, 3), 10.0, 1.6e-2), "rest": ((500, 45), 1e-3, 1.25e-5)},
    "adapter": {"frozen": ((64, 64), 0.5, 0.0), "a": ((16, 64), 0.02, 1e-3), "b": ((64, 16), 0.0, 1e-3)},
    "zero conv": {"body": BODY, "zero.weight": ((32, 32, 1, 1), 0.0, 1e-5), "zero.bias": ((32,), 0.0, 1e-5)},
    "layer scale": {"body": BODY, "gamma": ((256,), 1e-5, 1e-7)},
    "hash grid": {"body": BODY, "grid": ((4096, 2), 1e-4, 1e-6)},
    "thawed": {"body": BODY, "late": ((64, 32), 1e-3, (0, 0, 0, 1e-5, 1e-5))},
    "stopped": {"body": BODY, "early": ((64, 32), 1e-3, (1e-5, 1e-5, 0, 0, 0))},
    "slow": {"body": BODY, "slow": ((64, 96), 1.0, 1e-7)},
    "tiny": {"body": BODY, "tiny": ((64, 32), 1e-20, 1e-22), "tinier": ((48, 64), 1e-24, 1e-26)},
}
ADAM, SGD = torch.optim.Adam, torch.optim.SGD


def write_run(folder, tensors, *, kind=ADAM, state=True, n_rows=None):
    """Write a training on noisy gradients; of the last tensor, only `n_rows` rows have any."""
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator) * size)
        for name, (shape, size, _) in tensors.items()
    }
    groups = [{"params": [parameter], "name": name, "lr": 0.0} for name, parameter in parameters.items()]
    optimizer = kind(groups, **({"eps": 1e-30} if kind is ADAM else {"momentum": 0.9}))
    folder.mkdir()
    for save in SAVES:
        for group in optimizer.param_groups:
            rates = tensors[group["name"]][2]
            group["lr"] = rates[save - 1] if isinstance(rates, tuple) else rates
        for _ in range(10):
            for name, parameter in parameters.items():
                gradient = torch.randn(parameter.shape, generator=generator) + 0.5
                if kind is ADAM:
                    gradient *= 1e-3 / (tensors[name][1] or 1.0)
                if n_rows is not None and name == list(tensors)[-1]:
                    gradient[n_rows:] = 0.0
                parameter.grad = None if tensors[name][2] == 0.0 else gradient
            optimizer.step()
        saved = {
            "model": {name: parameter.detach().clone() for name, parameter in parameters.items()},
            "step": save,
        }
        saved |= {"optimizer": optimizer.state_dict()} if state else {}
        torch.save(saved, folder / f"step_{save}.pt")
    return folder


def relative(tensor, other):
    return float((tensor.double() - other.double()).norm() / other.double().norm())


def errors_of(run, archive):
    """Yield save, name, relative error and relative movement since the save before, from the second on."""
    opened = Archive.open(archive)
    states = {save: torch.load(run / f"step_{save}.pt")["model"] for save in SAVES}
    for save in SAVES[1:]:
        for name, now in states[save].items():
            yield save, name, relative(opened[save][name], now), relative(states[save - 1][name], now)


def require_near(run, archive):
    """An error is at most .1, or what the tensor moved; .25 of the body, whose rounding is shaped."""
    for save, name, error, moved in errors_of(run, archive):
        most = 0.25 if name == "body" else 0.1
        assert error <= max(most, moved), (save, name)


@pytest.mark.parametrize("state", [True, False], ids=["with its optimizer", "weights alone"])
@pytest.mark.parametrize("model", MODELS)
def test_a_tensor_comes_back_within_a_tenth_of_its_size_or_within_its_movement(tmp_path, model, state):
    run = write_run(tmp_path / "run", MODELS[model], state=state)
    inshrink_core.compress(run, tmp_path / "whole", threads=1)
    require_near(run, tmp_path / "whole")
    # As a training writes them: nothing is known of the saves to come.
    inshrink_core.compress(run, tmp_path / "grown", look_ahead=False, threads=1)
    require_near(run, tmp_path / "grown")


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("splats", {"kind": SGD}),
        ("hash grid", {"kind": SGD}),
        ("hash grid", {"n_rows": 40}),
        ("hash grid", {"n_rows": 40, "kind": SGD, "state": False}),
        ("tiny", {"kind": SGD}),
    ],
)
def test_so_it_does_under_other_optimizers_and_sparse_gradients(tmp_path, model, options):
    run = write_run(tmp_path / "run", MODELS[model], **options)
    inshrink_core.compress(run, tmp_path / "archive", threads=1)
    require_near(run, tmp_path / "archive")


def test_a_restored_run_of_unlike_tensors_goes_on_within_the_same_bounds(tmp_path):
    run = write_run(tmp_path / "run", MODELS["splats"])
    inshrink_core.compress(run, tmp_path / "archive", steps=SAVES[:3], threads=1)
    inshrink_core.compress(run, tmp_path / "archive", resumed_from=3, threads=1)
    require_near(run, tmp_path / "archive")


def test_compress_and_verify_name_tensors_with_large_errors_unless_they_were_asked_for(tmp_path, capsys):
    run = write_run(tmp_path / "run", {"body": BODY, "other": ((64, 64), 0.5, 1e-2)})

    def named(archive, *options):
        found = []
        for words in (
            ["compress", str(run), "-o", archive, *options],
            ["verify", archive, "--against", str(run)],
        ):
            assert main([*words, "--json"]) == 0
            found.append(json.loads(capsys.readouterr().out)["large_errors"])
        assert [row["name"] for row in found[0]] == [row["name"] for row in found[1]]
        return found[0]

    assert named(str(tmp_path / "default")) == []
    rows = named(str(tmp_path / "coarse"), "--set", "coarseness=200")
    assert {row["name"] for row in rows} == {"body", "other"}
    assert all(row["relative_error"] > 0.25 and row["step"] in SAVES for row in rows)
    config = tmp_path / "config.toml"
    config.write_text('[settings]\ncoarseness = 200\n[[override]]\nmatch = "body"\ncoarseness = 100\n')
    assert {row["name"] for row in named(str(tmp_path / "asked"), "--config", str(config))} == {"other"}

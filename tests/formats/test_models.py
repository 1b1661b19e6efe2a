"""Models of a checkpoint: found wherever they are, told apart by name, averages known as what they are."""

import copy
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import inshrink_core
from inshrink_core.checkpoint import TensorRole, twins
from inshrink_core.errors import NotFoundError
from inshrink_core.formats import open_run
from tests.formats.run_builders import Call


def net(seed=0, width=6):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return optimizer


def saved(folder, content, name="ckpt_1.pt"):
    torch.save(content, folder / name)
    return open_run(folder)


MODEL, OTHER = net(1), net(2, 8)
OPTIMIZER, OTHER_OPTIMIZER = trained(MODEL), trained(OTHER)
AVERAGE = copy.deepcopy(MODEL)
with torch.no_grad():
    for value in AVERAGE.parameters():
        value.mul_(0.5)
STATE, EMA, SECOND = MODEL.state_dict(), AVERAGE.state_dict(), OTHER.state_dict()
SHADOW = [value.detach() for value in AVERAGE.parameters()]
N_PARAMETERS = sum(value.numel() for value in MODEL.parameters())


AVERAGES = {
    "ema": {"model": STATE, "ema": EMA},
    "a network of any name": {"network": STATE, "network_ema": EMA},
    "state dict in the average": {"model": STATE, "ema": {"state_dict": EMA, "decay": 0.9}},
    "EMAModel of diffusers": {"model": STATE, "ema": {"decay": 0.9, "shadow_params": SHADOW}},
    "torch_ema": {
        "model": STATE,
        "ema": {"num_updates": 3, "shadow_params": SHADOW, "collected_params": None},
    },
    "a shadow by name": {"model": STATE, "ema": {"shadow": dict(AVERAGE.named_parameters()), "backup": {}}},
    "WeightAveraging of Lightning": {
        "state_dict": EMA,
        "current_model_state": STATE,
        "averaging_state": {"n_averaged": torch.tensor(3)},
    },
    "a callback": {"state_dict": STATE, "callbacks": {"EMA{'decay': 0.9}": {"ema_state_dict": EMA}}},
    "fairseq": {"model": STATE, "extra_state": {"ema": EMA, "epoch": 3}},
    "ema-pytorch": {
        "model": STATE,
        "ema": {f"online_model.{name}": value for name, value in STATE.items()}
        | {f"ema_model.{name}": value for name, value in EMA.items()}
        | {"initted": torch.tensor(True), "step": torch.tensor(5)},
    },
    "a list of weights and buffers": {"model": STATE, "shadow": list(EMA.values())},
    "two averages": {"model": STATE, "emas": [EMA, STATE]},
    "a teacher": {"model": STATE, "teacher": EMA},
    "called like nothing": {"model": STATE, "smooth": EMA},
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_a_moving_average_is_no_part_of_the_model(tmp_path, kind):
    run = saved(tmp_path, {"optimizer": OPTIMIZER.state_dict(), "step": 7, **AVERAGES[kind]})
    checkpoint = run[run.steps[0]]
    assert checkpoint.n_parameters == N_PARAMETERS
    state, average = checkpoint.state_dict(), checkpoint.state_dict("average")
    fresh = net()
    fresh.load_state_dict(state, strict=True)
    assert all(torch.equal(state[name], value) for name, value in STATE.items())
    fresh.load_state_dict(average, strict=True)
    assert all(torch.equal(average[name], value) for name, value in AVERAGE.named_parameters())
    moments = {spec.name for spec in checkpoint.specs if spec.role is TensorRole.EXP_AVG}
    assert moments == {name for name, _ in MODEL.named_parameters()}
    buffers = {name for name, _ in MODEL.named_buffers()}
    for spec in checkpoint.specs:
        if twin := checkpoint.twins.get(spec.name):
            assert (spec.role is TensorRole.BUFFER) == (twin in buffers)


SEVERAL = {
    "a generator beside the model": ({"model": STATE, "D": SECOND}, {"": STATE, "D": SECOND}),
    "netG and netD": ({"netG": STATE, "netD": SECOND}, {"netG": STATE, "netD": SECOND}),
    "an average of one of them": (
        {"g": STATE, "d": SECOND, "g_ema": EMA},
        {"g": STATE, "d": SECOND, "g_ema": EMA, "average": EMA},
    ),
    "actor and critic": (
        {"actor": {"state_dict": STATE}, "critic": {"state_dict": SECOND}},
        {"actor": STATE, "critic": SECOND},
    ),
    "a list": ({"models": [STATE, SECOND]}, {"models.0": STATE, "models.1": SECOND}),
    "models by name": ({"models": {"G": STATE, "D": SECOND}}, {"models.G": STATE, "models.D": SECOND}),
    "a tuple": ((STATE, SECOND, 3), {"0": STATE, "1": SECOND}),
    "a list in the place of the model": ({"model": [STATE, SECOND]}, {"0": STATE, "1": SECOND}),
}


def require(checkpoint, models):
    """Require that a checkpoint has these models by name, bit for bit."""
    for which, expected in models.items():
        found = checkpoint.state_dict(which)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", SEVERAL)
def test_models_side_by_side_are_read_by_their_places(tmp_path, kind):
    content, models = SEVERAL[kind]
    (checkpoint,) = saved(tmp_path, content).values()
    require(checkpoint, models)
    buffers = {spec.name.split(".")[-1] for spec in checkpoint.specs if spec.role is TensorRole.BUFFER}
    assert buffers == {"running_mean", "running_var", "num_batches_tracked"}


def test_an_archive_has_the_models_of_its_run(tmp_path):
    content, models = SEVERAL["an average of one of them"]
    inshrink_core.compress(saved(tmp_path, content), tmp_path / "a.inshrink", codec="lossless")
    (checkpoint,) = inshrink_core.Archive.open(tmp_path / "a.inshrink").values()
    require(checkpoint, models)


def test_a_model_that_is_not_there_is_an_error(tmp_path):
    checkpoint = saved(tmp_path, {"model": STATE, "D": SECOND})[1]
    with pytest.raises(NotFoundError, match="the checkpoint has the models D"):
        checkpoint.state_dict("G")
    with pytest.raises(NotFoundError, match="no model 'average'"):
        checkpoint.state_dict("average")


PLACES = {
    "a tuple": (STATE, OPTIMIZER.state_dict(), 12),
    "a list": [STATE, OPTIMIZER.state_dict()],
    "the only model of a list": {"models": [STATE], "optimizer": OPTIMIZER.state_dict()},
    "half None": {
        name: value for key, item in STATE.items() for name, value in ((key, item), (f"{key}._x", None))
    },
    "numbers among tensors": STATE | {f"{name}.scale": 0.5 for name in STATE} | {"0.dtype": "qint8"},
    "an average alone": {"ema": STATE, "step": 3},
    "a name of its own": {"regressor": STATE, "step": 3},
}


@pytest.mark.parametrize("kind", PLACES)
def test_the_only_model_of_a_file_is_found_and_has_plain_names(tmp_path, kind):
    checkpoint = next(iter(saved(tmp_path, PLACES[kind]).values()))
    assert checkpoint.state_dict().keys() == STATE.keys()
    assert checkpoint.models == ()


def test_records_and_random_states_are_no_models(tmp_path):
    history = [{"loss": torch.rand(40), "accuracy": torch.rand(40)} for _ in range(3)]
    content = {
        "model": STATE,
        "history": history,
        "losses": [torch.rand(9), torch.rand(9)],
        "rng_states": {"ema": 3, "torch": torch.get_rng_state()},
        "extra_state": {"cache": {"a.b": torch.rand(3, 3)}},
    }
    checkpoint = saved(tmp_path, content)[1]
    assert {spec.name for spec in checkpoint.specs} == STATE.keys()


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_an_optimizer_for_each_parameter_has_the_name_of_its_key(tmp_path, wrapper):
    model = net(3)
    each = {
        f"{wrapper}{name}": torch.optim.AdamW([value], lr=0.1 / n)
        for n, (name, value) in enumerate(model.named_parameters(), 1)
    }
    model(torch.randn(8, 4)).square().sum().backward()
    for optimizer in each.values():
        optimizer.step()
    states = {name: optimizer.state_dict() for name, optimizer in reversed(each.items())}
    checkpoint = saved(tmp_path, {"model": model.state_dict(), "optimizer": states})[1]
    for n, (name, value) in enumerate(model.named_parameters(), 1):
        state = each[f"{wrapper}{name}"].state[value]
        assert torch.equal(checkpoint[f"{name}@exp_avg"], state["exp_avg"])
        assert checkpoint.hyperparameters[name]["lr"] == 0.1 / n


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["model.a.w", "ema_model.module.a.w", "ema_model.n_averaged"],
            {"ema_model.module.a.w": "model.a.w"},
        ),
        (["net.a.w", "net_ema.a.w"], {"net_ema.a.w": "net.a.w"}),
        # Latent diffusion's average has names without dots.
        (["model.d.a.0.w", "model_ema.da0w", "model_ema.decay"], {"model_ema.da0w": "model.d.a.0.w"}),
        (["encoder.w", "schema.w"], {}),
        (["a.w", "ema.b.w"], {}),
    ],
)
def test_averages_within_a_model_are_found_by_names(names, expected):
    shapes = {name: (2, 3) if name.endswith("w") else () for name in names}
    assert twins(shapes) == expected


def test_an_ensemble_whose_members_are_all_trained_has_no_average(tmp_path):
    twin = copy.deepcopy(MODEL)
    both = [OPTIMIZER.state_dict(), trained(twin).state_dict()]
    content = {"model": STATE, "model2": twin.state_dict(), "optimizers": both}
    assert saved(tmp_path, content)[1].n_parameters == 2 * N_PARAMETERS
    averages = {"model": STATE, "model2": twin.state_dict(), "optimizer": OPTIMIZER.state_dict()}
    assert saved(tmp_path, averages)[1].n_parameters == N_PARAMETERS


def step_folder(root, step):
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    return folder


def save_model(folder, state, name="model.safetensors"):
    folder.mkdir(exist_ok=True, parents=True)
    save_file({key: value.contiguous() for key, value in state.items()}, folder / name)
    (folder / "config.json").write_text("{}")


FOLDERS = {
    "adapters of PEFT": (
        {"policy/adapter_model.safetensors": STATE, "reward/adapter_model.safetensors": SECOND},
        {"policy": STATE, "reward": SECOND},
    ),
    "a reference adapter": (
        {"adapter_model.safetensors": STATE, "reference/adapter_model.safetensors": SECOND},
        {"": STATE, "reference": SECOND},
    ),
    "an average beside the model": (
        {"model.safetensors": STATE, "model_ema.safetensors": EMA},
        {"": STATE, "average": EMA},
    ),
    "a module of sentence-transformers": (
        {"model.safetensors": STATE, "2_Dense/model.safetensors": SECOND},
        {"": STATE, "2_Dense": SECOND},
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_models_in_folders_of_a_checkpoint_are_read(tmp_path, kind):
    files, models = FOLDERS[kind]
    for step in (500, 1000):
        folder = step_folder(tmp_path / "run", step)
        for name, state in files.items():
            save_model((folder / name).parent, state, Path(name).name)
        torch.save(OPTIMIZER.state_dict(), folder / "optimizer.bin")
        torch.save({"last_epoch": 1}, folder / "scheduler.bin")
        (folder / "random_states_0.pkl").write_bytes(b"opaque")
    run = open_run(tmp_path / "run")
    assert run.steps == (500, 1000)
    require(run[500], models)
    owned = {spec.parameter for spec in run[500].specs if spec.role is TensorRole.EXP_AVG_SQ}
    of = next(which for which, state in models.items() if state is STATE)
    assert owned >= {f"{of}.{name}" if of else name for name in ("0.weight", "2.weight")}


def test_torch_files_with_some_names_in_common_are_models_of_their_own(tmp_path):
    folder = step_folder(tmp_path, 1)
    deeper = nn.Sequential(*net(4), nn.Linear(3, 1))
    for name, model in {"actor": MODEL, "critic": deeper, "critic_target": deeper}.items():
        torch.save(model.state_dict(), folder / f"{name}.pth")
    torch.save(OPTIMIZER.state_dict(), folder / "optimizer.pth")
    checkpoint = open_run(tmp_path)[1]
    assert checkpoint.state_dict("actor").keys() == STATE.keys()
    assert checkpoint.state_dict("critic").keys() == deeper.state_dict().keys()
    assert set(checkpoint.twins.values()) == {f"critic.{name}" for name in deeper.state_dict()}


def test_a_model_that_cannot_be_read_without_running_it_travels_as_it_is(tmp_path):
    folder = step_folder(tmp_path, 1)
    save_model(folder, STATE)
    (folder / "tower").mkdir()
    torch.save({"a": Call(os.system, "true")}, folder / "tower/pytorch_model.bin")
    assert open_run(tmp_path)[1].models == ()


def test_the_sensitivity_of_an_average_is_that_of_what_it_averages(tmp_path):
    run = saved(tmp_path, {"model": STATE, "ema": EMA, "optimizer": OPTIMIZER.state_dict(), "step": 2})
    for metric in ("fisher", "taylor"):
        table = inshrink_core.analysis.sensitivity(run, metric).by("tensor")
        means = dict(zip(table.rows, table.mean[:, 0].tolist(), strict=True))
        assert means.keys() == {p + name for p in ("", "ema.") for name, _ in MODEL.named_parameters()}
        assert all(means[f"ema.{name}"] == means[name] > 0 for name, _ in MODEL.named_parameters())
    own = inshrink_core.analysis.sensitivity(run, "magnitude").by("tensor")
    means = dict(zip(own.rows, own.mean[:, 0].tolist(), strict=True))
    assert means["ema.0.weight"] == pytest.approx(means["0.weight"] / 2)


def test_tensors_in_a_tuple_with_their_optimizer_are_the_model(tmp_path):
    # As 3D Gaussian splatting saves them: (capture(), iteration).
    values = [nn.Parameter(torch.randn(5, n)) for n in (3, 4)]
    optimizer = torch.optim.Adam([{"params": [value], "name": f"p{n}"} for n, value in enumerate(values)])
    sum(value.square().sum() for value in values).backward()
    optimizer.step()
    run = saved(tmp_path, ((3, *values, optimizer.state_dict(), 0.1), 700), "chkpnt700.pth")
    assert run.steps == (700,)
    specs = run[700].specs
    assert [spec.shape for spec in specs if spec.role is TensorRole.WEIGHT] == [(5, 3), (5, 4)]
    assert [spec.shape for spec in specs if spec.role is TensorRole.EXP_AVG] == [(5, 3), (5, 4)]
    assert not any(spec.is_unattributed for spec in specs)


@pytest.mark.parametrize("suffix", ["bin", "pt"])
def test_every_optimizer_of_a_folder_is_read(tmp_path, suffix):
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file(MODEL.state_dict(), folder / "model.safetensors")
    parameters = list(MODEL.parameters())
    for number, part in enumerate((parameters[:2], parameters[2:])):
        optimizer = torch.optim.SGD(part, lr=0.1, momentum=0.9)
        MODEL(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        name = f"optimizer_{number}" if number else "optimizer"
        torch.save(optimizer.state_dict(), folder / f"{name}.{suffix}")
    run = open_run(tmp_path)
    assert (run.steps, run.unreadable) == ((5,), ())
    assert sum(spec.role is TensorRole.MOMENTUM for spec in run[5].specs) == len(parameters)


def test_a_file_named_like_a_step_is_never_passed_over_as_another_model(tmp_path):
    for step, width in enumerate((32, 32, 16), 1):
        torch.save(net(step, width).state_dict(), tmp_path / f"pruned_{step}.pt")
    torch.save(net(0, 8).state_dict(), tmp_path / "teacher.pt")
    run = open_run(tmp_path)
    assert run.steps == (1, 2)
    fates = {file.path: file.fate for file in run.fates}
    assert (fates["pruned_3.pt"], fates["teacher.pt"]) == ("left out", "other model")

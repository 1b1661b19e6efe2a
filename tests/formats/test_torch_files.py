"""Torch files: what is found in them, and that writing one back gives the same bytes."""

import tarfile
import zipfile
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save, save_file

import inshrink_core
from inshrink_core.checkpoint import LayerType, TensorRole
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.formats import open_run, write_checkpoint
from tests.formats.run_builders import same_bits, small_model, train, training_state, without_checksums


def _only(path):
    run = open_run(path)
    return run[run.steps[0]]


def _round_trip(path, tmp_path):
    written = write_checkpoint(_only(path), tmp_path / "restored")
    assert [p.name for p in written] == [path.name]
    assert written[0].read_bytes() == path.read_bytes()
    return written[0]


def test_tied_weights_stand_once_and_are_both_in_the_state_dict(tmp_path):
    weight = torch.randn(10, 4)
    torch.save({"lm_head.weight": weight, "wte.weight": weight, "fc": torch.ones(3)}, tmp_path / "step_1.pt")
    checkpoint = _only(tmp_path / "step_1.pt")
    assert [spec.name for spec in checkpoint.specs] == ["lm_head.weight", "fc"]
    assert checkpoint.aliases == {"wte.weight": "lm_head.weight"}
    assert checkpoint.spec("lm_head.weight").layer is LayerType.EMBEDDING
    assert same_bits(checkpoint.state_dict()["wte.weight"], weight)
    _round_trip(tmp_path / "step_1.pt", tmp_path)


def test_overlapping_views_share_a_region_and_are_exact(tmp_path):
    base = torch.randn(10)
    torch.save({"a": base[:6], "b": base[4:], "c": torch.ones(2)}, tmp_path / "step_1.pt")
    checkpoint = _only(tmp_path / "step_1.pt")
    assert checkpoint.spec("a").exact
    assert checkpoint.spec("b").exact
    assert not checkpoint.spec("c").exact
    assert same_bits(checkpoint["b"], base[4:])
    _round_trip(tmp_path / "step_1.pt", tmp_path)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[1:, 1:3],
        lambda t: t[:, 0],
        lambda t: t[:1].expand(3, 6),
        lambda t: t.unfold(1, 3, 1),
        lambda t: t[:0],
        lambda t: t[0, 0],
        lambda _: torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45]),
    ],
    ids=[
        *("transposed", "every second column", "inner block", "column", "expanded", "overlapping windows"),
        *("empty", "scalar", "special values"),
    ],
)
def test_views_read_right_and_restore_bit_for_bit(tmp_path, view):
    values = view(torch.randn(4, 6))
    torch.save({"w": values, "bias": torch.ones(2)}, tmp_path / "step_1.pt")
    assert same_bits(_only(tmp_path / "step_1.pt")["w"], values.contiguous())
    _round_trip(tmp_path / "step_1.pt", tmp_path)


def test_changed_values_give_a_file_whose_checksums_hold(tmp_path):
    torch.save(training_state(), tmp_path / "step_5.pt")
    checkpoint = _only(tmp_path / "step_5.pt")

    class Doubled:
        def read(self, spec):
            return checkpoint.source.read(spec) * 2

        def skeleton(self, layout):
            return checkpoint.source.skeleton(layout)

    (path,) = write_checkpoint(replace(checkpoint, source=Doubled()), tmp_path / "out")
    assert zipfile.ZipFile(path).testzip() is None
    loaded = torch.load(path, weights_only=True)
    assert same_bits(loaded["model"]["1.weight"], checkpoint["1.weight"] * 2)
    assert loaded["step"] == 5


def test_a_file_without_checksums_restores_bit_for_bit(tmp_path):
    with without_checksums():
        torch.save(training_state(), tmp_path / "step_5.pt")
    _round_trip(tmp_path / "step_5.pt", tmp_path)


@pytest.mark.parametrize(
    ("make", "known"),
    [
        (torch.optim.RMSprop, {"square_avg": "@exp_avg_sq"}),
        (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9), {"momentum_buffer": "@momentum"}),
        (torch.optim.Adagrad, {"sum": "@exp_avg_sq"}),
        (torch.optim.Adadelta, {"square_avg": "@exp_avg_sq"}),
        (torch.optim.Adamax, {"exp_avg": "@exp_avg"}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_state_of_every_optimizer_is_tensors_of_the_checkpoint(make, known, tmp_path):
    model = small_model()
    optimizer = make(model.parameters())
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "step_1.pt")
    checkpoint = _only(tmp_path / "step_1.pt")
    for name, parameter in model.named_parameters():
        for word, value in optimizer.state[parameter].items():
            key = "@step" if word == "step" else known.get(word, f":{word}@state")
            assert same_bits(checkpoint[name + key], value), word
    _round_trip(tmp_path / "step_1.pt", tmp_path)


def test_state_in_eight_bits_is_read_and_a_table_that_all_share_once(tmp_path):
    model, table = small_model(), torch.linspace(-1, 1, 256)
    state = {
        i: {
            "state1": torch.full(p.shape, i, dtype=torch.uint8),
            "absmax1": torch.rand(3),
            "qmap1": table,
            "step": 7,
            "nested": {"factors": [torch.rand(2, 2)]},
            "unused": torch.tensor(1.0),
        }
        for i, p in enumerate(model.parameters())
    }
    groups = [{"params": list(state), "lr": 0.1}]
    content = {"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}}
    torch.save(content, tmp_path / "step_1.pt")
    checkpoint = _only(tmp_path / "step_1.pt")
    names = [name for name, _ in model.named_parameters()]
    for i, name in enumerate(names):
        assert same_bits(checkpoint[f"{name}:state1@state"], state[i]["state1"])
        assert same_bits(checkpoint[f"{name}:nested.factors.0@state"], state[i]["nested"]["factors"][0])
        assert f"{name}:unused@state" not in checkpoint
    tables = [spec for spec in checkpoint.specs if spec.name.endswith(":qmap1")]
    assert [spec.key for spec in tables] == [f"{names[0]}:qmap1@state"]
    assert len([alias for alias in checkpoint.aliases if alias.endswith("qmap1@state")]) == len(names) - 1
    _round_trip(tmp_path / "step_1.pt", tmp_path)


def test_ema_gradients_and_random_state_find_their_place(tmp_path):
    state = {
        "model": {"w": torch.ones(3)},
        "ema": {"module.w": torch.zeros(3)},
        "gradients": {"w": torch.full((3,), 2.0)},
        "rng_state": {"cpu": torch.get_rng_state()},
        "step": 4,
    }
    torch.save(state, tmp_path / "x.pt")
    checkpoint = _only(tmp_path / "x.pt")
    roles = {spec.key: spec.role for spec in checkpoint.specs}
    weight, gradient = TensorRole.WEIGHT, TensorRole.GRADIENT
    assert roles == {"w": weight, "ema.w": weight, "w@gradient": gradient}
    _round_trip(tmp_path / "x.pt", tmp_path)


@pytest.mark.parametrize("protocol", [2, 4])
def test_files_of_the_legacy_format_are_read_and_come_back_bit_for_bit(tmp_path, protocol):
    path, state = tmp_path / "step_5.pt", training_state()
    state["model"] |= {
        "view": torch.randn(6, 4)[1:, ::2],
        "bool": torch.tensor([True, False]),
        "half": torch.ones(3).half(),
        "empty": torch.empty(0, 3),
    }
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    checkpoint = _only(path)
    found = checkpoint.state_dict()
    assert found.keys() == state["model"].keys()
    assert all(same_bits(found[name], value) for name, value in state["model"].items())
    assert "1.weight@exp_avg" in checkpoint
    _round_trip(path, tmp_path)


@pytest.mark.parametrize(
    "damaged",
    [
        *(lambda content, n=n: content[:n] for n in (20, 60, 300, -1, -20)),
        lambda content: content[:-40] + b"\xff" * 8 + content[-32:],  # the size of the only storage
        lambda content: content + b"tail",
    ],
    ids=range(7),
)
def test_a_legacy_file_that_is_cut_off_or_contradicts_itself_is_damage(tmp_path, damaged):
    path = tmp_path / "step_5.pt"
    torch.save({"w": torch.ones(8)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(damaged(path.read_bytes()))
    with pytest.raises(DamagedError):
        open_run(path)


def test_the_oldest_format_is_refused_with_the_line_that_converts_it(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    with tarfile.open(tmp_path / "step_1.pth", "w") as tar:
        for name in ("storages", "tensors", "sys_info", "pickle"):
            tar.add(tmp_path / "x", name)
    with pytest.raises(InputError, match=r"torch\.save\(torch\.load\("):
        open_run(tmp_path / "step_1.pth")


def test_a_torchscript_module_is_refused_with_the_line_that_converts_it(tmp_path):
    torch.save({"fc.weight": torch.ones(2)}, tmp_path / "scripted.pt")
    with zipfile.ZipFile(tmp_path / "scripted.pt", "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("scripted/code/__torch__/torch/nn/modules/linear.py", "class Linear(Module):\n")
    with pytest.raises(DamagedError, match=r"TorchScript.*torch\.jit\.load\("):
        open_run(tmp_path / "scripted.pt")


@pytest.mark.parametrize("layout", ["pt", "legacy", "safetensors"])
@pytest.mark.parametrize(
    "view", [lambda t: t, lambda t: t.t(), lambda t: t[:, ::3]], ids=["all", "transposed", "columns"]
)
def test_a_bool_that_is_neither_0_nor_1_comes_back_as_its_byte(tmp_path, layout, view):
    (tmp_path / "run").mkdir()
    for step in (1, 2, 3):
        raw = torch.randint(0, 256, (20, 30), dtype=torch.uint8)
        mask = view(raw.view(torch.bool))
        state = {"w": torch.randn(64, 64), "mask": mask, "usual": torch.randn(9) > 0}
        path = tmp_path / "run" / f"step_{step}.{layout.replace('legacy', 'pt')}"
        if layout == "safetensors":
            save_file({name: value.contiguous() for name, value in state.items()}, path)
        else:
            torch.save(state, path, _use_new_zipfile_serialization=layout == "pt")
    inshrink_core.compress(tmp_path / "run", tmp_path / "a", codec="lossless")
    paths = inshrink_core.restore(tmp_path / "a", tmp_path / "out", every=True).paths
    assert [one.read_bytes() == (tmp_path / "run" / one.name).read_bytes() for one in paths] == [True] * 3
    assert same_bits(_only(path)["mask"], view(raw.ne(0)).contiguous())
    _round_trip(path, tmp_path)


@pytest.mark.parametrize("change", ["nothing", "shape", "name", "missing", "tie", "dtype", "storage"])
def test_every_file_of_a_run_is_read_as_it_is_whatever_the_others_are(tmp_path, change):
    def state(step):
        weights = {f"blocks.{i}.weight": torch.full((2, 3), float(step)) for i in range(120)}
        last = "blocks.119.weight"
        if step == 30 and change == "name":
            weights["blocks.x19.weight"] = weights.pop(last)
        elif step == 30 and change == "missing":
            del weights[last]
        elif step == 30 and change != "nothing":
            weights[last] = {
                "shape": torch.zeros(3, 2),
                "tie": weights["blocks.0.weight"],
                "dtype": torch.zeros(2, 3, dtype=torch.int32),
                "storage": torch.arange(120.0).view(40, 3)[2:4],
            }[change]
        return weights

    for step in (10, 20, 30, 300, 70_000):
        optimizer = {"state": {}, "param_groups": [{"params": list(range(120)), "lr": 1 / step}]}
        content = {"model": state(step), "step": step, "optimizer": optimizer}
        torch.save(content, tmp_path / f"step_{step}.pt")
    run = open_run(tmp_path)
    if change == "nothing":
        assert run[10].specs is run[20].specs  # which takes most of the time to open a run
        rates = [run[step].hyperparameters["blocks.7.weight"]["lr"] for step in run.steps]
        assert rates == [1 / step for step in run.steps]
    for step in run.steps:
        found, expected = run[step].state_dict(), state(step)
        assert found.keys() == expected.keys()
        assert all(same_bits(found[name], value) for name, value in expected.items())


def test_a_header_that_equals_another_is_compared_with_its_own_file(tmp_path):
    content = save({"w": torch.ones(2)}, metadata={"format": "pt"})
    (tmp_path / "step_1.safetensors").write_bytes(content)
    (tmp_path / "step_2.safetensors").write_bytes(content + b"x")
    (damaged,) = open_run(tmp_path).unreadable
    assert damaged.path == str(tmp_path / "step_2.safetensors")

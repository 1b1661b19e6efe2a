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
from inshrink_core.formats import assembly, open_run, safetensors_file, write_checkpoint
from inshrink_core.formats.checkpoints import FileReader
from inshrink_core.formats.disk import Access
from tests.formats.run_builders import same_bits, small_model, train, training_state, without_checksums


def _only(path):
    run = open_run(path)
    return run[run.steps[0]]


def _round_trip(path, tmp_path):
    written = write_checkpoint(_only(path), tmp_path / "restored")
    assert [p.name for p in written] == [path.name]
    assert written[0].read_bytes() == path.read_bytes()
    return written[0]


def test_empty_and_scalar_tensors_and_special_values_survive(tmp_path):
    state = {
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3),
        "special": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45]),
    }
    torch.save(state, tmp_path / "step_1.pt")
    checkpoint = _only(tmp_path / "step_1.pt")
    assert all(same_bits(checkpoint[name], value) for name, value in state.items())
    _round_trip(tmp_path / "step_1.pt", tmp_path)


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
    ],
    ids=["transposed", "every second column", "inner block", "column", "expanded", "overlapping windows"],
)
def test_strided_views_read_right_and_restore_bit_for_bit(tmp_path, view):
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


def test_a_file_that_changed_since_it_was_opened_is_refused(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "step_1.pt")
    checkpoint = _only(tmp_path / "step_1.pt")
    torch.save({"w": torch.ones(3000)}, tmp_path / "step_1.pt")
    with pytest.raises(DamagedError, match="changed"):
        checkpoint["w"]


def _names(n=900):
    return [f"blocks.{i}.weight" for i in range(n)]


def _alone_and_in_a_row(folder):
    run = open_run(folder)
    access = Access.of(folder)
    alone = {}
    for step in run.steps:
        assembly._last = None, {}
        alone[step] = FileReader().open(run.path_of(step), access)
    return alone, run._parsed, access.counter.total, run.bytes_read


def _save_run(folder, state_at, steps=(10, 20, 30, 300, 70_000)):
    for step in steps:
        torch.save(state_at(step), folder / f"step_{step}.pt")


def test_a_run_in_a_row_reads_as_each_file_alone(tmp_path):
    weights = {name: torch.full((2, 3), float(i)) for i, name in enumerate(_names(120))}
    weights["tied"] = weights["blocks.0.weight"]
    _save_run(tmp_path, lambda step: {"model": weights, "ema": {"w": torch.ones(2)}, "step": step})
    alone, in_a_row, n_alone, n_in_a_row = _alone_and_in_a_row(tmp_path)
    assert in_a_row == alone
    assert n_in_a_row == n_alone


@pytest.mark.parametrize("change", ["shape", "name", "missing", "tie", "dtype", "storage"])
def test_a_file_that_is_laid_out_otherwise_reads_as_alone(tmp_path, change):
    def state(step):
        weights = {name: torch.zeros(2, 3) for name in _names(120)}
        if step == 30:
            last = "blocks.119.weight"
            if change == "shape":
                weights[last] = torch.zeros(3, 2)
            elif change == "name":
                weights["blocks.x19.weight"] = weights.pop(last)
            elif change == "missing":
                del weights[last]
            elif change == "tie":
                weights[last] = weights["blocks.0.weight"]
            elif change == "dtype":
                weights[last] = torch.zeros(2, 3, dtype=torch.int32)
            else:
                weights[last] = torch.zeros(40, 3)[2:4]
        return {"model": weights, "step": step}

    _save_run(tmp_path, state)
    alone, in_a_row, *_ = _alone_and_in_a_row(tmp_path)
    assert in_a_row == alone
    assert in_a_row[30].specs != in_a_row[10].specs or in_a_row[30].places != in_a_row[20].places


def test_where_tensors_lie_is_worked_out_once(tmp_path):
    weights = {name: torch.ones(2) for name in _names(20)}
    group = {"params": list(range(20))}

    def state(step):
        optimizer = {"state": {}, "param_groups": [group | {"lr": 1 / step}]}
        return {"step": step, "model": weights, "optimizer": optimizer}

    _save_run(tmp_path, state, steps=(10, 20, 30))
    run = open_run(tmp_path)
    assert run[10].specs is run[20].specs is run[30].specs
    assert [run[step].hyperparameters["blocks.7.weight"]["lr"] for step in run.steps] == [
        1 / step for step in run.steps
    ]


def test_equal_headers_of_safetensors_are_parsed_once_and_compared_with_each_file(tmp_path):
    content = save({name: torch.ones(2) for name in _names(20)}, metadata={"format": "pt"})
    for step in (1, 2):
        (tmp_path / f"step_{step}.safetensors").write_bytes(content)
    safetensors_file._parse.cache_clear()
    run = open_run(tmp_path)
    assert run[1].specs == run[2].specs
    assert safetensors_file._parse.cache_info().misses == 1
    longer = tmp_path / "step_3.safetensors"
    longer.write_bytes(content + b"x")
    with pytest.raises(DamagedError, match="does not end with its last tensor") as caught:
        FileReader().open(longer, Access.of(tmp_path))
    assert caught.value.where == str(longer)

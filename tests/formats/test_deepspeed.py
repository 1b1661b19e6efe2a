"""Folders of DeepSpeed are checkpoints of whole tensors, however ZeRO laid them out over ranks."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import inshrink_core
from benchmarks.fuzz.zero import GROUPS, save_zero, some_state
from inshrink_core.errors import DamagedError
from inshrink_core.formats import open_run
from inshrink_core.formats.deepspeed import DeepSpeedReader
from inshrink_core.testing.readers import ReaderSuite
from tests.formats.run_builders import content_of

FIXTURES = Path(__file__).parent / "deepspeed"
"""Written by DeepSpeed itself: make.py."""

RUNS = ("stage1", "stage2", "stage3", "bf16", "pipeline")
WEIGHT = {"fp32": "@master", "exp_avg": "@exp_avg", "exp_avg_sq": "@exp_avg_sq"}


class TestDeepSpeedReader(ReaderSuite):
    reader = DeepSpeedReader()

    def save(self, folder, step, weights):
        state = {name: {"fp32": weight} for name, weight in weights.items()}
        groups = [
            [name for name in weights if weights[name].dtype == dtype]
            for dtype in {weight.dtype for weight in weights.values()}
        ]
        return save_zero(folder / f"global_step{step}", weights, state, groups, stage=3, step=step)


@pytest.mark.parametrize("name", RUNS)
def test_files_of_deepspeed_are_restored_byte_for_byte(name, tmp_path):
    inshrink_core.compress(FIXTURES / name, tmp_path / "a.inshrink", codec="lossless", optimizer="exact")
    for step in (2, 3):
        inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / str(step), steps=[step])
        assert content_of(tmp_path / str(step)) == content_of(FIXTURES / name / f"global_step{step}")


@pytest.mark.parametrize("name", ["stage1", "stage2", "stage3"])
def test_masters_are_those_that_deepspeed_puts_together(name):
    checkpoint = open_run(FIXTURES / name)[3]
    told = torch.load(FIXTURES / f"{name}.pt")
    for key, value in told.items():
        owner = checkpoint.aliases.get(key, key)
        master = owner if f"{owner}@master" not in checkpoint else f"{owner}@master"
        assert torch.equal(checkpoint[master].float(), value.float()), key
    assert {"tok.weight", "fc.bias", "head.weight"} < told.keys()
    assert ("frozen.weight" in told) == (name != "stage1")


@pytest.mark.parametrize("name", ["stage1", "stage2", "stage3", "bf16"])
def test_roles_groups_and_ties_of_deepspeed_are_those_of_a_torch_file(name):
    run = open_run(FIXTURES / name)
    assert run.steps == (2, 3)
    checkpoint = run[3]
    roles = {spec.key: spec.role.value for spec in checkpoint.specs}
    moved = ["tok.weight", "fc.weight", "fc.bias", "norm.weight", "norm.bias"]
    expected = dict.fromkeys([*moved, "frozen.weight"], "weight") | {"scale": "buffer"}
    for role in ("exp_avg", "exp_avg_sq", *(() if name == "stage3" else ("master",))):
        expected |= {f"{parameter}@{role}": role for parameter in moved}
    assert roles == expected
    assert checkpoint.aliases["head.weight"] == "tok.weight"
    decays = {parameter: checkpoint.hyperparameters[parameter]["weight_decay"] for parameter in moved}
    assert decays == {p: 0.1 if p in ("tok.weight", "fc.weight") else 0.0 for p in moved}
    assert all(spec.shape == checkpoint.spec(spec.name).shape for spec in checkpoint.specs)


def test_a_pipeline_has_the_weights_of_its_layers_and_the_state_of_its_stages():
    checkpoint = open_run(FIXTURES / "pipeline")[3]
    for layer in ("1.weight", "1.bias", "2.weight", "2.bias"):
        assert torch.equal(checkpoint[f"{layer}@master"].bfloat16(), checkpoint[layer])
        assert f"{layer}@exp_avg" in checkpoint
    assert "0.weight" in checkpoint


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("padding", [0, 3])
def test_state_has_its_values_on_any_number_of_ranks(tmp_path, stage, n_ranks, padding):
    module, state = some_state()
    save_zero(
        tmp_path / "global_step5",
        module,
        state,
        GROUPS,
        stage=stage,
        n_ranks=n_ranks,
        step=5,
        padding=padding if stage == 1 else 0,
    )
    checkpoint = open_run(tmp_path)[5]
    for name, held in state.items():
        for key, value in held.items():
            suffix = "" if key == "fp32" and stage == 3 else WEIGHT[key]
            assert torch.equal(checkpoint[name + suffix], value), (name, key)
    assert len(checkpoint.specs) == 1 + 4 * (3 if stage == 3 else 4)


def test_model_parallel_ranks_have_names_of_their_own(tmp_path):
    for rank in (0, 1):
        module, state = some_state(rank)
        save_zero(tmp_path / "global_step1", module, state, GROUPS, mp_rank=rank)
    checkpoint = open_run(tmp_path)[1]
    for prefix, rank in (("", 0), ("mp_rank_01.", 1)):
        _, state = some_state(rank)
        for name, held in state.items():
            assert torch.equal(checkpoint[prefix + name], held["fp32"])
            assert torch.equal(checkpoint[f"{prefix}{name}@exp_avg"], held["exp_avg"])


def trainer(root, step, *, stage=1):
    """Write a checkpoint as Hugging Face's trainer does with DeepSpeed."""
    module, state = some_state(step)
    folder = root / f"checkpoint-{step}"
    save_zero(folder / f"global_step{step}", module, state, GROUPS, stage=stage, step=step)
    save_file(module, folder / "model.safetensors")
    (folder / "latest").write_text(f"global_step{step}")
    (folder / "zero_to_fp32.py").write_text("# recovers weights\n")
    (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    torch.save({"seed": step}, folder / "rng_state_0.pth")
    return folder


@pytest.mark.parametrize("stage", [1, 3])
def test_the_folder_of_a_trainer_is_one_checkpoint(tmp_path, stage):
    for step in (10, 20):
        trainer(tmp_path / "run", step, stage=stage)
    run = open_run(tmp_path / "run")
    assert run.steps == (10, 20)
    assert run.format == "huggingface"
    _, state = some_state(20)
    for name, held in state.items():
        assert torch.equal(run[20][name], held["fp32"])
        assert torch.equal(run[20][f"{name}@exp_avg_sq"], held["exp_avg_sq"])
        assert torch.equal(run[20][f"{name}@master"], held["fp32"])
    assert open_run(tmp_path / "run" / "checkpoint-20").steps == (20,)
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec="lossless", optimizer="exact")
    inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", steps=[20])
    assert content_of(tmp_path / "out") == content_of(tmp_path / "run" / "checkpoint-20")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_damaged_or_missing_rank_is_named(tmp_path, stage):
    module, state = some_state()
    for step in (1, 2):
        save_zero(tmp_path / f"global_step{step}", module, state, GROUPS, stage=stage, n_ranks=4, step=step)
    broken = tmp_path / "global_step2" / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    for spoil in (lambda: os.truncate(broken, broken.stat().st_size - 700), broken.unlink):
        spoil()
        run = open_run(tmp_path)
        assert run.steps == (1,)
        assert broken.name in run.unreadable[0].reason
    for path in (tmp_path / "global_step1").glob("*optim*"):
        path.unlink()
    with pytest.raises(DamagedError, match="' is missing"):
        open_run(tmp_path / "global_step1")


def edited(path, edit):
    root = torch.load(path)
    edit(root)
    torch.save(root, path)


FP32 = "single_partition_of_fp32_groups"


def of_rank(change):
    return "zero_pp_rank_1_mp_rank_00_optim_states.pt", lambda root: change(root["optimizer_state_dict"])


def of_shapes(change):
    return "mp_rank_00_model_states.pt", lambda root: change(root["param_shapes"])


def double(state):
    state[FP32] = [vector.double() for vector in state[FP32]]


def shared(state):
    state[FP32] = [held["exp_avg"] for held in state["base_optimizer_state"]["state"].values()]


def many(state):
    state["base_optimizer_state"] = [dict.fromkeys(map(str, range(1000)))] * 1000


@pytest.mark.parametrize(
    ("file", "edit", "reason"),
    [
        (*of_shapes(lambda shapes: shapes[0].update(c=(9, 9))), "partitions end"),
        (*of_shapes(lambda shapes: shapes[0].update(c=(-1,))), "no shape"),
        (*of_shapes(lambda shapes: shapes[0].update(c=(1 << 62,) * 9)), "no shape"),
        (*of_shapes(lambda shapes: shapes.extend(shapes * 99)), "two shapes"),
        (*of_rank(many), "more values"),
        (*of_rank(lambda state: state[FP32].pop()), "rank 1 has not all of its part"),
        (*of_rank(double), "rank 1 has"),
        (*of_rank(shared), "overlap"),
    ],
)
def test_files_that_contradict_each_other_are_refused(tmp_path, file, edit, reason):
    module, state = some_state()
    folder = save_zero(tmp_path / "global_step1", module, state, GROUPS)
    edited(folder / file, edit)
    with pytest.raises(DamagedError, match=reason):
        open_run(folder)


def test_what_a_lossy_restore_wrote_has_the_same_partitions_and_paddings(tmp_path):
    module, state = some_state(n=8)
    folder = save_zero(tmp_path / "global_step1", module, state, GROUPS, n_ranks=3)
    inshrink_core.compress(tmp_path, tmp_path / "a.inshrink")
    inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", steps=[1])
    for path in folder.iterdir():
        root, back = torch.load(path), torch.load(tmp_path / "out" / path.name)
        if "module" in root:
            assert root["module"].keys() == back["module"].keys()
            continue
        held, again = (one["optimizer_state_dict"]["single_partition_of_fp32_groups"] for one in (root, back))
        for one, other in zip(held, again, strict=True):
            assert one.shape == other.shape
            assert torch.allclose(one, other, atol=0.05)
            assert not torch.equal(one, other)


def test_state_that_is_partitioned_in_another_way_is_carried_and_said(tmp_path):
    module, state = some_state(n=60)
    folder = save_zero(tmp_path / "run" / "global_step1", module, state, GROUPS)
    for path in folder.glob("*optim*"):
        # Experts: a group has as many partitions as there are copies of them.
        edited(path, lambda root: root["optimizer_state_dict"].update(partition_count=[2, 1]))
    run = open_run(tmp_path / "run")
    assert run[1].keys() == module.keys()
    assert "stored unchanged" in run.notes[1]
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt" in run.notes[1]
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec="lossless")
    inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", steps=[1])
    assert content_of(tmp_path / "out") == content_of(folder)

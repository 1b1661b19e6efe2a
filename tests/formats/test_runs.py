"""Runs: what is found in a directory, which step it is, and what is said about the rest."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inshrink_core.checkpoint import TensorRole
from inshrink_core.errors import ConfigError, DamagedError, InputError, NotFoundError
from inshrink_core.formats import Fate, NoCheckpointError, open_run, preview_steps, write_checkpoint
from inshrink_core.formats.disk import holding_files, natural_key
from inshrink_core.formats.names import step_in_name
from inshrink_core.formats.source import peek_sample
from inshrink_core.formats.step_pattern import steps_by_pattern, suggest_step_pattern
from inshrink_core.ops.sample import sample
from tests.formats.run_builders import same_bits, save_huggingface, save_run, small_model


def _save(path, step=None, **tensors):
    state = {"model": tensors or {"w": torch.ones(3)}}
    torch.save(state if step is None else state | {"step": step}, path)


def test_open_run_imports_neither_torch_nor_numpy(tmp_path):
    save_run(tmp_path / "run")
    save_huggingface(tmp_path / "hf")
    script = (
        "import sys; from inshrink_core.formats import open_run\n"
        f"for p in ({str(tmp_path / 'run')!r}, {str(tmp_path / 'hf')!r}):\n"
        "    run = open_run(p); list(run.values()); run.identity(run.steps[0]); run.log; run.settings\n"
        "print([m for m in ('torch', 'numpy', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_opening_reads_headers_and_reading_counts(tmp_path):
    for step in (1, 2):
        _save(tmp_path / f"step_{step}.pt", step, w=torch.zeros(1 << 20))
    run = open_run(tmp_path)
    assert 0 < run.bytes_read < 200_000
    before = run.bytes_read
    run[1]["w"]
    records = run.bytes_read - before - (4 << 20)
    assert 0 <= records < 8192  # with the first read, the checksums in the records of the zip
    before = run.bytes_read
    run[1].source.peek(run[1].specs[0])
    assert run.bytes_read == before + (4 << 20)


@pytest.mark.parametrize(
    ("tensor", "nbytes"),
    [
        (torch.arange(3_000_017.0), 4 * 16384),
        (torch.arange(4_000_000).to(torch.bfloat16).view(2000, 2000), 2 * 16384),
        (torch.arange(20_000.0), 4 * 20_000),
        (torch.arange(2_000_000.0).view(1000, 2000).t(), 4 * 2_000_000),
    ],
)
def test_of_a_large_tensor_little_more_than_the_sample_is_read(tmp_path, tensor, nbytes):
    _save(tmp_path / "step_1.pt", 1, w=tensor)
    run = open_run(tmp_path)
    spec, before = run[1].specs[0], run.bytes_read
    taken = peek_sample(run[1].source, spec)
    assert run.bytes_read == before + nbytes
    assert same_bits(taken, sample(tensor.reshape(-1)))


def test_a_sample_of_a_large_tensor_is_read_once_and_belongs_to_its_reader(tmp_path):
    _save(tmp_path / "step_1.pt", 1, w=torch.arange(3_000_017.0))
    run = open_run(tmp_path)
    taken = peek_sample(run[1].source, run[1].specs[0])
    before = run.bytes_read
    peek_sample(run[1].source, run[1].specs[0]).zero_()
    again = open_run(tmp_path)
    held = again.bytes_read
    assert same_bits(peek_sample(again[1].source, again[1].specs[0]), taken)
    assert (run.bytes_read, again.bytes_read) == (before, held)
    _save(tmp_path / "step_1.pt", 1, w=torch.ones(3_000_017))
    changed = open_run(tmp_path)
    assert bool((peek_sample(changed[1].source, changed[1].specs[0]) == 1).all())


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_files_that_are_held_stay_open_until_the_end(tmp_path):
    def n_open():
        found = (os.path.realpath(one) for one in Path("/proc/self/fd").iterdir())
        return sum(one.startswith(str(tmp_path.resolve())) for one in found)

    for step in range(1, 21):
        _save(tmp_path / f"step_{step}.pt", step, w=torch.full((100,), float(step)))
    run = open_run(tmp_path)
    run[1]["w"]
    assert n_open() == 0
    with holding_files():
        assert float(run[1]["w"].sum() + run[1]["w"].sum() + run[2]["w"].sum()) == 400
        assert n_open() == 2
        with holding_files():
            assert all(bool((run[step]["w"] == step).all()) for step in run.steps)
        assert n_open() == 16
        os.truncate(tmp_path / "step_20.pt", 200)
        with pytest.raises(DamagedError, match="the file changed since its header was read"):
            run[20]["w"]
        assert n_open() == 15
    assert n_open() == 0


def test_a_sample_of_a_file_that_was_cut_off_is_refused(tmp_path):
    _save(tmp_path / "step_1.pt", 1, w=torch.arange(3_000_017.0))
    run = open_run(tmp_path)
    spec = run[1].specs[0]
    os.truncate(tmp_path / "step_1.pt", 1 << 20)
    with pytest.raises(DamagedError):
        run[1].source.sample(spec)


def test_steps_come_from_the_documented_keys_in_order(tmp_path):
    torch.save({"model": {"w": torch.ones(1)}, "epoch": 1, "global_step": 70, "step": 9}, tmp_path / "a.pt")
    torch.save({"model": {"w": torch.ones(1)}, "epoch": 2, "global_step": 140}, tmp_path / "b.pt")
    run = open_run(tmp_path)
    assert run.steps == (70, 140)
    assert any("global_step" in note for note in run.notes)


def test_several_saves_in_one_epoch_take_their_steps_from_names(tmp_path):
    for step in (100, 200, 300):
        torch.save(
            {"model": {"w": torch.ones(1)}, "epoch": step // 250}, tmp_path / f"epoch=0-step={step}.ckpt"
        )
    assert open_run(tmp_path).steps == (100, 200, 300)


def test_names_without_numbers_are_numbered_in_natural_order(tmp_path):
    for name in ("late", "early"):
        _save(tmp_path / f"{name}.pt")
    run = open_run(tmp_path)
    assert run.steps == (0, 1)
    assert run.path_of(0).name == "early.pt"
    assert any("no number" in note for note in run.notes)


@pytest.mark.parametrize(
    ("names", "steps", "note"),
    [
        (["checkpoint_1_500.pt", "checkpoint_1_1000.pt", "checkpoint_2_1500.pt"], (500, 1000, 1500), "names"),
        (["500k.pt", "900k.pt", "1M.pt", "1.5M.pt"], (500_000, 900_000, 1_000_000, 1_500_000), "names"),
        (["2024-05-12_13-45-50.pt", "2024-05-12_13-46-10.pt"], (0, 1), "the dates and times"),
        (["version_0/step_9.pt", "version_0/step_10.pt", "version_1/step_9.pt"], (9, 10, 19), "restart"),
    ],
)
def test_every_numbered_checkpoint_of_a_run_is_a_step_of_it(tmp_path, names, steps, note):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        _save(tmp_path / name)
    run = open_run(tmp_path)
    assert run.steps == steps
    assert [run.path_of(step) for step in steps] == [tmp_path / name for name in names]
    assert note in run.notes[0]
    assert run.skipped == ()


def test_a_pattern_overrides_and_a_bad_one_is_told(tmp_path):
    for i in (1, 2):
        _save(tmp_path / f"e{i}_b{i * 7}.pt", step=i)
    assert open_run(tmp_path, step_pattern=r"_b(\d+)").steps == (7, 14)
    for bad in ("(", r"\d+", r"(\d)(\d)"):
        with pytest.raises(ConfigError):
            open_run(tmp_path, step_pattern=bad)


def test_a_step_pattern_is_a_name_with_its_number_left_out(tmp_path):
    for name in ("model_ep02_acc91_final.pt", "model_ep01_acc95_final.pt", "model_ep03.pt", "other.pt"):
        _save(tmp_path / name, step=7)
    pattern = "model_ep{step}_*_final.pt"
    run = open_run(tmp_path, step_pattern=pattern)
    assert run.steps == (1, 2)
    assert run.path_of(1).name == "model_ep01_acc95_final.pt"
    assert {Path(row.path).name for row in run.skipped} == {"model_ep03.pt", "other.pt"}
    by_path = open_run(tmp_path / pattern)
    assert by_path.steps == by_path.refresh().steps == (1, 2)
    assert by_path.path == tmp_path
    assert [(row.step, bool(row.reason)) for row in preview_steps(tmp_path, pattern)] == [
        (1, False),
        (2, False),
        (None, True),
        (None, True),
    ]
    with pytest.raises(InputError, match="two step patterns"):
        open_run(tmp_path / pattern, step_pattern="{step}.pt")


def test_a_file_that_is_called_like_a_step_pattern_is_opened(tmp_path):
    _save(tmp_path / "model_{step}.pt", step=3)
    assert open_run(tmp_path / "model_{step}.pt").steps == (3,)


@pytest.mark.parametrize(
    ("pattern", "name", "step"),
    [
        ("ckpt-e*-s{step}.pt", "ckpt-e3-s1200.pt", 1200),
        ("*{step}.pt", "model_120.pt", 120),
        ("{step}*", "0012-last", 12),
        ("a{step}*b*.pt", "a7xbybz.pt", 7),
        ("v2{step}.pt", "v2305.pt", 305),
        ("[x]{step}.pt", "[x]5.pt", 5),
        ("e{step}.pt", "xe5.pt", None),
        ("e{step}.pt", "e5.pt\n", None),
        ("e{step}.pt", "e٣.pt", None),
        ("e{step}", "e" + "1" * 19, None),
        (r"_b(\w+)", "e_bx", None),
    ],
)
def test_step_patterns_find_numbers(pattern, name, step):
    (row,) = steps_by_pattern([name], pattern)
    assert row.step == step
    assert bool(row.reason) == (step is None)


@pytest.mark.parametrize("pattern", ["{step}{step}", "{step}" + "x" * 255, "e.pt"])
def test_what_is_no_step_pattern_is_told(pattern):
    with pytest.raises(ConfigError, match="step"):
        steps_by_pattern(["e1.pt"], pattern)


def test_a_hostile_step_pattern_is_matched_at_once():
    begun = time.perf_counter()
    steps_by_pattern(["a" * 255] * 20, "*".join("a" * 100) + "*b{step}*c")
    steps_by_pattern(["1" * 255] * 20, "*1" * 60 + "{step}" + "*1" * 60 + "x")
    assert time.perf_counter() - begun < 2


def test_the_suggested_pattern_leaves_out_the_number_that_rises():
    def suggested(*names):
        return suggest_step_pattern(names)

    assert suggested("m_ep1_acc91.pt", "m_ep2_acc90.pt", "m_ep3_acc95.pt") == "m_ep{step}_acc*.pt"
    assert suggested("ckpt-e3-s1200.pt", "ckpt-e3-s1300.pt") == "ckpt-e*-s{step}.pt"
    assert suggested("best.pt") == suggested() == ""


def test_names_tell_steps():
    assert step_in_name("global_step120") == 120
    assert step_in_name("checkpoint-40") == 40
    assert step_in_name("ckpt_iter-0007.pt") == 7
    assert step_in_name("epoch=1-step=9-v1.ckpt") == 9
    assert step_in_name("model3_0400.pt") == 400
    assert step_in_name("best.pt") is None
    assert sorted(["s10", "s9", "s1"], key=natural_key) == ["s1", "s9", "s10"]


def test_files_without_a_number_are_no_steps_beside_numbered_ones(tmp_path):
    for step in (100, 200):
        _save(tmp_path / f"step_{step}.pt")
    _save(tmp_path / "best.pt", w=torch.zeros(3))
    torch.save({"images": torch.ones(4), "labels": torch.arange(4)}, tmp_path / "validation.pt")
    run = open_run(tmp_path)
    assert run.steps == (100, 200)
    assert {Path(s.path).name: s.fate for s in run.skipped} == {"validation.pt": Fate.OTHER_MODEL}
    assert list(run.branches) == ["best"]


def test_links_to_a_checkpoint_stand_once(tmp_path):
    _save(tmp_path / "step_5.pt", step=5)
    (tmp_path / "last.pt").symlink_to("step_5.pt")
    (tmp_path / "gone.pt").symlink_to("nowhere.pt")
    run = open_run(tmp_path)
    assert run.steps == (5,)
    assert run.path_of(5).name == "step_5.pt"
    assert {"a link to step_5.pt", "a link that leads nowhere"} == {s.reason for s in run.skipped}


def test_files_being_written_are_skipped(tmp_path):
    _save(tmp_path / "step_5.pt", step=5)
    (tmp_path / "step_6.pt.tmp").write_bytes(b"PK")
    (tmp_path / "step_7.pt.part").write_bytes(b"PK")
    (tmp_path / "tmp-checkpoint-9").mkdir()
    run = open_run(tmp_path)
    assert run.steps == (5,)
    assert len(run.skipped) == 3
    assert all("being written" in s.reason for s in run.skipped)


def test_two_models_in_one_run_are_refused_by_name(tmp_path):
    _save(tmp_path / "a_1.pt", **{f"a{i}": torch.ones(2) for i in range(4)})
    _save(tmp_path / "b_2.pt", **{f"b{i}": torch.ones(2) for i in range(4)})
    with pytest.raises(InputError, match="two different models") as caught:
        open_run(tmp_path)
    assert "a_1.pt" in str(caught.value)
    assert "b_2.pt" in str(caught.value)
    assert open_run(f"{tmp_path}/a_*.pt").steps == (1,)


def test_a_tensor_may_change_appear_and_vanish(tmp_path):
    common = {f"w{i}": torch.ones(2) for i in range(4)}
    _save(tmp_path / "step_1.pt", **common, old=torch.ones(1), grows=torch.ones(2))
    _save(tmp_path / "step_2.pt", **common, new=torch.ones(1), grows=torch.ones(4).half())
    run = open_run(tmp_path)
    assert "new" not in run[1]
    assert run[2].spec("grows").shape == (4,)


def test_an_empty_directory_says_what_was_there(tmp_path):
    with pytest.raises(NotFoundError):
        open_run(tmp_path)
    (tmp_path / "step_1.pt").write_bytes(b"nothing")
    (tmp_path / "step_2.pt").write_bytes(b"")
    with pytest.raises(NoCheckpointError) as caught:
        open_run(tmp_path)
    assert len(caught.value.skipped) == 2
    assert caught.value.exit_code == 2
    for missing in ("nowhere", "no*thing", "a\0b"):
        with pytest.raises(InputError):
            open_run(tmp_path / missing)


def test_a_missing_step_names_its_neighbours(tmp_path):
    run = open_run(save_run(tmp_path / "run"))
    with pytest.raises(NotFoundError, match="10 and 20"):
        run[15]
    assert 20 in run
    assert 15 not in run
    assert len(run) == 3


def test_identity_changes_when_the_file_does(tmp_path):
    run = open_run(save_run(tmp_path / "run"))
    assert run.identity(10) == open_run(tmp_path / "run").identity(10)
    assert run.identity(10) != run.identity(20)
    os.utime(run.path_of(10), ns=(1, 1))
    assert run.refresh().identity(10) != run.identity(10)


def test_refresh_finds_new_checkpoints_and_reads_old_ones_no_more(tmp_path):
    run = open_run(save_run(tmp_path / "run"))
    before = run.bytes_read
    assert run.refresh().bytes_read == before
    save_run(tmp_path / "run", (40,))
    again = run.refresh()
    assert again.steps == (10, 20, 30, 40)
    assert run.steps == (10, 20, 30)
    assert again.bytes_read - before < before


def test_settings_are_read_strictly(tmp_path):
    _save(tmp_path / "step_1.pt")
    assert open_run(tmp_path).settings.file is None
    path = tmp_path / "inshrink.toml"
    path.write_text('[evaluator]\nfile = "e.py"\nfunction = "f"\nmetric = "accuracy"\ndirection = "higher"\n')
    settings = open_run(tmp_path).settings
    assert (settings.file, settings.function, settings.metric) == ("e.py", "f", "accuracy")
    for bad in (
        '[evaluator]\nfiel = "x"',
        "a = 1",
        '[evaluator]\ndirection = "up"',
        "[evaluator]\nfile = 1",
        "[",
    ):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=r"inshrink\.toml"):
            open_run(tmp_path).settings  # noqa: B018


def test_logs_of_three_kinds_are_read(tmp_path):
    _save(tmp_path / "step_1.pt")
    assert dict(open_run(tmp_path).log) == {}
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "loss": 1}\n{"step": 1, "loss": NaN}\n{"step": 3, "lo'
    )
    log = open_run(tmp_path).log
    assert [step for step, _ in log["loss"]] == [1, 2]
    (tmp_path / "metrics.csv").write_text("epoch,step,train_loss,val_acc\n0,10,0.5,\n0,20,,0.9\n")
    log = open_run(tmp_path).log
    assert log["train_loss"] == [(10, 0.5)]
    assert log["val_acc"] == [(20, 0.9)]
    save_huggingface(tmp_path / "hf")
    log = open_run(tmp_path / "hf").log
    assert log["loss"] == [(50, 0.02), (100, 0.01), (150, 1 / 150), (200, 0.005)]


@pytest.mark.parametrize("sharded", [False, True])
def test_huggingface_checkpoints_are_read_and_restored_whole(tmp_path, sharded):
    run = open_run(save_huggingface(tmp_path / "hf", sharded=sharded))
    assert run.format == "huggingface"
    assert run.steps == (100, 200)
    checkpoint = run[100]
    model = small_model(100)
    assert set(checkpoint.state_dict()) == set(model.state_dict())
    roles = {spec.role for spec in checkpoint.specs}
    assert {TensorRole.EXP_AVG, TensorRole.STEP} <= roles
    shapes = [parameter.shape for parameter in model.parameters()]
    for spec in checkpoint.specs:
        # Weights are sorted by name, state is numbered: only where one weight has a shape is it certain.
        if spec.role is TensorRole.EXP_AVG:
            assert spec.name.startswith("optimizer.") == (shapes.count(spec.shape) > 1)
    source = run.path_of(100)
    written = write_checkpoint(checkpoint, tmp_path / "out")
    assert {p.relative_to(tmp_path / "out") for p in written} == {
        p.relative_to(source) for p in source.rglob("*")
    }
    for path in written:
        assert path.read_bytes() == (source / path.relative_to(tmp_path / "out")).read_bytes()
    assert open_run(tmp_path / "out").steps == (100,)


def test_two_huggingface_groups_find_the_right_parameters(tmp_path):
    run = open_run(save_huggingface(tmp_path / "hf", (100,)))
    names = [name for name, p in small_model().named_parameters() if p.ndim >= 2]
    assert all(run[100].hyperparameters[name]["weight_decay"] == 0.1 for name in names)
    assert run[100].hyperparameters["1.bias"]["weight_decay"] == 0.0


def test_a_missing_shard_and_a_lying_index_are_damage(tmp_path):
    save_huggingface(tmp_path / "hf", (100,), sharded=True)
    folder = tmp_path / "hf" / "checkpoint-100"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / "model-00002-of-00002.safetensors").rename(tmp_path / "away")
    with pytest.raises(DamagedError, match="missing"):
        open_run(folder)
    (tmp_path / "away").rename(folder / "model-00002-of-00002.safetensors")
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedError, match="ghost"):
        open_run(folder)
    index["weight_map"] = {"w": "../away"}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedError, match="outside"):
        open_run(folder)


def test_the_final_model_beside_checkpoints_is_no_step(tmp_path):
    save_huggingface(tmp_path / "hf")
    shutil.copy(tmp_path / "hf" / "checkpoint-200" / "model.safetensors", tmp_path / "hf")
    run = open_run(tmp_path / "hf")
    assert run.steps == (100, 200)
    assert {one.path: (one.fate, one.step) for one in run.fates}["model.safetensors"] == (
        Fate.DUPLICATE,
        200,
    )


def test_safetensors_files_are_read_by_content_and_take_the_step_from_metadata(tmp_path):
    save_file({"w": torch.ones(2).bfloat16()}, tmp_path / "a.safetensors", metadata={"step": "7"})
    save_file({"w": torch.zeros(2).bfloat16()}, tmp_path / "b.pt", metadata={"step": "9"})
    run = open_run(tmp_path)
    assert run.steps == (7, 9)
    assert same_bits(run[7]["w"], torch.ones(2).bfloat16())
    assert write_checkpoint(run[9], tmp_path / "out")[0].read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_directories_with_files_of_any_name_are_checkpoints(tmp_path):
    for step in (1, 2):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        torch.save({"w": torch.full((3,), float(step))}, folder / "weights.pt")
        save_file({"w": torch.ones(3)}, folder / "gradients.safetensors")
        (folder / "notes.txt").write_text("x")
    run = open_run(tmp_path)
    assert run.steps == (1, 2)
    assert set(run[2]) == {"w", "w@gradient"}
    assert [layout.kind for layout in run[2].files] == ["safetensors", "opaque", "torch"]


def test_reading_from_threads_gives_the_same_tensors(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    run = open_run(save_run(tmp_path / "run", (10,)))
    keys = list(run[10]) * 4
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(run[10].__getitem__, keys))
    assert all(same_bits(a, run[10][key]) for a, key in zip(read, keys, strict=True))


def test_the_checkpoints_of_a_run_share_their_specs(tmp_path):
    run = open_run(save_run(tmp_path / "run", (10, 20)))
    assert all(a is b for a, b in zip(run[10].specs, run[20].specs, strict=True))

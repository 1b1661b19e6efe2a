"""Runs: what is found in a directory, which step it is, and what is said about the rest."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.errors import ConfigError, DamagedError, InputError, NotFoundError
from inshrink_core.formats import NoCheckpointError, open_run
from inshrink_core.formats.names import step_by_pattern
from inshrink_core.formats.source import peek
from inshrink_core.ops.sample import sample
from tests.builders import seeded
from tests.formats.run_builders import same_bits, save_huggingface, save_run
from tests.processes import ran


def _save(path, step, **tensors):
    torch.save({"model": tensors or {"w": torch.ones(3)}, "step": step}, path)


def test_open_run_imports_neither_torch_nor_numpy(tmp_path):
    save_run(tmp_path / "run")
    save_huggingface(tmp_path / "hf")
    script = (
        "import sys; from inshrink_core.formats import open_run\n"
        f"for p in ({str(tmp_path / 'run')!r}, {str(tmp_path / 'hf')!r}):\n"
        "    run = open_run(p); list(run.values()); run.identity(run.steps[0]); run.log; run.settings\n"
        "print([m for m in ('torch', 'numpy', 'numba') if m in sys.modules])"
    )
    assert ran(sys.executable, "-c", script).stdout.strip() == "[]"


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
    run[1].source.read(run[1].specs[0], checked=False)
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
    taken = peek(run[1].source, spec, sampled=True)
    assert run.bytes_read == before + nbytes
    assert same_bits(taken, sample(tensor.reshape(-1)))
    os.truncate(tmp_path / "step_1.pt", 1 << 14)
    with pytest.raises(DamagedError):
        peek(run[1].source, spec, sampled=True)


def test_a_file_that_changed_since_its_header_was_read_is_refused(tmp_path):
    _save(tmp_path / "step_1.pt", 1, w=torch.ones(100))
    run = open_run(tmp_path)
    os.truncate(tmp_path / "step_1.pt", 200)
    with pytest.raises(DamagedError, match="the file changed since its header was read"):
        run[1]["w"]


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
    with pytest.raises(InputError, match="two step patterns"):
        open_run(tmp_path / pattern, step_pattern="{step}.pt")


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
    ],
)
def test_step_patterns_find_numbers(pattern, name, step):
    assert step_by_pattern(name, pattern) == step


@pytest.mark.parametrize("pattern", ["{step}{step}", "{step}" + "x" * 255, "e.pt"])
def test_what_is_no_step_pattern_is_told(pattern):
    with pytest.raises(ConfigError, match="step"):
        step_by_pattern("e1.pt", pattern)


def test_a_hostile_step_pattern_is_matched_at_once():
    begun = time.perf_counter()
    for _ in range(20):
        step_by_pattern("a" * 255, "*".join("a" * 100) + "*b{step}*c")
        step_by_pattern("1" * 255, "*1" * 60 + "{step}" + "*1" * 60 + "x")
    assert time.perf_counter() - begun < 2


def test_links_to_a_checkpoint_stand_once(tmp_path):
    _save(tmp_path / "step_5.pt", step=5)
    (tmp_path / "last.pt").symlink_to("step_5.pt")
    (tmp_path / "gone.pt").symlink_to("nowhere.pt")
    run = open_run(tmp_path)
    assert run.steps == (5,)
    assert run.path_of(5).name == "step_5.pt"
    assert {"a link to step_5.pt", "a link that leads nowhere"} == {s.reason for s in run.skipped}


def test_two_models_in_one_run_are_refused_by_name(tmp_path):
    _save(tmp_path / "a_1.pt", 1, **{f"a{i}": torch.ones(2) for i in range(4)})
    _save(tmp_path / "b_2.pt", 2, **{f"b{i}": torch.ones(2) for i in range(4)})
    with pytest.raises(InputError, match=r"two different models.*a_1\.pt.*b_2\.pt"):
        open_run(tmp_path)
    assert open_run(f"{tmp_path}/a_*.pt").steps == (1,)


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


def test_a_selection_of_checkpoints_is_read_alone_and_a_refresh_reads_the_rest(tmp_path):
    folder = tmp_path / "run"
    save_run(folder)
    run = open_run(folder, reading=lambda paths: paths[-1:])
    assert (run.steps, run.n_unread) == ((30,), 2)
    assert run.refresh(lambda paths: paths[1:]).steps == (20, 30)
    whole = run.refresh()
    assert (whole.steps, whole.n_unread) == ((10, 20, 30), 0)
    for place in (folder, next(folder.glob("*.pt"))):
        with pytest.raises(NoCheckpointError):
            open_run(place, reading=lambda paths: [])


def test_settings_are_read_strictly(tmp_path):
    _save(tmp_path / "step_1.pt", 1)
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


def test_a_missing_shard_and_a_lying_index_are_damage(tmp_path):
    folder = save_huggingface(tmp_path / "hf", (100,), sharded=True) / "checkpoint-100"
    shard, index = folder / "model-00002-of-00002.safetensors", folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    shard.rename(tmp_path / "away")
    with pytest.raises(DamagedError, match="missing"):
        open_run(folder)
    (tmp_path / "away").rename(shard)
    for lie, said in ((listed | {"ghost": shard.name}, "ghost"), ({"w": "../away"}, "outside")):
        index.write_text(json.dumps({"weight_map": lie}))
        with pytest.raises(DamagedError, match=said):
            open_run(folder)


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


def save(path, seed):
    """Save a model with values by seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"fc.weight": seeded((8, 8), seed), "fc.bias": seeded((8,), seed)}, path)


def fates(folder):
    return {one.path: one.fate.value for one in open_run(folder).fates}


@pytest.fixture
def run(tmp_path):
    """Three epochs, one file each."""
    for epoch in (1, 2, 3):
        save(tmp_path / f"epoch_{epoch}.pth", epoch)
    return tmp_path


@pytest.mark.parametrize("folder", ["a/b/c/d/e", "epoch=4-val", "lightning_logs/version_0/checkpoints", ""])
@pytest.mark.parametrize("suffix", [".pth.tar", ".PTH", ".pkl", "", ".model"])
def test_neither_depth_nor_suffix_hides_a_torch_file(run, folder, suffix):
    save(run / folder / f"epoch_4{suffix}", 4)
    (run / "up").symlink_to(run)  # which ends
    assert open_run(run).steps == (1, 2, 3, 4)


def test_archives_and_hidden_folders_are_not_searched(run):
    save(run / "x.inshrink" / "epoch_4.pth", 4)
    save(run / ".cache" / "epoch_5.pth", 5)
    save(run / "archive" / "epoch_6.pth", 6)
    (run / "archive" / MANIFEST_NAME).write_bytes(b"")
    assert open_run(run).steps == (1, 2, 3)


def test_the_search_has_a_budget_and_says_where_it_ended(run, monkeypatch):
    monkeypatch.setattr("inshrink_core.formats.discovery.MAX_ENTRIES", 5)
    for number in range(5):
        (run / "data").mkdir(exist_ok=True)
        (run / "data" / f"{number}.txt").touch()
    found = open_run(run)
    assert [Path(row.path).name for row in found.unreadable] == ["data"]
    assert fates(run)["data"] == "left out"


def test_files_that_are_being_written_are_pending(run):
    (run / "epoch_4.pth.tmp").write_bytes(b"PK")
    assert fates(run)["epoch_4.pth.tmp"] == "pending"

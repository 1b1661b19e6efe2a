"""Directories of torch.distributed.checkpoint are checkpoints of whole tensors, whoever wrote the shards."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict

import inshrink_core
from inshrink_core.checkpoint import Box
from inshrink_core.errors import (
    ChecksumError,
    DamagedError,
    InputError,
    InshrinkError,
    UnsafePathError,
    UnsafePickleError,
)
from inshrink_core.formats import open_run, write_checkpoint
from inshrink_core.formats.checkpoints import DistributedReader
from inshrink_core.testing.readers import ReaderSuite
from tests.builders import flip
from tests.formats.run_builders import Call, content_of, small_model, train
from tests.formats.shards import edited, rewrite, save_shards, stored

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(folder, state):
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def trained(seed=0):
    model = small_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95))
    train(model, optimizer)
    return get_state_dict(model, optimizer)


class TestDistributedReader(ReaderSuite):
    reader = DistributedReader()

    def save(self, folder, step, weights):
        return save(folder / f"step-{step}", {"model": weights})


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adadelta, torch.optim.Adafactor])
@pytest.mark.parametrize("numbered", [False, True])
def test_a_state_has_the_names_and_roles_that_it_has_in_a_torch_file(tmp_path, make, numbered):
    model = small_model()
    optimizer = make(model.parameters(), lr=0.01)
    train(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    if numbered:
        moments = optimizer.state_dict()
    save(tmp_path / "a" / "step-7", {"model": weights, "optimizer": moments, "train_state": {"step": 70}})
    (tmp_path / "b").mkdir()
    torch.save(
        {"model": weights, "optimizer": optimizer.state_dict(), "step": 70}, tmp_path / "b" / "step-7.pt"
    )
    shards, file = open_run(tmp_path / "a")[70], open_run(tmp_path / "b")[70]
    assert {spec.key: spec.role for spec in shards.specs} == {spec.key: spec.role for spec in file.specs}
    assert all(torch.equal(shards[key], file[key]) for key in file)
    assert shards.hyperparameters == file.hyperparameters != {}


GLOBAL = torch.arange(60, dtype=torch.float32).reshape(10, 6)
PIECES = {
    "rows": [(0, (0, 0), GLOBAL[:7]), (1, (7, 0), GLOBAL[7:])],
    "columns": [(0, (0, 0), GLOBAL[:, :4].clone()), (1, (0, 4), GLOBAL[:, 4:].clone())],
    "grid": [
        (rank, (i, j), GLOBAL[i : i + 5, j : j + 3].clone())
        for rank, (i, j) in enumerate([(0, 0), (0, 3), (5, 0), (5, 3)])
    ],
    "transposed": [(0, (0, 0), GLOBAL[:7].t().clone().t()), (1, (7, 0), GLOBAL[7:])],
    "one": [(1, (0, 0), GLOBAL)],
    "uneven": [(0, (0, 0), GLOBAL), (1, (10, 0), GLOBAL[10:])],
}
MORE = {
    "half": ((4,), [(0, (0,), torch.ones(3).bfloat16()), (1, (3,), torch.full((1,), 7).bfloat16())]),
    "eighth": ((4,), [(i, (2 * i,), torch.tensor([1.0, -2.0]).to(torch.float8_e5m2)) for i in (0, 1)]),
    "mask": ((2,), [(0, (0,), torch.tensor([True])), (1, (1,), torch.tensor([False]))]),
    "scale": ((), [(1, (), torch.tensor(2.5))]),
    "empty": ((0, 3), [(0, (0, 0), torch.zeros(0, 3))]),
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    root = tmp_path_factory.mktemp("sharded")
    for step in (1, 2):
        tensors = {
            name: ((10, 6), [(rank, at, part * step) for rank, at, part in shards])
            for name, shards in PIECES.items()
        }
        save_shards(root / f"step-{step}", tensors | MORE)
    return root


def test_shards_are_seen_as_the_tensors_they_are_parts_of(sharded):
    run = open_run(sharded)
    assert run.steps == (1, 2)
    for name in PIECES:
        assert torch.equal(run[2][name], GLOBAL * 2), name
    assert run[1]["half"].tolist() == [1, 1, 1, 7]
    assert run[1]["half"].dtype == torch.bfloat16
    assert run[1]["eighth"].float().tolist() == [1, -2, 1, -2]
    assert run[1]["mask"].tolist() == [True, False]
    assert run[1]["scale"] == 2.5
    assert run[1]["empty"].shape == (0, 3)


def test_shards_are_restored_byte_for_byte(sharded, tmp_path):
    inshrink_core.compress(sharded, tmp_path / "a.inshrink", codec="lossless")
    inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", steps=[1, 2])
    for step in (1, 2):
        [folder] = [p.parent for p in (tmp_path / "out").rglob(".metadata") if f"{step}" in p.parent.name]
        assert content_of(folder) == content_of(sharded / f"step-{step}")


def test_what_a_lossy_restore_wrote_loads_with_torch(sharded, tmp_path):
    inshrink_core.compress(sharded, tmp_path / "a.inshrink", codec="lattice")
    inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", steps=[2])
    decoded = inshrink_core.open(tmp_path / "a.inshrink")[2]
    state = {name: torch.zeros(10, 6) for name in PIECES}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    for name in PIECES:
        assert torch.equal(state[name], decoded[name]), name
    assert not torch.equal(state["rows"], GLOBAL * 2)
    [again] = open_run(tmp_path / "out").values()
    assert all(torch.equal(again[name], decoded[name]) for name in decoded)


def test_weights_alone_are_restored_without_the_description_of_the_shards(tmp_path):
    weights, moments = trained()
    save(tmp_path / "run" / "step-7", {"model": weights, "optimizer": moments})
    inshrink_core.compress(tmp_path / "run", tmp_path / "a.inshrink", codec="lossless", optimizer="drop")
    inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", steps=[7])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"checkpoint.pt"}
    assert open_run(tmp_path / "out")[7].keys() == weights.keys()


@dataclass
class Hyperparameters:
    width: int = 3


def test_lightnings_folder_takes_its_step_from_the_file_beside_the_shards(tmp_path):
    for number, step in enumerate((40, 80)):
        folder = tmp_path / f"epoch={number}.ckpt"
        weights, moments = trained(step)
        save(folder, {"model": weights, "optimizer_0": moments})
        torch.save({"global_step": step, "epoch": number}, folder / "meta.pt")
    run = open_run(tmp_path)
    assert run.steps == (40, 80)
    assert "1.weight@exp_avg_sq" in run[80]
    torch.save({"global_step": 80, "hyper_parameters": Hyperparameters()}, folder / "meta.pt")
    assert len(open_run(tmp_path)) == 2


def test_the_state_of_a_whole_application_is_found(tmp_path):
    weights, moments = trained()
    save(tmp_path / "step-3", {"app": {"model": weights, "optim": moments}})
    assert {"1.weight", "1.weight@exp_avg"} <= set(open_run(tmp_path)[3])


def test_a_save_that_was_never_finished_is_passed_over(tmp_path):
    save(tmp_path / "step-1", {"model": {"w": torch.ones(3)}})
    save(tmp_path / "step-2", {"model": {"w": torch.ones(3)}})
    (tmp_path / "step-2" / ".metadata").rename(tmp_path / "step-2" / ".metadata.tmp")
    run = open_run(tmp_path)
    assert run.steps == (1,)
    assert "'.metadata' is missing" in run.skipped[0].reason


def _overlap(folder, metadata):
    metadata.state_dict_metadata["rows"].chunks[1].offsets = torch.Size([6, 0])
    info = metadata.storage_data.pop(MetadataIndex("rows", (7, 0)))
    metadata.storage_data[MetadataIndex("rows", (6, 0))] = info


def _cut(folder, metadata):
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-3000])


def _swap(folder, metadata):
    one, other = stored(metadata, "rows"), stored(metadata, "one")
    one.relative_path, one.offset, one.length = other.relative_path, other.offset, other.length
    other.offset += 1


def _set(name, which, **values):
    def edit(folder, metadata):
        for key, value in values.items():
            setattr(stored(metadata, name, which), key, value)

    return edit


def _of(name, edit):
    return lambda folder, metadata: edit(metadata.state_dict_metadata[name])


def _transposed(folder, metadata):
    # A shard of the same number of bytes, but another shape.
    description = metadata.state_dict_metadata["one"]
    description.size = description.chunks[0].sizes = torch.Size([6, 10])


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (_overlap, DamagedError),
        (_of("scale", lambda told: told.chunks.append(told.chunks[0])), DamagedError),
        (_of("rows", lambda told: told.chunks.pop()), DamagedError),
        (_of("rows", lambda told: setattr(told, "size", torch.Size([9, 6]))), DamagedError),
        (_of("rows", lambda told: setattr(told.properties, "dtype", torch.int32)), DamagedError),
        (_transposed, DamagedError),
        (lambda _, held: held.storage_data.pop(MetadataIndex("rows", (7, 0))), DamagedError),
        (lambda folder, _: (folder / "__1_0.distcp").unlink(), DamagedError),
        (_cut, DamagedError),
        (_swap, DamagedError),
        (_set("rows", 1, offset=-8), DamagedError),
        (_set("rows", 1, length="8"), DamagedError),
        (_set("rows", 1, offset=1 << 60), DamagedError),
        (_set("rows", 1, length=20), DamagedError),
        (_set("rows", 1, relative_path="../__1_0.distcp"), UnsafePathError),
        (_set("rows", 1, relative_path="/etc/passwd"), UnsafePathError),
        (_set("rows", 1, transform_descriptors=["zstd"]), InputError),
    ],
)
def test_descriptions_that_lie_are_refused(tmp_path, edit, error):
    tensors = {name: ((10, 6), PIECES[name]) for name in ("rows", "one")}
    folder = save_shards(tmp_path / "step-1", tensors | {"scale": MORE["scale"]})
    metadata = edited(folder)
    edit(folder, metadata)
    rewrite(folder, metadata)
    with pytest.raises(error):
        open_run(folder)


def test_a_description_that_calls_something_is_refused_and_not_executed(tmp_path, capsys):
    folder = save(tmp_path / "step-1", {"model": {"w": torch.ones(3)}})
    rewrite(folder, replace(edited(folder), planner_data=Call(print, "executed")))
    with pytest.raises(UnsafePickleError, match="print"):
        open_run(folder)
    assert capsys.readouterr().out == ""


def test_a_shard_that_rotted_is_refused_with_the_tensor_it_is_of(tmp_path):
    folder = save_shards(tmp_path / "step-1", {"rows": ((10, 6), PIECES["rows"])})
    [spec] = open_run(folder)[1].specs
    file = folder / "__1_0.distcp"
    at = file.read_bytes().index(GLOBAL[7:].numpy().tobytes())
    flip(file, at + 5)
    with pytest.raises(ChecksumError, match=r"which holds .?rows"):
        open_run(folder)[1].source.read(spec)
    damaged = open_run(folder, allow_damaged=True)[1]
    write_checkpoint(damaged, tmp_path / "out")
    assert content_of(tmp_path / "out") == content_of(folder)


def test_shards_in_safetensors_are_not_taken_for_tensors(tmp_path):
    for rank in (0, 1):
        told = json.dumps({"w": {"saved_offsets": [3 * rank, 0]}})
        name = f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        save_file({"w": torch.ones(3, 2)}, tmp_path / name, metadata={"DCP_SHARDING_INFO": told})
    with pytest.raises(InputError, match="consolidate"):
        open_run(tmp_path)
    (tmp_path / name).rename(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="consolidate"):
        open_run(tmp_path / "model.safetensors")


@pytest.mark.parametrize("box", [Box((4, 0), (7, 6)), Box((0,), (60,)), Box((0, 0, 0), (1, 1, 1))])
def test_a_layout_with_a_part_outside_of_its_tensor_is_damage(sharded, tmp_path, box):
    checkpoint = open_run(sharded)[1]
    [layout] = [file for file in checkpoint.files if file.path == "__1_0.distcp"]
    at, region = next((i, r) for i, r in enumerate(layout.regions) if r.members[0].key == "rows")
    lie = region._replace(members=(region.members[0]._replace(box=box),))
    regions = (*layout.regions[:at], lie, *layout.regions[at + 1 :])
    with pytest.raises(InshrinkError, match=r"outside of|strides|larger"):
        write_checkpoint(replace(checkpoint, files=(replace(layout, regions=regions),)), tmp_path / "out")

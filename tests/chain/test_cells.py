"""Tensors in cells, as ranks of a sharded training write them: everything that reads sees whole tensors."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import inshrink_core
from inshrink_core.analysis import anatomy
from inshrink_core.archive import ArchiveWriter, PartWriter, check_archive, commit_parts
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.chain import Archive, ChainConfig, ChainWriter, parts
from inshrink_core.chain.parts import Shards, box_of, cells_of
from inshrink_core.checkpoint import Box, Checkpoint, TensorRole, TensorsInMemory, TensorSpec
from inshrink_core.codec import make_codec
from inshrink_core.errors import ConflictError, DamagedError, MissingFrameError
from inshrink_core.verbs import export, inspect, prune, restore, verify
from inshrink_lab.budget import changed_nbytes
from tests.builders import flip

ROWS, COLUMNS, STEPS = 40, 8, (1, 2, 3)


@pytest.fixture(autouse=True)
def small_cells(monkeypatch):
    monkeypatch.setattr(parts, "CELL_NUMEL", 64)  # eight rows


def specs():
    weight = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(ROWS, COLUMNS))
    bias = TensorSpec(name="fc.bias", role=TensorRole.WEIGHT, dtype="float32", shape=(ROWS,))
    moment = TensorSpec(name="fc.weight", role=TensorRole.EXP_AVG, dtype="float32", shape=(ROWS, COLUMNS))
    return [weight, moment, bias]


def values(step):
    found = {}
    for seed, spec in enumerate(specs()):
        before = torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed))
        found[spec] = before + 1e-3 * step * torch.randn(
            spec.shape, generator=torch.Generator().manual_seed(9)
        )
    return found


def shards_of(step, rank, world):
    """Return what a rank holds: rows of the matrices, and the first one all of the bias."""
    shards = {}
    for spec, tensor in values(step).items():
        if len(spec.shape) == 1:
            shards |= {spec: tensor} if rank == 0 else {}
            continue
        size = -(-ROWS // world)
        rows = range(min(rank * size, ROWS), min((rank + 1) * size, ROWS))
        box = Box((rows.start, 0), (len(rows), COLUMNS))
        shards |= {cell: tensor[box_of(cell).slices] for cell, _ in cells_of(spec, box)}
    return shards


def write(path, world, steps=STEPS, codec="lossless"):
    """Write an archive as so many ranks do."""
    if not path.exists():
        ArchiveWriter(path, create=True).close()
    for step in steps:
        write_step(path, world, step, codec)
        commit_parts(path)
    return path


def write_step(path, world, step, codec):
    """Write a step, each rank a thread that has one part."""
    order = {spec.key: place for place, spec in enumerate(specs())}
    meeting, given = threading.Barrier(world, timeout=20), [None] * world
    shards = [shards_of(step, rank, world) for rank in range(world)]
    rows = sorted((order[spec.full_spec.key], box_of(spec).offsets) for shard in shards for spec in shard)
    places = {row: place for place, row in enumerate(rows)}

    def rank_writes(rank):
        def gathered(value):
            given[rank] = value
            meeting.wait()
            return list(given)

        tensors = {spec.key: tensor for spec, tensor in shards[rank].items()}
        checkpoint = Checkpoint(step=step, specs=tuple(shards[rank]), source=TensorsInMemory(tensors))
        at = {one.key: places[order[one.full_spec.key], box_of(one).offsets] for one in shards[rank]}
        config = ChainConfig(config=make_codec(codec, None), threads=1, optimizer="exact")
        with PartWriter(path, rank, world, bytes([step])) as writer:
            ChainWriter(writer, config, split=Shards(at, gathered)).append(checkpoint)

    with ThreadPoolExecutor(world) as ranks:
        list(ranks.map(rank_writes, range(world)))


def same(path, steps=STEPS):
    archive = Archive.open(path)
    return archive.steps == tuple(steps) and all(
        torch.equal(archive[step][spec.key], tensor)
        for step in steps
        for spec, tensor in values(step).items()
    )


@pytest.fixture(params=[1, 3])
def path(tmp_path, request):
    return write(tmp_path / "a.inshrink", request.param)


def test_all_tensors_are_whole_and_in_the_order_of_the_state(path):
    archive = Archive.open(path)
    assert archive[3].specs == tuple(specs())
    assert same(path)
    assert [frame.kind for frame in archive.frames] == ["keyframe", "delta", "delta"]
    assert len(archive.blocks(archive.last, "fc.weight")) > 4


def test_a_delta_is_taken_of_each_cell_that_both_numbers_of_ranks_have(tmp_path):
    path = write(write(tmp_path / "a.inshrink", 1, STEPS[:2]), 2, STEPS[2:])
    assert same(path)
    alone = write(tmp_path / "b.inshrink", 2, STEPS[2:])
    nbytes = [
        {e.key: e.nbytes for e in Archive.open(p).blocks(Archive.open(p).last, "fc.weight")}
        for p in (path, alone)
    ]
    assert nbytes[0].keys() == nbytes[1].keys()
    shared = [key for key in nbytes[0] if nbytes[0][key] < nbytes[1][key]]
    assert shared == [f"fc.weight[{row}:{row + 8},0:8]" for row in (0, 8, 24, 32)]


@pytest.mark.parametrize("codec", ["lattice", "inshrinkerator"])
def test_ranks_plan_as_one_where_their_cells_agree(tmp_path, codec):
    found = []
    for world in (1, 5):  # eight rows each
        archive = Archive.open(write(tmp_path / str(world), world, codec=codec))
        frames = [archive.frame(info) for info in archive.frames]
        found.append([{entry.key: frame.read(entry) for entry in frame.entries} for frame in frames])
    assert found[0] == found[1]


def test_inspect_and_drill_down_see_whole_tensors(path):
    facts = inspect(path, tensors=True).to_json()
    assert [row["key"] for row in facts["tensors"]] == [spec.key for spec in specs()]
    archive = Archive.open(path)
    nbytes = sum(block.nbytes for block in archive.blocks(archive.last, "fc.weight"))
    seen = anatomy(archive, 3, "fc.weight")
    assert (seen.spec, seen.nbytes) == (specs()[0], nbytes)
    assert changed_nbytes(archive, archive.last)["fc.weight"] > nbytes


def test_verify_reads_every_cell_and_compares_whole_tensors(path, tmp_path):
    assert not verify(path, deep=True).problems
    run = tmp_path / "run"
    run.mkdir()
    restore(path, run, steps=list(STEPS), layout="torch")
    assert not verify(path, deep=True, against=run).problems


def test_pruned_packed_and_rebuilt_archives_hold_the_same(path, tmp_path):
    export(path, pack=tmp_path / "packed")
    assert same(tmp_path / "packed")
    export(tmp_path / "packed", unpack=tmp_path / "unpacked")
    assert same(tmp_path / "unpacked")
    prune(path, keep=[3], apply=True)
    assert same(path, (3,))
    assert Archive.open(path).last.kind == "keyframe"
    (path / MANIFEST_NAME).unlink()
    ArchiveWriter(path, rebuild=True).close()
    assert same(path, (3,))
    assert not check_archive(path)


def test_optimizer_state_of_the_last_step_alone_leaves_every_cell_of_the_weights(path):
    prune(path, optimizer_last=1, apply=True)
    archive = Archive.open(path)
    assert archive.steps == STEPS
    for step in STEPS:
        stored = archive[step]
        shards = {spec.key: tensor for spec, tensor in values(step).items() if spec.key in stored}
        assert set(shards) == {
            spec.key for spec in specs() if step == STEPS[-1] or spec.role is TensorRole.WEIGHT
        }
        assert all(torch.equal(stored[key], tensor) for key, tensor in shards.items())
    assert not verify(path, deep=True).problems


def test_exported_files_hold_whole_tensors(path, tmp_path):
    for layout in ("torch", "safetensors", "dcp"):
        inshrink_core.restore(path, tmp_path / layout, steps=[3], layout=layout)
        found = inshrink_core.open(tmp_path / layout)
        checkpoint = found[found.steps[0]]
        for spec, tensor in values(3).items():
            assert torch.equal(checkpoint[spec.key], tensor)


@pytest.mark.parametrize("act", ["lost", "damaged"])
def test_a_part_that_is_lost_or_damaged_is_named_and_the_rest_is_read(tmp_path, act):
    path = write(tmp_path / "a.inshrink", 2)
    part = path / Archive.open(path).reader.find(2).files[1].path  # what the second rank wrote
    if act == "lost":
        part.unlink()
    else:
        flip(part, 100)
    problems = " ".join(f"{one.where} {one.what}" for one in verify(path, deep=True).problems)
    assert ("part 2/2" if act == "lost" else part.name) in problems
    archive = Archive.open(path)
    assert torch.equal(archive[1]["fc.weight"], values(1)[specs()[0]])
    with pytest.raises((MissingFrameError, DamagedError)):
        archive.decode(archive.reader.find(2), "fc.weight")


def test_a_part_remembers_its_own_cells_alone_and_a_frame_all_of_them(tmp_path):
    alone = Archive.open(write(tmp_path / "alone", 1, codec="lattice"))
    write(tmp_path / "changing", 5, STEPS[:1], codec="lattice")
    changing = Archive.open(write(tmp_path / "changing", 1, STEPS[1:], codec="lattice"))
    first, second = changing.frames[0], alone.frames[0]
    reader = changing.reader.frame(first.frame_id)
    for part in range(5):
        shards = {entry.key for entry in reader.entries if entry.part == part}
        memory = reader.meta_of(part)["memory"]
        remembered = {key for one in memory.values() if isinstance(one, dict) for key in one}
        assert remembered
        assert remembered <= shards
    assert reader.meta["memory"] == alone.reader.frame(second.frame_id).meta["memory"]
    # What follows plans with all of it, on whatever number of ranks.
    for one, other in zip(alone.frames, changing.frames, strict=True):
        assert blocks(alone, one) == blocks(changing, other)
    assert not check_archive(tmp_path / "changing")


def blocks(archive, info):
    frame = archive.frame(info)
    return {entry.key: frame.read(entry) for entry in frame.entries if not entry.attachment}


def test_parts_that_remember_otherwise_of_the_same_are_named(tmp_path, monkeypatch):
    from inshrink_core.chain import append

    calls = []

    def otherwise(memory, keys):
        calls.append(keys)
        return memory | {"rate": float(len(calls))}

    monkeypatch.setattr(append, "memory_of", otherwise)
    with pytest.raises(ConflictError, match="memory"):
        write(tmp_path / "a", 2, STEPS[:1], codec="lattice")

"""`InshrinkWriter` and `InshrinkReader` in one process: what DCP gives comes back, from any archive."""

import io
import pickle
from collections import OrderedDict, deque
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

import inshrink_core
from inshrink_core.archive import PartWriter
from inshrink_core.chain import Archive
from inshrink_core.checkpoint import TensorRole
from inshrink_core.errors import (
    ConfigError,
    InputError,
    NotFoundError,
    StepConflictError,
    StorageError,
    UnsafePickleError,
)
from inshrink_core.execution.progress import Progress
from inshrink_core.formats.dcp_state import unpack_state
from inshrink_core.integrations import dcp as dcp_module
from inshrink_core.integrations.dcp import InshrinkReader, InshrinkWriter, step_of
from inshrink_core.verbs import compress, restore, verify
from tests.formats.run_builders import small_model, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EXACT = {"codec": "lossless", "optimizer": "exact"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.inshrink"


def trained(step):
    """Return a state as FSDP's users make it."""
    torch.manual_seed(0)
    model = small_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(step):
        train(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    rest = {"step": step, "rng": torch.get_rng_state(), "lr": [0.1, 0.2], "scale": torch.tensor(3.5)}
    return {"model": weights, "optim": moments, "train": rest}


def save(path, *steps, state=trained, planner=None, **options):
    writer = InshrinkWriter(path, **EXACT, **options)
    for step in steps:
        how = {"checkpoint_id": f"step-{step}", "planner": planner, "no_dist": True}
        dcp.save(state(step), storage_writer=writer, **how)
    return writer


def load(state, **reader):
    dcp.load(state, storage_reader=InshrinkReader(**reader), no_dist=True)
    return state


def same(a, b):
    one, other = (flatten_state_dict(state)[0] for state in (a, b))
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]
        for name, value in one.items()
    )


def test_what_was_saved_is_loaded_bit_for_bit_objects_and_numbers_too(path):
    save(path, 1, 2, 3)
    for step in (1, 2, 3):
        assert same(load(trained(0), archive=path, step=step), trained(step))
    assert same(load(trained(0), archive=path), trained(3))
    assert [frame.kind for frame in Archive.open(path).frames] == ["keyframe", "delta", "delta"]


def test_names_are_given_the_roles_that_they_have_in_a_folder_of_the_same(path):
    save(path, 1)
    checkpoint = inshrink_core.open(path)[1]
    weights = trained(1)["model"]
    assert weights.keys() <= checkpoint.state_dict().keys()
    name = next(iter(weights))
    assert checkpoint.spec(f"{name}@exp_avg").role is TensorRole.EXP_AVG
    assert checkpoint.hyperparameters == {} or "lr" in checkpoint.hyperparameters[name]
    assert {spec.key for spec in checkpoint.specs if spec.role is TensorRole.EXTRA} == {
        "train.rng@extra",
        "train.scale@extra",
    }


def test_the_checkpoint_is_read_by_its_name_where_no_step_is_given(path):
    save(path, 1, 2)
    state, reader = trained(0), InshrinkReader(path)
    dcp.load(state, storage_reader=reader, checkpoint_id="runs/step-1", no_dist=True)
    assert same(state, trained(1))
    assert step_of("out/step-00012") == 12
    assert step_of("epoch=3-step=40.ckpt") == 40
    with pytest.raises(InputError, match="no step"):
        step_of("best")


@pytest.mark.parametrize("layout", ["same", "dcp"])
def test_a_step_is_restored_as_a_folder_that_dcp_loads(path, tmp_path, layout):
    save(path, 1, 2)
    now: list[Progress] = []
    report = restore(path, tmp_path / "out", steps=[2], layout=layout, progress=now.append)
    assert report.layout == "dcp"
    assert now[-1].done == now[-1].total > 1
    state = trained(0)
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same(state, trained(2))
    assert verify(path, deep=True).problems == ()


def test_an_archive_of_a_run_is_loaded_and_restored_for_dcp(tmp_path):
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    archive, step = tmp_path / "a.inshrink", run.steps[1]
    compress(run, archive, steps=run.steps[:2], **EXACT)
    names = run[step].state_dict().keys()

    def state(of, at):
        moments = {
            name: {"exp_avg": of(f"{name}@exp_avg")} for name in names if f"{name}@exp_avg" in run[step]
        }
        return {"model": {name: of(name) for name in names}, "optimizer": {"state": moments}, "step": at}

    restore(archive, tmp_path / "out", steps=[step], layout="dcp")
    for where in (
        {"storage_reader": InshrinkReader(archive, step=step)},
        {"checkpoint_id": tmp_path / "out"},
    ):
        found = state(lambda key: torch.zeros_like(run[step][key]), 0)
        assert found["optimizer"]["state"]
        dcp.load(found, **where, no_dist=True)
        assert same(found, state(run[step].__getitem__, step))


def test_names_of_megatron_are_weights_and_their_moments(path):
    """What `torch_dist` has: names at the top, moments under ``optimizer.state``, objects with a shard."""
    layer = "decoder.layers.self_attention.linear_qkv.weight"

    def state(step):
        made = {
            layer: torch.full((2, 12, 4), float(step)),
            "embedding.word_embeddings.weight": torch.ones(8, 4),
        }
        for name in list(made):
            for kind in ("exp_avg", "exp_avg_sq", "fp32_param"):
                made[f"optimizer.state.{kind}.{name}"] = made[name] + step
        made["decoder.layers.self_attention.core_attention._extra_state/shard_0_2"] = {"scale": step}
        return OrderedDict(made)

    save(path, 1, 2, state=state, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    roles = {spec.key: spec.role for spec in inshrink_core.open(path)[2].specs}
    assert roles[layer] is TensorRole.WEIGHT
    assert roles[f"{layer}@exp_avg"] is TensorRole.EXP_AVG
    assert roles[f"{layer}@master"] is TensorRole.MASTER
    found = state(0)
    loading = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(found, storage_reader=InshrinkReader(path), planner=loading, no_dist=True)
    held = {name: value for name, value in state(2).items() if torch.is_tensor(value)}
    assert all(torch.equal(found[name], value) for name, value in held.items())


class Strange:
    pass


def beside(value):
    return {"model": {"w": torch.ones(3)}, "loader": value}


@pytest.mark.parametrize(
    ("value", "key", "kind"),
    [
        (Strange(), "loader", f"{__name__}.Strange"),
        ([1, {"inner": (Strange(),)}], "loader.1.inner", f"{__name__}.Strange"),
        (deque([1]), "loader", "collections.deque"),
        (numpy.arange(3), "loader", "numpy.ndarray"),
        (print, "loader", "builtins.print"),
    ],
    ids=["object", "nested", "deque", "array", "function"],
)
def test_an_object_that_loading_would_refuse_is_refused_when_it_is_saved(path, value, key, kind):
    writer = save(path, 1, state=lambda step: beside(step))
    with pytest.raises(CheckpointException) as caught:
        dcp.save(beside(value), storage_writer=writer, checkpoint_id="step-2", no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, UnsafePickleError)
    assert f"'{key}' is of a type that is not loaded: " in str(error)
    assert kind in error.wanted
    assert "add_safe_globals" in error.remedy
    assert str(error).isprintable()
    assert Archive.open(path).steps == (1,)
    dcp.save(beside(2), storage_writer=writer, checkpoint_id="step-2", no_dist=True)
    assert load(beside(None), archive=path)["loader"] == 2


def test_a_type_that_was_allowed_for_saving_alone_is_refused_when_it_is_loaded(path):
    torch.serialization.add_safe_globals([Strange])
    try:
        save(path, 1, state=lambda step: beside(Strange()))
        assert isinstance(load(beside(None), archive=path)["loader"], Strange)
    finally:
        torch.serialization.clear_safe_globals()
    with pytest.raises(CheckpointException) as caught:
        load(beside(None), archive=path)
    assert f"{__name__}.Strange" in str(caught.value.failures[0][0])
    assert str(caught.value.failures[0][0]).isprintable()
    found = load({"model": {"w": torch.zeros(3)}}, archive=path)  # the rest is read
    assert torch.equal(found["model"]["w"], torch.ones(3))


@pytest.mark.parametrize(
    "value",
    [Path("/data/train"), PurePosixPath("a/b"), PureWindowsPath("c:/a"), [Path("a"), {"b": Path("c")}]],
    ids=["path", "pure", "windows", "nested"],
)
def test_paths_are_saved_and_loaded(path, value):
    allowed = torch.serialization.get_safe_globals()
    save(path, 1, state=lambda step: beside(value))
    assert load(beside(value), archive=path)["loader"] == value
    assert torch.serialization.get_safe_globals() == allowed


def test_bytes_in_memory_are_saved_and_loaded_where_they_were_read_to(path):
    stream = io.BytesIO(b"of a loader")
    stream.seek(3)
    save(path, 1, state=lambda step: beside(stream))
    found = load(beside(None), archive=path)["loader"]
    assert (found.getvalue(), found.tell()) == (b"of a loader", 3)


def test_training_that_goes_back_leaves_later_steps_on_their_branch(path):
    save(path, 1, 2, 3)
    with pytest.raises(CheckpointException, match="resumed_from") as raised:
        save(path, 2)
    assert isinstance(raised.value.failures[0][0], StepConflictError)
    save(path, 2, 3, 4, resumed_from=1)
    archive = Archive.open(path)
    assert [(frame.step, frame.branch) for frame in archive.reader.frames] == [
        *[(1, 0), (2, 0), (3, 0)],
        *[(2, 1), (3, 1), (4, 1)],
    ]
    first = archive.reader.find(1).frame_id
    assert archive.frame(archive.reader.find(2, branch=1)).meta["restored"] == first
    with pytest.raises(CheckpointException, match="step 9"):
        save(path, 10, resumed_from=9)


def test_a_training_that_saves_meanwhile_is_refused_and_the_first_goes_on(path, monkeypatch):
    writer, begin, refused = save(path, 1), PartWriter.begin, []

    def between(self, **options):
        monkeypatch.setattr(PartWriter, "begin", begin)
        with pytest.raises(CheckpointException, match="LockedError"):
            save(path, 2)
        refused.append(True)
        return begin(self, **options)

    monkeypatch.setattr(PartWriter, "begin", between)
    dcp.save(trained(2), storage_writer=writer, checkpoint_id="step-2", no_dist=True)
    assert refused
    assert same(load(trained(0), archive=path, step=2), trained(2))


def test_a_commit_that_failed_is_made_up_for_by_the_next_save(path, monkeypatch):
    writer, commit = save(path, 1), dcp_module.commit_parts

    def full(archive, *, discard=False):
        if discard:
            return commit(archive, discard=True)
        raise StorageError("the disk is full")

    monkeypatch.setattr(dcp_module, "commit_parts", full)
    with pytest.raises(CheckpointException, match="the disk is full"):
        dcp.save(trained(2), storage_writer=writer, checkpoint_id="step-2", no_dist=True)
    monkeypatch.setattr(dcp_module, "commit_parts", commit)
    dcp.save(trained(3), storage_writer=writer, checkpoint_id="step-3", no_dist=True)
    assert Archive.open(path).steps == (1, 2, 3)
    assert [frame.branch for frame in Archive.open(path).reader.frames] == [0, 0, 0]
    assert same(load(trained(0), archive=path, step=3), trained(3))


def test_misuse_is_refused_when_made(path):
    with pytest.raises(ConfigError):
        InshrinkWriter(path, codec="no such codec")
    with pytest.raises(NotFoundError):
        InshrinkReader(path)
    save(path, 1)
    with pytest.raises(NotFoundError, match="step 7"):
        InshrinkReader(path, step=7)
    with pytest.raises(InputError, match="written with the codec"):
        InshrinkWriter(path, codec="lattice")
    with pytest.raises(CheckpointException, match="no name"):
        dcp.save(trained(2), storage_writer=InshrinkWriter(path), no_dist=True)
    with pytest.raises(InputError, match="no step"):
        dcp.save(trained(2), storage_writer=InshrinkWriter(path), checkpoint_id="last", no_dist=True)


def test_a_writer_that_is_pickled_is_one_in_a_process(path):
    writer = InshrinkWriter(path, **EXACT)
    copies = [pickle.loads(pickle.dumps(writer)) for _ in range(2)]
    assert copies[0] is copies[1]
    assert copies[0].archive == writer.archive


@pytest.mark.parametrize("content", [b"", b"\x93\x80\x80", b"\x93\x81\xa1a\x01\x80\x90", b"\x01"])
def test_a_saved_state_that_is_damaged_is_said_to_be(content):
    with pytest.raises(inshrink_core.errors.DamagedError, match="saved state"):
        unpack_state(content, "a")


def test_verbs_inside_a_training_wait_for_no_other_rank(path, tmp_path, monkeypatch):
    save(path, 1)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: pytest.fail("waits for another"))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: pytest.fail("joins others"))
    assert verify(path).problems == ()
    assert restore(path, tmp_path / "out").steps == (1,)

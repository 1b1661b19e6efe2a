"""What the ranks of the tests of a writer under a check do: importable, for they are processes."""

import math
import time

import dcp_ranks as ranks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from inshrink_core.chain import Archive
from inshrink_core.errors import ConflictError, EvaluatorError, InputError
from inshrink_core.integrations.dcp import InshrinkWriter

WIDTH, BOUND, STEPS = 64, 0.0005, (5, 10, 15, 20, 25)


def network():
    """Return the model of `Training`, whole."""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 3), nn.BatchNorm1d(3))


def samples(n=32):
    inputs = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(99))
    return inputs, inputs[:, :3].argmax(1)


def answer(model, inputs, labels):
    logits = model(inputs)
    return {"loss": functional.cross_entropy(logits, labels), "log_probs": functional.log_softmax(logits, 1)}


def check(model):
    return answer(model, *samples())


def check_of_share(model):
    """Ask about this rank's share of the samples."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return answer(model, *(item.chunk(world)[rank] for item in samples()))


def train(archive, stored, options, replicas=False, asked=check):
    """Save under a check; the model is as it was after each save."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "rows")) if replicas else None
    training = ranks.Training(mesh, width=WIDTH)
    writer = InshrinkWriter(archive, model=training.model, check=asked, **options)
    for step in STEPS:
        training.train(step)
        before = training.whole()
        ranks.save(training.state(), writer, step)
        assert ranks.same(before, training.whole())
        assert training.model.training
        ranks.keep(
            {name: item for name, item in before.items() if name.startswith("model.")}, stored / f"{step}.pt"
        )


def fail(folder):
    """Save while the check fails on one rank, in one way after the other."""
    rank, archive = dist.get_rank(), folder / "a"
    how = ["not at all"]

    def asked(model):
        if how[0] == "before" and rank == 1:
            raise RuntimeError("out of luck")
        loss = check(model)
        if how[0] == "after" and rank == 1:
            raise RuntimeError("out of luck")
        if how[0] == "another" and rank == 1:
            return {"accuracy": float(loss["loss"])}
        return loss

    # A group of the training's own, for it is of no use after the last failure.
    training = ranks.Training(DeviceMesh.from_group(dist.new_group([0, 1]), "cpu"), width=WIDTH)
    options = {"model": training.model, "check": asked, "max_restore_cost": BOUND}
    writer = InshrinkWriter(archive, **options)
    training.train(1)
    ranks.save(training.state(), writer, 1)
    training.train(2)
    state, before = training.state(), training.whole()

    def refused(words, saves=writer, kind=CheckpointException):
        with pytest.raises(kind, match=words) as caught:
            ranks.save(state, saves, 2)
        if kind is CheckpointException:
            assert set(caught.value.failures) == {0, 1}
        assert Archive.open(archive).steps == (1,), words

    how[0] = "after"
    refused(r"rank 1: check: it cannot be evaluated \(RuntimeError: out of luck\)")
    assert ranks.same(before, training.whole())
    how[0] = "another"
    refused("rank 1", InshrinkWriter(archive, **options))
    how[0] = "not at all"
    refused(
        "another max_restore_cost",
        InshrinkWriter(archive, **options | {"max_restore_cost": 0.1 + rank}),
        ConflictError,
    )
    with pytest.raises((InputError, CheckpointException), match="training must not use meanwhile"):
        dcp.async_save(state, storage_writer=writer, checkpoint_id="step-2").result()
    ranks.save(state, writer, 2)
    assert Archive.open(archive).steps == (1, 2)
    # Others are in the midst of what the rank that fails does not come to:
    how[0], began = "before", time.monotonic()
    training.step = 3
    state = training.state()
    with pytest.raises(CheckpointException, match="rank 1: check: it cannot be evaluated") as caught:
        ranks.save(state, writer, 3)
    assert isinstance(caught.value.failures[0][0], EvaluatorError)
    assert time.monotonic() - began < 60
    assert Archive.open(archive).steps == (1, 2)


def not_finite(archive):
    """Save where one rank finds that nothing but the original gives a finite number."""
    training = ranks.Training(width=WIDTH)
    originals = []

    def asked(model):
        loss = check(model)
        (weight,) = (item for name, item in model.named_parameters() if name == "0.weight")
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        same = torch.equal(whole, originals[0])
        return loss if same or dist.get_rank() != 1 else loss["loss"] * math.nan

    writer = InshrinkWriter(archive, model=training.model, check=asked)
    for step in (1, 2):
        training.train(step)
        originals[:] = [training.whole()["model.0.weight"]]
        ranks.save(training.state(), writer, step)

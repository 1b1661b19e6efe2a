"""What encoding reads of a checkpoint: in order, never too much ahead, and files do not depend on it."""

import threading
import time
from dataclasses import replace

import pytest
import torch

import inshrink_core
from inshrink_core.archive import ArchiveWriter
from inshrink_core.chain import ChainConfig, ChainWriter, PreparedFrame
from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
from inshrink_core.codec import get_codec
from inshrink_core.errors import DamagedError
from inshrink_core.search.measure import encode_step
from tests.builders import memory_checkpoint, seeded


@pytest.mark.parametrize("other", ["none", "config", "checkpoint", "state"])
def test_what_was_prepared_is_taken_over_only_where_it_would_be_encoded_again(tmp_path, other):
    first, second = (
        memory_checkpoint(step, {"w": seeded((64, 64), step), "w@exp_avg": seeded((64, 64), 9)})
        for step in (1, 2)
    )
    chain = ChainConfig(config=get_codec("lattice")())
    with ArchiveWriter(tmp_path / "a", create=True) as writer:
        lines = ChainWriter(writer, chain)
        lines.append(first)
        state = lines.state(keyframe=False, specs=second.specs)
        encoded = encode_step(chain, second, state)
        prepared = PreparedFrame(encoded.plan, state, encoded.results)
        if other == "config":
            lines.config = replace(
                chain, config=replace(chain.config, coarseness=2 * chain.config.coarseness)
            )
        target = replace(second) if other == "checkpoint" else second
        appended = lines.append(target, keyframe=other == "state", prepared=prepared)
        assert appended.as_prepared == (other == "none")
        frame = lines.archive.frame(appended.info)
        same = frame.read(frame.entry("w")) == encoded.results["w"].block.payload
        assert same == (other in ("none", "checkpoint"))


def spec_of(name, n):
    return TensorSpec(name=name, role=TensorRole.WEIGHT, dtype="float32", shape=(n,))


class Counted:
    """A source of tensors that tells what was read."""

    def __init__(self):
        self.read_keys: list[str] = []

    def read(self, spec):
        self.read_keys.append(spec.key)
        if spec.name == "bad":
            raise DamagedError("a tensor is damaged")
        return torch.full(spec.shape, float(len(spec.name)))

    def skeleton(self, layout):
        return b"skeleton"


def checkpoint_of(specs):
    source = Counted()
    return Checkpoint(step=1, specs=tuple(specs), source=source), source


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_tensors_come_in_whatever_order_they_are_asked_for(threads):
    specs = [spec_of("x" * i, 10 * i) for i in range(1, 30)]
    checkpoint, source = checkpoint_of(specs)
    with checkpoint.prefetch(specs, threads) as ahead:
        for spec in (*specs[20:], *specs[:20], specs[3]):
            tensor = ahead.source.read(spec)
            assert torch.equal(tensor, torch.full(spec.shape, float(len(spec.name))))
        assert ahead.source.skeleton(None) == b"skeleton"
    assert sorted(source.read_keys) == sorted([*(spec.key for spec in specs), specs[3].key])


def test_no_more_is_read_ahead_than_the_window_holds():
    specs = [spec_of(f"w{i}", 100) for i in range(50)]
    checkpoint, source = checkpoint_of(specs)
    with checkpoint.prefetch(specs, 2) as ahead:
        ahead.source.read(specs[0])
        time.sleep(0.05)
        assert len(source.read_keys) <= 4


def test_an_error_is_raised_where_its_tensor_is_asked_for():
    specs = [spec_of("good", 5), spec_of("bad", 5), spec_of("fine", 5)]
    checkpoint, _ = checkpoint_of(specs)
    with checkpoint.prefetch(specs, 2) as ahead:
        assert ahead.source.read(specs[0]).tolist() == [4.0] * 5
        with pytest.raises(DamagedError):
            ahead.source.read(specs[1])
        assert ahead.source.read(specs[2]).tolist() == [4.0] * 5


def test_no_thread_is_left_when_the_context_closes():
    before = threading.active_count()
    specs = [spec_of("bad", 100), *(spec_of(f"w{i}", 100) for i in range(50))]
    checkpoint, _ = checkpoint_of(specs)
    with pytest.raises(DamagedError), checkpoint.prefetch(specs, 3) as ahead:
        ahead.source.read(specs[0])
    assert threading.active_count() == before


@pytest.mark.parametrize("codec", ["lattice", "lossless"])
def test_tensors_of_an_archive_are_the_callers_own(tmp_path, codec):
    archive = tmp_path / "a.inshrink"
    with ArchiveWriter(archive, create=True) as writer:
        lines = ChainWriter(writer, ChainConfig(config=get_codec(codec)()))
        for step in (1, 2):
            tensors = {"w": seeded((64, 64), step), "constant": torch.full((8, 8), 2.0)}
            lines.append(memory_checkpoint(step, tensors))
    for opened in (inshrink_core.open(archive), inshrink_core.open(archive).sequential()):
        for step in opened.steps:
            before = {key: tensor.clone() for key, tensor in opened[step].items()}
            for tensor in opened[step].values():
                assert tensor.is_contiguous()
                tensor.zero_()
            assert before["constant"].unique().tolist() == [2.0]
            assert all(torch.equal(opened[step][key], value) for key, value in before.items())

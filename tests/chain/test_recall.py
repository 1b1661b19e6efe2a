"""States that are not held: read again, decoded where that fails, and never in the way of the bytes."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import inshrink_core
from inshrink_core.archive import ArchiveWriter
from inshrink_core.chain import Archive, ChainConfig, ChainWriter
from inshrink_core.codec import get_codec
from inshrink_core.errors import MissingFrameError
from tests.builders import flip, memory_checkpoint
from tests.processes import ran
from tests.runs import payloads_of

CODECS = ("inshrinkerator", "lossless")


def write_run(directory, layers=3, width=160, n_steps=3):
    """Write a run whose weights and moments move a little, each larger than what is held."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    model = {f"layers.{i}.weight": torch.randn(width, width, generator=generator) for i in range(layers)}
    moments = [torch.randn(width, width, generator=generator) for _ in range(layers)]
    for step in range(1, n_steps + 1):
        for tensor in (*model.values(), *moments):
            tensor += 1e-4 * torch.randn(width, width, generator=generator)
        state = {
            i: {"step": torch.tensor(float(step)), "exp_avg": m, "exp_avg_sq": m * m}
            for i, m in enumerate(moments)
        }
        groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(layers))}]
        content = {"model": model, "optimizer": {"state": state, "param_groups": groups}, "step": step}
        torch.save(content, directory / f"step_{step}.pt")
    return directory


def compress_with_between(run_path, target, codec, between):
    """Compress step by step, doing something to each file once its frame is written."""
    run = inshrink_core.open(run_path)
    config = ChainConfig(config=get_codec(codec)(), optimizer="exact", threads=2)
    with ArchiveWriter(target, create=True) as writer:
        chain = ChainWriter(writer, config)
        for step in run.steps:
            chain.append(run[step])
            between(run_path / f"step_{step}.pt")


def leave(path):
    """Do nothing to a file."""


def delete(path):
    """Delete a file, as a training does that keeps the last few checkpoints."""
    path.unlink()


def rewrite_unnoticed(path):
    """Change one bit of every tensor and turn the clock back: only the digests tell."""
    stamp = path.stat()
    content = bytearray(path.read_bytes())
    for at in range(4096, len(content) - 4096, 4096):
        content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


@pytest.fixture
def run_path(tmp_path):
    return write_run(tmp_path / "run")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("between", [delete, flip, rewrite_unnoticed])
def test_the_blocks_are_the_same_where_the_previous_file_is_gone_or_has_changed(
    codec, between, run_path, tmp_path, caplog
):
    inshrink_core.compress(run_path, tmp_path / "whole.inshrink", codec=codec, optimizer="exact")
    with caplog.at_level("INFO", logger="inshrink_core"):
        compress_with_between(run_path, tmp_path / "fallback.inshrink", codec, between)
    assert "is decoded from the archive" in caplog.text
    assert payloads_of(tmp_path / "fallback.inshrink") == payloads_of(tmp_path / "whole.inshrink")


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_is_decoded_while_the_files_are_there(codec, run_path, tmp_path, monkeypatch):
    monkeypatch.setattr(Archive, "decode", Mock(side_effect=AssertionError("decoded from the archive")))
    compress_with_between(run_path, tmp_path / "a.inshrink", codec, leave)


def test_checkpoints_in_memory_are_not_asked_again(tmp_path):
    first = memory_checkpoint(1, {"w.weight": torch.randn(200, 200)})
    second = memory_checkpoint(2, {"w.weight": first["w.weight"] * 1.0001})
    config = ChainConfig(config=get_codec("lossless")())
    with ArchiveWriter(tmp_path / "a.inshrink", create=True) as writer:
        chain = ChainWriter(writer, config)
        chain.append(first)
        first.source.tensors.clear()  # type: ignore[attr-defined]
        chain.append(second)
    archive = Archive.open(tmp_path / "a.inshrink")
    assert torch.equal(archive[2]["w.weight"], second["w.weight"])


def test_a_state_that_is_nowhere_raises_an_error_of_ours(run_path, tmp_path):
    target = tmp_path / "a.inshrink"

    def lose(path):
        path.unlink()
        for frame in Archive.open(target).reader.frames:
            (target / frame.path).unlink()

    with pytest.raises(MissingFrameError):
        compress_with_between(run_path, target, "lossless", lose)


PEAK = """
import json, sys
import inshrink_core

def peak_nbytes():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

small, large, target, threads = sys.argv[1:]
inshrink_core.compress(small, target + ".small", codec="lossless", threads=int(threads))
before = peak_nbytes()
inshrink_core.compress(large, target, codec="lossless", threads=int(threads))
print(json.dumps(peak_nbytes() - before))
"""


@pytest.fixture(scope="module")
def small_and_large(tmp_path_factory):
    """Two runs of two steps; a tensor of the large one is a seventy-second of its checkpoint."""
    folder = tmp_path_factory.mktemp("peak")
    return write_run(folder / "small", n_steps=2), write_run(folder / "large", 24, 640, 2)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
def test_the_peak_of_memory_stays_well_below_a_checkpoint(small_and_large, tmp_path):
    # The states of losslessly stored tensors are a whole checkpoint.
    small, large = small_and_large
    done = ran(sys.executable, "-c", PEAK, str(small), str(large), str(tmp_path / "a"), "2")
    checkpoint_nbytes = (large / "step_1.pt").stat().st_size
    assert json.loads(done.stdout) < 0.6 * checkpoint_nbytes

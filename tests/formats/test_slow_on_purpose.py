"""Files that would take minutes or gigabytes to read are refused by a stated limit."""

import pickle
import resource
import struct
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import inshrink_core
from inshrink_core.errors import DamagedError, InshrinkError
from inshrink_core.formats.disk import MAX_VALUES, parse_json
from inshrink_core.formats.logs.log import read_log, read_metrics
from inshrink_core.formats.safetensors_file import MAX_TENSORS

_MAX_S = 10.0
_MAX_KB = 1_000_000


@pytest.fixture(autouse=True)
def within_bounds():
    """Seconds of the processor, not of a clock: the machine may be busy."""
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - begun < _MAX_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MAX_KB


def safetensors(path, header, n_bytes=0):
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(n_bytes))
    return path


def scalars(n_tensors):
    entries = (f'"t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(n_tensors))
    return ("{" + ",".join(entries) + "}").encode()


HEADERS: dict[str, Callable[[], bytes]] = {
    "a million tensors": lambda: scalars(10**6),
    "one tensor more than allowed": lambda: scalars(MAX_TENSORS + 1),
    "lists within a shape": lambda: b'{"t":{"dtype":"U8","shape":[' + b"[]," * 25_000_000 + b"1]}}",
    "objects within a shape": lambda: b'{"t":{"dtype":"U8","shape":[' + b"{}," * 25_000_000 + b"1]}}",
    "one deep list": lambda: b'{"t":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
    "a long integer": lambda: b'{"t":{"dtype":"U8","shape":[' + b"9" * 4000 + b'],"data_offsets":[0,1]}}',
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_of_safetensors_that_takes_long_is_refused(tmp_path, kind):
    safetensors(tmp_path / "step_1.safetensors", HEADERS[kind](), 10**6)
    with pytest.raises(InshrinkError, match=r"than are read|no valid JSON") as caught:
        inshrink_core.open(tmp_path)
    assert len(str(caught.value)) < 1000


def test_more_tensors_than_any_model_has_are_opened(tmp_path):
    n = 50_000
    safetensors(tmp_path / "step_1.safetensors", scalars(n), n)
    assert len(inshrink_core.open(tmp_path)[1].specs) == n


@pytest.mark.parametrize("size", [8, 0])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_shard_that_metadata_repeats_is_refused(tmp_path, size):
    folder = tmp_path / "step-1"
    dcp.save({"model": {"w": torch.ones(8)}}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    shard = ChunkStorageMetadata(torch.Size([0]), torch.Size([size]))
    told = metadata.state_dict_metadata["model.w"]
    told.chunks = [*told.chunks, *[shard] * 330_000]
    for number in range(300):
        metadata.state_dict_metadata[f"model.w{number}"] = told
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InshrinkError, match="more shards than it describes"):
        inshrink_core.open(tmp_path)


def test_a_log_of_many_columns_is_refused(tmp_path):
    n = 10**5
    row = ",".join(["1"] * n)
    lines = ["step," + ",".join(map(str, range(n))), *(f"{step},{row}" for step in range(60))]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    for read in (lambda: read_log(tmp_path), lambda: read_metrics(tmp_path / "metrics.csv")):
        with pytest.raises(DamagedError, match=r"at most 4,194,304.*every tenth row"):
            read()
    (tmp_path / "metrics.csv").write_text("\n".join(lines[:11]))
    assert len(read_log(tmp_path)) == n


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.json"])
def test_a_log_of_many_empty_values_is_refused(tmp_path, name):
    (tmp_path / name).write_text('{"a": [' + "{}," * 6_000_000 + "1]}\n")
    with pytest.raises(DamagedError, match="more values than are read"):
        read_metrics(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 400,
        "-" + "9" * 5000,
        "[" + "{}," * MAX_VALUES + "1]",
        "",
        "\udcff",
    ],
)
def test_json_that_no_number_or_stack_can_hold_is_refused_in_one_line(text):
    with pytest.raises(DamagedError) as caught:
        parse_json(text.encode("utf-8", "surrogateescape"), "file")
    assert len(str(caught.value)) < 200

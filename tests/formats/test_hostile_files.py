"""Files from anywhere: no pickle runs, and damage gives one of our own errors."""

import argparse
import fractions
import io
import json
import os
import pickle
import struct
import zipfile
from contextlib import suppress

import pytest
import torch
from safetensors.torch import save as save_safetensors

from benchmarks.fuzz.campaign import case_rng
from benchmarks.fuzz.targets import named
from inshrink_core.errors import DamagedError, InshrinkError, UnsafePickleError
from inshrink_core.formats import open_run, write_checkpoint
from inshrink_core.formats.torch.pickles import read_pickle
from tests.formats.run_builders import Call, same_bits
from tests.formats.test_objects_in_pickles import Width

N_MUTANTS = int(os.environ.get("INSHRINK_MUTANTS", "100"))


def _torch_bytes(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _zip(path, pickle_bytes, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x/data.pkl", pickle_bytes)
        archive.writestr("x/byteorder", b"little")
        archive.writestr("x/data/0", bytes(16))


def test_an_unsafe_pickle_is_refused_with_every_name_it_wanted(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "a": Call(os.system, "touch hacked"), "b": [Call(eval, "1")]}
    (tmp_path / "step_1.pt").write_bytes(_torch_bytes(state))
    with pytest.raises(UnsafePickleError) as caught:
        open_run(tmp_path / "step_1.pt")
    assert caught.value.wanted == ("__builtin__.eval", f"{os.system.__module__}.system")
    assert not os.path.lexists("hacked")


def test_a_directory_in_the_zip64_form_is_read(tmp_path):
    whole = _torch_sample()
    at = whole.rfind(b"PK\x05\x06")
    n_entries, size, offset = struct.unpack_from("<HII", whole, at + 10)
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, n_entries, n_entries, size, offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path = tmp_path / "step_3.pt"
    path.write_bytes(whole[:at] + end64 + locator + end)
    assert same_bits(open_run(path)[3]["w"], torch.ones(3, 2))
    (restored,) = write_checkpoint(open_run(path)[3], tmp_path / "out")
    assert restored.read_bytes() == path.read_bytes()
    path.write_bytes(whole[:at] + end64[:-8] + struct.pack("<Q", 1 << 62) + locator + end)
    with pytest.raises(DamagedError):
        open_run(path)


@pytest.mark.parametrize("value", [argparse.Namespace(a=1), fractions.Fraction(1, 3)])
def test_an_object_of_any_class_is_no_checkpoint(value):
    with pytest.raises(UnsafePickleError, match=type(value).__name__):
        read_pickle(pickle.dumps(value))


def test_a_model_that_is_an_object_and_no_module_is_refused_with_its_class(tmp_path):
    torch.save({"model": Width(), "step": 1}, tmp_path / "step_1.pt")
    with pytest.raises(UnsafePickleError, match="Width"):
        open_run(tmp_path / "step_1.pt")


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b".",
        b"\x80\x02",
        b"\x80\x02(.",
        b"\x80\x02K\x01K\x02R.",
        b"\x80\x02}K\x01b",
        b"\x80\x02h\x00.",
        b"\x80\x02r\xff\xff\xff\xff.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".",
        b"\x80\x04\x96" + struct.pack("<Q", 1 << 62) + b".",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"I" + b"9" * 10_000 + b"\n.",
        b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"ctorch._utils\n_rebuild_tensor_v3\n(K\x01t R.",
        b"ccollections\nOrderedDict\n(]K\x01aK\x02etR.",
        b"(" * 100_000 + b".",
        b"\x80\x02]q\x00" + b"K\x01a" * 2000 + b"cbuiltins\nlist\nq\x01" + b"h\x01h\x00\x85R0" * 2000 + b".",
        b"\x80\x02\x82\x01.",
        b"\x80\x02P1\n.",
        b"\x80\x05\x97.",
        b"\x80\x02N\x94\x94.",
        b"\x80\x02Np99999999\n.",
        b"\x80\x02]K\x00K\x01s.",
        b"\x80\x02ctorch\nfloat32\nN}X\x01\x00\x00\x00aNs\x86b.",
        b"\x80\x02(ctorch.nn.parameter\nParameter\nK\x01o\x81.",
        b"\x80\x02(K\x01tN\x92.",
    ],
    ids=range(26),
)
def test_malformed_programs_give_a_damaged_error(program):
    with pytest.raises(DamagedError):
        read_pickle(program)


def test_nested_and_self_referring_containers_do_not_hang(tmp_path):
    deep = b"\x80\x02)" + b"\x85" * 200_000 + b"."
    assert isinstance(read_pickle(deep), tuple)
    doubling = b"\x80\x02)q\x00" + b"".join(b"h\x00h\x00\x86q\x00" for _ in range(64)) + b"K\x01K\x02\x86."
    read_pickle(doubling)
    as_key = doubling[:-6] + b"h\x00}h\x00K\x01s."
    assert isinstance(read_pickle(as_key), dict)
    loop: dict = {"w": torch.ones(2)}
    loop["self"] = loop
    (tmp_path / "step_1.pt").write_bytes(_torch_bytes({"model": loop}))
    assert "w" in open_run(tmp_path / "step_1.pt")[1]


def test_tensors_past_their_storage_are_refused(tmp_path):
    program = (
        b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storage"
        b"ctorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQK\x00K%c\x85K\x01\x85\x89}tRs."
    )
    _zip(tmp_path / "step_1.pt", program % 4)
    assert open_run(tmp_path / "step_1.pt")[1]["w"].tolist() == [0, 0, 0, 0]
    _zip(tmp_path / "step_1.pt", program % 5)
    with pytest.raises(DamagedError, match="past its storage"):
        open_run(tmp_path / "step_1.pt")


def test_compressed_zips_and_duplicate_entries_are_refused(tmp_path):
    _zip(tmp_path / "a_1.pt", pickle.dumps({"w": 1}, protocol=2) * 1, zipfile.ZIP_DEFLATED)
    with pytest.raises(DamagedError, match="compressed"):
        open_run(tmp_path / "a_1.pt")
    with zipfile.ZipFile(tmp_path / "b_1.pt", "w") as archive:
        archive.writestr("x/data.pkl", b"N.")
        archive.writestr("x/data.pkX", b"N.")
    content = (tmp_path / "b_1.pt").read_bytes()
    (tmp_path / "b_1.pt").write_bytes(content.replace(b"data.pkX", b"data.pkl"))
    with pytest.raises(DamagedError, match="one name"):
        open_run(tmp_path / "b_1.pt")


def _torch_sample():
    return _torch_bytes({"model": {"w": torch.ones(3, 2), "b": torch.ones(2)}, "step": 3})


def _safetensors_sample():
    return save_safetensors({"w": torch.ones(3, 2), "b": torch.ones(2)}, metadata={"step": "3"})


@pytest.mark.parametrize(("suffix", "build"), [(".pt", _torch_sample), (".safetensors", _safetensors_sample)])
def test_a_file_cut_at_any_byte_gives_an_error_of_ours(tmp_path, suffix, build):
    whole = build()
    path = tmp_path / f"step_3{suffix}"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(InshrinkError):
            open_run(path)


ABSURD = ([1 << 63, 0], [0, 1 << 70], [1 << 62, 0, 8], [0, 10**400])


@pytest.mark.parametrize(
    "header",
    [
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}',
        b'{"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
        b'{"w":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]}}',
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"v":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        b'{"w":[]}',
        b"[]",
        b"{",
        b'{"__metadata__":{"a":1}}',
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"[" * 100_000,
        *(b'{"w":{"dtype":"F32","shape":%a,"data_offsets":[0,0]}}' % shape for shape in ABSURD),
    ],
    ids=range(12 + len(ABSURD)),
)
def test_safetensors_headers_that_lie_are_refused(tmp_path, header):
    path = tmp_path / "step_1.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(0 if b"[0,0]" in header else 8))
    with pytest.raises(DamagedError):
        open_run(path)


def test_an_over_long_shard_name_is_an_error_of_ours(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(_safetensors_sample())
    index = {"weight_map": {"w": "x" * 3000 + ".safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InshrinkError) as caught:
        open_run(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "name", ["torch-sealed", "safetensors", "folders", "zero-sealed", "zero3-sealed", "pickle"]
)
def test_every_mutant_is_read_or_refused_with_an_error_of_ours(name):
    (target,) = named((name,))
    for case in range(N_MUTANTS):
        with suppress(InshrinkError):
            target.execute(target.mutate(case_rng(name, 0, case)))


def test_an_oversized_header_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "step_1.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 150_000_000) + b"{")
        file.truncate(200_000_000)
    with pytest.raises(DamagedError, match="larger than allowed"):
        open_run(path)

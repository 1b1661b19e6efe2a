"""Whatever stands in the files of a run, the answer is a run or an error of ours."""

import copy
import functools
import io
import json
import os
import random
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as save_safetensors

from benchmarks.fuzz.zero import GROUPS, save_zero, some_state
from inshrink_core.errors import InshrinkError
from inshrink_core.formats import open_run
from tests.formats.run_builders import training_state

N_MUTANTS = int(os.environ.get("INSHRINK_MUTANTS", "150"))

ODD_VALUES = [
    0, 1, -1, 1 << 31, 1 << 62, 1 << 63, -(1 << 63), 1 << 64, 1 << 70, 10**400, 1.5, 1e308, 1e400, -0.0,
    float("nan"), None, True, "", "x" * 300, "x" * 5000, "\0", "\ud800", "..", "/etc/passwd", [], {}, [[]],
    [0, 1 << 63], [1 << 62, 0], {"a": 1}, "F32", "F4", [-1], [1.5], ["a"], [True],
]  # fmt: skip


ODD_OPCODES = [
    b"\x8a\x09" + b"\xff" * 8 + b"\x7f",
    b"\x8b\x00\x01\x00\x00" + b"\x7f" * 256,
    b"G\x7f\xf0\0\0\0\0\0\0",
    *(b"(", b"h\x01", b"R", b"u", b"\x85", b"2", b"K\x00", b"N", b"e", b"s", b"}"),
]


def mutated_json(value, chance: random.Random, n: int = 2):
    """Return a document with some values, or keys, replaced by others."""
    document = json.loads(json.dumps(value))
    for _ in range(n):
        at, path = document, []
        while isinstance(at, (dict, list)) and at and (not path or chance.random() < 0.8):
            key = chance.choice(list(at)) if isinstance(at, dict) else chance.randrange(len(at))
            path.append((at, key))
            at = at[key]
        if not path:
            return copy.deepcopy(chance.choice(ODD_VALUES))
        holder, key = path[-1]
        if isinstance(holder, dict) and chance.random() < 0.3:
            other = chance.choice([v for v in ODD_VALUES if isinstance(v, str)])
            holder[other] = holder.pop(key)
        else:
            # A copy: what is inserted may be changed next.
            holder[key] = copy.deepcopy(chance.choice(ODD_VALUES))
    return document


def flipped(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with some of them changed, repeated, cut out or moved."""
    raw = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at, n = chance.randrange(len(raw) + 1), chance.randrange(1, 9)
        kind = chance.randrange(5)
        if kind == 0 and raw:
            raw[min(at, len(raw) - 1)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            raw[at : at + n] = bytes(chance.randrange(256) for _ in range(n))
        elif kind == 2:
            del raw[at : at + n]
        elif kind == 3:
            source = chance.randrange(len(raw) + 1)
            raw[at:at] = raw[source : source + 8 * n]
        else:
            raw[at:at] = chance.choice(ODD_OPCODES)
    return bytes(raw)


def torch_mutant(chance: random.Random, whole: bytes) -> bytes:
    """Return a torch file whose pickle was changed and whose checksums hold."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith("data.pkl"):
                data = flipped(data, chance)
            elif chance.random() < 0.02:
                data = data[: chance.randrange(len(data) + 1)]
            new.writestr(info.filename, data)
    return out.getvalue()


def safetensors_mutant(chance: random.Random) -> bytes:
    whole = save_safetensors({"a": torch.ones(3, 2), "b": torch.zeros(0, 4), "c@exp_avg": torch.ones(2)})
    n_header = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + n_header]), whole[8 + n_header :]
    header["__metadata__"] = {"format": "pt", "step": "7", "d": "a"}
    text = json.dumps(mutated_json(header, chance)).encode()
    if chance.random() < 0.2:
        text = flipped(text, chance)
    return struct.pack("<Q", len(text)) + text + data


def saved(state: dict) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@functools.cache
def zero_files(stage: int) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        save_zero(Path(folder), *some_state(), GROUPS, stage=stage)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def write_mutant(folder: Path, chance: random.Random, state: bytes) -> None:
    """Fill a folder with a run of which one file is odd."""
    kind = chance.randrange(6)
    whole = save_safetensors({"w": torch.ones(2)})
    if kind == 0:
        (folder / "step_1.pt").write_bytes(torch_mutant(chance, state))
    elif kind == 5:
        files = zero_files(chance.choice((1, 3)))
        odd = chance.choice(sorted(files))
        for name, content in files.items():
            (folder / name).write_bytes(torch_mutant(chance, content) if name == odd else content)
    elif kind == 1:
        (folder / "step_1.safetensors").write_bytes(safetensors_mutant(chance))
    else:
        inner = folder / "checkpoint-3"
        inner.mkdir()
        (inner / "model-00001-of-00001.safetensors").write_bytes(whole)
        index = {"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
        trainer = {"global_step": 3, "log_history": [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1}]}
        index = mutated_json(index, chance) if kind == 2 else index
        trainer = mutated_json(trainer, chance) if kind == 3 else trainer
        (inner / "model.safetensors.index.json").write_text(json.dumps(index))
        (inner / "trainer_state.json").write_text(json.dumps(trainer))
        if kind == 4:
            text = '[evaluator]\nfile = "e.py"\nfunction = "f"\nmetric = "m"\ndirection = "lower"\n'
            (folder / "inshrink.toml").write_bytes(flipped(text.encode(), chance))
            rows = "step,loss,acc\n1,0.5,1\n2,0.25,1e9999\n"
            name = chance.choice(("metrics.csv", "metrics.jsonl"))
            (folder / name).write_bytes(flipped(rows.encode(), chance))
            sums = f"{'0' * 64}  model-00001-of-00001.safetensors\n".encode()
            (inner / "SHA256SUMS").write_bytes(flipped(sums, chance))


def look_at(folder: Path) -> None:
    """Read all there is to read; each part raises an error of ours or nothing."""
    try:
        run = open_run(folder)
    except InshrinkError as error:
        said = str(error)
    else:
        said = ""
        read_all(run)
    assert len(said) < 20_000


def read_all(run) -> None:
    for part in (lambda: run.log, lambda: run.settings, lambda: run.identity(run.steps[0])):
        try:
            part()
        except InshrinkError:
            continue
    for checkpoint in run.values():
        readers = [lambda c=checkpoint, s=spec: c[s.key] for spec in checkpoint.specs]
        readers += [lambda c=checkpoint, f=file: c.source.skeleton(f) for file in checkpoint.files]
        for read in readers:
            try:
                read()
            except InshrinkError:
                continue


@pytest.mark.parametrize("seed", range(4))
def test_every_mutant_is_read_or_refused_with_an_error_of_ours(seed, tmp_path):
    chance, state = random.Random(seed), saved(training_state())
    for number in range(N_MUTANTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_mutant(folder, chance, state)
        look_at(folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize("shape", [[1 << 63, 0], [0, 1 << 70], [1 << 62, 0, 8], [0, 10**400]])
def test_an_empty_tensor_of_absurd_extents_is_refused(shape, tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "step_1.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(InshrinkError):
        open_run(path)


def test_an_over_long_shard_name_is_an_error_of_ours(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(save_safetensors({"w": torch.ones(2)}))
    index = {"weight_map": {"w": "x" * 3000 + ".safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InshrinkError) as caught:
        open_run(tmp_path)
    assert len(str(caught.value)) < 1000

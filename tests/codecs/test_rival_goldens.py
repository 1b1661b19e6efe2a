"""Blocks that the first version of each published rival wrote still decode to the same bits."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from inshrink_core.checkpoint import TensorRole
from inshrink_core.codec import TensorInput
from inshrink_core.frame import Block
from inshrink_lab.published.context import ContextCodec
from inshrink_lab.published.excp import ExcpCodec
from inshrink_lab.published.lc_checkpoint import LcCheckpointCodec
from inshrink_lab.published.qd import QdCodec
from inshrink_lab.published.uniform import UniformCodec
from tests.strategies import bits, spec_of

_FOLDER = Path(__file__).parent / "golden"

CONFIGS = {
    "lc-checkpoint": {
        "default": LcCheckpointCodec(),
        "mean_rans": LcCheckpointCodec(bits=2, representative="mean", coder="rans"),
        "quantized_keyframe": LcCheckpointCodec(keyframe="quantized", vectors="exact"),
    },
    "excp": {
        "default": ExcpCodec(),
        "rans": ExcpCodec(coder="rans", indicator="element"),
        "filled": ExcpCodec(coder="huffman", pruned_second_moment="mean", keyframe="quantized"),
    },
    "qd": {"default": QdCodec(), "narrow": QdCodec(bits=4, spread=2, grid="held", coder="rans")},
    "uniform": {"default": UniformCodec(), "coarse": UniformCodec(bits=3, coder="zstd", vectors="quantized")},
    "context": {"default": ContextCodec(), "wide": ContextCodec(bits=6, keyframe="quantized")},
}

_VERSIONED_ELSEWHERE = {("excp", "default"), ("uniform", "coarse")}
"""What liblzma and zstd write may change with their version, exact blocks too; what they read may not."""


def _frames():
    """Tensors by role of three frames, exact on every platform, and the second moment of each frame."""
    counts = torch.arange(240).float()
    for step in range(3):
        ramp = ((counts - 100) / 64 + (counts * (7 + step) % 61 - 30) / 4096).view(12, 20)
        second = ((counts * 5 % 17 + 1) / 2**30).view(12, 20)
        first = ((counts * (3 + step) % 23 - 11) / 2**16).view(12, 20)
        yield {
            "weight": (TensorRole.WEIGHT, ramp),
            "half": (TensorRole.WEIGHT, (ramp * (1 + step / 64)).bfloat16()),
            "vector": (TensorRole.WEIGHT, ramp.reshape(-1)[:70] / 3),
            "first": (TensorRole.EXP_AVG, first),
            "second": (TensorRole.EXP_AVG_SQ, second),
        }


def _names(codec):
    """Parameter name of each tensor: the moments are those of the weight."""
    moments = {"first": "weight", "second": "weight"} if len(codec.takes()) > 2 else {}
    return {"weight": "weight", "half": "half", "vector": "vector"} | moments


def make_golden(name):
    """Codec, payload and digest of the decoded bits of each frame's tensors, by config."""
    golden = {}
    for label, config in CONFIGS[name].items():
        golden[label], references, names = [], {}, _names(config)
        for frame in _frames():
            items = {}
            for key, parameter in names.items():
                role, tensor = frame[key]
                second = frame["second"][1] if key == "weight" else None
                items[key] = TensorInput(
                    spec=spec_of(tensor, parameter, role),
                    tensor=tensor,
                    auxiliaries={TensorRole.EXP_AVG_SQ: second},
                )
            seen = [config.observe(item, references.get(key)) for key, item in items.items()]
            plan = config.plan([item.spec for item in items.values()], seen)
            rows = []
            for key, item in items.items():
                block, references[key] = config.encode(item, plan, references.get(key))
                digest = hashlib.sha256(bits(references[key].decoded())).hexdigest()
                rows.append([block.codec, bytes(block.payload).hex(), digest])
            golden[label].append(rows)
    return golden


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_golden_blocks_are_still_written_and_decode_to_the_same_bits(name):
    golden, written = json.loads((_FOLDER / f"{name}-1.json").read_text()), make_golden(name)
    assert golden.keys() == CONFIGS[name].keys()
    for label, config in CONFIGS[name].items():
        references, names, n_blocks = {}, _names(config), 0
        for frame, rows, ours in zip(_frames(), golden[label], written[label], strict=True):
            for (key, parameter), row, our in zip(names.items(), rows, ours, strict=True):
                bitstream, payload, digest = row
                is_fixed = bitstream == config.bitstream and (name, label) not in _VERSIONED_ELSEWHERE
                assert our[:: 1 if is_fixed else 2] == row[:: 1 if is_fixed else 2], (label, key)
                role, tensor = frame[key]
                block, spec = Block(bitstream, bytes.fromhex(payload)), spec_of(tensor, parameter, role)
                references[key] = config.decode(spec, block, references.get(key))
                restored = references[key].decoded()
                assert hashlib.sha256(bits(restored)).hexdigest() == digest, (label, key)
                n_blocks += bitstream == config.bitstream
        assert n_blocks >= 4, label

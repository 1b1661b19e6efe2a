"""Encode and decode speed on a GPU: tensors on the device in, compressed bytes out, and back.

`Codec.encode` of a tensor on the device and `Codec.decode` are timed, with the reference state on the device,
where chains keep it.

The frame is the second delta of a weight matrix that moves by a tenth of its spread, or of moments whose
first is that matrix and whose second its squares. Before it is timed every block is compared with that of the
CPU, and decoded.

``make gpu`` runs the tests that need a GPU, then this.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.results import write
from benchmarks.speed import encoded
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import Encoded, TensorInput, TensorReference, make_codec

MEGABYTES = (16, 64, 256, 1024)
QUICK_MEGABYTES = (16, 64)
REPETITIONS = 7
SPREAD, MOVEMENT = 0.02, 0.1
BINS = 16
COARSENESS = 2.0
"""Step of the lattice in units of the movement: a ratio of about 30."""


class Way(NamedTuple):
    """One thing to time: an encoder, its decoder, and whether what comes back is right."""

    encode: Callable[[], bytes]
    decode: Callable[[bytes], Tensor]
    is_right: Callable[[Tensor], bool]


def states(megabytes: float, device: str) -> list[Tensor]:
    """Return a float32 matrix at three steps of a random walk, on the device."""
    generator = torch.Generator(device).manual_seed(0)
    columns = 1024
    shape = (max(int(megabytes * 2**20) // 4 // columns, 1), columns)
    scale = SPREAD * (1 + torch.rand(shape[0], 1, generator=generator, device=device))
    walk = [torch.randn(shape, generator=generator, device=device) * scale]
    for _ in range(2):
        walk.append(walk[-1] + MOVEMENT * scale * torch.randn(shape, generator=generator, device=device))
    return walk


def way_of(name: str, settings: dict[str, Any], role: TensorRole, walk: list[Tensor]) -> Way:
    """Encode and decode the last of some states through a codec, plan included; states stay on the device."""
    codec, device = make_codec(name, settings), walk[0].device
    spec = TensorSpec(name="fc.weight", role=role, dtype="float32", shape=tuple(walk[0].shape), exact=False)

    def item(values: Tensor) -> TensorInput:
        second = values.square() if role is TensorRole.EXP_AVG else None
        tensor = values.square() if role is TensorRole.EXP_AVG_SQ else values
        return TensorInput(spec=spec, tensor=tensor, auxiliaries={TensorRole.EXP_AVG_SQ: second})

    def encoder(on: Any) -> tuple[TensorReference | None, Callable[[], Encoded]]:
        state = memory = None
        *earlier, last = (item(values.to(on)) for values in walk)
        for each in earlier:
            (made,), memory = encoded(codec, [each], [state], memory)
            state = codec.decode(spec, made.block, state, str(on))
        return state, lambda: encoded(codec, [last], [state], memory)[0][0]

    state, encode = encoder(device)
    block, plain = encode().block, encoder("cpu")[1]()
    if bytes(block.payload) != bytes(plain.block.payload):
        raise ValueError("the device and the CPU encode different bytes")
    expected = plain.reference.decoded()

    def decode(payload: bytes) -> Tensor:
        return codec.decode(spec, replace(block, payload=payload), state, str(device)).decoded()

    return Way(
        lambda: bytes(encode().block.payload), decode, lambda found: torch.equal(found.cpu(), expected)
    )


def timed(action: Callable[[], object], device: str) -> float:
    """Return the median of the seconds an action takes, its work on the device included."""
    seconds = []
    for _ in range(REPETITIONS):
        _wait(device)
        begun = time.perf_counter()
        action()
        _wait(device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def measure(codec: str, way: Way, n_bytes: int, device: str) -> dict[str, object]:
    """Check one way, warm, and time it."""
    payload = way.encode()
    if not way.is_right(way.decode(payload)):
        raise ValueError(f"{codec}: what was decoded is not what was encoded")
    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "codec": codec,
        "megabytes": n_bytes / 2**20,
        "encode_gb_per_s": n_bytes / 1e9 / timed(way.encode, device),
        "decode_gb_per_s": n_bytes / 1e9 / timed(lambda: way.decode(payload), device),
        "ratio": n_bytes / len(payload),
    }


def rows_of(megabytes: float, device: str) -> list[dict[str, object]]:
    """Measure every codec at one size."""
    walk = states(megabytes, device)
    n_bytes = walk[0].numel() * 4
    ways: dict[str, tuple[str, dict[str, Any], TensorRole]] = {
        "lattice": ("lattice", {"coarseness": COARSENESS}, TensorRole.WEIGHT),
        "inshrinkerator": ("inshrinkerator", {"bins": BINS, "protect": 0.0}, TensorRole.WEIGHT),
        "moments, exp_avg": ("moments", {}, TensorRole.EXP_AVG),
        "moments, exp_avg_sq": ("moments", {}, TensorRole.EXP_AVG_SQ),
    }
    return [measure(name, way_of(*way, walk), n_bytes, device) for name, way in ways.items()]


def main(quick: bool = False) -> Path | str:
    """Write ``results/gpu.csv``, or say why nothing was measured."""
    if not torch.cuda.is_available():
        return "skipped, there is no CUDA device here"
    sizes = QUICK_MEGABYTES if quick else MEGABYTES
    rows = [row for megabytes in sizes for row in rows_of(megabytes, "cuda")]
    return write("gpu_quick" if quick else "gpu", rows)


if __name__ == "__main__":
    sys.stderr.write(f"gpu: {main()}\n")

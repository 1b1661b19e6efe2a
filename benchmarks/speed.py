"""Encode and decode speed on one thread against ``zstd -3`` on the same float32 bytes, interleaved.

The last of a few consecutive states of a model is encoded as a delta, when codecs that follow their
chain know it. Each repetition times zstd, then ours, so that a machine whose speed drifts moves both; the
ratios are medians over the pairs. Time is that of the thread's own work, which leaves other programs out.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import zstandard

from benchmarks.results import write
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import Encoded, EncoderState, FrameContext, TensorInput, TensorReference, make_codec

N_TENSORS, ROWS, COLUMNS = 4, 1024, 2048
N_STATES = 4
"""A keyframe, two deltas from which statistics and contexts come, and the delta that is timed."""
REPETITIONS = 9
MOVEMENTS = (0.02, 0.1)
"""Movement between the two states, in standard deviations of the weights: late and early in training."""


def _states(movement: float) -> list[list[torch.Tensor]]:
    """Return consecutive states of a few matrices with heavier than Gaussian tails."""
    generator = torch.Generator().manual_seed(0)
    scales = [0.02 * (1 + torch.rand(ROWS, 1, generator=generator)) for _ in range(N_TENSORS)]
    states = [[scale * torch.randn(ROWS, COLUMNS, generator=generator) for scale in scales]]
    for _ in range(N_STATES - 1):
        moves = [movement * scale * torch.randn(ROWS, COLUMNS, generator=generator) for scale in scales]
        states.append([tensor + move for tensor, move in zip(states[-1], moves, strict=True)])
    return states


def measure(codec_name: str, settings: dict[str, Any], movement: float) -> dict[str, object]:
    """Time one codec against zstd."""
    torch.set_num_threads(1)
    codec = make_codec(codec_name, settings)
    matrix = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(ROWS, COLUMNS))
    specs = [dataclasses.replace(matrix, name=f"layers.{i}.weight") for i in range(N_TENSORS)]
    *earlier, after = (
        [TensorInput(spec=spec, tensor=tensor) for spec, tensor in zip(specs, state, strict=True)]
        for state in _states(movement)
    )
    raw = [item.tensor.numpy().tobytes() for item in after]
    n_bytes = sum(map(len, raw))
    previous: list[TensorReference | None] = [None] * N_TENSORS
    memory = None
    for state in earlier:
        frame, memory = encoded(codec, state, previous, memory)
        previous = [made.reference for made in frame]
    compressor = zstandard.ZstdCompressor(level=3)
    times: dict[str, list[float]] = {"zstd": [], "encode": [], "decode": []}
    blocks = [made.block for made in encoded(codec, after, previous, memory)[0]]
    for _ in range(REPETITIONS):
        times["zstd"].append(_timed(lambda: [compressor.compress(chunk) for chunk in raw]))
        times["encode"].append(_timed(lambda: encoded(codec, after, previous, memory)))
        times["decode"].append(_timed(lambda: _decode(codec, specs, blocks, previous)))
    speed = {key: n_bytes / 1e6 / statistics.median(values) for key, values in times.items()}
    pairs = zip(times["zstd"], times["encode"], times["decode"], strict=True)
    ratios = [(zstd / encode, zstd / decode) for zstd, encode, decode in pairs]
    return {
        "codec": codec_name,
        "setting": ", ".join(f"{key}={value}" for key, value in settings.items()) or "default",
        "movement": movement,
        "encode_mb_per_s": speed["encode"],
        "decode_mb_per_s": speed["decode"],
        "zstd3_compress_mb_per_s": speed["zstd"],
        "encode_vs_zstd3": statistics.median(encode for encode, _ in ratios),
        "encode_vs_zstd3_min": min(encode for encode, _ in ratios),
        "decode_vs_zstd3": statistics.median(decode for _, decode in ratios),
        "decode_vs_zstd3_min": min(decode for _, decode in ratios),
        "ratio": n_bytes / sum(len(block.payload) for block in blocks),
        "zstd3_ratio": n_bytes / sum(len(compressor.compress(chunk)) for chunk in raw),
    }


def encoded(
    codec: Any, items: list[TensorInput], previous: Sequence[TensorReference | None], memory: Any = None
) -> tuple[list[Encoded], Any]:
    """Run the whole encoder of a frame (observe, plan, encode); return what it made and remembers."""
    pairs = [*zip(items, previous, strict=True)]
    seen = [codec.observe(item, reference) for item, reference in pairs]
    plan = codec.plan([item.spec for item in items], seen, FrameContext(memory=memory))
    made = [codec.encode(item, plan, reference) for item, reference in pairs]
    return made, codec.remember(plan) if isinstance(codec, EncoderState) else None


def _decode(codec: Any, specs: list[TensorSpec], blocks: list[Any], previous: list[Any]) -> None:
    for spec, block, reference in zip(specs, blocks, previous, strict=True):
        codec.decode(spec, block, reference)


def _timed(action: Callable[[], object]) -> float:
    begun = time.thread_time()
    action()
    return time.thread_time() - begun


def main(quick: bool = False) -> Path:
    """Write ``results/speed.csv``."""
    settings: list[tuple[str, dict[str, Any]]] = [
        ("inshrinkerator", {}),
        ("inshrinkerator", {"bins": 16}),
        ("lattice", {"coarseness": 2.5}),
        ("lossless", {}),
    ]
    rows = [measure(*setting, movement) for setting in settings for movement in MOVEMENTS]
    return write("speed_quick" if quick else "speed", rows)


if __name__ == "__main__":
    main()

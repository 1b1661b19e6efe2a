"""Encode and decode speed on one thread against ``zstd -3`` on the same float32 bytes, interleaved.

The last of a few consecutive states of a model is encoded as a delta, when codecs that follow their
chain know it. Each repetition times zstd, then ours, so that a machine whose speed drifts moves both; the
ratios are medians over the pairs. Time is that of the thread's own work, which leaves other programs out.

``models.csv`` has the time of each tensor of a small model, a GPT of .8 M parameters in 34 tensors, weights
and both moments of Adam: the first frame, whose integers are large, the second, and the mean of the first
twenty, of which some renew the factors of shaped rounding. Processor time, the least of several, and the
ratio to zstd's on the same tensors in turn; ``python -m benchmarks.speed models`` measures this alone.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import zstandard

from benchmarks.generated import Model, directions, gpt, gradient
from benchmarks.results import write
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import FrameContext, TensorInput, TensorReference, make_codec
from inshrink_core.execution import recycling

N_TENSORS, ROWS, COLUMNS = 4, 1024, 2048
N_STATES = 4
"""A keyframe, two deltas from which statistics and contexts come, and the delta that is timed."""
REPETITIONS = 9
MOVEMENTS = (0.02, 0.1)
"""Movement between the two states, in standard deviations of the weights: late and early in training."""
SMALL_FRAMES = 20
"""Frames of a small model whose mean time is taken."""


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
    whole = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(ROWS, COLUMNS))
    spec = [dataclasses.replace(whole, name=f"layers.{i}.weight") for i in range(N_TENSORS)]
    *earlier, after = _states(movement)
    raw = [tensor.numpy().tobytes() for tensor in after]
    n_bytes = sum(map(len, raw))
    previous: list[TensorReference | None] = [None] * N_TENSORS
    memory = None
    for state in earlier:
        frame, memory = _encode(codec, spec, state, previous, memory)
        previous = [encoded.reference for encoded in frame]
    compressor = zstandard.ZstdCompressor(level=3)
    times: dict[str, list[float]] = {"zstd": [], "encode": [], "decode": []}
    blocks = [encoded.block for encoded in _encode(codec, spec, after, previous, memory)[0]]
    for _ in range(REPETITIONS):
        times["zstd"].append(_timed(lambda: [compressor.compress(chunk) for chunk in raw]))
        times["encode"].append(_timed(lambda: _encode(codec, spec, after, previous, memory)))
        times["decode"].append(_timed(lambda: _decode(codec, spec, blocks, previous)))
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


def _encode(
    codec: Any,
    specs: list[TensorSpec],
    tensors: list[torch.Tensor],
    previous: list[TensorReference | None],
    memory: Any = None,
    beside: Mapping[str, list[torch.Tensor]] = MappingProxyType({}),
) -> tuple[list[Any], Any]:
    """Run the whole encoder of a frame (observe, plan, encode); return what it made and remembers.

    `beside` has what else it is given of each tensor, by the name of `TensorInput`.
    """
    items = [
        TensorInput(spec=spec, tensor=tensor, **{name: given[i] for name, given in beside.items()})
        for i, (spec, tensor) in enumerate(zip(specs, tensors, strict=True))
    ]
    statistics_ = [codec.observe(item, ref) for item, ref in zip(items, previous, strict=True)]
    plan = codec.plan([item.spec for item in items], statistics_, FrameContext(memory=memory))
    encoded = [codec.encode(item, plan, ref) for item, ref in zip(items, previous, strict=True)]
    return encoded, codec.remember(plan)


def _decode(codec: Any, specs: list[TensorSpec], blocks: list[Any], previous: list[Any]) -> None:
    for spec, block, reference in zip(specs, blocks, previous, strict=True):
        codec.decode(spec, block, reference)


def small_model(quick: bool = False) -> list[dict[str, object]]:
    """Time each frame and each part of a small model."""
    torch.set_num_threads(1)
    rows = []
    for part in (TensorRole.WEIGHT, TensorRole.EXP_AVG, TensorRole.EXP_AVG_SQ):
        with recycling():  # as a chain
            rows += _of_model("gpt", gpt(128, 4, 128), part, 1 if quick else 2 * REPETITIONS)
    return rows


def _of_model(name: str, model: Model, part: TensorRole, repetitions: int) -> list[dict[str, object]]:
    """Time the frames of a part of a model: the first, the second, and the mean of all."""
    generator = torch.Generator().manual_seed(1)
    codec = make_codec("lattice" if part is TensorRole.WEIGHT else "moments", {})
    specs = [
        TensorSpec(name=key, role=part, dtype="float32", shape=tuple(tensor.shape))
        for key, tensor in model.items()
    ]
    previous: list[Any] = [None] * len(specs)
    memory, rows = None, list[dict[str, float]]()
    compressor, counted = zstandard.ZstdCompressor(level=3), range(repetitions)
    for at in range(SMALL_FRAMES):
        tensors, known = _frame(model, part, at, generator)
        raw = [tensor.numpy().tobytes() for tensor in tensors]
        encoded, after = _encode(codec, specs, tensors, previous, memory, known)
        blocks = [one.block for one in encoded]
        calls: dict[str, Callable[[], object]] = {
            "zstd": partial(_compress, compressor, raw),
            "encode": partial(_encode, codec, specs, tensors, previous, memory, known),
            "decode": partial(_decode, codec, specs, blocks, previous),
        }
        taken = [{call: _timed(action) for call, action in calls.items()} for _ in counted]
        rows.append({call: min(one[call] for one in taken) for call in calls})
        previous, memory = [one.reference for one in encoded], after
    rows.append({call: statistics.fmean(one[call] for one in rows) for call in rows[0]})
    nbytes = sum(4 * spec.numel for spec in specs)
    return [
        {
            "model": name,
            "parameters": nbytes // 4,
            "tensors": len(specs),
            "part": part.value,
            "frame": frame,
            "call": call,
            "ms_per_tensor": 1e3 * rows[at][call] / len(specs),
            "mb_per_s": nbytes / 1e6 / rows[at][call],
            "vs_zstd3": rows[at]["zstd"] / rows[at][call],
            "repetitions": repetitions,
        }
        for frame, at in (("first", 0), ("second", 1), (f"mean of {SMALL_FRAMES}", -1))
        for call in ("encode", "decode")
    ]


def _frame(
    model: Model, part: TensorRole, at: int, generator: torch.Generator
) -> tuple[list[torch.Tensor], dict[str, list[Any]]]:
    """Return the tensors of a frame, and what an encoder is given beside them."""
    same = torch.Generator().manual_seed(2)
    noise = [torch.randn(tensor.shape, generator=generator) for tensor in model.values()]
    seconds = [1e-8 * (1 + 0.1 * one.square()) for one in noise]
    firsts = [
        1e-4 * gradient(one, generator, directions(one.shape, same) if one.dim() > 1 else None)
        for one in noise
    ]
    if part is TensorRole.EXP_AVG:
        return firsts, {"second_moment": seconds}
    if part is TensorRole.EXP_AVG_SQ:
        return seconds, {}
    tensors = [tensor + 1e-3 * one for tensor, one in zip(model.values(), noise, strict=True)]
    if not at:
        return tensors, {"gradient": firsts}
    return tensors, {"moment_before": [lambda one=one: one for one in firsts]}


def _compress(compressor: zstandard.ZstdCompressor, raw: list[bytes]) -> None:
    for chunk in raw:
        compressor.compress(chunk)


def _timed(action: Callable[[], object]) -> float:
    begun = time.thread_time()
    action()
    return time.thread_time() - begun


def main(quick: bool = False) -> Path:
    """Write ``models.csv`` and ``speed.csv``."""
    models = write("models_quick" if quick else "models", small_model(quick))
    if sys.argv[1:] == ["models"]:
        return models
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

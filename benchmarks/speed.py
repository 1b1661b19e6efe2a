"""Encode and decode speed on one thread against ``zstd -3`` on the same float32 bytes, interleaved.

The last of a few consecutive states of a model is encoded as a delta, when codecs that follow their
chain know it. Each repetition times zstd, then ours, so that a machine whose speed drifts moves both; the
ratios are medians over the pairs. Time is that of the thread's own work, which leaves other programs out.

``first_call.csv`` has what the first call after installation takes beyond a warm one, compilers included:
the first `compress` of a small run with optimizer state and the first `restore`, each in a process that
finds no compiled kernel, against the same with all of them. Processor time, the least of a few pairs.

``blocks.csv`` has the time that decoding takes for each block where blocks are small: a run of 300 tensors of
4,096 and 64 values, 32 frames long, decoded in order from disk. The least of several passes over codecs in
turn, in wall time and in processor time; ``python -m benchmarks.speed blocks`` measures this alone.

``models.csv`` has what each tensor of a small model takes: a GPT of .8 M parameters in 34 tensors and an LSTM
of 1.1 M in 11, weights and both moments of Adam: the first frame, whose integers are large, the second, and
the mean of the first twenty, of which some renew what rounding follows and some do not. First moments lie
in few directions, so that the rounding of weights is shaped, as by default. Processor time, the least of
several, and the ratio to zstd's on the same tensors in turn; ``python -m benchmarks.speed models`` measures
this alone.

``two_threads.csv`` has what a second thread is worth (`benchmarks.two_threads`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import zstandard
from safetensors.torch import save_file

from benchmarks.results import write
from benchmarks.two_threads import Model, directions, gpt, gradient, measure_all
from inshrink_core import compress
from inshrink_core.chain import Archive
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import FrameContext, TensorInput, TensorReference, make_codec
from inshrink_core.execution import recycling

N_TENSORS, ROWS, COLUMNS = 4, 1024, 2048
N_STATES = 4
"""A keyframe, two deltas from which statistics and contexts come, and the delta that is timed."""
REPETITIONS = 9
PAIRS = 3
SMALL_PAIRS, SMALL_SIDE, SMALL_STEPS = 150, 64, 32
"""Matrices and vectors of the run of small tensors, the side of a matrix, and the frames of their chain."""
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


def lstm(width: int = 256, n_layers: int = 2, n_tokens: int = 128) -> Model:
    """Return weights with the shapes of a small LSTM."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (n_tokens, width)}
    for i in range(n_layers):
        for side in ("ih", "hh"):
            shapes |= {f"lstm.weight_{side}_l{i}": (4 * width, width), f"lstm.bias_{side}_l{i}": (4 * width,)}
    shapes |= {"head.weight": (n_tokens, width), "head.bias": (n_tokens,)}
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def small_models(quick: bool = False) -> list[dict[str, object]]:
    """Time each frame and each part of small models."""
    torch.set_num_threads(1)
    rows = []
    for name, model in {"gpt": gpt(128, 4, 128), "lstm": lstm()}.items():
        for part in (TensorRole.WEIGHT, TensorRole.EXP_AVG, TensorRole.EXP_AVG_SQ):
            with recycling():  # as a chain
                rows += _of_model(name, model, part, 1 if quick else 2 * REPETITIONS)
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
    return tensors, {"moment_before": [lambda one=one: (one, 0.0) for one in firsts]}


def _compress(compressor: zstandard.ZstdCompressor, raw: list[bytes]) -> None:
    for chunk in raw:
        compressor.compress(chunk)


def _timed(action: Callable[[], object]) -> float:
    begun = time.thread_time()
    action()
    return time.thread_time() - begun


_FIRST_CALL = """
import json, sys, time
import torch, inshrink_core

begun, cpu = time.perf_counter(), time.process_time()
if sys.argv[1] == "compress":
    how = dict(codec="lattice", config={"coarseness": 2.5}, optimizer="exact")
    inshrink_core.compress(sys.argv[2], sys.argv[3], **how, threads=1)
else:
    inshrink_core.restore(sys.argv[2], sys.argv[3])
print(json.dumps([time.perf_counter() - begun, time.process_time() - cpu]))
"""


def _write_run(directory: Path) -> None:
    """Write three small checkpoints with the state of Adam."""
    generator = torch.Generator().manual_seed(0)
    model = {f"layers.{i}.weight": 0.02 * torch.randn(256, 256, generator=generator) for i in range(4)}
    model |= {f"layers.{i}.bias": torch.ones(256) for i in range(4)}
    for step in range(1, 4):
        state = {}
        for i, weight in enumerate(model.values()):
            weight += 2e-3 * torch.randn(weight.shape, generator=generator)
            moment = 1e-4 * gradient(torch.randn(weight.shape, generator=generator), generator)
            state[i] = {"step": torch.tensor(float(step)), "exp_avg": moment, "exp_avg_sq": moment**2}
        groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": list(state)}]
        content = {"model": model, "optimizer": {"state": state, "param_groups": groups}, "step": step}
        torch.save(content, directory / f"step_{step}.pt")


def first_call(verb: str) -> dict[str, object]:
    """Time a verb in processes without and with compiled kernels, in turn."""
    seconds: dict[str, list[list[float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="inshrink-first-") as scratch:
        run, archive = Path(scratch) / "run", Path(scratch) / "run.inshrink"
        run.mkdir()
        _write_run(run)
        for pair in range(PAIRS):
            kernels = Path(scratch) / f"kernels-{pair}"
            for kind, found in seconds.items():
                target = Path(scratch) / f"{verb}-{kind}-{pair}"
                if verb == "compress":
                    target = archive = target.with_suffix(".inshrink")
                elif not archive.exists():
                    _run_first_call(["compress", str(run), str(archive)], Path(scratch) / "others")
                given = str(run if verb == "compress" else archive)
                found.append(_run_first_call([verb, given, str(target)], kernels))
    least = {kind: min(cpu for _, cpu in found) for kind, found in seconds.items()}
    return {
        "call": verb,
        "cold_cpu_seconds": least["cold"],
        "warm_cpu_seconds": least["warm"],
        "extra_cpu_seconds": least["cold"] - least["warm"],
        "extra_wall_seconds": min(
            cold[0] - warm[0] for cold, warm in zip(seconds["cold"], seconds["warm"], strict=True)
        ),
        "pairs": PAIRS,
    }


def _run_first_call(arguments: list[str], kernels: Path) -> list[float]:
    """Return wall and processor seconds of one call that keeps what it compiles in a folder."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(kernels)}
    command = [sys.executable, "-c", _FIRST_CALL, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def small_blocks(quick: bool = False) -> list[dict[str, object]]:
    """Time decoding of many small tensors, frame by frame."""
    torch.set_num_threads(1)
    n_steps = 4 if quick else SMALL_STEPS
    with tempfile.TemporaryDirectory(prefix="inshrink-blocks-") as scratch:
        _write_small(Path(scratch), n_steps)
        codecs = ("lattice", "lossless")
        sizes = {
            codec: compress(scratch, Path(scratch) / f"{codec}.inshrink", codec=codec, keyframe_every=n_steps)
            for codec in codecs
        }
        seconds: dict[str, list[tuple[float, float]]] = {codec: [] for codec in codecs}
        for _ in range(1 if quick else REPETITIONS):
            for codec, found in seconds.items():
                found.append(_decode_all(Path(scratch) / f"{codec}.inshrink"))
    n_blocks = n_steps * 2 * SMALL_PAIRS
    return [
        {
            "codec": codec,
            "blocks": n_blocks,
            "values": SMALL_SIDE * (SMALL_SIDE + 1) * SMALL_PAIRS * n_steps,
            "wall_ms_per_block": 1e3 * min(wall for wall, _ in found) / n_blocks,
            "cpu_ms_per_block": 1e3 * min(cpu for _, cpu in found) / n_blocks,
            "ratio": sizes[codec].size.ratio_weights,
            "passes": len(found),
        }
        for codec, found in seconds.items()
    ]


def _write_small(directory: Path, n_steps: int) -> None:
    """Write a run of matrices and vectors that move a little from step to step."""
    generator = torch.Generator().manual_seed(0)
    model = {}
    for i in range(SMALL_PAIRS):
        model[f"layers.{i}.weight"] = 0.02 * torch.randn(SMALL_SIDE, SMALL_SIDE, generator=generator)
        model[f"layers.{i}.bias"] = 0.1 * torch.randn(SMALL_SIDE, generator=generator)
    for step in range(1, n_steps + 1):
        for tensor in model.values():
            tensor += 1e-3 * torch.randn(tensor.shape, generator=generator)
        save_file(model, directory / f"step_{step}.safetensors")


def _decode_all(path: Path) -> tuple[float, float]:
    """Return wall and processor seconds of decoding every tensor of an archive, step by step."""
    begun, cpu = time.perf_counter(), time.process_time()
    for checkpoint in Archive.open(path).sequential().values():
        for spec in checkpoint.specs:
            checkpoint.source.read(spec)
    return time.perf_counter() - begun, time.process_time() - cpu


def main(quick: bool = False) -> Path:
    """Write ``models.csv``, ``blocks.csv``, ``first_call.csv``, ``two_threads.csv`` and ``speed.csv``."""
    models = write("models_quick" if quick else "models", small_models(quick))
    if sys.argv[1:] == ["models"]:
        return models
    blocks = write("blocks_quick" if quick else "blocks", small_blocks(quick))
    if sys.argv[1:] == ["blocks"]:
        return blocks
    first = [first_call(verb) for verb in ("compress", "restore")]
    write("first_call_quick" if quick else "first_call", first)
    write("two_threads_quick" if quick else "two_threads", measure_all(quick))
    settings: list[tuple[str, dict[str, Any]]] = [
        ("inshrinkerator", {}),
        ("inshrinkerator", {"bins": 16}),
        ("inshrinkerator", {"entropy": "rans"}),
        ("lattice", {"coarseness": 2.5}),
        ("lossless", {}),
    ]
    rows = [measure(*setting, movement) for setting in settings for movement in MOVEMENTS]
    return write("speed_quick" if quick else "speed", rows)


if __name__ == "__main__":
    main()

"""What a second thread is worth: the time of one thread over that of two, interleaved in one process.

The codec alone, on tensors in memory; and `compress` and `restore` whole, with files, checksums and
digests. Wall time, which other programs on the machine lengthen: the row ``sha-256`` is what two threads
gain on work that needs neither the interpreter's lock nor memory, so what the machine had free. Where it is
well below 2, the other rows say little.

Two models: some matrices of one size, and the shapes of a small GPT, an embedding in front and many vectors
between, where the interpreter's share is largest.
"""

from __future__ import annotations

import hashlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import inshrink_core
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import FrameContext, TensorInput, TensorReference, make_codec
from inshrink_core.execution import ordered_map, recycling

Model = dict[str, torch.Tensor]

N_STATES = 4
"""As in `benchmarks.speed`: a keyframe, two deltas and the one that is timed."""
REPETITIONS = 9
MOVEMENT = 0.05
SETTINGS = {"coarseness": 2.5}
"""Movement between two states, in standard deviations of the weights."""

_HASHED = 32 << 20
_N_HASHED = 4


def matrices(n: int) -> Model:
    """Return some matrices of two million elements."""
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{i}.weight": 0.02 * torch.randn(1024, 2048, generator=generator) for i in range(n)}


Sides = tuple[torch.Tensor, torch.Tensor]
"""Directions of a matrix in which gradients lie: of its columns, and of its rows."""


def directions(shape: torch.Size, generator: torch.Generator) -> Sides:
    """Return a dozen directions of both sides of a matrix."""
    rows, columns = (torch.randn(n, 12, generator=generator) for n in shape)
    return rows, columns


def gradient(noise: torch.Tensor, generator: torch.Generator, lasting: Sides | None = None) -> torch.Tensor:
    """Return a gradient as layers have them, most of it in a dozen directions of a matrix, about as large.

    As those of a training, gradients lie in `lasting` directions where they are given; else in new ones.
    """
    if noise.dim() < 2:
        return noise
    rows, columns = lasting or directions(noise.shape, generator)
    if lasting is not None:
        rows = rows @ torch.randn(12, 12, generator=generator) / 12**0.5
    return 0.27 * rows @ columns.T + 0.3 * noise


def gpt(width: int = 384, n_layers: int = 6, n_tokens: int = 8000) -> Model:
    """Return weights with the shapes of a small GPT."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (n_tokens, width), "wpe.weight": (256, width)}
    for i in range(n_layers):
        layer: dict[str, tuple[int, ...]] = {
            "ln_1.weight": (width,),
            "ln_1.bias": (width,),
            "attn.qkv.weight": (3 * width, width),
            "attn.proj.weight": (width, width),
            "ln_2.weight": (width,),
            "ln_2.bias": (width,),
            "mlp.fc.weight": (4 * width, width),
            "mlp.proj.weight": (width, 4 * width),
        }
        shapes |= {f"h.{i}.{name}": shape for name, shape in layer.items()}
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _states(model: Model) -> list[Model]:
    """Return consecutive states of a model."""
    generator = torch.Generator().manual_seed(1)
    states = [model]
    for _ in range(N_STATES - 1):
        states.append(
            {
                name: tensor + MOVEMENT * 0.02 * torch.randn(tensor.shape, generator=generator)
                for name, tensor in states[-1].items()
            }
        )
    return states


def measure(name: str, model: Model, repetitions: int = REPETITIONS) -> list[dict[str, object]]:
    """Return a row for each call."""
    torch.set_num_threads(1)
    states = _states(model)
    n = sum(tensor.numel() for tensor in model.values())
    rows: list[dict[str, object]] = []
    with _codec_calls(states) as codec_calls, _session_calls(states) as session_calls:
        calls: dict[str, Callable[[int], object]] = {"sha-256": _hash, **codec_calls, **session_calls}
        seconds: dict[str, list[tuple[float, float]]] = {call: [] for call in calls}
        for repetition in range(-1, repetitions):
            for call, action in calls.items():
                pair = (_timed(action, 1), _timed(action, 2))
                if repetition >= 0:  # the first compiles
                    seconds[call].append(pair)
    for call, pairs in seconds.items():
        one, two = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows.append(
            {
                "model": name,
                "parameters": n,
                "tensors": len(model),
                "call": call,
                "one_thread_seconds": one,
                "two_threads_seconds": two,
                "gain": statistics.median(a / b for a, b in pairs),
                "gain_of_fastest": min(a for a, _ in pairs) / min(b for _, b in pairs),
                "pairs": len(pairs),
            }
        )
    return rows


def _timed(action: Callable[[int], object], threads: int) -> float:
    begun = time.perf_counter()
    action(threads)
    return time.perf_counter() - begun


def _hash(threads: int) -> None:
    """Digest some memory, of which every piece is too large to wait for the interpreter's lock."""
    data = bytes(_HASHED // _N_HASHED)
    list(ordered_map(lambda _: hashlib.sha256(data).digest(), range(_N_HASHED), threads=threads))


@contextmanager
def _codec_calls(states: list[Model]) -> Iterator[dict[str, Callable[[int], object]]]:
    """Give the encoder and the decoder of a frame, as a chain runs them."""
    codec = make_codec("lattice", SETTINGS)
    specs = [
        TensorSpec(name=name, role=TensorRole.WEIGHT, dtype="float32", shape=tuple(tensor.shape))
        for name, tensor in states[0].items()
    ]
    previous: list[TensorReference | None] = [None] * len(specs)
    memory = None

    def encode(state: Model, threads: int) -> tuple[list[TensorReference], list[Any], Any]:
        pairs = [
            (TensorInput(spec=spec, tensor=state[spec.name]), reference)
            for spec, reference in zip(specs, previous, strict=True)
        ]
        seen = list(ordered_map(lambda p: codec.observe(*p), pairs, threads=threads, weight=_weight))
        plan = codec.plan(specs, seen, FrameContext(memory=memory))
        encoded = [
            (one.reference if keep else None, one.block)
            for one in ordered_map(
                lambda p: codec.encode(p[0], plan, p[1]), pairs, threads=threads, weight=_weight
            )
        ]
        return [r for r, _ in encoded if r is not None], [b for _, b in encoded], codec.remember(plan)

    def decode(threads: int) -> None:
        pairs = list(zip(specs, blocks, previous, strict=True))
        for _ in ordered_map(
            lambda p: codec.decode(*p), pairs, threads=threads, weight=lambda p: p[0].nbytes + 1
        ):
            pass

    keep = True
    for state in states[:-1]:
        references, _, memory = encode(state, 1)
        previous = list(references)
    keep = False
    blocks: list[Any] = encode(states[-1], 1)[1]
    with recycling():
        yield {"encode": lambda threads: encode(states[-1], threads), "decode": decode}


def _weight(pair: tuple[TensorInput, TensorReference | None]) -> int:
    return pair[0].spec.nbytes + 1


@contextmanager
def _session_calls(states: list[Model]) -> Iterator[dict[str, Callable[[int], object]]]:
    """Give `compress` of a run of torch files and `restore` of its last step."""
    with tempfile.TemporaryDirectory(prefix="inshrink-threads-") as scratch:
        run, out = Path(scratch) / "run", Path(scratch) / "out"
        run.mkdir()
        for step, state in enumerate(states, 1):
            torch.save({"model": state, "step": step}, run / f"step_{step}.pt")

        def compress(threads: int) -> None:
            target = Path(scratch) / f"{threads}.inshrink"
            shutil.rmtree(target, ignore_errors=True)
            inshrink_core.compress(run, target, codec="lattice", config=SETTINGS, threads=threads)

        def restore(threads: int) -> None:
            shutil.rmtree(out, ignore_errors=True)
            inshrink_core.restore(Path(scratch) / f"{threads}.inshrink", out, threads=threads)

        yield {"compress": compress, "restore": restore}


def measure_all(quick: bool = False) -> list[dict[str, object]]:
    """Return the rows of both models."""
    repetitions = 3 if quick else REPETITIONS
    return measure("matrices", matrices(6), repetitions) + measure("gpt", gpt(), repetitions)

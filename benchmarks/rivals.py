"""Compressors of others on the runs of `benchmarks.runs`: NNCodec, ZipNN, pcodec, 7-zip and zstd.

Optional packages, none of which Inshrink needs; what is not installed is a row that says so::

    nncodec   the coder of ISO/IEC 15938-17; compiled on installation
    zipnn     lossless, for models; compiled on installation
    pcodec    lossless, for columns of numbers
    py7zr     where there is no program 7z

They may stand in an environment of their own (``pip install --no-deps`` is enough for these four, with
the packages py7zr asks for): ``INSHRINK_RIVALS`` names its folder ``site-packages``, which is searched
last.

Weights and buffers only. Lossless: four consecutive checkpoints of the middle of the run, each alone, or
the exclusive or, or the bytewise difference, against the one before; all float32 tensors of a checkpoint
as one string of bytes; MB/s of raw bytes in memory on one thread. Ours, for comparison, is timed with
reading and writing files. NNCodec: the whole chain, first frame included, under a sweep of QPs, each
restored and judged by the run's evaluator. ``results/rivals_lead.csv`` interpolates the ratios of
NNCodec (the best of its settings) and of lattice (its default, and the better of its settings of gamma) at
equal mean divergence.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import inshrink_core
from benchmarks import matrix, rival_lossless
from benchmarks.interpolation import ratio_at
from benchmarks.results import kept, renew
from benchmarks.rival_lossless import Bytes, Compressor
from benchmarks.rival_nncodec import DEFAULT_VECTOR_QP, LATTICE_VECTOR_QP, MODES, Chain, load
from benchmarks.runs import evaluator_of, open_run
from inshrink_core.evaluate import Evaluator, EvaluatorRequest, OriginalEvaluations
from inshrink_core.metrics import drop

RUNS = ("digits-cnn", "cnn-adamw", "cnn-sgd")
"""At a megabyte a second and less, NNCodec would take a day for the runs of the GPT."""

QPS = (-38, -34, -30, -26, -23, -20, -17, -14)
"""About a factor of two in the step each; a sweep ends beyond the largest divergence of interest."""

LARGEST_DIVERGENCE = 0.03
VARIANTS = (
    (MODES[0], DEFAULT_VECTOR_QP),
    (MODES[1], DEFAULT_VECTOR_QP),
    (MODES[1], LATTICE_VECTOR_QP),
    (MODES[2], LATTICE_VECTOR_QP),
)
N_LOSSLESS = 4
LOSSLESS: dict[str, Callable[[], Compressor]] = {
    "zstd -1": partial(rival_lossless.zstd, 1),
    "zstd -3": partial(rival_lossless.zstd, 3),
    "zstd -19": partial(rival_lossless.zstd, 19),
    "7-zip -9": rival_lossless.seven_zip,
    "pcodec -8": partial(rival_lossless.pcodec, 8),
    "pcodec -8, integers": partial(rival_lossless.pcodec_integers, 8),
    "zipnn": rival_lossless.zipnn,
}
ABOUT = ("run", "rival", "mode", "qp", "vector_qp")
"""What a row is about."""

TRANSFORMS = {"alone": None, "xor": rival_lossless.xor, "difference": rival_lossless.difference}


def lossless_rows(name: str, rival: str, make: Callable[[], Compressor]) -> list[dict[str, object]]:
    """Return the rows of one lossless compressor on one run."""
    try:
        coder = make()
    except ImportError as error:
        return [{"run": name, "rival": rival, "skipped": f"not installed ({error})"}]
    run = open_run(name)
    first = (len(run.steps) - N_LOSSLESS) // 2
    steps = run.steps[first - 1 : first + N_LOSSLESS]
    raw = [_raw_bytes(run[step].state_dict()) for step in steps]
    rows: list[dict[str, object]] = []
    for transform, apply in TRANSFORMS.items():
        inputs = [now if apply is None else apply(now, before) for before, now in pairwise(raw)]
        begun = time.perf_counter()
        packed = [coder.compress(one) for one in inputs]
        middle = time.perf_counter()
        unpacked = [coder.decompress(one) for one in packed]
        ended = time.perf_counter()
        if not all(map(np.array_equal, inputs, unpacked)):
            raise ValueError(f"{rival} does not return what it was given")
        n_bytes = sum(len(one) for one in inputs)
        rows.append(
            {
                "run": name,
                "rival": rival,
                "mode": transform,
                "steps": len(inputs),
                "ratio_weights": n_bytes / sum(map(len, packed)),
                "encode_mb_per_s": n_bytes / 1e6 / (middle - begun),
                "decode_mb_per_s": n_bytes / 1e6 / (ended - middle),
            }
        )
    return rows


def _raw_bytes(state: Mapping[str, Tensor]) -> Bytes:
    """Return the bytes of the float32 tensors, one after the other."""
    values = [tensor.numpy().ravel() for tensor in state.values() if tensor.dtype == torch.float32]
    raw: Bytes = np.concatenate(values).view(np.uint8)
    return raw


def own_lossless(name: str) -> list[dict[str, object]]:
    """Return Inshrink's lossless codec on the same steps: the frames after the first."""
    run = open_run(name)
    first = (len(run.steps) - N_LOSSLESS) // 2
    steps = run.steps[first - 1 : first + N_LOSSLESS]
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "own.inshrink"
        options = {"codec": "lossless", "optimizer": "drop", "threads": 1}
        inshrink_core.compress(run, Path(scratch) / "warm.inshrink", steps=steps[:2], **options)
        report = inshrink_core.compress(run, target, steps=steps, **options)
        frames = report.size.frames[1:]
    raw, packed = (
        sum(values) for values in zip(*((f.raw_weights, f.weights_nbytes) for f in frames), strict=True)
    )
    return [
        {
            "run": name,
            "rival": "inshrink lossless",
            "mode": "against the one before",
            "steps": len(frames),
            "ratio_weights": raw / packed,
        }
    ]


def nncodec_rows(name: str, mode: str, vector_qp: int, stride: int) -> list[dict[str, object]]:
    """Return a row a QP, from fine to coarse, until the divergence is beyond interest; each is kept."""
    run = open_run(name)
    steps = run.steps[::stride]
    rows: list[dict[str, object]] = []
    own = evaluator_of(name)
    asked = EvaluatorRequest(evaluator=own, metric="loss" if own else None, trust_run=True)
    evaluator = asked.resolve(run)
    with tempfile.TemporaryDirectory() as scratch, evaluator as judge:
        originals = OriginalEvaluations(lambda step: judge.evaluate(run[step]), Path(scratch))
        for qp in QPS:
            key = {
                "run": [run.identity(step) for step in steps],
                "mode": mode,
                "qp": qp,
                "vectors": vector_qp,
            }
            measure = partial(nncodec_point, run, steps, Chain(mode, qp, vector_qp), judge, originals)
            row = kept("rivals", f"{name}-nncodec-{MODES.index(mode)}-{qp}", key, lambda m=measure: [m()])[0]  # type: ignore[misc]
            rows.append({"run": name, **row})
            sys.stderr.write(f"{rows[-1]}\n")
            if float(str(row["mean_divergence"])) > LARGEST_DIVERGENCE:
                break
    return rows


def nncodec_point(
    run: inshrink_core.Run,
    steps: tuple[int, ...],
    chain: Chain,
    judge: Evaluator,
    originals: OriginalEvaluations,
) -> dict[str, object]:
    """Code, restore and judge a chain under one QP."""
    drops, divergences, n_raw, n_packed, seconds = [], [], 0, 0, [0.0, 0.0]
    for step in steps:
        state = run[step].state_dict()
        begun = time.perf_counter()
        bitstream, left_out = chain.encode(state)
        middle = time.perf_counter()
        decoded = chain.decode(bitstream, state)
        seconds[0] += middle - begun
        seconds[1] += time.perf_counter() - middle
        n_raw += sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        n_packed += len(bitstream) + left_out
        original, restored = originals(step), judge.evaluate(decoded)
        drops.append(drop(original.value, restored.value, original.direction))
        divergences.append(original.divergence(restored))
    return {
        "rival": "nncodec",
        "mode": chain.mode,
        "steps": len(steps),
        "ratio_weights": n_raw / n_packed,
        "encode_mb_per_s": n_raw / 1e6 / seconds[0],
        "decode_mb_per_s": n_raw / 1e6 / seconds[1],
        "qp": chain.qp,
        "vector_qp": chain.vector_qp,
        "max_drop": max(one for one in drops if one is not None),
        "mean_divergence": sum(one for one in divergences if one is not None) / len(steps),
    }


def all_lossless(name: str) -> list[dict[str, object]]:
    """Return the rows of the lossless compressors, ours among them; each is kept once it is measured."""
    identity = {"run": [open_run(name).identity(step) for step in open_run(name).steps]}
    rows = kept("rivals", f"{name}-own", identity, partial(own_lossless, name))
    for rival, make in LOSSLESS.items():
        key = identity | {"rival": rival}
        rows += kept("rivals", f"{name}-{rival}", key, partial(lossless_rows, name, rival, make))
    return rows


def rows_of(name: str, quick: bool, lossless: bool) -> list[dict[str, object]]:
    """Return all rows of a run."""
    rows = all_lossless(name) if lossless else []
    try:
        load()
    except ImportError as error:
        return [*rows, {"run": name, "rival": "nncodec", "skipped": f"not installed ({error})"}]
    stride = 6 if quick else matrix.PLANS[name].stride
    for mode, vector_qp in VARIANTS[1:2] if quick else VARIANTS:
        rows += nncodec_rows(name, mode, vector_qp, stride)
    return rows


def leads(name: str, rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return lattice against NNCodec at equal mean divergence; None where a sweep does not reach it."""
    plan = matrix.PLANS[name]
    sweeps = [
        [tuple(point) for point in matrix.codec_rows(name, codec, plan)[-1]["points"]]  # type: ignore[attr-defined]
        for codec in matrix.LATTICE
    ]
    found: list[dict[str, object]] = []
    for divergence in matrix.DIVERGENCES:
        ratios = [ratio_at(points, divergence) for points in sweeps]
        ratio, best = ratios[0], max(one or 0.0 for one in ratios) or None
        for mode in MODES:
            points = [
                (float(str(row["mean_divergence"])), float(str(row["ratio_weights"])))
                for row in rows
                if row["rival"] == "nncodec" and row.get("mode") == mode
            ]
            theirs = ratio_at(points, divergence)
            found.append(
                {
                    "run": name,
                    "divergence": divergence,
                    "rival": f"nncodec, {mode}",
                    "ratio_rival": theirs,
                    "ratio_lattice": ratio,
                    "ratio_best_lattice": best,
                    "lattice_over_rival": ratio / theirs if ratio and theirs else None,
                    "best_lattice_over_rival": best / theirs if best and theirs else None,
                }
            )
    return found


def main(quick: bool = False, names: list[str] | None = None, lossless: bool = True) -> Path:
    """Write ``results/rivals.csv`` and ``results/rivals_lead.csv``, after each run what there is.

    Rows of other runs and of what was not asked for stay as they were.
    """
    folder = os.environ.get("INSHRINK_RIVALS")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    lead_rows: list[dict[str, object]] = []
    for name in ("digits-cnn",) if quick else names or RUNS:
        found = rows_of(name, quick, lossless)
        rows += [dict.fromkeys(ABOUT, "") | row for row in found if "skipped" not in row]
        path = renew("rivals_quick" if quick else "rivals", rows, ABOUT)
        if not quick:
            lead_rows += leads(name, found)
            renew("rivals_lead", lead_rows, ("run", "divergence", "rival"))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *RUNS], help="runs; by default all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nncodec", action="store_true", help="without the lossless compressors")
    arguments = parser.parse_args()
    main(arguments.quick, arguments.names, not arguments.nncodec)

"""The lattice's plans: one that looks ahead, as `compress` makes it, and one that does not, as the saver's.

For each run of `benchmarks.runs` that is there, chains in memory of weights and buffers: ratio, index and
header included, against mean divergence. ``results/lookahead.csv`` has every point; rows without a coarseness
are interpolated between the others, at .003 nats. ``share_vectors`` is what vectors and running statistics
take of all bytes, ``divergence_vectors`` the divergence that they cause alone: with them as restored, and
everything else as it was.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.interpolation import ratio_at
from benchmarks.results import RESULTS, renew
from benchmarks.runs import RUNS, evaluator_of, open_run
from inshrink_core.chain import FrameEncoder
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.evaluate import Evaluator, EvaluatorRequest, OriginalEvaluations
from inshrink_core.formats import Run
from inshrink_core.search.measure import EncodedStep, encode_chain

DIVERGENCE = 0.003
COARSENESS: Mapping[str, tuple[float, ...]] = {
    "digits-cnn": (0.5, 2.5, 3.5, 5.0),
    "cnn-adamw": (0.5, 3.0, 4.5, 7.0),
    "cnn-sgd": (0.5, 6.0, 8.5, 12.0),
    "char-gpt": (0.5, 2.5, 4.0, 6.0),
    "fine-tune": (0.5, 40.0, 70.0, 120.0),
}
"""The default, and values that enclose the divergence."""

PLANS: Mapping[str, tuple[bool, dict[str, Any]]] = {
    "ahead": (True, {}),
    "as it comes": (False, {}),
    "ahead, sensitivity .25": (True, {"sensitivity": 0.25}),
    "ahead, gamma .5": (True, {"gamma": 0.5}),
}
"""Whether the codec looks ahead, and settings that are not the default."""


def point(
    run: Run, judge: Evaluator, originals: OriginalEvaluations, plan: str, coarseness: float
) -> dict[str, object]:
    """Encode a chain, and judge every step."""
    looks, settings = PLANS[plan]
    chain = make_chain_config("", "lattice", {**settings, "coarseness": coarseness}, "drop", 32, "cpu", 1)
    foreseen = FrameEncoder(chain).look_ahead(run.steps, run.__getitem__) if looks else None
    raw = nbytes = vectors = 0
    divergences, alone = [], []
    for encoded in encode_chain(chain, map(run.__getitem__, run.steps), foreseen=foreseen):
        raw, nbytes = raw + encoded.raw_weights, nbytes + encoded.weights_nbytes
        vectors += sum(encoded.nbytes[key] for key in _vectors(encoded))
        step, restored = encoded.checkpoint.step, encoded.restored().state_dict()
        divergences.append(_divergence(originals, judge, step, restored))
        mixed = run[step].state_dict() | {key: restored[key] for key in _vectors(encoded)}
        alone.append(_divergence(originals, judge, step, mixed))
    return {
        "plan": plan,
        "coarseness": coarseness,
        "steps": len(divergences),
        "ratio_weights": raw / nbytes,
        "share_vectors": vectors / nbytes,
        "mean_divergence": sum(divergences) / len(divergences),
        "max_divergence": max(divergences),
        "divergence_vectors": sum(alone) / len(alone),
    }


def _vectors(encoded: EncodedStep) -> list[str]:
    """Keys of what has at most one dimension."""
    return [key for key in encoded.nbytes if len(encoded.checkpoint.spec(key).shape) < 2]


def _divergence(
    originals: OriginalEvaluations, judge: Evaluator, step: int, state: Mapping[str, Tensor]
) -> float:
    found = originals(step).divergence(judge.evaluate(dict(state)))
    if found is None:
        raise ValueError("the evaluator returns no predictions")
    return found


def measure(name: str, plans: Sequence[str], n_points: int) -> None:
    """Measure a run under some plans; every point is written as soon as it is there."""
    results = "lookahead" if n_points > 1 else "lookahead_quick"
    run, own = open_run(name), evaluator_of(name)
    asked = EvaluatorRequest(evaluator=own, metric="loss" if own else None, trust_run=True)
    with tempfile.TemporaryDirectory() as scratch, asked.resolve(run) as judge:
        originals = OriginalEvaluations(lambda step: judge.evaluate(run[step]), Path(scratch))
        for plan in plans:
            rows: list[dict[str, object]] = []
            for coarseness in COARSENESS[name][:n_points]:
                rows.append({"run": name, **point(run, judge, originals, plan, coarseness)})
                sys.stderr.write(f"{rows[-1]}\n")
                renew(results, rows[-1:], _COLUMNS)
            points = [(float(str(r["mean_divergence"])), float(str(r["ratio_weights"]))) for r in rows]
            between = {"ratio_weights": ratio_at(points, DIVERGENCE), "mean_divergence": DIVERGENCE}
            renew(results, [{"run": name, "plan": plan, "coarseness": "", **between}], _COLUMNS)


_COLUMNS = ("run", "plan", "coarseness")


def main(quick: bool = False, names: Sequence[str] = (), plans: Sequence[str] = ()) -> Path:
    """Write ``results/lookahead.csv``."""
    torch.set_num_threads(1)
    for name in ("digits-cnn",) if quick else names or RUNS:
        measure(name, plans or list(PLANS), 1 if quick else len(COARSENESS[name]))
    return RESULTS / f"lookahead{'_quick' if quick else ''}.csv"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"runs, of {', '.join(RUNS)}; by default all")
    parser.add_argument("--plan", choices=PLANS, action="append", help="by default all")
    parser.add_argument("--quick", action="store_true", help="one point of each")
    arguments = parser.parse_args()
    main(arguments.quick, arguments.names, arguments.plan or ())

"""Every codec on every run: ``inshrink bench`` over the runs of `benchmarks.runs`.

``results/matrix.csv`` has one row a run, codec and bound: the largest measured ratio that keeps the
bound. ``results/matrix_lead.csv`` compares at equal mean divergence instead: the ratio of each codec,
interpolated between its measured settings, and how many times as large lattice's is: that of its default,
and that of the better of its two settings of gamma.

Measured points are kept in ``benchmarks/data/matrix`` and not measured again. A run or a codec that
would take too long is measured in part; the columns ``steps`` and ``refine`` say with how many steps and
how fine a search.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.interpolation import ratio_at
from benchmarks.results import DATA, kept, nothing_new, renew
from benchmarks.runs import evaluator_of, open_run
from inshrink_core.codec import get_codec
from inshrink_core.codecs.variants import Variant
from inshrink_core.execution.progress import Progress
from inshrink_core.lab.bench import BenchReport, bench
from inshrink_core.lab.bench.report import REPEAT, BoundRow

INSHRINKERATOR = (
    "inshrinkerator",
    "inshrinkerator:codebook=refit",
    "inshrinkerator:entropy=rans",
    "inshrinkerator:codebook=refit,entropy=rans",
)
"""Warm-started and refitted codebooks, with the published coder and with rANS."""

LATTICE = ("lattice", "lattice:gamma=0.5")
FIRST = (*LATTICE, *INSHRINKERATOR)
"""Measured on every run before any other codec is measured on one. With gamma=.5, the
former default, the spacing follows the learning rate down."""

RIVALS = ("lc-checkpoint", "qd", "uniform", "excp", "excp:coder=rans", "context", "lossless")
DIVERGENCES = (0.003, 0.01, 0.03)


@dataclass(frozen=True)
class Plan:
    """What of a run is measured.

    Parameters
    ----------
    codecs
        In this order.
    stride
        Every how manieth step of the run is in the chain.
    refine
        How often each codec's gap below each bound is halved.
    values
        Values of the knob, by codec; by default all that `inshrink bench` sweeps.
    """

    codecs: tuple[str, ...]
    stride: int = 1
    refine: int = 0
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


FEW = {"lattice": (1.5, 4.0, 10.0, 25.0), "inshrinkerator": (48, 24, 12, 6), "uniform": (8, 6, 4, 3)}
"""Where a chain takes a minute to restore and judge: each has about twice the error of the one before."""

WARM = tuple(codec for codec in FIRST if "refit" not in codec)
PLANS = {
    "digits-cnn": Plan((*FIRST, *RIVALS), values=FEW),
    "cnn-adamw": Plan((*FIRST, *RIVALS), values=FEW),
    "cnn-sgd": Plan((*FIRST, *RIVALS), values=FEW),
    "fine-tune": Plan((*WARM, "uniform", "lossless"), values=FEW | {"lattice": (10.0, 25.0, 60.0, 150.0)}),
    "char-gpt": Plan(
        (*WARM, "uniform", "lossless"), stride=2, values=FEW | {"lattice": (1.5, 4.0, 6.0, 10.0)}
    ),
}
QUICK = {"digits-cnn": Plan(("lattice", "inshrinkerator:entropy=rans"), stride=6)}


def variants_of(codec: str, values: Mapping[str, tuple[float, ...]]) -> list[str]:
    """Return a codec as it is swept: by itself, or once for each value its knob is held at."""
    knob = Variant.parse(codec).knob
    held = values.get(codec.partition(":")[0], ())
    if knob is None or not held:
        return [codec]
    separator = "," if ":" in codec else ":"
    return [codec + separator + ",".join(f"{name}={value}" for name in knob.settings) for value in held]


def report_of(name: str, codec: str, plan: Plan) -> BenchReport:
    """Measure one codec on one run; points that are kept are not measured again."""
    run, stride = open_run(name), plan.stride
    steps = run.steps[::stride] if stride > 1 else None

    def show(progress: Progress) -> None:
        sys.stderr.write(f"\r{name} {progress.detail}: {progress.done} of about {progress.total} steps  ")

    report = bench(
        run,
        codecs=variants_of(codec, plan.values),
        steps=steps,
        refine=plan.refine,
        evaluator=evaluator_of(name),
        metric="loss" if evaluator_of(name) else None,
        trust_run=True,
        threads=1,
        output=DATA / "matrix" / name,
        progress=show if sys.stderr.isatty() else None,
    )
    sys.stderr.write(f"\r{name} {codec}: {len(report.rows)} rows, {report.seconds:.0f} s\n")
    return report


def measure(name: str, codec: str, plan: Plan) -> list[dict[str, object]]:
    """Return the rows of one codec on one run, the points behind them in the last column."""
    report = report_of(name, codec, plan)
    swept = [one for label, group in report.points.items() if label != REPEAT for one in group]
    points = [
        [point.mean_divergence, point.ratio_weights]
        for point in swept
        if point.mean_divergence is not None and point.ratio_weights is not None
    ]
    best: dict[tuple[bool, str, float], BoundRow] = {}
    for row in report.rows:  # of the values that a knob was held at, the largest ratio within a bound
        key = row.codec == REPEAT, row.bound.kind, row.bound.limit
        if key not in best or _ratio(row) > _ratio(best[key]):
            best[key] = row
    rows: list[dict[str, object]] = []
    for (is_repeat, *_), row in best.items():
        values = row.to_json()
        config = values.pop("config") or {}
        rows.append(
            {
                "run": name,
                **values,
                "codec": REPEAT if is_repeat else codec,
                "knob": row.point.knob if row.point is not None else None,
                "steps": len(report.steps),
                "refine": plan.refine,
                "config": json.dumps(dict(config), sort_keys=True),
                "points": [] if is_repeat else points,
            }
        )
    return rows


def _ratio(row: BoundRow) -> float:
    """Return what is to be large; 0 where the bound is out of reach."""
    return (row.point.ratio_weights or 0.0) if row.kept and row.point is not None else 0.0


def codec_rows(name: str, codec: str, plan: Plan, kept_only: bool = False) -> list[dict[str, object]]:
    """Return the rows of one codec on one run, measured now or before.

    Raises
    ------
    LookupError
        It is not kept, and `kept_only`.
    """
    run = open_run(name)
    key = {
        "run": [run.identity(step) for step in run.steps],
        "codec": codec,
        "bitstream": get_codec(codec.partition(":")[0]).bitstream,
        "stride": plan.stride,
        "refine": plan.refine,
        "values": list(plan.values.get(codec.partition(":")[0], ())),
        "defaults": get_codec(codec.partition(":")[0])().settings(),
    }
    label = f"{name}-{re.sub('[:=,]', '-', codec)}"
    return kept("matrix", label, key, nothing_new if kept_only else partial(measure, name, codec, plan))


def in_order(plans: Mapping[str, Plan]) -> list[tuple[str, str]]:
    """Return the runs and codecs in the order they are measured: what is compared most comes first."""
    pairs = [(name, codec) for name, plan in plans.items() for codec in plan.codecs]
    return sorted(pairs, key=lambda pair: pair[1] not in FIRST)


def leads(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return, for each run, divergence and codec, the interpolated ratio and lattice's over it."""
    out: list[dict[str, object]] = []
    for run in dict.fromkeys(str(row["run"]) for row in rows):
        of_run = {str(row["codec"]): row for row in rows if row["run"] == run and row["codec"] != REPEAT}
        for divergence in DIVERGENCES:
            ratios = {codec: ratio_at(map(tuple, row["points"]), divergence) for codec, row in of_run.items()}  # type: ignore[arg-type, call-overload]
            ours = ratios.get("lattice")
            best = max(ratios.get(codec) or 0.0 for codec in LATTICE)
            for codec, ratio in ratios.items():
                row = of_run[codec]
                out.append(
                    {
                        **{key: row[key] for key in ("date", "machine", "version")},
                        "run": run,
                        "divergence": divergence,
                        "codec": codec,
                        "ratio_weights": ratio,
                        "lattice_over_this": ours / ratio if ours and ratio else None,
                        "best_lattice_over_this": best / ratio if best and ratio else None,
                        "steps": row["steps"],
                    }
                )
    return out


def main(
    quick: bool = False,
    names: list[str] | None = None,
    kept_only: bool = False,
    codecs: list[str] | None = None,
) -> Path:
    """Write ``results/matrix.csv`` and ``results/matrix_lead.csv``, after each codec what there is.

    Rows of other runs and codecs stay as they were.
    """
    suffix = "_quick" if quick else ""
    plans = dict(QUICK) if quick else {name: PLANS[name] for name in names or PLANS}
    if codecs:
        plans = {
            name: replace(plan, codecs=tuple(codec for codec in plan.codecs if codec in codecs))
            for name, plan in plans.items()
        }
    rows: list[dict[str, object]] = []
    path = Path()
    for name, codec in in_order(plans):
        try:
            found = codec_rows(name, codec, plans[name], kept_only)
        except LookupError:
            sys.stderr.write(f"{name} {codec}: not measured yet\n")
            continue
        known = any(row["run"] == name for row in rows)
        rows += [row for row in found if not (known and row["codec"] == REPEAT)]
        # Stable: within a run, the order in which codecs were measured.
        rows.sort(key=lambda row: list(plans).index(str(row["run"])))
        renew(f"matrix_lead{suffix}", leads(rows), ("run", "divergence", "codec"))
        told = [{k: v for k, v in row.items() if k != "points"} for row in rows]
        path = renew(f"matrix{suffix}", told, ("run", "codec", "bound_kind", "bound"))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *PLANS], help="runs; by default all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kept", action="store_true", help="rows of what was measured before, nothing new")
    parser.add_argument("--codecs", nargs="+", help="these alone")
    arguments = parser.parse_args()
    main(arguments.quick, arguments.names, arguments.kept, arguments.codecs)

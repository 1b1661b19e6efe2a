"""``python -m benchmarks.fuzz SECONDS --seed N``: attack archives, inputs and decoders."""

from __future__ import annotations

import os

# One thread of PyTorch for each worker, set before anything imports it.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results
from benchmarks.fuzz import scratch
from benchmarks.fuzz.campaign import Campaign, Finding, Fuzzer, input_of, limits_of, warm_up
from benchmarks.fuzz.judging import Limits, judge_alone
from benchmarks.fuzz.target import KINDS, Target
from benchmarks.fuzz.targets import named

_MAX_SHOWN = 300


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.fuzz", description=__doc__)
    parser.add_argument("seconds", type=float, nargs="?", default=60.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1, help="of the campaign; the same cases every time")
    parser.add_argument("--target", action="append", default=[], metavar="NAME", help="may be repeated")
    parser.add_argument("--cases", type=int, help="of each target, instead of a time")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the input of each finding here")
    parser.add_argument("--csv", action="store_true", help="write benchmarks/results/fuzz.csv")
    parser.add_argument("--list", action="store_true", help="name the targets")
    parser.add_argument("--replay", nargs=3, metavar=("TARGET", "SEED", "CASE"), help="one case again")
    return parser.parse_args(words)


def rows(campaign: Campaign) -> list[dict[str, object]]:
    """Return a row a target, as ``benchmarks/results/fuzz.csv`` has them."""
    return [
        {
            "target": name,
            "seed": campaign.seed,
            "cases": tally.n_cases,
            "seconds": tally.cpu_seconds,
            "cases_per_cpu_second": tally.n_cases / tally.cpu_seconds if tally.cpu_seconds else 0.0,
            "slowest_seconds": tally.slowest_seconds,
            **{kind: tally.counts[kind] for kind in KINDS},
        }
        for name, tally in campaign.tallies.items()
    ]


def _print_table(campaign: Campaign) -> None:
    print(f"{'target':22}{'cases':>9}{'/cpu s':>8}{'slowest':>9}" + "".join(f"{kind:>10}" for kind in KINDS))
    for row in rows(campaign):
        counts = "".join(f"{row[kind]:>10,}" for kind in KINDS)
        rate, slowest = row["cases_per_cpu_second"], row["slowest_seconds"]
        print(f"{row['target']:22}{row['cases']:>9,}{rate:>8.0f}{slowest:>7.2f} s{counts}")


def _print_finding(finding: Finding, seed: int) -> None:
    verdict = finding.verdict
    sound = ", a sound input" if finding.case < 0 else ""
    print(f"\n{verdict.kind}: {verdict.message[:_MAX_SHOWN]!r}")
    print(
        f"  {finding.n_cases} cases, {len(finding.data)} bytes{sound}, "
        f"--replay {finding.target} {seed} {finding.case}"
    )
    for frame in verdict.frames:
        print(f"  {frame}")


def save_finding(folder: Path, finding: Finding) -> Path:
    """Write the input of a finding where the corpus has it, by a name that says what it did."""
    name = re.sub("[^A-Za-z0-9]+", "-", finding.verdict.key).strip("-")[:100]
    path = folder / finding.target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(finding.data)
    return path


def _replay(name: str, seed: int, case: int) -> int:
    (target,) = named((name,))
    warm_up(target)
    data = input_of(target, seed, case)
    verdict = judge_alone(target, data, limits_of(target, Limits()))
    print(f"{verdict.kind} ({verdict.cpu_seconds:.2f} s): {verdict.message}")
    for frame in verdict.frames:
        print(f"  {frame}")
    return int(verdict.bad)


def _attack(options: argparse.Namespace, targets: list[Target]) -> int:
    fuzzer = Fuzzer(targets, options.seed, workers=options.workers)
    campaign = fuzzer.run(None if options.cases else options.seconds, options.cases)
    for finding in campaign.findings.values() if options.save else ():
        save_finding(options.save, finding)
    _print_table(campaign)
    for finding in campaign.findings.values():
        _print_finding(finding, options.seed)
    total = sum(tally.n_cases for tally in campaign.tallies.values())
    print(f"\n{total:,} cases, {campaign.n_bad:,} bad, {len(campaign.findings)} findings")
    if options.csv:
        results.renew("fuzz", rows(campaign), ("target",))
    return int(campaign.n_bad > 0)


def main(words: Sequence[str] | None = None) -> int:
    """Run the campaign; 1 where anything bad was found."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    options = _arguments(words)
    try:
        if options.list:
            print("\n".join(target.name for target in named(())))
            return 0
        if options.replay:
            name, seed, case = options.replay
            return _replay(name, int(seed), int(case))
        return _attack(options, named(tuple(options.target)))
    finally:
        scratch.remove()


if __name__ == "__main__":
    sys.exit(main())

"""Proof that the harness can fail: defects are planted, and each must be found."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

from benchmarks.crash.cases import Stage
from benchmarks.crash.modes import CASES, Case, replays
from benchmarks.crash.plants import PLANTS
from benchmarks.crash.ranks import RANK_PLANTS, RankStage
from benchmarks.crash.shim import Shim
from benchmarks.crash.verbs import VERBS

N_CASES = 120
"""Within which a planted defect is found, by far."""


def prove(shim: Shim, folder: Path, seed: int) -> bool:
    """Plant each defect, look for it, and print which case found it; tell whether all were found."""
    missed = 0
    for name, (plant, verb, mode) in PLANTS.items():
        with plant():
            stage = Stage(VERBS[verb](), shim, folder / verb)
            stage.open()
            if not replays(stage):
                raise RuntimeError(f"the log of {verb} does not tell all that it did")
            cases = islice(CASES[mode](stage, Random(f"{seed} {name}")), N_CASES)
            found = next((case for case in cases if case.outcome.problems), None)
        missed += _tell(name, verb, mode, found)
    for name, (plant_in_ranks, point) in RANK_PLANTS.items():
        with plant_in_ranks():
            ranks = RankStage(folder / "ranks")
            ranks.open()
            kills = ranks.kills(Random(f"{seed} {name}"), point)
            found = next((case for case in kills if case.outcome.problems), None)
        missed += _tell(name, "ranks", "kill", found)
    return not missed


def _tell(name: str, verb: str, mode: str, found: Case | None) -> bool:
    """Print which case found a defect, and return whether none did."""
    message = "NOT FOUND" if found is None else f"{found.name}: {found.outcome.problems[0]}"
    print(f"{name:>18} {verb:>8} {mode:>6}  {message}", flush=True)
    return found is None

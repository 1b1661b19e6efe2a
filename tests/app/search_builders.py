"""What a search leaves: trials, results and jobs, made up."""

from pathlib import Path
from typing import Any

from inshrink_app.services import SearchPoint

from tests.app.job_stubs import STEPS, StubJobs


def config(coarseness: float, **more: Any) -> dict[str, Any]:
    return {"codec": "lattice", "settings": {"coarseness": coarseness}, **more}


def trial(step: int, coarseness: float, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "config": config(coarseness),
        "drop": 0.001 * coarseness,
        "divergence": 1e-4 * coarseness,
        "failure": "",
        "ratio_weights": 1000 / int(100 / coarseness),
        **changes,
    }


def document(**changes: Any) -> dict[str, Any]:
    """Return what a search of three configurations would leave; the coarsest broke the bound early."""
    trials = [trial(step, coarseness) for coarseness in (1.0, 2.0) for step in STEPS]
    trials.append(trial(STEPS[0], 9.0, divergence=0.5))
    return {
        "best": {"config": config(2.0)},
        "bounds": {"drop": 0.01, "divergence": 0.003},
        "steps": list(STEPS),
        "not_discriminative": [20, 30],
        "evaluations": 9,
        "trials": trials,
        "seconds": 12.0,
        "notes": ["<b>note</b>"],
        **changes,
    }


def put(
    jobs: StubJobs, run: Path, state: str = "finished", result: Any = None, *more: str, steps: bool = True
) -> Any:
    words = ["search", str(run), "--codec", "lattice", *(more or ("--max-drop", "0.01"))]
    words += ["--steps", ",".join(map(str, STEPS))] if steps else []
    return jobs.put(words, state=state, result=result, shown=str(run))


def point(ratio: float, drop: float | None, **changes: Any) -> SearchPoint:
    values: dict[str, Any] = {
        "label": "x",
        "config": config(1.0),
        "ratio": ratio,
        "drop": drop,
        "divergence": None,
        "n_steps": 4,
        "keeps": True,
    }
    return SearchPoint(**(values | changes))

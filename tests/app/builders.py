"""Small runs on disk, synthetic tables, and the explorer's script under test."""

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from inshrink_app.jobs.work import Work
from inshrink_app.model.sensitivity import Sensitivity
from inshrink_app.model.subject import Subject
from inshrink_app.pages import page
from inshrink_app.server import recent
from streamlit.testing.v1 import AppTest, app_test

from inshrink_core import Archive
from inshrink_core.analysis.profile import Row
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.evaluate import EvaluatedStep
from inshrink_core.evaluate.comparison import Compared
from inshrink_core.metrics import Direction
from inshrink_core.report import plain_value
from inshrink_core.verbs.shared.measured import Measurements

MAIN = Path(__file__).parents[2] / "app" / "main.py"
EVALUATOR = "def evaluate(state):\n    return {'loss': float(len(state))}\n"
SAMPLE = Path(__file__).parents[2] / "sample_checkpoints" / "digits-cnn"


def visit(app: AppTest, name: str) -> AppTest:
    """Turn a session to a page, by the name of its folder; the next run draws it."""
    app._page_hash = app_test.calc_hash(page(name).address)
    return app


def session(**query: str) -> AppTest:
    """Return a session of the explorer's script with a query, not run yet."""
    app = AppTest.from_file(str(MAIN), default_timeout=60)
    for key, value in query.items():
        app.query_params[key] = value
    return app


def linked(page: str, **query: str) -> AppTest:
    """Run the explorer's script as a session that begins at one page, as a link from anywhere makes it."""
    return visit(session(**query), page).run()


def explorer(page: str | None = None, **query: str) -> AppTest:
    """Run the explorer's script at its first page, or at one that was clicked on, with a query."""
    app = session(**query)
    if page is not None:
        visit(app, page)
        app.session_state["inshrink.arrived"] = "elsewhere"  # The session did not begin at this page.
    return app.run()


def archives(panel: str, run: object, *, evaluator: bool = False, **query: str) -> AppTest:
    """Run the explorer's script at a panel of Archives; `evaluator` opens the evaluator in the header."""
    app = explorer("archives", panel=panel, run=str(run), **query)
    if evaluator:
        app.session_state["header.evaluator"] = True
        app.run()
    return app


def drawer() -> AppTest:
    """Run the explorer's script at its first page, with the drawer of the jobs open."""
    app = session()
    app.session_state["header.jobs"] = True
    return app.run()


def open_panel(app: AppTest) -> None:
    """Open "Do this without the explorer" as a click does; closed, it holds nothing."""
    panels = [found for found in app.expander if found.label == "Do this without the explorer"]
    assert panels
    assert not any(panel.code for panel in panels)
    app.session_state["snippets"] = True
    app.run()


def texts(app: AppTest) -> str:
    """Return every text on the page, for asking whether something is said."""
    kinds = ["title", "header", "subheader", "markdown", "caption", "text", "code"]
    kinds += ["error", "warning", "info", "success"]
    said = [str(element.value) for kind in kinds for element in app.get(kind)]
    return "\n".join([*said, *header(app)]).replace("\xa0", " ")


def header(app: AppTest) -> list[str]:
    """Return the buttons of the header, the run first, each with what a hover tells of it."""
    return [f"{one.proto.popover.label} {one.proto.popover.help}" for one in app.get("popover")]


def charts(app: AppTest) -> int:
    """Return how many Plotly figures are on the page."""
    return len(app.get("plotly_chart"))


def button(app: AppTest, label: str) -> Any:
    """Return the button with a label."""
    return next(found for found in app.button if found.label == label)


def primary(app: AppTest) -> list[str]:
    """Return the labels of the buttons that stand out."""
    return [found.label for found in app.button if found.proto.type == "primary"]


def write_run(folder: Path, steps: tuple[int, ...] = (10, 20, 30)) -> Path:
    """Write a run of torch files, two layers each."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        state = {
            "fc1.weight": torch.randn(4, 3, generator=generator),
            "fc1.bias": torch.randn(4, generator=generator),
            "fc2.weight": torch.randn(2, 4, generator=generator),
        }
        torch.save({"model": state, "step": step}, folder / f"step_{step:06}.pt")
    return folder


def trusted(run: Path, code: str = EVALUATOR) -> Path:
    """Give a run an evaluator that its user trusts; return its file."""
    judge = judged(run, code)
    recent.trust(judge, hashlib.sha256(judge.read_bytes()).hexdigest())
    return judge


def judged(run: Path, code: str = EVALUATOR) -> Path:
    """Give a run an evaluator; return its file."""
    (run / "judge.py").write_text(code)
    (run / "inshrink.toml").write_text('[evaluator]\nfile = "judge.py"\nmetric = "loss"\n')
    return run / "judge.py"


def sensitivity_table(
    n_rows: int = 6, n_steps: int = 5, *, metric: str = "magnitude", note: str = ""
) -> Sensitivity:
    """Return a table of plausible values, with the first step of the last row absent."""
    generator = np.random.default_rng(7)
    values = 10.0 ** generator.normal(-3, 1, (n_rows, n_steps))
    values[-1, 0] = np.nan
    layers = ("linear", "convolution", "vector")
    return Sensitivity(
        metric=metric,
        rows=tuple(
            Row(f"layers.{i}.weight", f"layers.{i}", layers[i % 3], "weight", 1, 12, (4, 3))
            for i in range(n_rows)
        ),
        steps=tuple(10 * (i + 1) for i in range(n_steps)),
        values={name: (values * scale).astype(np.float32) for name, scale in _SCALES.items()},
        note=note,
    )


_SCALES = {"mean": 1.0, "p50": 0.7, "p99": 5.0}


def subject(n_tensors: int = 6, n_steps: int = 5, **changes: Any) -> Subject:
    """Return a run as its headers would tell."""
    values: dict[str, Any] = {
        "path": Path("/runs/huge"),
        "name": "huge",
        "kind": "run",
        "format": "torch",
        "steps": tuple(10 * (i + 1) for i in range(n_steps)),
        "tensors": tuple(
            TensorSpec(name=f"layers.{i}.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(4, 3))
            for i in range(n_tensors)
        ),
        "total_bytes": 10**9,
    }
    return Subject(**(values | changes))


MEASURING = Work(
    documents=({"verb": "sensitivity", "fields": {"run": "run"}},), page="sensitivity", topic="magnitude"
)
"""Some measurement, where it does not matter of what."""


def compared_row(**changes: Any) -> EvaluatedStep:
    """Return a compared step."""
    row: dict[str, Any] = {"step": 20, "original": 2.0, "restored": 2.1, "drop": 0.05, "divergence": 1e-3}
    row |= {"previous_drop": None, "previous_divergence": None, "restore_cost": 0.004}
    return EvaluatedStep(**(row | changes))


def keep_comparison(
    archive: Path, rows: Sequence[EvaluatedStep], *, name: str = "judge.py:f", metric: str = "loss"
) -> None:
    """Keep a comparison of an archive as the engine does."""
    asked = {"evaluator": "0" * 16, "name": name, "run": {}, "before": {}}
    found = Compared(metric=metric, direction=Direction.LOWER, device="cpu", steps=tuple(rows))
    store = Measurements.of_archive(Archive.open(archive))
    store.add("compare", asked, plain_value(found))


def snippets(app: Any) -> tuple[list[list[str]], str]:
    """Take the panel "Do this without the explorer" apart: its commands as words, and its Python lines."""
    open_panel(app)
    panel = next(found for found in app.expander if found.label == "Do this without the explorer")
    commands, python = (code.value for code in panel.code)
    lines = [shlex.split(line) for line in commands.splitlines()]
    assert all(words[0] == "inshrink" for words in lines)
    return [words[1:] for words in lines], python

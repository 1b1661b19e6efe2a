"""Evaluate one step of a run, or write a template of an evaluator."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, cast

from inshrink_core.checkpoint import MODEL_ROLES, model_of
from inshrink_core.errors import InputError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.verbs.shared.groups import PathLike, Reading, RunLike
from inshrink_core.verbs.shared.measured import EvaluatorId, Measurements

if TYPE_CHECKING:
    from inshrink_core.metrics import Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateReport(Report):
    """Result of an evaluator for one step.

    Parameters
    ----------
    step
        The step.
    evaluator
        The evaluator, as ``FILE.py:FUNCTION``.
    metric, direction, value
        The metric that is compared, its better direction, and its value.
    metrics, standard_errors
        All returned metrics, and the standard errors of some.
    log_probs, predictions
        Shapes of the returned arrays that a divergence compares; None if not returned.
    printed
        The end of the evaluator's output, in one line.
    seconds
        Time within the evaluator.
    """

    step: int
    evaluator: str
    metric: str
    direction: Direction
    value: float
    metrics: Mapping[str, float]
    standard_errors: Mapping[str, float] = field(default_factory=dict)
    log_probs: tuple[int, ...] | None = None
    predictions: tuple[int, ...] | None = None
    printed: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorReport(Report):
    """Result of writing a template of an evaluator.

    Parameters
    ----------
    output
        The file.
    digest
        SHA-256 of the file.
    """

    output: Path
    digest: str

    KEYS: ClassVar = "evaluator=output sha256=digest"


@dataclass(frozen=True)
class Evaluate(EvaluatorRequest, Reading, Request[EvaluateReport]):
    """Evaluate one step, to test an evaluator; or write a template of one.

    Parameters
    ----------
    run
        A run: a directory, a glob or a checkpoint file.
    step
        The step; by default the last.
    write
        Write a template of an evaluator to this Python file instead; nothing is executed.
    model
        The model's class, constructed without arguments.
    force
        Overwrite existing files.

    Raises
    ------
    UntrustedCodeError
        The run's own evaluator needs consent before it is executed.
    EvaluatorError
        The evaluator failed.

    Examples
    --------
    >>> import inshrink_core
    >>> report = inshrink_core.verbs.evaluate(inshrink_core.sample("digits-cnn"))
    >>> report.metric, report.value > 0.97, report.log_probs
    ('accuracy', True, (540, 10))
    >>> import tempfile
    >>> target = f"{tempfile.mkdtemp()}/judge.py"
    >>> made = inshrink_core.verbs.evaluate(inshrink_core.sample("digits-cnn"), write=target)
    >>> "def evaluate(state_dict)" in made.output.read_text()
    True
    """

    run: RunLike
    _: KW_ONLY
    step: Annotated[int | None, Option(metavar="STEP")] = None
    write: Annotated[PathLike | None, Option(metavar="FILE.py")] = None
    model: Annotated[str | None, Option(metavar="MODULE:CLASS", needs="write")] = None
    force: Annotated[bool, Option(needs="write")] = False

    EXAMPLES: ClassVar = (
        "inshrink evaluate runs/digits --write judge.py",
        "inshrink evaluate runs/digits --evaluator judge.py:evaluate",
    )

    def perform(self) -> EvaluateReport:
        """Evaluate the step, or write an evaluator."""
        if self.write is not None:
            return cast("EvaluateReport", self.written())
        opened = self.opened_run(self.run)
        chosen = opened.steps[-1] if self.step is None else self.step
        with self.resolve(opened) as judge:
            found = judge.evaluate(opened[chosen])
            report = EvaluateReport(
                step=chosen,
                evaluator=judge.spec,
                metric=found.metric,
                direction=found.direction,
                value=found.value,
                metrics=found.metrics,
                standard_errors=found.standard_errors,
                log_probs=None if found.log_probs is None else found.log_probs.shape,
                predictions=None if found.predictions is None else found.predictions.shape,
                printed=judge.printed,
                seconds=found.seconds,
            )
            asked = EvaluatorId.of(judge)
        question = {"step": chosen, "evaluator": asked.digest, "name": asked.name}
        Measurements.of_run(opened, make=True).add("evaluate", question, report.to_json())
        return report

    def written(self) -> EvaluatorReport:
        """Write a template of an evaluator, which marks what the user fills in."""
        from inshrink_core.evaluate.template import evaluator_source
        from inshrink_core.execution import make_folders, require_free, write_durably

        path = Path(self.write or "")
        self.exclude("--write", ("step", "evaluator", "metric", "direction", "trust_run", "timeout"))
        opened, target = self.opened_run(self.run), path.absolute()
        if target.suffix != ".py":
            raise InputError("an evaluator is a Python file", where=str(path), remedy="call it NAME.py")
        require_free(target, self.force)
        checkpoint = opened[opened.steps[-1]]
        names = [
            model_of(spec.name, checkpoint.models) for spec in checkpoint.specs if spec.role in MODEL_ROLES
        ]
        which = "" if "" in names else names[0]
        source = evaluator_source(self.model, which, checkpoint.models).encode()
        make_folders(target.parent)
        write_durably(target, source)
        return EvaluatorReport(output=path, digest=hashlib.sha256(source).hexdigest())


evaluate = python_call(Evaluate)

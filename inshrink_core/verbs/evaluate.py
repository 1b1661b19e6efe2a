"""Evaluate one step of a run, or write a template of an evaluator."""

from __future__ import annotations

import hashlib
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, ClassVar, cast

from inshrink_core.checkpoint import MODEL_ROLES, model_of
from inshrink_core.errors import InputError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.evaluate.evaluator import Evaluation
from inshrink_core.evaluate.template import evaluator_source
from inshrink_core.execution.files import make_folders, require_free, write_durably
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.verbs.shared.groups import PathLike, Reading, RunLike


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateReport(Report):
    """Result of an evaluator for one step.

    Parameters
    ----------
    step
        Training step.
    evaluator
        The evaluator, as ``FILE.py:FUNCTION``.
    found
        The evaluation; the document has the shapes of its arrays.
    printed
        The end of the evaluator's output, in one line.
    """

    step: int
    evaluator: str
    found: Evaluation
    printed: str = ""

    KEYS: ClassVar = (
        "step evaluator metric=found.metric direction=found.direction value=found.value "
        "metrics=found.metrics standard_errors=found.standard_errors log_probs predictions "
        "printed seconds=found.seconds"
    )

    @property
    def log_probs(self) -> tuple[int, ...] | None:
        """Shape of the log probabilities; None if they were not returned."""
        return None if self.found.log_probs is None else self.found.log_probs.shape

    @property
    def predictions(self) -> tuple[int, ...] | None:
        """Shape of the predictions; None if they were not returned."""
        return None if self.found.predictions is None else self.found.predictions.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorReport(Report):
    """Result of writing a template of an evaluator.

    Parameters
    ----------
    output
        Path of the file written.
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
    >>> found = inshrink_core.verbs.evaluate(inshrink_core.sample("digits-cnn")).found
    >>> found.metric, found.value > 0.97, found.log_probs.shape
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
        with self.resolve(opened) as evaluator:
            found = evaluator.evaluate(opened[chosen])
            return EvaluateReport(
                step=chosen, evaluator=evaluator.spec, found=found, printed=evaluator.printed
            )

    def written(self) -> EvaluatorReport:
        """Write a template of an evaluator, which marks what the user fills in."""
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
        source = evaluator_source(which, checkpoint.models).encode()
        make_folders(target.parent)
        write_durably(target, source)
        return EvaluatorReport(output=path, digest=hashlib.sha256(source).hexdigest())


evaluate = python_call(Evaluate)

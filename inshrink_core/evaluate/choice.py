"""Choice of a command's evaluator, and the check that its code may run."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from inshrink_core.errors import InputError, UntrustedCodeError
from inshrink_core.evaluate.evaluator import DEFAULT_TIMEOUT_S, Evaluator
from inshrink_core.evaluate.own_samples import AUTO, prepare
from inshrink_core.request import Option
from inshrink_core.samples import is_trusted_sample

if TYPE_CHECKING:
    from inshrink_core.formats import Run


@dataclass(frozen=True, kw_only=True)
class Executing:
    """Code that a request may execute; a base class of requests that name code.

    Parameters
    ----------
    trusted
        SHA-256 of each trusted code file; by default all files that the request names are trusted.
    """

    trusted: Annotated[Collection[str] | None, Option(hidden=True)] = field(
        default=None, compare=False, repr=False
    )

    def require_trusted(self, file: Path | str) -> None:
        """Raise unless a code file is trusted.

        Raises
        ------
        UntrustedCodeError
            The file's current content is not trusted.
        """
        if self.trusted is None:
            return
        try:
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        except OSError:
            digest = ""
        if digest not in self.trusted:
            raise UntrustedCodeError(
                "this code is not what was trusted"
                if self.trusted
                else "a request's file cannot have code executed",
                where=str(file),
                remedy="read it, and confirm that you trust it: --trust and its SHA-256",
            )


@dataclass(frozen=True, kw_only=True)
class EvaluatorRequest(Executing):
    """Evaluator and metric; a base class of the requests of several verbs.

    Parameters
    ----------
    evaluator
        A function from a state dict to metrics, by default the run's (inshrink.toml). Naming it here trusts
        it. auto needs no data: it evaluates models of transformers on generated samples.
    metric
        The metric to compare; by default the one in inshrink.toml, else loss, else the only one.
    direction
        Whether higher or lower is better; by default from inshrink.toml or the metric's name.
    trust_run
        Execute the evaluator in the run's directory.
    timeout
        Maximum duration of one evaluation.
    """

    evaluator: Annotated[str | None, Option(metavar="FILE.py:FUNCTION|auto")] = None
    metric: Annotated[str | None, Option(("--eval-metric",), "NAME")] = None
    direction: Annotated[str | None, Option(metavar="higher|lower")] = None
    trust_run: bool = False
    timeout: Annotated[float, Option(metavar="SECONDS", least=0.1)] = DEFAULT_TIMEOUT_S

    def resolve(self, run: Run | None) -> Evaluator:
        """Return the evaluator that a command should use; refuse untrusted code.

        Parameters
        ----------
        run
            The evaluated run; it may name an evaluator (``inshrink.toml``).

        Raises
        ------
        UntrustedCodeError
            The run names an evaluator that neither the user nor the digest of a bundled sample trusts.
        InputError
            No evaluator is known, or the run names one outside of its directory.
        EvaluatorError
            The evaluator's file does not exist.
        """
        settings = run.settings if run is not None else None
        run_metric = settings.metric if settings is not None else None
        metric, direction = self.metric or run_metric, self.direction
        if direction is None and settings is not None and self.metric in (None, run_metric):
            # The run's direction applies only to the run's metric.
            direction = settings.direction
        spec = self._spec_of_run(run) if self.evaluator is None else self.evaluator
        isolated = self.evaluator is None and not self.trust_run
        file = spec.rpartition(":")[0]
        if file and not isolated:
            self.require_trusted(file)
        prepared = None
        if spec == AUTO:
            if run is None:
                remedy = "give the run, or another evaluator"
                raise InputError("this evaluator is made from a run", where=AUTO, remedy=remedy)
            prepared = prepare(run)
        named: dict[str, Any] = {"metric": metric, "direction": direction, "timeout": self.timeout}
        return Evaluator(spec, **named, isolated=isolated, prepared=prepared)

    def _spec_of_run(self, run: Run | None) -> str:
        """Return the evaluator that the run names, if it may run."""
        named = None if run is None else run.settings.file
        if run is None or named is None:
            raise InputError(
                "there is no evaluator",
                where="" if run is None else str(run.directory),
                remedy="give one with --evaluator FILE.py:FUNCTION, or name it in inshrink.toml;"
                " --evaluator auto needs none where checkpoints have a config.json of transformers",
            )
        if run.is_elsewhere:
            raise InputError(
                "evaluators run only from local files, but this run is remote",
                where=run.address,
                remedy="copy it here, and give it with --evaluator FILE.py:FUNCTION",
            )
        root = run.directory.resolve()
        file = (root / named).resolve()
        if not file.is_relative_to(root):
            raise InputError(
                f"inshrink.toml names an evaluator outside of the run, '{named}'",
                where=str(run.directory),
                remedy="give it with --evaluator FILE.py:FUNCTION if you trust it",
            )
        if not (self.trust_run or (is_trusted_sample(root) and named == "evaluator.py")):
            raise UntrustedCodeError(
                f"the run names its own evaluator, '{named}', which is code",
                where=str(run.directory),
                remedy="read it, and add --trust-run if you trust it",
            )
        return f"{file}:{run.settings.function or 'evaluate'}"

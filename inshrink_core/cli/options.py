"""Options that more than one verb has: each defined once, and in groups where they belong together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, get_type_hints

import typer

from inshrink_core.cli.output import Advance, present, progress_bar
from inshrink_core.cli.values import choose_steps, given_settings, read_config_file
from inshrink_core.errors import InputError, InshrinkError
from inshrink_core.execution import Limits
from inshrink_core.execution.progress import Progress
from inshrink_core.text import parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.chain import Archive
    from inshrink_core.execution.progress import OnProgress
    from inshrink_core.formats import Run

__all__ = [
    "BASE_METAVAR",
    "STEPS_HELP",
    "Based",
    "BoundOptions",
    "Computing",
    "Evaluating",
    "Limiting",
    "MemoryLimit",
    "OnDevice",
    "Output",
    "Reading",
    "Steps",
    "Threads",
    "Writing",
    "steps_of",
    "verb",
]

STEPS_HELP = "A step, a list 100,200, or a range FIRST:LAST[:EVERY], both ends included; may be repeated."

BASE_METAVAR = "FILE|DIRECTORY|ARCHIVE@STEP"

_KEYFRAME_EVERY = 32
"""Where neither the command line nor a file says it."""


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Return a verb as typer takes it: in place of each group among its parameters stand the group's fields.

    Examples
    --------
    >>> @verb
    ... def look(path: str, out: Output) -> None: ...
    >>> list(inspect.signature(look).parameters)
    ['path', 'as_json', 'quiet']
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            parameters.append((name, parameter.default, hints[name]))
            continue
        own = get_type_hints(groups[name], include_extras=True)
        parameters += [(field.name, field.default, own[field.name]) for field in fields(groups[name])]

    @functools.wraps(function)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        function(**given)

    signature = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for name, default, hint in parameters
        ]
    )
    called.__signature__ = signature  # type: ignore[attr-defined]
    called.__annotations__ = {name: hint for name, _, hint in parameters}
    return called


Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Tensors worked on at a time. (default: the processors of this machine)"),
]
Steps = Annotated[list[str] | None, typer.Option("--steps", "--step", metavar="STEPS", help=STEPS_HELP)]


class _Stepped(Protocol):
    """A run or an archive."""

    @property
    def path(self) -> Path: ...

    @property
    def steps(self) -> Sequence[int]: ...


class _Report(Protocol):
    """What a verb returns."""

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Reading:
    """How a run is opened; headers only."""

    step_pattern: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="How the step number stands in file names: 'model_ep{step}_*.pt', or a regular expression "
            "with one group.",
        ),
    ] = None
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="Follow links of the run that lead out of it.")
    ] = False

    def open(self, path: str) -> Run:
        """Open a run; an archive, which would be a directory without checkpoints, is refused."""
        from inshrink_core import formats
        from inshrink_core.archive import is_archive

        if is_archive(path):
            raise InputError(
                "this is an archive, where a run is needed",
                where=path,
                remedy="`inshrink restore` makes one",
            )
        return formats.open_run(path, step_pattern=self.step_pattern, follow_links=self.follow_links)


@dataclass(frozen=True)
class Based:
    """The base model that an archive's first frame is told against."""

    base: Annotated[
        str | None,
        typer.Option(
            metavar=BASE_METAVAR,
            help="The base model that the archive's first frame is told against."
            " (default: what lies where it lay, if it is the same)",
        ),
    ] = None

    def open(self, path: str | Path) -> Archive:
        """Open an archive."""
        from inshrink_core.chain import Archive

        return Archive.open(path, base=self.base)

    def open_any(self, path: str, reading: Reading) -> Run | Archive:
        """Open a run or an archive."""
        from inshrink_core.archive import is_archive

        return self.open(path) if is_archive(path) else reading.open(path)


def steps_of(opened: _Stepped, texts: Sequence[str] | None) -> tuple[int, ...] | None:
    """Return the steps that options name, of a run or an archive; None where there are no options."""
    return choose_steps(texts or (), getattr(opened, "listed_steps", opened.steps), str(opened.path))


@dataclass(frozen=True)
class Writing:
    """How frames are written: what a config file says, the command line on top of it."""

    codec: Annotated[
        str | None, typer.Option(help="Codec of the weights. (default: the archive's, else lattice)")
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the codec; may be repeated."),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Settings from a TOML or JSON file, or a search's result; options override it.",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="exact|compressed|compact|drop",
            help="Keep the optimizer's state bit-exact, to an octave, as rank-one factors, or leave it out."
            " (default: compressed, to an octave; exact beside weights that stay exact)",
        ),
    ] = None
    keyframe_every: Annotated[
        int | None, typer.Option(min=1, help="Frames from one keyframe to the next. (default: 32)")
    ] = None

    def keywords(self, **named: Any) -> dict[str, Any]:
        """Return what the engine takes; `named` are settings that have options of their own."""
        given = read_config_file(self.config) if self.config is not None else {}
        config = given_settings(given, self.settings or ()) | {
            name: value for name, value in named.items() if value is not None
        }
        return {
            "codec": self.codec or given.get("codec"),
            "config": config or None,
            "optimizer": self.optimizer or given.get("optimizer"),
            "keyframe_every": self.keyframe_every or given.get("keyframe_every", _KEYFRAME_EVERY),
        }


@dataclass(frozen=True)
class OnDevice:
    """Where is computed."""

    device: Annotated[
        str,
        typer.Option(
            metavar="auto|cpu|cuda",
            help="Where numbers are crunched; auto: CUDA where there is one. The bytes do not depend on it.",
        ),
    ] = "auto"


@dataclass(frozen=True)
class Computing(OnDevice):
    """Where and how much at a time is computed."""

    threads: Threads = None


@dataclass(frozen=True)
class Evaluating:
    """The evaluator, and which of its figures counts."""

    evaluator: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION|NAME",
            help="A function from a state dict to its figures, or one that an installed package names."
            " (default: what the run's inshrink.toml names)",
        ),
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(
            "--eval-metric",
            metavar="NAME",
            help="Which of the figures counts."
            " (default: what inshrink.toml names, else loss, else the only one)",
        ),
    ] = None
    direction: Annotated[
        str | None, typer.Option(metavar="higher|lower", help="Whether more of it is better or worse.")
    ] = None
    trust_run: Annotated[
        bool, typer.Option("--trust-run", help="Execute the evaluator that lies in the run's directory.")
    ] = False
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one evaluation may take.")] = 600.0


@dataclass(frozen=True)
class BoundOptions:
    """What is promised of every restored step."""

    max_drop: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION", help="Most that the metric of a restored step may drop: 0.01 is 1 %."
        ),
    ] = None
    max_divergence: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            help="Most that a restored step's predictions may diverge; inf: any."
            " (default with --max-drop: 0.003, where the evaluator returns log_probs)",
        ),
    ] = None
    max_restore_cost: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION",
            help="Most that a restore may cost: the loss is expected to rise by this share of it."
            " 0.003 is the default where there is an evaluator and no bound.",
        ),
    ] = None


@dataclass(frozen=True)
class MemoryLimit:
    """What decoding may take."""

    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Most memory that decoding may take, as 4GB. (default: what is available)"
        ),
    ] = None

    def keywords(self) -> dict[str, Any]:
        """Return what the engine takes: bytes."""
        texts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: None if text is None else parse_size(text) for name, text in texts.items()}

    def limits(self) -> Limits:
        """Return the limits."""
        return Limits(**self.keywords())


@dataclass(frozen=True)
class Limiting(MemoryLimit):
    """What decoding and writing may take."""

    max_disk: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most disk that may be written, as 4GB. (default: what is free)"),
    ] = None


@dataclass(frozen=True)
class Output:
    """Whether a result is shown as text, as a document, or not at all."""

    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON document to stdout instead (docs/cli.md).")
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False

    @property
    def hidden(self) -> bool:
        """Whether nothing is for people."""
        return self.as_json or self.quiet

    @contextmanager
    def progress(
        self, verb: str, *, in_bytes: bool = True, stage: str | None = None
    ) -> Iterator[OnProgress | None]:
        """Show how far a verb has come; of one with several stages, the one named."""
        with progress_bar(verb, hidden=self.hidden, in_bytes=in_bytes) as advance:

            def progress(now: Progress) -> None:
                if advance is not None and stage in (None, now.stage):
                    advance(now.done, now.total, now.step, now.found)

            yield None if advance is None else progress

    def advance(self, verb: str) -> AbstractContextManager[Advance | None]:
        """Show how far a verb has come that counts steps by itself."""
        return progress_bar(verb, hidden=self.hidden, in_bytes=False)

    def present(
        self,
        report: _Report,
        show: Callable[[Console, Any], None],
        failure: InshrinkError | None = None,
    ) -> None:
        """Show a report, and end with the exit code of its failure, if there is one."""
        present(
            report.to_json(),
            as_json=self.as_json,
            quiet=self.quiet,
            text=lambda console: show(console, report),
            failure=failure or getattr(report, "failure", None),
        )

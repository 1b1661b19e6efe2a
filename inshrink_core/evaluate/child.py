"""The child process in which a user's evaluator runs; started as a script, never imported.

Arguments: the evaluator's file, its function, and ``isolated`` or ``beside`` (whether modules that lie
beside the file may be imported); or its module, its function, ``installed``, and perhaps the folder of what
was prepared for it: the function then takes the folder and returns the evaluator. Then one JSON object a
line each way:

- in: ``{"state": PATH, "results": DIRECTORY}``, a dict of tensors written by ``torch.save``;
- out: ``{"ready": true, "which": MODEL}`` once, where MODEL is the default of the function's parameter
  ``which``, the model whose state it wants; then, for every state, ``{"metrics": {…}, "standard_errors": {…},
  "arrays": {NAME: PATH}, "correction": …, "seconds": …}`` or ``{"error": TEXT}``.

With ``"partial": true`` in the command, each result that a generator yields before its last goes out too, as
``{"partial": {"n": …, "of": …, "range": {…}}, …}``, and waits for ``{"go_on": true}``; after
``{"go_on": false}`` the generator is closed, and ``{"stopped": true, "seconds": …}`` ends the evaluation.

Whatever the evaluator prints goes to standard error, so that it cannot disturb this channel. The end
of standard input means that the parent is gone: the process ends at once, even within an evaluation.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, TextIO

ARRAYS = ("log_probs", "predictions")
LONGEST_ERROR = 600
"""Signs of an error text that are passed on: one readable line, not a dump."""


class UnusableError(Exception):
    """The evaluator returned something that cannot be used."""


def claim_channel() -> tuple[TextIO, TextIO]:
    """Take the standard streams for the protocol and leave the evaluator a stdout that is stderr."""
    commands = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return commands, replies


def load_installed(module: str) -> tuple[ModuleType, Path]:
    """Import a module as its package has it, and return it with its file."""
    loaded = importlib.import_module(module)
    return loaded, Path(loaded.__file__ or "")


def load_file(path: Path) -> ModuleType:
    """Return a file as a module, compiled from its source: a ``__pycache__`` beside it is never read."""
    module = ModuleType("inshrink_evaluator")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module


def function_of(module: ModuleType, name: str) -> Callable[[Any], Any]:
    """Return the evaluator."""
    function = getattr(module, name, None)
    if not callable(function):
        there = sorted(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        raise UnusableError(f"it has no function '{name}' (there are: {', '.join(there) or 'none'})")
    evaluator: Callable[[Any], Any] = function
    return evaluator


def model_wanted(function: Callable[..., Any]) -> str:
    """Return which model of a checkpoint an evaluator wants: the default of its parameter ``which``."""
    try:
        which = inspect.signature(function).parameters.get("which")
    except (TypeError, ValueError):  # a function without Python's signature
        return ""
    return which.default if which is not None and isinstance(which.default, str) else ""


def scalar(value: Any) -> float | None:
    """Return a number, numpy scalar or one-element tensor as a float, anything else as None."""
    if isinstance(value, bool | int | float):
        return float(value)
    size = getattr(value, "size", None)
    n_elements = value.numel() if hasattr(value, "numel") else size
    if hasattr(value, "item") and n_elements == 1:
        return scalar(value.item())
    return None


def write_array(value: Any, name: str, directory: Path) -> str:
    """Write log_probs or predictions where the parent reads them, and return the path."""
    import numpy as np

    if hasattr(value, "detach"):
        import torch

        value = value.detach().to("cpu")
        value = (value if value.dtype is torch.float64 else value.float()).numpy()
    try:
        array = np.asarray(value, dtype=None if getattr(value, "dtype", None) == np.float32 else np.float64)
    except (TypeError, ValueError):
        raise UnusableError(f"its '{name}' is not an array of numbers") from None
    path = directory / f"{name}.npy"
    np.save(path, array, allow_pickle=False)
    return str(path)


def is_partial(outcome: Any) -> bool:
    """Tell whether an outcome is one of the results before the last: it says of how many samples."""
    return isinstance(outcome, Mapping) and "n" in outcome and "of" in outcome


def read_partial(outcome: Mapping[Any, Any], directory: Path) -> dict[str, Any]:
    """Sort a partial result: what a full one may hold, and how far it is."""
    counts = {name: outcome[name] for name in ("n", "of")}
    if any(type(value) is not int for value in counts.values()) or not 0 < counts["n"] <= counts["of"]:
        raise UnusableError(
            f"a partial result is of n samples of all, found {counts['n']!r} of {counts['of']!r}"
        )
    ranges = outcome.get("range", {})
    if not isinstance(ranges, Mapping) or any(not is_range(one) for one in ranges.values()):
        raise UnusableError("its 'range' is a dict, metric to (least, largest), each a number or None")
    rest = {key: value for key, value in outcome.items() if key not in ("n", "of", "range")}
    limits = {str(key): [None if end is None else float(end) for end in one] for key, one in ranges.items()}
    return {"partial": {**counts, "range": limits}, **read_outcome(rest, directory)}


def is_range(value: Any) -> bool:
    """Tell whether a value is a pair of numbers, either of which may be None."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return all(end is None or isinstance(end, int | float) for end in value)


def read_outcome(outcome: Any, directory: Path) -> dict[str, Any]:
    """Sort what the evaluator returned into metrics, standard errors and arrays."""
    if not isinstance(outcome, Mapping):
        raise UnusableError(f"it returned {type(outcome).__name__}, not a dict of metrics")
    metrics: dict[str, float] = {}
    errors: dict[str, float] = {}
    arrays: dict[str, str] = {}
    correction = 1.0
    for key, value in outcome.items():
        name = str(key)
        if name in ARRAYS:
            arrays[name] = write_array(value, name, directory)
        elif name == "standard_errors" and isinstance(value, Mapping):
            errors = {
                str(metric): number
                for metric, error in value.items()
                if (number := scalar(error)) is not None
            }
        elif name == "correction":
            correction = scalar(value) or 0.0
            if not 0 < correction < float("inf"):
                raise UnusableError(f"its 'correction' is {value!r}, not a positive number")
        elif (number := scalar(value)) is not None:
            metrics[name] = number
        else:
            raise UnusableError(f"its '{name}' is {type(value).__name__}, not a number")
    return {"metrics": metrics, "standard_errors": errors, "arrays": arrays, "correction": correction}


def describe(error: BaseException, path: Path, state: Mapping[str, Any]) -> str:
    """Return one line: the last line of the traceback, and where in the evaluator it came from."""
    if isinstance(error, UnusableError):
        return str(error)
    if (
        isinstance(error, KeyError)
        and error.args
        and isinstance(error.args[0], str)
        and error.args[0] not in state
    ):
        there = ", ".join(list(state)[:5])
        wanted = error.args[0]
        text = f"it asked for the tensor '{wanted}', which the checkpoint does not have (it has {there} …)"
    else:
        text = " ".join("".join(traceback.format_exception_only(error)).split())
        text = f"it raised {text[:LONGEST_ERROR]}"
    lines = [
        entry.lineno for entry in traceback.extract_tb(error.__traceback__) if entry.filename == str(path)
    ]
    return f"{text} (line {lines[-1]})" if lines else text


GoOn = Callable[[dict[str, Any]], bool]
"""Passes a partial reply on, and tells whether to go on."""


def evaluate_once(
    function: Callable[[dict[str, Any]], Any], command: Mapping[str, Any], path: Path, go_on: GoOn
) -> dict[str, Any]:
    """Run the evaluator on one state and return the reply."""
    import torch

    state: dict[str, Any] = torch.load(command["state"], map_location="cpu", weights_only=True, mmap=True)
    names = dict.fromkeys(state)  # the evaluator may empty the dict it is given
    results = Path(command["results"])
    try:
        start = time.perf_counter()
        outcome = function(state)
        if isinstance(outcome, Generator):
            outcome = last_of(outcome, results, go_on if command.get("partial") else None)
        seconds = time.perf_counter() - start
        if outcome is STOPPED:
            return {"stopped": True, "seconds": seconds}
        return {**read_outcome(outcome, results), "seconds": seconds}
    except (Exception, SystemExit) as error:
        return {"error": describe(error, path, names)}


STOPPED = object()
"""In the place of an outcome: the parent has seen enough."""


def last_of(outcomes: Generator[Any, None, Any], directory: Path, go_on: GoOn | None) -> Any:
    """Return the last result that a generator yields; pass those before it on where someone listens."""
    outcome: Any = None
    for outcome in outcomes:
        if is_partial(outcome) and go_on is not None and not go_on(read_partial(outcome, directory)):
            outcomes.close()
            return STOPPED
    if outcome is None or is_partial(outcome):
        raise UnusableError("it yielded no full result after its partial ones")
    return outcome


def serve(
    commands: TextIO, replies: TextIO, place: str, name: str, *, installed: bool, prepared: str | None
) -> None:
    """Answer until standard input ends."""
    lines: SimpleQueue[str] = SimpleQueue()

    def receive() -> None:
        for line in commands:
            lines.put(line)
        os._exit(0)  # the parent is gone; the main thread may be deep in an evaluation

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    threading.Thread(target=receive, daemon=True).start()
    path = Path(place)
    try:
        if installed:
            module, path = load_installed(place)
        else:
            module = load_file(path)
        function = function_of(module, name)
        if prepared is not None:
            function = function(Path(prepared))
    except (Exception, SystemExit) as error:
        reply({"error": describe(error, path, {})})
        return

    def go_on(partial: Mapping[str, Any]) -> bool:
        reply(partial)
        return bool(json.loads(lines.get())["go_on"])

    reply({"ready": True, "which": model_wanted(function)})
    while True:
        reply(evaluate_once(function, json.loads(lines.get()), path, go_on))


def main() -> None:
    """Serve the parent that started this process."""
    place, name, mode, *prepared = sys.argv[1:5]
    commands, replies = claim_channel()
    sys.dont_write_bytecode = True  # a run directory is not ours to write to
    sys.argv = [place]
    if mode == "beside":
        sys.path.insert(0, str(Path(place).parent))
    folder = prepared[0] if prepared else None
    serve(commands, replies, place, name, installed=mode == "installed", prepared=folder)


if __name__ == "__main__":
    main()

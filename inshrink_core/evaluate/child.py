"""Child process that runs a user's evaluator; started as a script, never imported.

Arguments: the evaluator's file, its function, ``isolated`` or ``beside`` (whether modules next to the file
may be imported), and optionally a folder with prepared data. The function then takes the folder and returns
the evaluator. Each direction has one JSON object per line:

- in: ``{"state": PATH, "results": DIRECTORY}``, with a dict of tensors written by ``torch.save``;
- out: ``{"ready": true, "which": MODEL}`` once, where MODEL is the default of the function's parameter
  ``which``, the model whose state it evaluates; then, for every state, ``{"metrics": {…}, "standard_errors":
  {…}, "arrays": {NAME: PATH}, "correction": …, "seconds": …}`` or ``{"error": TEXT}``.

The evaluator's prints go to standard error, so that they cannot disturb this channel. The end of standard
input means that the parent has ended: the process then exits at once, even during an evaluation.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, TextIO

ARRAYS = ("log_probs", "predictions")
LONGEST_ERROR = 600
"""Maximum length of an error text: one readable line, not a dump."""


class UnusableError(Exception):
    """The evaluator returned an unusable result."""


def claim_channel() -> tuple[TextIO, TextIO]:
    """Take the standard streams for the protocol; the evaluator's stdout becomes stderr."""
    commands = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return commands, replies


def load_file(path: Path) -> ModuleType:
    """Return a file as a module compiled from its source; a ``__pycache__`` next to it is never read."""
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
    """Return the model that an evaluator evaluates: the default of its parameter ``which``."""
    try:
        which = inspect.signature(function).parameters.get("which")
    except (TypeError, ValueError):  # no Python signature
        return ""
    return which.default if which is not None and isinstance(which.default, str) else ""


def scalar(value: Any) -> float | None:
    """Return a number, numpy scalar or one-element tensor as a float, and None for other values."""
    if isinstance(value, bool | int | float):
        return float(value)
    size = getattr(value, "size", None)
    n_elements = value.numel() if hasattr(value, "numel") else size
    if hasattr(value, "item") and n_elements == 1:
        return scalar(value.item())
    return None


def write_array(value: Any, name: str, directory: Path) -> str:
    """Write log_probs or predictions to a file for the parent; return the path."""
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


def read_outcome(outcome: Any, directory: Path) -> dict[str, Any]:
    """Split the evaluator's result into metrics, standard errors and arrays."""
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
                if (number := scalar(error)) is not None and math.isfinite(number)
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
    """Return one line: the last line of the traceback, and its place in the evaluator."""
    if isinstance(error, UnusableError):
        return str(error)
    wanted = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(wanted, str) and wanted not in state:
        there = ", ".join(list(state)[:5])
        text = f"it asked for the tensor '{wanted}', which the checkpoint does not have (it has {there} …)"
    else:
        text = " ".join("".join(traceback.format_exception_only(error)).split())
        text = f"it raised {text[:LONGEST_ERROR]}"
    lines = [
        entry.lineno for entry in traceback.extract_tb(error.__traceback__) if entry.filename == str(path)
    ]
    return f"{text} (line {lines[-1]})" if lines else text


def evaluate_once(
    function: Callable[[dict[str, Any]], Any], command: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """Run the evaluator on one state and return the reply."""
    import torch

    state: dict[str, Any] = torch.load(command["state"], map_location="cpu", weights_only=True, mmap=True)
    names = dict.fromkeys(state)  # the evaluator may empty the dict it is given
    try:
        start = time.perf_counter()
        outcome = function(state)
        seconds = time.perf_counter() - start
        return {**read_outcome(outcome, Path(command["results"])), "seconds": seconds}
    except (Exception, SystemExit) as error:
        return {"error": describe(error, path, names)}


def serve(commands: TextIO, replies: TextIO, path: Path, name: str, prepared: Sequence[str]) -> None:
    """Answer requests until standard input ends."""
    lines: SimpleQueue[str] = SimpleQueue()

    def receive() -> None:
        for line in commands:
            lines.put(line)
        os._exit(0)  # the parent has ended; the main thread may still evaluate

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    threading.Thread(target=receive, daemon=True).start()
    try:
        function = function_of(load_file(path), name)
        for folder in prepared:
            function = function(Path(folder))
    except (Exception, SystemExit) as error:
        reply({"error": describe(error, path, {})})
        return

    reply({"ready": True, "which": model_wanted(function)})
    while True:
        reply(evaluate_once(function, json.loads(lines.get()), path))


def main() -> None:
    """Serve the parent process."""
    place, name, mode, *prepared = sys.argv[1:5]
    commands, replies = claim_channel()
    sys.dont_write_bytecode = True  # do not write into a run directory
    sys.argv = [place]
    if mode == "beside":
        sys.path.insert(0, str(Path(place).parent))
    serve(commands, replies, Path(place), name, prepared)


if __name__ == "__main__":
    main()

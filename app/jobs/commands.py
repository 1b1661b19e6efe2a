"""What the words of a command say: its title, the page of its result, and the same as shell and as Python.

The words are those after `inshrink`: a verb, what it is about, and options, each with a value but for those
of `_FLAGS`.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from inshrink_app.widgets.tables import METRICS

__all__ = [
    "MEASURED",
    "PAGES",
    "archives_of",
    "is_measuring",
    "is_shrinking",
    "is_watching",
    "option",
    "page_of",
    "python_text",
    "settings_words",
    "shell_text",
    "steps_words",
    "title_of",
]

_FLAGS = frozenset(
    {"--apply", "--by-tensor", "--deep", "--drop-branches", "--exact", "--force", "--gain", "--goals"}
    | {"--search", "--smallest", "--trust-run", "--watch", "--weights-only"}
)

PAGES = {
    "average": "export",
    "bench": "allocate",
    "compare": "compare",
    "compress": "export",
    "estimate": "allocate",
    "evaluate": "allocate",
    "export": "export",
    "inspect": "sensitivity",
    "prune": "archive",
    "rehearse": "compare",
    "report": "archive",
    "restore": "compare",
    "search": "allocate",
    "sensitivity": "sensitivity",
    "verify": "archive",
}
"""The verbs that a job may run, and the page that shows the result of each."""

MEASURED = "measured.inshrink"
"""The archive of one configuration, that is compared and goes."""

_POSITIONAL = {
    "average": "-o",
    "compare": "--against",
    "compare_archives": "--against",
    "compress": "-o",
    "export": "-o",
    "make_evaluator": "--write",
    "pack": "--pack",
    "rehearse": "-o",
    "report": "--out",
    "restore": "-o",
    "watch": "-o",
}
"""The option whose value is the second argument of the function of a verb."""

_KEYWORDS = {"--format": "layout", "--step": "steps", "-o": "output"}
_LISTS = ("keep", "steps")
_REPEATED = ("tensors", "without")
_ONE_STEP = ("evaluate", "export")
_SHOWN = {
    "average": "print({}.coefficients, {}.judged)",
    "compare": "for row in {}.steps:\n    print(row.step, row.original, row.restored, row.drop)",
    "compare_archives": "for path, one in {}.archives:\n    print(path, one.max_drop)",
    "compress": "print({}.size.ratio_total)",
    "estimate": "print({}.ratio_weights, {}.drop)",
    "estimate_goals": "for goal in {}.goals:\n    print(goal.goal, goal.archive_bytes, goal.bits_per_weight)",
    "estimate_levels": "print({}.to_json()['levels'])",
    "evaluate": "print({}.metrics)",
    "export": "print({}.nbytes)",
    "make_evaluator": "print({}.output, {}.task)",
    "pack": "print({}.nbytes)",
    "prune": "print({}.freed)",
    "rehearse": "print({}.to_json())",
    "report": "print({}.output, {}.digest)",
    "restore": "print({}.paths)",
    "search": "print({}.best and {}.best.to_json())",
    "watch": "print({}.ended, {}.appended)",
    "verify": "print('sound' if {}.ok else {}.problems)",
}


def option(words: Sequence[str], *names: str) -> str | None:
    """Return the value of an option under any of its names; None where it is not given.

    Examples
    --------
    >>> option(["verify", "a.inshrink", "--against", "run"], "--against")
    'run'
    """
    return next((words[i + 1] for i, word in enumerate(words[:-1]) if word in names), None)


def archives_of(words: Sequence[str]) -> list[str]:
    """Return what a command is about: what stands before its options.

    Examples
    --------
    >>> archives_of(["compare", "a.inshrink", "b.inshrink", "--against", "run"])
    ['a.inshrink', 'b.inshrink']
    """
    return list(takewhile(lambda word: not word.startswith("-"), words[1:]))


def steps_words(steps: Sequence[int], every: Sequence[int] = ()) -> list[str]:
    """Return the option that chooses steps; nothing where they are all that there are."""
    return [] if not steps or tuple(steps) == tuple(every) else ["--steps", ",".join(map(str, steps))]


def settings_words(settings: Mapping[str, Any]) -> list[str]:
    """Return the options that set a codec's settings; overrides are one of them.

    Examples
    --------
    >>> settings_words({"coarseness": 2.5, "grid": "held"})
    ['--set', 'coarseness=2.5', '--set', 'grid=held']
    """
    words = []
    for name, value in settings.items():
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return words


def shell_text(commands: Sequence[Sequence[str]]) -> str:
    """Return commands as lines of a shell."""
    return "\n".join(shlex.join(["inshrink", *words]) for words in commands)


def is_watching(commands: Sequence[Sequence[str]]) -> bool:
    """Return whether a command stays beside a training until it is ended."""
    return any("--watch" in words for words in commands)


def is_shrinking(commands: Sequence[Sequence[str]]) -> bool:
    """Return whether commands do the whole in a row: write an archive and prove what it holds."""
    return len(commands) > 1 and [words[0] for words in commands[:2]] == ["compress", "verify"]


def is_measuring(commands: Sequence[Sequence[str]]) -> bool:
    """Return whether commands write an archive that is compared and goes: one configuration is measured."""
    return Path(option(commands[0], "-o") or "").name == MEASURED


def page_of(commands: Sequence[Sequence[str]]) -> str:
    """Return the page that shows the result of some commands."""
    words = commands[-1]
    if is_shrinking(commands) or "--goals" in words:
        return "overview"
    if is_measuring(commands):
        return "allocate"
    return "compare" if words[0] == "verify" and "--against" in words else PAGES.get(words[0], "jobs")


def title_of(commands: Sequence[Sequence[str]]) -> str:
    """Say what a job does. Names come from files and are untrusted."""
    words = commands[-1]
    verb, name = words[0], Path(commands[0][1]).name
    if is_shrinking(commands):
        return f"Shrink {name} to {Path(option(commands[0], '-o') or '').name}"
    if is_measuring(commands):
        return f"Measure one configuration of {name}"
    if "--goals" in words:
        return f"Try what {name} shrinks to"
    target = Path(option(words, "-o", "--output", "--pack") or "").name
    if is_watching(commands):
        return f"Archive {name} as it grows, to {target}"
    if verb == "sensitivity":
        metric = option(words, "--metric") or ""
        return f"Measure {METRICS[metric].label.lower() if metric in METRICS else metric} of {name}"
    if verb == "verify":
        against = option(words, "--against")
        if against:
            return f"Errors of {name} against {Path(against).name}"
        return f"Verify {name}" + (", every tensor decoded" if "--deep" in words else "")
    if verb == "compare":
        names = ", ".join(Path(path).name for one in commands for path in archives_of(one))
        return f"Compare {names} with {Path(option(words, '--against') or '').name}"
    if verb in ("compress", "export"):
        return f"Try two steps of {name}" if target.startswith("trial.") else f"Export {name} to {target}"
    return {
        "average": f"Average steps of {name}",
        "bench": f"Measure baselines of {name}",
        "estimate": f"Estimate {option(words, '--codec')} on {name}",
        "evaluate": f"Try the evaluator on {name}",
        "inspect": f"Measure restore gain and noise of {name}",
        "prune": f"Prune {name}" + ("" if "--apply" in words else ", dry run"),
        "rehearse": f"Rehearse failures of {name}",
        "report": f"Write a report of {name}",
        "restore": f"Restore step {option(words, '--step')} of {name}",
        "search": f"Search {option(words, '--codec')} on {name}",
    }.get(verb, verb)


def _home_of(verb: str) -> str:
    """Return the public package that has the function of a verb; verbs that are registered have one home."""
    import inshrink_core
    from inshrink_core import analysis, verbs

    homes = (inshrink_core, verbs, analysis)
    return next((home.__name__ for home in homes if verb in home.__all__), verbs.__name__)


def python_text(commands: Sequence[Sequence[str]]) -> str:
    """Return Python lines that do the same as some commands."""
    lines = ["import inshrink_core", ""]
    for words in commands:
        verb = "pack" if words[0] == "export" and "--pack" in words else words[0]
        verb = "watch" if "--watch" in words else verb
        verb = "make_evaluator" if verb == "evaluate" and "--write" in words else verb
        verb = "estimate_levels" if "--levels" in words else "estimate_goals" if "--goals" in words else verb
        verb = "compare_archives" if verb == "compare" and len(archives_of(words)) > 1 else verb
        if "--config" in words:  # What the search before it has found.
            lines.append("best = found.best.to_json()['config']")
        lines += [f"found = {_call(verb, words)}", _SHOWN.get(verb, "print({})").replace("{}", "found")]
    return "\n".join(lines)


def _call(verb: str, words: Sequence[str]) -> str:
    """Return the call of the function of a verb."""
    about = archives_of(words)
    arguments, named, settings = [repr(about if len(about) > 1 else about[0])], {}, {}
    repeated: dict[str, list[Any]] = {}
    rest = iter(words[1 + len(about) :])
    for name in rest:
        value = True if name in _FLAGS else _parse(next(rest))
        if name in ("--goals", "--watch"):  # The function's name says it.
            continue
        keyword = _KEYWORDS.get(name, name.lstrip("-").replace("-", "_"))
        if name == "--set":
            key, _, text = str(value).partition("=")
            settings[key] = _parse(text)
        elif name == "--config":
            named["codec"] = "best['codec']"
            named["config"] = "{**best['settings'], 'overrides': best.get('override', [])}"
        elif keyword in _REPEATED:
            repeated.setdefault(keyword, []).append(str(value))
        elif name == _POSITIONAL.get(verb):
            arguments.append(repr(value))
        elif keyword in _LISTS and not (verb in _ONE_STEP and name == "--step"):
            named[keyword] = repr([int(one) for one in str(value).split(",")])
        elif verb == "verify" and name == "--against":
            named[keyword] = f"inshrink_core.open({value!r})"
        else:
            named["step" if name == "--step" else keyword] = _literal(value)
    named |= {keyword: repr(values) for keyword, values in repeated.items()}
    if settings:
        named["config"] = repr(settings)
    return f"{_home_of(verb)}.{verb}({', '.join([*arguments, *(f'{k}={v}' for k, v in named.items())])})"


def _parse(text: str) -> Any:
    """Return a JSON value, or the text itself, as ``--set`` reads it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _literal(value: Any) -> str:
    """Return a value as Python writes it; a bound that is waived is infinite."""
    if value == "inf" or (isinstance(value, float) and math.isinf(value)):
        return "float('inf')"
    return repr(value)

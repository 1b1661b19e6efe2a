"""Find the checkpoints of a run among the files of a directory."""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice, repeat
from pathlib import Path
from typing import Final, NamedTuple

from inshrink_core.errors import ConfigError, InputError, InshrinkError, NotFoundError, clipped
from inshrink_core.formats.disk import Access, Skipped, is_dir, is_file, natural_key, scan
from inshrink_core.formats.readers import Reader, reader_of, readers

_TEMPORARY: Final = re.compile(
    r"(\.(tmp|temp|part|partial|incomplete|lock)(\.[^.]*|\d*)?$|^tmp[-_])", re.IGNORECASE
)
_UNFINISHED: Final = "still being written: it has a temporary name"
_DANGLING: Final = "a link that leads nowhere"
_APART: Final = (
    "what may be checkpoints in it is not looked at, because others lie above it: open it by its own path"
)
_MOST_LOOKED_AT: Final = 1000
"""Names in a folder beside checkpoints, which may hold a data set."""

_MAX_DEPTH: Final = 3

SHARDED_PART: Final = re.compile(r"^(pytorch_model_fsdp|optimizer)_\d+$")
"""Directories that accelerate and Hugging Face's trainer write shards into: parts of one checkpoint."""

STEP_FOLDER: Final = re.compile(
    r"(?:^|[^a-z])(step|iter(ation)?|checkpoint|ckpt|epoch)s?[-_=. ]?\d", re.IGNORECASE
)
"""Folders that are called like a step."""

_TAG: Final = re.compile(r"^global_step\d+$")
"""A folder of DeepSpeed: a part, where the trainer's state lies beside it."""

TRAINER_STATE: Final = "trainer_state.json"
"""What Hugging Face's trainer writes into each checkpoint."""

WEIGHT_SUFFIXES: Final = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

_SIDE_FILE: Final = re.compile(
    r"^(training_args|scheduler|lr_scheduler|scaler|sampler|dl_state_dict|random_states|rng_state|"
    r"custom_checkpoint|tokenizer|spiece|meta)([._-].*)?$",
    re.IGNORECASE,
)
"""Never opened: pickles of schedulers, random-number generators and arguments, and tokenizers."""

METADATA: Final = ".metadata"
"""Of a distributed checkpoint, written last: a directory that has it is a finished one."""

_WORDS: Final = ("global_step", "step", "iteration", "iter", "checkpoint", "ckpt", "epoch")
"""In the order of precedence: of ``epoch=3-step=400`` the step is 400."""

_NAMED: Final = tuple(
    re.compile(rf"(?:^|[^a-z]){word}s?[-_=. ]?(\d{{1,18}})", re.IGNORECASE) for word in _WORDS
)
_NUMBER: Final = re.compile(r"\d{1,18}")
_DECIMAL: Final = re.compile(r"\d+(\.\d+)*")

_STEP_PART: Final = "{step}"
_LONGEST_PATTERN: Final = 255
"""As long as a name can be."""


def is_weight_file(name: str) -> bool:
    """Tell from its name that a file is read for tensors, not carried without being opened."""
    return Path(name).suffix in WEIGHT_SUFFIXES and _SIDE_FILE.match(name) is None


class CheckpointPath(NamedTuple):
    """What may be a checkpoint, a file or a directory, and who reads it."""

    path: Path
    reader: Reader


class Discovery(NamedTuple):
    """What was found below a path.

    Parameters
    ----------
    root
        The path.
    candidates
        In natural order.
    skipped
        What was passed over.
    single
        The path itself is the one candidate.
    others
        What no reader takes for a checkpoint. Beside checkpoints with names of the same shape, one is a
        checkpoint that has lost what it was known by.
    """

    root: Path
    candidates: tuple[CheckpointPath, ...]
    skipped: tuple[Skipped, ...]
    single: bool
    others: tuple[Path, ...] = ()


class _Search:
    """A look for checkpoints below a directory: what was found, and what passed over."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.skipped: list[Skipped] = []
        self.others: list[Path] = []

    def walk(self, root: Path, depth: int = 0) -> list[CheckpointPath]:
        """Return the candidates below a directory that is no checkpoint itself."""
        found: list[CheckpointPath] = []
        folders: list[Path] = []
        for entry in scan(root):
            path = Path(entry.path)
            if _TEMPORARY.search(entry.name):
                if is_dir(entry) or "." in entry.name:
                    self.skipped.append(Skipped(str(path), _UNFINISHED))
            elif is_dir(entry):
                if entry.name.startswith(".") or entry.name.endswith(".inshrink") or self.is_refused(path):
                    continue
                reader = reader_of(path, self.access)
                if reader is not None and not self.holds_checkpoints(path):
                    found.append(CheckpointPath(path, reader))
                else:
                    folders.append(path)
            elif entry.is_symlink() and not is_file(entry):
                self.others.append(path)
                if path.suffix in WEIGHT_SUFFIXES:
                    self.skipped.append(Skipped(str(path), _DANGLING))
            elif (reader := reader_of(path, self.access)) is not None:
                found.append(CheckpointPath(path, reader))
            else:
                self.others.append(path)
        self.others += folders
        if depth < _MAX_DEPTH and not found:
            for folder in folders:
                found += self.walk(folder, depth + 1)
        elif depth < _MAX_DEPTH:
            apart = (folder for folder in folders if self.holds_some(folder, depth + 1))
            self.skipped += [Skipped(str(folder), _APART) for folder in apart]
        return found

    def is_refused(self, folder: Path) -> bool:
        """Tell whether a directory is a link out of the run; one that is a step is an error.

        Raises
        ------
        RefusedLinkError
            Its name says that it is one of the checkpoints.
        """
        if self.access.admits(folder):
            return False
        if step_in_name(folder.name) is not None:
            self.access.admit(folder)
        self.skipped.append(self.access.skipped(folder))
        return True

    def holds_checkpoints(self, folder: Path) -> bool:
        """Tell whether a directory has checkpoint directories inside, numbered by step."""
        return any(
            is_dir(entry)
            and step_in_name(entry.name) is not None
            and not _is_part(folder, entry.name)
            and self.access.admits(entry.path)
            and reader_of(Path(entry.path), self.access) is not None
            for entry in scan(folder)
        )

    def holds_some(self, folder: Path, depth: int) -> bool:
        """Tell whether something in a directory may be a checkpoint, from the first of its names."""
        todo, left = [(folder, depth)], _MOST_LOOKED_AT
        while todo:
            folder, depth = todo.pop()
            with suppress(OSError, InshrinkError), os.scandir(folder) as entries:
                for entry in islice(entries, left):
                    left -= 1
                    if entry.name.startswith(".") or entry.name.endswith(".inshrink"):
                        continue
                    if not _TEMPORARY.search(entry.name) and reader_of(Path(entry.path), self.access):
                        return True
                    if depth < _MAX_DEPTH and entry.is_dir(follow_symlinks=False):
                        todo.append((Path(entry.path), depth + 1))
        return False

    def match(self, pattern: str) -> list[CheckpointPath]:
        """Return the candidates that a pattern matches."""
        matches = sorted(
            (Path(m) for m in glob.glob(pattern, recursive=True)),  # noqa: PTH207 - absolute patterns too
            key=lambda p: natural_key(str(p)),
        )
        if not matches:
            raise NotFoundError("nothing matches the pattern", where=pattern)
        found: list[CheckpointPath] = []
        for match in matches:
            if _TEMPORARY.search(match.name):
                self.skipped.append(Skipped(str(match), _UNFINISHED))
            elif is_dir(match) and self.is_refused(match):
                continue
            elif (reader := reader_of(match, self.access)) is not None:
                found.append(CheckpointPath(match, reader))
            else:
                self.others.append(match)
        return found

    def without_links(self, candidates: list[CheckpointPath]) -> list[CheckpointPath]:
        """Keep one of the paths that lead to the same file; a real one before a link."""
        by_target: dict[str, list[CheckpointPath]] = {}
        for candidate in candidates:
            by_target.setdefault(os.path.realpath(candidate.path), []).append(candidate)
        kept = []
        for paths in by_target.values():
            first = next((c for c in paths if not c.path.is_symlink()), paths[0])
            kept.append(first)
            self.skipped += [
                Skipped(str(c.path), f"a link to {first.path.name}") for c in paths if c is not first
            ]
        return kept


def _is_part(folder: Path, name: str) -> bool:
    """Tell whether a folder inside another is a part of the checkpoint that the other is."""
    if SHARDED_PART.match(name):
        return True
    if STEP_FOLDER.search(folder.name) and not STEP_FOLDER.search(name):
        return True  # a model of its own, whatever number is in its name
    return _TAG.match(name) is not None and is_file(folder / TRAINER_STATE)


def fixed_part(path: str | os.PathLike[str]) -> Path:
    """Return the directory that a path names, without links in it resolved.

    Of a file that is its directory, of a pattern the part before the first wildcard.
    """
    named = Path(path)
    if is_dir(named):
        return named
    if os.path.lexists(named) or not glob.has_magic(os.fspath(path)):
        return named.parent
    parts = []
    for part in named.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts) if parts else Path()


def _check_path(text: str) -> None:
    """Refuse a path that no file can have, and say what the system says of others.

    Raises
    ------
    InputError
        It holds a NUL byte, or is too long.
    """
    if "\0" in text:
        raise InputError("a path cannot hold a NUL byte", where=clipped(repr(text)))
    try:
        os.lstat(text)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.EACCES, errno.EIO):
            raise InputError(f"the path cannot be opened: {error.strerror}", where=clipped(text)) from error


def discover(path: str | os.PathLike[str], access: Access) -> Discovery:
    """Return what may be checkpoints under a path.

    Parameters
    ----------
    path
        A file, a directory, or a glob.
    access
        Where links may lead.

    Raises
    ------
    NotFoundError
        Nothing is there.
    RefusedLinkError
        A directory of a step is a link out of the run.
    InputError
        The path holds a NUL byte, or is too long.
    """
    text = os.fspath(path)
    _check_path(text)
    root = Path(text)
    search = _Search(access)
    if is_file(root):
        # A file that no reader knows is opened all the same, to say what is wrong with it.
        return Discovery(root, (CheckpointPath(root, reader_of(root, access) or readers()[-1]),), (), True)
    if is_dir(root):
        reader = reader_of(root, access)
        if reader is not None and not search.holds_checkpoints(root):
            return Discovery(root, (CheckpointPath(root, reader),), (), True)
        found = search.walk(root)
        if reader is not None:
            search.skipped += [
                Skipped(str(c.path), "beside the checkpoints of the run, not one of its steps")
                for c in found
                if is_file(c.path)
            ]
            found = [candidate for candidate in found if is_dir(candidate.path)]
    elif glob.has_magic(text):
        found = search.match(text)
        root = fixed_part(text)
    else:
        raise NotFoundError("there is no such file or directory", where=text)
    found = search.without_links(found)
    found.sort(key=lambda candidate: natural_key(str(candidate.path)))
    return Discovery(root, tuple(found), tuple(search.skipped), False, tuple(search.others))


class StepChoice(NamedTuple):
    """Steps of checkpoints in the order given, and where they come from, for the user to read."""

    steps: tuple[int, ...]
    origin: str


class NamedStep(NamedTuple):
    """The step of a checkpoint by its name, or why it is none of the run's: either `step` or `reason`."""

    name: str
    step: int | None
    reason: str = ""


def name_shape(name: str) -> str:
    """Return a name with its numbers left out: that of a checkpoint and of its siblings is the same.

    Examples
    --------
    >>> name_shape("epoch=3-step=400.ckpt"), name_shape("last.ckpt")
    ('epoch=*-step=*.ckpt', 'last.ckpt')
    """
    return _DECIMAL.sub("*", name)


def step_in_name(name: str) -> int | None:
    """Return the step in a file's name, or None.

    Examples
    --------
    >>> step_in_name("epoch=3-step=400.ckpt"), step_in_name("model_0200.pt"), step_in_name("last.pt")
    (400, 200, None)
    """
    for pattern in _NAMED:
        if found := pattern.search(name):
            return int(found.group(1))
    stem = re.sub(r"(-v\d+)?\.[a-z]\w*$", "", name)
    numbers = _NUMBER.findall(stem)
    return int(numbers[-1]) if numbers else None


def suggest_step_pattern(names: Sequence[str]) -> str:
    """Return the step pattern that gives most names a step, in rising order where one does; else nothing.

    Parameters
    ----------
    names
        File or directory names in natural order.

    Examples
    --------
    >>> suggest_step_pattern(["model_ep07_acc0.91.pt", "model_ep08_acc0.9.pt"])
    'model_ep{step}_acc*.pt'
    """
    first = next((name for name in names if _DECIMAL.search(name)), "")
    patterns = [
        _STEP_PART.join(_DECIMAL.sub("*", part) for part in (first[: one.start()], first[one.end() :]))
        for one in _DECIMAL.finditer(first)
        if one.group().isdigit()
    ]

    def merit(pattern: str) -> tuple[int, bool]:
        steps = [row.step for row in steps_by_pattern(names, pattern) if row.step is not None]
        return len(steps), steps == sorted(steps)

    return max(reversed(patterns), key=merit, default="")


def split_step_pattern(path: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """Return a path and its step pattern, for a path whose last part is one; None for others.

    A file that is really called so is no pattern.

    Examples
    --------
    >>> split_step_pattern("runs/a/model_ep{step}_*.pt")
    (PosixPath('runs/a'), 'model_ep{step}_*.pt')
    """
    named = Path(path)
    if _STEP_PART not in named.name or os.path.lexists(named):
        return named, None
    return named.parent, named.name


def compile_step_pattern(pattern: str) -> re.Pattern[str]:
    """Return the user's pattern as a regular expression with one group, checked.

    Parameters
    ----------
    pattern
        A whole name in which ``{step}`` stands for the number and ``*`` for anything; or a regular
        expression with one group, the number, that is looked for in a name.

    Raises
    ------
    ConfigError
        It is neither.

    Notes
    -----
    What `{step}` and ``*`` make is matched in time proportional to the name's length times the pattern's:
    such a pattern may come from anybody.

    Examples
    --------
    >>> compile_step_pattern("model_ep{step}_*.pt").search("model_ep07_acc0.91.pt").group(1)
    '07'
    """
    if _STEP_PART in pattern:
        return _compile_simple(pattern)
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"the step pattern is no regular expression: {error}", found=clipped(pattern)
        ) from error
    if compiled.groups != 1:
        raise ConfigError(
            "the step pattern must have one group, the number",
            expected=r"such as 'model_ep{step}_*.pt' or 'step-(\d+)'",
            found=clipped(pattern),
        )
    return compiled


def _compile_simple(pattern: str) -> re.Pattern[str]:
    if pattern.count(_STEP_PART) != 1 or len(pattern) > _LONGEST_PATTERN:
        raise ConfigError(
            "a step pattern has {step} once, and is no longer than a name",
            expected="such as 'model_ep{step}_*.pt'",
            found=clipped(pattern),
        )

    def literal(text: str) -> str:
        number = r"(\d{1,18})(?!\d)"
        at_start = r"(?<!\d)" if text.startswith(_STEP_PART) else ""
        return at_start + number.join(map(re.escape, text.split(_STEP_PART)))

    first, *others = pattern.split("*")
    # What is between two stars matches where it can first: going back would find nothing more.
    middle = "".join(f"(?>.*?{literal(text)})" for text in others[:-1] if text)
    end = f".*{literal(others[-1])}" if others else ""
    return re.compile(rf"\A{literal(first)}{middle}{end}\Z", re.DOTALL | re.ASCII)


def steps_by_pattern(names: Sequence[str], pattern: str) -> tuple[NamedStep, ...]:
    """Return the steps that a pattern finds in names, and why others have none.

    Parameters
    ----------
    names
        File or directory names in natural order.
    pattern
        As for `compile_step_pattern`.

    Raises
    ------
    ConfigError
        It is no step pattern.

    Examples
    --------
    >>> for row in steps_by_pattern(["a_1.pt", "b_1.pt", "best.pt"], "*_{step}.pt"):
    ...     print(row.step or row.reason)
    1
    step 1 is in a_1.pt already
    its name does not match the step pattern '*_{step}.pt'
    """
    search = compile_step_pattern(pattern).search
    texts = [(found.group(1) or "") if (found := search(name)) else None for name in names]
    steps = [int(t) if t and t.isascii() and t.isdigit() and len(t) < 19 else None for t in texts]
    reasons = [
        f"its name does not match the step pattern '{pattern}'"
        if text is None
        else "what the step pattern finds in its name is no number"
        for text in texts
    ]
    return steps_once(names, steps, reasons)


def steps_once(
    names: Sequence[str], steps: Sequence[int | None], reasons: Sequence[str] = ()
) -> tuple[NamedStep, ...]:
    """Return names with their steps, each step once, the first by name; `reasons` are of those without."""
    holders: dict[int, str] = {}
    rows = []
    for name, step, reason in zip(names, steps, reasons or repeat(""), strict=False):
        if step is None:
            rows.append(NamedStep(name, None, reason))
        elif step in holders:
            rows.append(NamedStep(name, None, f"step {step} is in {holders[step]} already"))
        else:
            holders[step] = name
            rows.append(NamedStep(name, step))
    return tuple(rows)


def _from_keys(keys: Sequence[tuple[tuple[str, int], ...]]) -> tuple[list[int | None], str]:
    """Prefer a key that all checkpoints have, so that epochs and steps do not mix."""
    shared = [key for key, _ in keys[0] if all(key in dict(k) for k in keys)] if keys else []
    if shared:
        return [dict(k)[shared[0]] for k in keys], f"the key '{shared[0]}'"
    return [k[0][1] if k else None for k in keys], "keys in the files"


def number_steps(names: Sequence[str], keys: Sequence[tuple[tuple[str, int], ...]]) -> StepChoice:
    """Return the step of every checkpoint, without a step pattern.

    Parameters
    ----------
    names
        File or directory names in natural order.
    keys
        For each, the step keys found inside with their values, in order of precedence.

    Returns
    -------
    StepChoice
        Inside keys first; then names, also where the keys repeat but the names do not (several saves
        in one epoch); else the position in natural order.
    """
    named = [step_in_name(name) for name in names]
    inside, origin = _from_keys(keys)
    distinct_names = None not in named and len(set(named)) == len(names)
    if None not in inside and (len(set(inside)) == len(names) or not distinct_names):
        return StepChoice(tuple(s for s in inside if s is not None), origin)
    if distinct_names:
        return StepChoice(tuple(s for s in named if s is not None), "names")
    mixed = [a if a is not None else b for a, b in zip(inside, named, strict=True)]
    if None not in mixed:
        return StepChoice(tuple(s for s in mixed if s is not None), "keys in the files and names")
    return StepChoice(tuple(range(len(names))), "the natural order of names: no number was found")

"""A public layout of checkpoints, and what must come of a run that has it."""

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Final

from inshrink_core.formats.disk import natural_key

Files = Callable[[Path], None]

WEIGHTS: Final = frozenset({"weight"})
BUFFERS: Final = frozenset({"buffer"})
ADAM: Final = frozenset({"exp_avg", "exp_avg_sq", "step"})
SGD: Final = frozenset({"momentum"})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One row of the table of layouts.

    Parameters
    ----------
    name
        Short identifier.
    framework
        Who writes it.
    given
        Its files, as documentation shows them, where they are not in the order of their names.
    files
        Writes a small run of it into an empty folder.
    steps
        Steps in training order. Empty where names have no number that must be the step; see `order`.
    order
        Checkpoints in training order, where `steps` is empty. Both are empty where nothing can be read.
    parameters
        Number of parameters of a step, without moving averages; None where headers cannot tell.
    roles
        Roles of the tensors of a step.
    models
        Models in a step beside the main one, or all of several that are equals, by name.
    branches
        Checkpoints beside the steps with values of their own: name and files.
    duplicates
        Files that equal a file of a step or of a branch byte for byte.
    beside
        Further files that are archived, as a branch or with a step.
    other_models
        Files of another model.
    left_out
        Files that cannot be read, or belong to no step; they must be reported.
    """

    name: str
    framework: str
    given: tuple[str, ...]
    files: Files
    steps: tuple[int, ...] = ()
    order: tuple[str, ...] = ()
    parameters: int | None = None
    roles: frozenset[str] = WEIGHTS
    models: tuple[str, ...] = ()
    branches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    duplicates: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    other_models: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def shown(self):
        """Its files, as documentation shows them: of folders that are alike, the first one with its files."""
        if self.given:
            return self.given
        folders: dict[str, list[str]] = {}
        with tempfile.TemporaryDirectory() as root:
            for path in self.write(Path(root)).rglob("*"):
                inside = path.parent.relative_to(root).as_posix()
                if path.is_symlink():
                    folders.setdefault(inside, []).append(f"{path.name} → {path.readlink()}")
                elif path.is_file():
                    folders.setdefault(inside, []).append(path.name)
        shown, known = [], set()
        for folder in sorted(folders, key=natural_key):
            names = sorted(folders[folder], key=self._place)
            alike = re.sub(r"\d+", "", "/".join([folder, *names]))
            if folder == ".":
                shown += names
            elif len(names) == 1:
                shown.append(f"{folder}/{names[0]}")
            else:
                shown.append(f"{folder}/{{{'…' if alike in known else ', '.join(names)}}}")
            known.add(alike)
        return tuple(shown)

    def _place(self, name):
        return self.order.index(name) if name in self.order else len(self.order), natural_key(name)

    @property
    def is_readable(self):
        """Whether the run has a step."""
        return bool(self.steps or self.order)

    def write(self, folder):
        """Write the run, and return its folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.files(folder)
        return folder


def layout(framework, *shown, **expected):
    """Make a row of the table from the function that writes its files, or those of a step."""

    def made(files):
        def of_each_step(folder):
            for step in expected["steps"]:
                files(folder, step)

        name = files.__name__.strip("_").replace("_", "-")
        written = files if len(signature(files).parameters) == 1 else of_each_step
        return Layout(name=name, framework=framework, given=shown, files=written, **expected)

    return made

"""Attacks on what people give us: files of runs, pickles, configs and requests are read, or refused."""

from __future__ import annotations

import json
import random
import shlex
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import msgpack

import inshrink_core
from benchmarks.fuzz import input_mutants, runs, scratch
from benchmarks.fuzz.archive_target import command_line, state_digest
from benchmarks.fuzz.judging import MAX_MESSAGE_CHARS
from benchmarks.fuzz.mutations import mutate_bytes
from benchmarks.fuzz.sealing import packed, packed_files, unpacked_files
from benchmarks.fuzz.target import require
from inshrink_core.cli.derived import read_request
from inshrink_core.errors import InshrinkError
from inshrink_core.evaluate import Executing
from inshrink_core.formats import Run, open_run
from inshrink_core.formats.torch.pickles import read_pickle
from inshrink_core.plugins import VERBS, plugins
from inshrink_core.request import read_document, request_from_json, request_of

_MAX_ELEMENTS: Final = 1 << 20
_STEP: Final = 10
_RARE: Final = 8

Change = Callable[[random.Random, runs.Files], runs.Files]


def run_files(layout: str) -> runs.Files:
    """Return the files of a tiny run of one step."""
    return runs.run_files(layout, (_STEP,))


@cache
def _true_state(layout: str) -> bytes:
    path = scratch.fresh("truth-run")
    runs.write_files(path, run_files(layout))
    run = open_run(path)
    return state_digest({key: run[_STEP][key] for key in run[_STEP]})


class RunTarget:
    """Mutants of a run's files: opened, read, shown, compressed and restored.

    Parameters
    ----------
    name, layout
        Of the target, and of the run (`run_files`).
    change
        Makes the mutant.
    checksummed
        Whether the files have checksums that the mutation leaves wrong: then nothing but the values
        that were written may ever be accepted.
    """

    def __init__(self, name: str, layout: str, change: Change, *, checksummed: bool = False) -> None:
        self.name = name
        self._layout, self._change, self._checksummed = layout, change, checksummed

    def seeds(self) -> Sequence[bytes]:
        """Return the run as it was written."""
        if self._checksummed:
            _true_state(self._layout)
        return [packed_files(run_files(self._layout))]

    def mutate(self, rng: random.Random) -> bytes:
        """Return the run with one file changed, or more."""
        return packed_files(self._change(rng, run_files(self._layout)))

    def execute(self, data: bytes) -> str:
        """Open the run, read all of it, archive it, and expect the same bytes back."""
        files = unpacked_files(data)
        path = scratch.fresh("run")
        runs.write_files(path, files)
        dice = random.Random(zlib.crc32(data))
        if dice.randrange(_RARE) == 0:
            command_line("inspect", str(path), "--tensors")
        run = open_run(path)
        refused = bool(run.skipped)
        for reason in run.skipped:
            _require_short(str(reason[1]))
        for read in (lambda: run.settings, lambda: run.log):
            try:
                read()
            except InshrinkError as error:
                _require_short(str(error))
                refused = True
        if not self._checksummed and any(_n_elements(run, step) > _MAX_ELEMENTS for step in run.steps):
            return "different"
        state = _read_all(run)
        if state is None:
            refused = True
        if self._checksummed or dice.randrange(4) == 0:
            _round_trip(run, files)
        if state is not None and self._checksummed and run.steps:
            is_true = state_digest(state) == _true_state(self._layout)
            require(is_true or refused, "rotten values are refused", f"{sorted(state)[:9]}")
            return "refused" if refused else "same"
        runs.require_outside_untouched()
        return "refused" if refused else "different"


def _require_short(message: str) -> None:
    require(len(message) <= MAX_MESSAGE_CHARS, "a message fits a screen", f"{len(message)} characters")


def _n_elements(run: Run, step: int) -> int:
    return sum(spec.numel for spec in run[step].specs)


def _read_all(run: Run) -> dict[str, Any] | None:
    """Return every tensor of the run's steps; None where one is refused."""
    state = {}
    try:
        for checkpoint in run.values():
            for key in checkpoint:
                state[key] = checkpoint[key]
            for layout in checkpoint.files:
                checkpoint.source.skeleton(layout)
    except InshrinkError as error:
        _require_short(str(error))
        return None
    return state


def _round_trip(run: Run, files: runs.Files) -> None:
    """What is archived without loss comes back byte for byte."""
    target, out = scratch.absent("archived"), scratch.absent("restored")
    report = inshrink_core.compress(
        run, target, codec="lossless", optimizer="exact", threads=1, skip_damaged=True
    )
    for step in report.appended:
        inshrink_core.restore(target, out, steps=[step], threads=1)
        for name, content in runs.files_of(out).items():
            given = run.path_of(step)
            original = (given / name if given.is_dir() else given).read_bytes()
            require(content == original, "what was archived comes back", f"step {step}, {name!r}"[:500])


class PickleTarget:
    """Hostile pickles, straight into the machine that reads them."""

    name = "pickle"
    cpu_seconds = 2.0
    memory_nbytes = 100 << 20
    """Any pickle of a mebibyte is read or refused within a second and 100 MB; a busy machine takes twice."""

    def seeds(self) -> Sequence[bytes]:
        """Return the pickle of a torch file."""
        return [self._sound()]

    def _sound(self) -> bytes:
        (data,) = run_files("torch").values()
        return next(content for name, content in input_mutants.zip_entries(data) if name.endswith("data.pkl"))

    def mutate(self, rng: random.Random) -> bytes:
        """Return another program for the machine."""
        return input_mutants.mutate_pickle(rng, self._sound())

    def execute(self, data: bytes) -> str:
        """Read it; whatever it says is as good as anything."""
        read_pickle(data, "data.pkl")
        return "same" if data == self._sound() else "different"


class ConfigTarget:
    """Settings that ``--config`` names, and the names that they give to a compression."""

    name = "config"
    _CONFIGS: Final = (
        ("config.toml", b'codec = "lattice"\noptimizer = "exact"\n[settings]\ncoarseness = 1.5\n'
                        b'[[override]]\nmatch = "*.bias"\ncoarseness = 0.5\n'),
        ("config.json", b'{"codec": "uniform", "settings": {}, "keyframe_every": 4, "override": []}'),
    )  # fmt: skip

    def seeds(self) -> Sequence[bytes]:
        """Return a config of either format."""
        return [packed([name, text]) for name, text in self._CONFIGS]

    def mutate(self, rng: random.Random) -> bytes:
        """Return a config that someone else wrote."""
        name, text = rng.choice(self._CONFIGS)
        return packed(
            [
                name,
                (input_mutants.mutate_json if name.endswith("json") else input_mutants.mutate_text)(
                    rng, text
                ),
            ]
        )

    def execute(self, data: bytes) -> str:
        """Read it, and make of it what a compression would."""
        name, text = msgpack.unpackb(data, raw=False)
        path = scratch.fresh("config") / name
        path.write_bytes(text)
        run = scratch.fresh("run")
        runs.write_files(run, run_files("safetensors"))
        target = scratch.absent("configured")
        code = command_line("compress", str(run), "-o", str(target), "--config", str(path), "--quiet")
        return "refused" if code else "different"


@cache
def _requests() -> tuple[bytes, ...]:
    """Return the documents of the examples of every verb and mode."""
    found = []
    for verb in plugins(VERBS):
        request = request_of(verb)
        if request is None or not request.REPORTS or verb == "run":
            continue
        words = (shlex.split(example)[1:] for example in request.EXAMPLES)
        found += [json.dumps(read_request(request, line).to_json()).encode() for line in words]
    return tuple(found)


class RequestTarget:
    """Requests as ``inshrink run`` reads them; what they ask for is not performed."""

    name = "requests"

    def seeds(self) -> Sequence[bytes]:
        """Return a request of each kind."""
        return _requests()

    def mutate(self, rng: random.Random) -> bytes:
        """Return a request that someone else wrote."""
        return input_mutants.mutate_json(rng, rng.choice(_requests()))

    def execute(self, data: bytes) -> str:
        """Read it; what is read says itself again, trusts no code, and is a command line."""
        request = read_document(data, "request.json")
        document = request.to_json()
        again = request_from_json(json.loads(json.dumps(document, allow_nan=False))).to_json()
        require(again == document, "a request that was read says itself again", str(document)[:200])
        trusts = isinstance(request, Executing) and request.trusted is not None
        require(not trusts, "no document says that code is trusted", str(document)[:200])
        is_line = all(isinstance(word, str) for word in request.words())
        require(is_line, "a request is a command line", str(document)[:200])
        return "same" if data in _requests() else "different"


def _single(name: str, mutate: Callable[[random.Random, bytes], bytes]) -> Change:
    """Change the file whose name ends so."""

    def change(rng: random.Random, files: runs.Files) -> runs.Files:
        chosen = rng.choice([path for path in files if path.endswith(name)])
        return dict(files) | {chosen: mutate(rng, files[chosen])}

    return change


def _special(rng: random.Random, files: runs.Files) -> runs.Files:
    """Put a pipe, a folder, a device or a link in the place of a file, or where one may be."""
    places = [*files, "metrics.csv", "metrics.jsonl", f"checkpoint-{_STEP}", ".inshrink", ".inshrink/cache"]
    return runs.special(rng, rng.choice(sorted(places)), files)


def _any_document(rng: random.Random, files: runs.Files) -> runs.Files:
    """Change one of the small files around the tensors, add one, or take one away."""
    found = dict(files)
    if rng.random() < 0.1:
        found["metrics.jsonl"] = input_mutants.mutate_text(
            rng, b'{"step": 10, "loss": 0.5}\n{"step": 20, "loss": 1}\n'
        )
    if rng.random() < 0.1:
        found["metrics.csv"] = input_mutants.mutate_text(rng, b"step,loss,lr\n10,0.5,1e-3\n20,0.25,1e-3\n")
    name = rng.choice(sorted(found))
    content = found[name]
    if rng.random() < 0.05:
        del found[name]
    elif name.endswith(".json"):
        found[name] = input_mutants.mutate_json(rng, content)
    elif name.endswith(".safetensors"):
        found[name] = input_mutants.mutate_safetensors(rng, content)
    elif name.endswith(".pt"):
        found[name] = input_mutants.resealed_torch(rng, content)
    else:
        found[name] = input_mutants.mutate_text(rng, content)
    return found


def targets() -> list[Any]:
    """Return the attacks on what people give us."""
    return [
        RunTarget("torch-blind", "torch", _single(".pt", mutate_bytes), checksummed=True),
        RunTarget("torch-sealed", "torch", _single(".pt", input_mutants.resealed_torch)),
        RunTarget("safetensors", "safetensors", _single(".safetensors", input_mutants.mutate_safetensors)),
        RunTarget("folders", "folders", _any_document),
        RunTarget("folders-special", "folders", _special),
        RunTarget("zero-blind", "zero", _single(".pt", mutate_bytes), checksummed=True),
        RunTarget("zero-sealed", "zero", _single(".pt", input_mutants.resealed_torch)),
        RunTarget("zero3-sealed", "zero3", _single(".pt", input_mutants.resealed_torch)),
        PickleTarget(),
        ConfigTarget(),
        RequestTarget(),
    ]

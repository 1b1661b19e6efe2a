"""Export and restore: requests that write, their targets, and their results."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st
from inshrink_app.jobs import Job, Work
from inshrink_app.model import ServiceError, Subject
from inshrink_app.server.downloads import downloads
from inshrink_app.server.roots import Address, settings
from inshrink_app.services.inside import is_own
from inshrink_app.services.jobs import documents_of, start_job
from inshrink_app.services.opening import chain_of, load_subject, resolve

from inshrink_core.chain import ChainReport
from inshrink_core.checkpoint import twins
from inshrink_core.request import Request
from inshrink_core.verbs.compress import Compress
from inshrink_core.verbs.export import Export, chosen_names

_SUFFIX = ".inshrink"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """An export: requests of the engine, in order, that still need a target.

    Parameters
    ----------
    asked
        The request that archives a run, the request that writes one file of an archive, or both.
    steps
        The steps to write.
    replaces
        Whether an existing target file may be replaced.
    """

    asked: tuple[Any, ...]
    steps: tuple[int, ...]
    replaces: bool = False

    @property
    def chain(self) -> Any:
        """The request that writes a chain; None for one step or a copy."""
        return self.asked[0] if self.kind == "chain" else None

    @property
    def file(self) -> Any:
        """The request that writes one file; None for a chain stored as a folder."""
        return self.asked[-1] if self.asked[-1].verb() == "export" else None

    @property
    def kind(self) -> str:
        """``chain``, ``step`` or ``pack`` (a copy)."""
        if self.file is not None and self.file.step is not None:
            return "step"
        return "pack" if self.file is not None and len(self.asked) == 1 else "chain"

    @property
    def suffix(self) -> str:
        """The suffix of the file name."""
        is_plain = self.file is not None and self.file.layout == "safetensors"
        return ".safetensors" if is_plain else _SUFFIX

    def keeps(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names of weights that the export includes."""
        return chosen_names(names, self.file.tensors, self.file.without)

    def placed(self, target: str, between: str = "", **fields: Any) -> list[Request[Any]]:
        """Return the requests with their target.

        Parameters
        ----------
        target
            Path to write.
        between
            Path of an intermediate archive, for a chain that becomes one file and for a step of a run, which
            passes through a lossless archive.
        fields
            Further fields of the request that writes the chain, such as its evaluator.
        """
        *first, last = self.asked
        if self.file is None:
            return [replace(last, archive=target, **fields)]
        where = {"pack" if self.file.step is None else "output": target, "force": self.replaces}
        where |= {"archive": between} if first else {}
        made = [replace(request, archive=between, **fields) for request in first]
        return [*made, replace(last, **where)]


def chain_export(
    shown: Subject, steps: tuple[int, ...], *, packed: bool = False, watch: bool = False, **fields: Any
) -> ExportRequest:
    """Return the export of several steps.

    Parameters
    ----------
    shown, steps
        The run and its steps.
    packed
        Write one file instead of a folder.
    watch
        Archive new steps as the run grows, until the job ends.
    **fields
        Fields of the engine's request.
    """
    path, chosen = str(shown.path), chosen_steps(steps, shown.steps)
    written = Compress(path, "", steps=None if watch else chosen, watch=watch, **fields)
    return ExportRequest(asked=(written, Export("", pack="")) if packed else (written,), steps=steps)


def pack_export(shown: Subject) -> ExportRequest:
    """Return the export that copies an archive into one file."""
    return ExportRequest(asked=(Export(str(shown.path), pack=""),), steps=shown.steps)


def step_export(shown: Subject, step: int, **weights: Any) -> ExportRequest:
    """Return the export of one step: whole, or only its weights if fields of the request are given."""
    path, first = str(shown.path), []
    if shown.kind == "run":
        optimizer = "drop" if weights else "exact"
        first = [Compress(path, "", codec="lossless", optimizer=optimizer, steps=(step,))]
    return ExportRequest(asked=(*first, Export(path, "", step=step, **weights)), steps=(step,))


def chosen_steps(steps: Sequence[int], every: Sequence[int] = ()) -> tuple[int, ...] | None:
    """Return steps in the form of a request: None if they are all steps."""
    return None if not steps or tuple(steps) == tuple(every) else tuple(steps)


def start_export(shown: Subject, request: ExportRequest, target: Path, *, trusted: str = "") -> Job:
    """Start an export; an interrupted one resumes.

    The name of the intermediate archive depends on the settings, so an export with other settings starts
    anew.
    """
    settings = replace(request, replaces=False).placed(str(target))
    digest = hashlib.sha256(repr([asked.to_json() for asked in settings]).encode()).hexdigest()[:8]
    between = str(target.with_name(f".{target.name}-{digest}.building"))
    requests = request.placed(str(target), between)
    scratch, topic = (between,) if len(requests) > 1 else (), "write" if request.kind == "chain" else "pack"
    more: dict[str, Any] = {"scratch": scratch, "trusted": trusted}
    return start_job(Work.asking(requests, shown.path, "archives", topic, **more))


def start_pack(shown: Subject, archive: Path) -> Job:
    """Copy an archive into one file beside it."""
    named = replace(shown, name=archive.name, path=archive)
    request = pack_export(named)
    requests = request.placed(suggested_name(named, request))
    return start_job(Work.asking(requests, shown.path, "archives", "pack"))


def suggested_name(shown: Subject, request: ExportRequest) -> str:
    """Return a file name that is free, or that of an archive which the export would continue."""
    stem = shown.name.removesuffix(_SUFFIX)
    if request.kind == "step":
        stem = f"{stem}-step-{request.steps[0]}-{'weights' if request.file.weights_only else 'checkpoint'}"
    elif request.kind == "pack":
        stem = f"{stem}-packed"
    elif request.chain.optimizer == "drop":
        stem = f"{stem}-weights"
    return _free_path(shown, stem, request.suffix, lambda path: _goes_on(path, request))


def suggested_path(shown: Subject, name: str, what: str) -> str:
    """Return a free path beside the run, or in the first root for a sample."""
    return _free_path(shown, f"{name.removesuffix(_SUFFIX)}-{what}", "", lambda path: False)


def _free_path(shown: Subject, stem: str, suffix: str, is_free: Callable[[Path], bool]) -> str:
    names = (stem, *(f"{stem}-{position}" for position in range(2, 100)))
    folder = default_folder(shown)
    paths = [folder / f"{name}{suffix}" for name in names]
    return str(next((path for path in paths if not os.path.lexists(path) or is_free(path)), paths[0]))


def default_folder(shown: Subject) -> Path:
    """Return the default output folder: beside the run, or the first root for a sample."""
    parent = shown.place.parent
    return parent if settings().may_write(parent) and not is_own(shown.place) else settings().roots[0]


def _goes_on(path: Path, request: ExportRequest) -> bool:
    """Return whether a path holds an archive of the same settings, which the export can append to."""
    if request.file is not None:
        return False
    try:
        chain = chain_of(str(path))
    except ServiceError:
        return False
    asked = request.chain
    if (chain.codec, chain.optimizer) != (asked.codec, asked.optimizer):
        return False
    if any(getattr(asked, f"max_{kind}") is not None for kind in ("restore_cost", "drop", "divergence")):
        # With a bound, settings differ by step, so an archive of uniform settings was written without one.
        return not chain.is_uniform
    settings = {**chain.config, "overrides": list(chain.overrides)}
    wanted = {"overrides": [], **(asked.config or {})}
    return all(name in settings and settings[name] == value for name, value in wanted.items())


def export_target(text: str, request: ExportRequest) -> Path:
    """Return the real path that an export may be written to.

    Raises
    ------
    ServiceError
        See `writable`; or the existing file may not be replaced.
    """
    path = writable(text, "an export goes into a folder of yours", request.suffix)
    if request.file is not None and path.is_dir():
        raise ServiceError("a folder is there already", str(path), "choose another name")
    if request.file is not None and path.exists() and not request.replaces:
        remedy = "choose another name, or let it be replaced"
        raise ServiceError("the file exists already", str(path), remedy)
    return path


def writable(text: str, what: str, suffix: str = "") -> Path:
    """Return the real path of a file or folder that may be written.

    Raises
    ------
    ServiceError
        The path is outside of the roots, has another suffix, or its folder does not exist. The message
        names it by `what`.
    """
    path = resolve(text)
    if isinstance(path, Address):
        remedy = "choose a folder; inshrink compress and export on the command line write to addresses"
        raise ServiceError("the explorer writes no files to addresses", text, remedy)
    if not settings().may_write(path):
        raise ServiceError(what, text, "choose one that the explorer may see")
    if suffix and (path.suffix != suffix or path.name.startswith(".")):
        remedy = f"call it, for example, {path.stem}{suffix}"
        raise ServiceError(f"the name of such a file ends in {suffix}", text, remedy)
    if not path.parent.is_dir():
        remedy = "make the folder, or choose another one"
        raise ServiceError("its folder does not exist", str(path.parent), remedy)
    return path


class Made(NamedTuple):
    """The result of an export: the file or archive on disk, and facts that only the export knows.

    `chain` is None for a plain file. `digest` is the SHA-256 of the file, or of a folder's manifest.
    `relative_error` is None if unknown; for a copy it is not relative to the copied archive.
    `layers_left_out` lists outermost modules and tensors. `renamed` holds the name prefix of a moving average
    and that of its model. `unreadable` lists omitted checkpoints with reasons. `device` is the device that
    wrote the export.
    """

    kind: str
    path: Path
    nbytes: int
    chain: ChainReport | None
    digest: str
    relative_error: float | None
    left_out: tuple[str, ...]
    weights_only: bool
    n_tensors: int | None
    layers_left_out: tuple[str, ...]
    unreadable: tuple[tuple[str, str], ...] = ()
    device: str = ""
    renamed: tuple[str, str] | None = None

    @property
    def loading(self) -> str:
        """Return Python lines that load the weights into a model; nothing else may be missing."""
        path = str(self.path)
        load = f"import inshrink_core\n\nweights = inshrink_core.verbs.load_state_dict({path!r})\n"
        call = "model.load_state_dict(weights"
        if self.chain is None and not self.renamed:
            load = "from safetensors.torch import load_model\n\nmodel = ...  # yours\n"
            call = f"load_model(model, {path!r}"
        elif self.chain is None:
            load = f"from safetensors.torch import load_file\n\nweights = load_file({path!r})\n"
        if self.renamed:
            old, new = self.renamed
            load += f"start = {old!r}\n"
            load += f"weights = {{{new!r} + name.removeprefix(start): weights[name] for name in weights}}\n"
        if not self.layers_left_out:
            return f"{load}{call})"
        return (
            f"{load}missing, unexpected = {call}, strict=False)\n"
            f"left_out = {tuple(f'{name}.' for name in self.layers_left_out)}\n"
            'assert not unexpected and all(f"{name}.".startswith(left_out) for name in missing)'
        )


def _model_of(
    job: Job, asked: Mapping[str, Any], left_out: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, str] | None]:
    """Return the omitted names of the written model, and how its prefix changes.

    A run with a moving average holds two models. The export writes one of them and does not count the other
    as omitted.
    """
    if "weights_only" not in asked:
        return left_out, None
    try:
        model = load_subject(job.shown).model_tensors
    except ServiceError:
        return left_out, None
    twin_of = twins({row.name: row.shape for row in model})
    if not twin_of:
        return left_out, None
    names = [row.name for row in model]
    written = chosen_names(names, asked.get("tensors", ()), asked.get("without", ()))
    renamed = _renamed(written, twin_of)
    is_average = renamed is not None
    missing = {name for name in names if (name in twin_of) == is_average}.difference(written)
    old, new = renamed or ("", "")
    inside = (module for module in left_out if any(f"{name}.".startswith(f"{module}.") for name in missing))
    return tuple(new + module.removeprefix(old) for module in inside), renamed


def _renamed(names: Collection[str], twin_of: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name prefixes of a moving average and of its model; None for other names."""
    if not names or not set(names) <= set(twin_of):
        return None
    found = set()
    for name in names:
        ours, theirs = name.split("."), twin_of[name].split(".")
        n = next((i for i in range(min(len(ours), len(theirs))) if ours[-1 - i] != theirs[-1 - i]), None)
        n = min(len(ours), len(theirs)) if n is None else n
        found.add(tuple("".join(f"{part}." for part in parts[: len(parts) - n]) for parts in (ours, theirs)))
    start = found.pop()
    return None if found else (start[0], start[1])


def made_by(job: Job) -> Made | None:
    """Return the result of a finished export; None if it no longer exists.

    Raises
    ------
    ServiceError
        The result cannot be read.
    """
    last, documents = job.requests[-1], documents_of(job)
    asked: Mapping[str, Any] = last.given()
    target = export_made_at(job)
    if not target.exists() or not documents:
        return None
    is_copy = len(job.requests) == 1 and "pack" in asked
    error = 0.0 if is_copy else documents[0 if "pack" in asked else -1].get("relative_error")
    path = target if target.is_file() else target / "inshrink-manifest"
    status = path.stat()
    chain = None if asked.get("layout") == "safetensors" else chain_of(str(target))
    layers, renamed = _model_of(job, asked, tuple(documents[-1].get("layers_left_out", ())))
    return Made(
        kind="pack" if is_copy else "step" if "step" in asked else "chain",
        path=target,
        nbytes=status.st_size if chain is None else chain.nbytes,
        chain=chain,
        digest=_sha256(str(path), status.st_mtime_ns, status.st_size),
        relative_error=error,
        left_out=tuple(map(str, documents[-1].get("left_out", ()))),
        weights_only="weights_only" in asked,
        n_tensors=documents[-1].get("tensors"),
        layers_left_out=layers,
        renamed=renamed,
        device=str(documents[0].get("device", "")),
        unreadable=tuple(
            (str(row["path"]), str(row["reason"]))
            for report in documents
            for row in report.get("unreadable", ())
        ),
    )


def export_made_at(job: Job) -> Path:
    """Return the path that an export writes to."""
    last: Any = job.requests[-1]
    return Path(last.archive if last.verb() == "compress" else last.pack or last.output)


@st.cache_data(show_spinner=False, max_entries=512)
def _sha256(path: str, mtime_ns: int, size: int) -> str:
    """Return the digest of a file; cached by its path, time and size."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download_url(path: Path) -> tuple[str, int] | None:
    """Return the download address of a file and its size; None if the file no longer exists."""
    try:
        real = resolve(str(path))
        if not real.is_file() or not settings().allows(real):
            return None
        return downloads.offer(real), real.stat().st_size
    except (ServiceError, OSError):
        return None


def restore_target(text: str) -> Path:
    """Return the real path of a new or empty folder that files may be restored to.

    Raises
    ------
    ServiceError
        See `writable`; or the path is not a folder, or is not empty.
    """
    path = writable(text, "files are restored to a folder of yours")
    with contextlib.suppress(OSError):
        if not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir())):
            return path
    remedy = "choose a new folder; nothing is overwritten"
    raise ServiceError("there is something at this path already", str(path), remedy)


def restored_files(document: Mapping[str, Any], folder: str) -> list[tuple[str, int, str]]:
    """Return name, size and SHA-256 of every restored file that still exists."""
    found = []
    for path in map(Path, document["files"]):
        if path.is_file():
            status = path.stat()
            digest = _sha256(str(path), status.st_mtime_ns, status.st_size)
            found.append((os.path.relpath(path, folder), status.st_size, digest))
    return found

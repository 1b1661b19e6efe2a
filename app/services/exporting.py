"""Export and restore: requests that write, their targets, and their results."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st
from inshrink_app.jobs import Job, Work
from inshrink_app.model import ServiceError, Subject
from inshrink_app.server.downloads import downloads
from inshrink_app.server.roots import Address, settings
from inshrink_app.services.inside import is_own
from inshrink_app.services.jobs import all_jobs, documents_of, start_job
from inshrink_app.services.opening import chain_of, load_subject, resolve

from inshrink_core.chain.report import ChainReport
from inshrink_core.checkpoint import TensorSpec, twins
from inshrink_core.request import Request
from inshrink_core.verbs.compress import Compress
from inshrink_core.verbs.export import Export, chosen_names

_SUFFIX = ".inshrink"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """Requests of the engine that write an archive or a file, without their target.

    Parameters
    ----------
    archive
        The request that archives steps of a run; None if an archive exists.
    file
        The request that writes one file of an archive; None for an archive that stays a folder.
    """

    archive: Compress | None = None
    file: Export | None = None

    @classmethod
    def of(cls, job: Job) -> ExportRequest:
        """Return the export that a job performs."""
        asked: dict[str, Any] = {request.verb(): request for request in job.requests}
        return cls(archive=asked.get("compress"), file=asked.get("export"))

    @property
    def kind(self) -> str:
        """``chain`` (several steps), ``step`` or ``pack`` (a copy of an archive)."""
        if self.file is not None and self.file.step is not None:
            return "step"
        return "pack" if self.archive is None else "chain"

    @property
    def suffix(self) -> str:
        """The suffix of its file."""
        return ".safetensors" if self.is_plain else _SUFFIX

    @property
    def is_plain(self) -> bool:
        """Whether it writes a safetensors file."""
        return self.file is not None and self.file.layout == "safetensors"

    def placed(self, target: str, between: str = "") -> list[Request[Any]]:
        """Return the requests with their target.

        Parameters
        ----------
        target
            Path to write.
        between
            Path of an intermediate archive, if a run is written to one file.
        """
        requests: list[Request[Any]] = []
        if self.archive is not None:
            requests.append(replace(self.archive, archive=target if self.file is None else between))
        if self.file is not None:
            where: dict[str, Any] = {"output" if self.kind == "step" else "pack": target}
            where |= {"archive": between} if requests else {}
            requests.append(replace(self.file, **where))
        return requests


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
    chosen = None if watch else chosen_steps(steps, shown.steps)
    written = Compress(str(shown.path), "", steps=chosen, watch=watch, **fields)
    return ExportRequest(archive=written, file=Export("", pack="") if packed else None)


def step_export(shown: Subject, step: int, **weights: Any) -> ExportRequest:
    """Return the export of the weights of one step; `weights` has further fields of the request."""
    path, first = str(shown.path), None
    if shown.kind == "run":
        first = Compress(path, "", codec="lossless", optimizer="drop", steps=(step,))
    return ExportRequest(archive=first, file=Export(path, "", step=step, weights_only=True, **weights))


def chosen_steps(steps: Sequence[int], every: Sequence[int] = ()) -> tuple[int, ...] | None:
    """Return steps in the form of a request: None if they are all steps."""
    return None if not steps or tuple(steps) == tuple(every) else tuple(steps)


def start_export(shown: Subject, request: ExportRequest, target: Path, *, trusted: str = "") -> Job:
    """Start an export; an interrupted one resumes.

    The name of the intermediate archive depends on its settings, so an export with other settings starts
    anew.
    """
    settings = None if request.archive is None else request.archive.to_json()
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:8]
    between = str(target.with_name(f".{target.name}-{digest}.building"))
    requests = request.placed(str(target), between)
    scratch, topic = (between,) if len(requests) > 1 else (), "write" if request.kind == "chain" else "pack"
    return start_job(Work.asking(requests, shown.path, "archives", topic, scratch=scratch, trusted=trusted))


def suggested_name(shown: Subject, request: ExportRequest) -> str:
    """Return a file name that is free, or that of an archive which the export would continue."""
    name, written = shown.name.removesuffix(_SUFFIX), request.file
    if written is not None and written.step is not None:
        name += f"-step-{written.step}-weights"
    elif request.archive is None:
        name += "-packed"
    elif request.archive.optimizer == "drop":
        name += "-weights"
    return _free_path(shown, name, request.suffix, lambda path: _is_continued(path, request))


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


def _is_continued(path: Path, request: ExportRequest) -> bool:
    """Return whether a path holds an archive of the same settings and bound, to which the export appends."""
    asked: Any = request.archive
    if asked is None or request.file is not None:
        return False
    try:
        chain = chain_of(str(path))
    except ServiceError:
        return False
    # An archive does not record the metric of a bound, but the job that wrote it does.
    requests: Iterator[Any] = (one for job in all_jobs() for one in job.requests if one.verb() == "compress")
    wrote = next((one for one in requests if one.archive == str(path)), None)
    is_bounded = bool(asked.bounds.limits)
    is_same = chain.is_uniform and not is_bounded
    if wrote is not None:
        is_same = (wrote.bounds, wrote.metric) == (asked.bounds, asked.metric)
    settings = {**chain.config, "overrides": list(chain.overrides)}
    wanted = {} if is_bounded else {"overrides": [], **(asked.config or {})}
    is_same &= (chain.codec, chain.optimizer) == (asked.codec, asked.optimizer)
    return is_same and all(name in settings and settings[name] == value for name, value in wanted.items())


def export_target(text: str, request: ExportRequest) -> Path:
    """Return the real path that an export may be written to.

    Raises
    ------
    ServiceError
        See `writable`; or the existing file may not be replaced, or the existing archive not continued.
    """
    path, file = writable(text, "an export goes into a folder of yours", request.suffix), request.file
    is_free = _is_continued(path, request) if file is None else file.force and path.is_file()
    if os.path.lexists(path) and not is_free:
        what = "this file already exists"
        if path.is_dir():
            what = "a folder already exists here, which is no archive of the same settings and bound"
        raise ServiceError(what, str(path), "choose another name, or let a file be replaced")
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
    """The archive or file that an export has written.

    `chain` is None for a plain file. `digest` is the SHA-256 of the file, or of a folder's manifest.
    `reports` are those of the engine, one for each request. `loading` is Python code that loads exported
    weights into a model; empty for other exports.
    """

    request: ExportRequest
    path: Path
    chain: ChainReport | None
    digest: str
    reports: list[Any]
    loading: str

    @property
    def relative_error(self) -> float | None:
        """The relative error of the weights; None if unknown. A copy is equal to the copied archive."""
        if self.request.kind == "pack":
            return 0.0
        found: float | None = self.reports[0 if self.request.kind == "chain" else -1].get("relative_error")
        return found

    @property
    def unreadable(self) -> list[tuple[str, str]]:
        """The checkpoints that could not be read, with reasons."""
        rows = (row for report in self.reports for row in report.get("unreadable", ()))
        return [(str(row["path"]), str(row["reason"])) for row in rows]


def made_by(job: Job) -> Made | None:
    """Return the result of a finished export; None if it no longer exists.

    Raises
    ------
    ServiceError
        The result cannot be read.
    """
    target, reports, request = export_made_at(job), documents_of(job), ExportRequest.of(job)
    if not target.exists() or not reports:
        return None
    chain = None if request.is_plain else chain_of(str(target))
    loading = ""
    if request.file is not None and request.file.weights_only:
        left_out = reports[-1].get("layers_left_out", ())
        loading = _loading_code(target, _model_at(job.shown), request.file, left_out)
    path = target if target.is_file() else target / "inshrink-manifest"
    status = path.stat()
    digest = _sha256(str(path), status.st_mtime_ns, status.st_size)
    return Made(request, target, chain, digest, reports, loading)


def _model_at(path: str) -> tuple[TensorSpec, ...]:
    """Return the weights and buffers of a run or an archive; empty if it cannot be read any more."""
    try:
        return load_subject(path).model_tensors
    except ServiceError:
        return ()


def _loading_code(path: Path, model: Sequence[TensorSpec], asked: Export, left_out: Iterable[str]) -> str:
    """Return Python code that loads written weights; only the layers that were left out may be missing.

    A run with a moving average holds two models. The average gets the names of its model, and the layers of
    the other model do not count as missing.
    """
    names, twin_of = [row.name for row in model], twins({row.name: row.shape for row in model})
    old, new = _prefixes(chosen_names(names, asked.tensors, asked.without), twin_of)
    others = {name for name in names if (name in twin_of) != (old != new)}

    def is_of_other_model(layer: str) -> bool:
        inside = {name for name in names if f"{name}.".startswith(f"{layer}.")}
        return bool(inside) and inside <= others

    missing = tuple(f"{new}{layer.removeprefix(old)}." for layer in left_out if not is_of_other_model(layer))
    call = "model.load_state_dict(weights"
    if asked.layout == "packed":
        load = f"import inshrink_core\n\nweights = inshrink_core.verbs.load_state_dict({str(path)!r})\n"
    elif old == new:
        load = "from safetensors.torch import load_model\n\nmodel = ...  # yours\n"
        call = f"load_model(model, {str(path)!r}"
    else:
        load = f"from safetensors.torch import load_file\n\nweights = load_file({str(path)!r})\n"
    if old != new:
        before = f"{new!r} + " if new else ""
        load += f"start = {old!r}\n"
        load += f"weights = {{{before}name.removeprefix(start): weights[name] for name in weights}}\n"
    if not missing:
        return f"{load}{call})"
    return (
        f"{load}missing, unexpected = {call}, strict=False)\n"
        f"left_out = {missing}\n"
        'assert not unexpected and all(f"{name}.".startswith(left_out) for name in missing)'
    )


def _prefixes(names: Iterable[str], twin_of: Mapping[str, str]) -> tuple[str, str]:
    """Return the name prefixes of a moving average and of its model; equal ones for other names."""
    found = set()
    for name in names:
        words, twin = name.split("."), twin_of.get(name, name).split(".")
        while words and twin and words[-1] == twin[-1]:
            del words[-1], twin[-1]
        found.add((".".join([*words, ""]), ".".join([*twin, ""])))
    return found.pop() if len(found) == 1 else ("", "")


def export_made_at(job: Job) -> Path:
    """Return the path that an export writes to."""
    last: Any = job.requests[-1]
    return Path(last.archive if last.verb() == "compress" else last.pack or last.output)


@st.cache_resource(show_spinner=False, max_entries=512)
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

"""Exporting and restoring: the requests that write, where to, how large it will be, and what was made."""

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
    """What to write: requests of the engine, one after the other, that wait to be told where to.

    Parameters
    ----------
    asked
        What makes an archive of a run, what makes one file of an archive, or both.
    steps
        The steps that are written.
    replaces
        Whether a file at the target may be replaced.
    """

    asked: tuple[Any, ...]
    steps: tuple[int, ...]
    replaces: bool = False

    @property
    def chain(self) -> Any:
        """The request that writes a chain; None of one step, and of a copy."""
        return self.asked[0] if self.kind == "chain" else None

    @property
    def file(self) -> Any:
        """The request that makes one file; None of a chain that stays a folder."""
        return self.asked[-1] if self.asked[-1].verb() == "export" else None

    @property
    def kind(self) -> str:
        """``chain``, ``step`` or ``pack``, which is a copy."""
        if self.file is not None and self.file.step is not None:
            return "step"
        return "pack" if self.file is not None and len(self.asked) == 1 else "chain"

    @property
    def suffix(self) -> str:
        """What the name of the file ends in."""
        is_plain = self.file is not None and self.file.layout == "safetensors"
        return ".safetensors" if is_plain else _SUFFIX

    def keeps(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return which tensors of weights are kept."""
        return chosen_names(names, self.file.tensors, self.file.without)

    def placed(self, target: str, between: str = "", **fields: Any) -> list[Request[Any]]:
        """Return the requests that write to a target.

        Parameters
        ----------
        target
            Where to.
        between
            Where an archive may be made on the way: of a chain that becomes one file, and of a step of a run,
            whose bits go through a lossless archive.
        fields
            More of how a chain is written: whose code measures what it costs.
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
        Of which run, and which.
    packed
        One file instead of a folder.
    watch
        Go on as the run grows, until the job is ended.
    **fields
        Of the engine's request.
    """
    path, chosen = str(shown.path), chosen_steps(steps, shown.steps)
    written = Compress(path, "", steps=None if watch else chosen, watch=watch, **fields)
    return ExportRequest(asked=(written, Export("", pack="")) if packed else (written,), steps=steps)


def pack_export(shown: Subject) -> ExportRequest:
    """Return the copy of an archive as one file."""
    return ExportRequest(asked=(Export(str(shown.path), pack=""),), steps=shown.steps)


def step_export(shown: Subject, step: int, **weights: Any) -> ExportRequest:
    """Return the export of one step, whole or, with fields of the engine's request, of its weights."""
    path, first = str(shown.path), []
    if shown.kind == "run":
        optimizer = "drop" if weights else "exact"
        first = [Compress(path, "", codec="lossless", optimizer=optimizer, steps=(step,))]
    return ExportRequest(asked=(*first, Export(path, "", step=step, **weights)), steps=(step,))


def chosen_steps(steps: Sequence[int], every: Sequence[int] = ()) -> tuple[int, ...] | None:
    """Return steps as a request has them: None where they are all that there are."""
    return None if not steps or tuple(steps) == tuple(every) else tuple(steps)


def start_export(shown: Subject, request: ExportRequest, target: Path, *, trusted: str = "") -> Job:
    """Write the export; one that was cut off goes on where it stopped.

    The name of the archive on the way depends on its settings, so that another export begins anew.
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
    """Return a file name that is free, or belongs to an archive that the export would go on with."""
    stem = shown.name.removesuffix(_SUFFIX)
    if request.kind == "step":
        stem = f"{stem}-step-{request.steps[0]}-{'weights' if request.file.weights_only else 'checkpoint'}"
    elif request.kind == "pack":
        stem = f"{stem}-packed"
    elif request.chain.optimizer == "drop":
        stem = f"{stem}-weights"
    return _free_path(shown, stem, request.suffix, lambda path: _goes_on(path, request))


def suggested_path(shown: Subject, name: str, what: str) -> str:
    """Return a path at which there is nothing yet: beside the run, or in the first root for a sample."""
    return _free_path(shown, f"{name.removesuffix(_SUFFIX)}-{what}", "", lambda path: False)


def _free_path(shown: Subject, stem: str, suffix: str, is_free: Callable[[Path], bool]) -> str:
    names = (stem, *(f"{stem}-{position}" for position in range(2, 100)))
    folder = default_folder(shown)
    paths = [folder / f"{name}{suffix}" for name in names]
    return str(next((path for path in paths if not os.path.lexists(path) or is_free(path)), paths[0]))


def default_folder(shown: Subject) -> Path:
    """Return where files go by default: beside the run, or into the first root for a sample."""
    parent = shown.place.parent
    return parent if settings().may_write(parent) and not is_own(shown.place) else settings().roots[0]


def _goes_on(path: Path, request: ExportRequest) -> bool:
    """Return whether a path is that of an archive of the same settings, to be appended to."""
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
        # Under a bound the settings differ by step; what was written without any would stay as it is.
        return not chain.is_uniform
    settings = {**chain.config, "overrides": list(chain.overrides)}
    wanted = {"overrides": [], **(asked.config or {})}
    return all(name in settings and settings[name] == value for name, value in wanted.items())


def export_target(text: str, request: ExportRequest) -> Path:
    """Return the real path that an export may be written to.

    Raises
    ------
    ServiceError
        As `writable` has it, or what is there may not be replaced.
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
        It lies outside of the roots, which `what` says, has another suffix, or no folder to lie in.
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
    """What an export has made: the file or archive as it lies there, and what only the export knows of it.

    `chain` is None of a plain file; `digest` is the SHA-256 of the file, or of the manifest of a folder;
    `relative_error` is None where it is not known; a copy has none against what it is a copy of;
    `layers_left_out` are outermost modules and tensors; `renamed` is how the names of a moving average begin,
    and how those of its model do; `unreadable` are checkpoints that are not in it, and why; `device` is where
    it was written.
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
        """The lines of Python that load the weights into a model: nothing else may be missing."""
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
    """Return what is left out of the model that was written, and how its names begin in another one.

    Of a run with a moving average, one of both models is written, and the other one is not left out of it.
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
    """Return how names of a moving average begin, and how those of its model do; None of other names."""
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
    """Return what a finished export has made; None where that is not there any more.

    Raises
    ------
    ServiceError
        What lies there cannot be read.
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
    """Return where an export writes to."""
    last: Any = job.requests[-1]
    return Path(last.archive if last.verb() == "compress" else last.pack or last.output)


@st.cache_data(show_spinner=False, max_entries=512)
def _sha256(path: str, mtime_ns: int, size: int) -> str:
    """Return the digest of a file of any size, as it was at that time."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download_url(path: Path) -> tuple[str, int] | None:
    """Return the address at which a file can be fetched, and its size; None where it is gone."""
    try:
        real = resolve(str(path))
        if not real.is_file() or not settings().allows(real):
            return None
        return downloads.offer(real), real.stat().st_size
    except (ServiceError, OSError):
        return None


def restore_target(text: str) -> Path:
    """Return the real path of a folder that files may be restored to: a new one, or an empty one.

    Raises
    ------
    ServiceError
        As `writable` has it, or it is no folder, or holds something.
    """
    path = writable(text, "files are restored to a folder of yours")
    with contextlib.suppress(OSError):
        if not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir())):
            return path
    remedy = "choose a new folder; nothing is overwritten"
    raise ServiceError("there is something at this path already", str(path), remedy)


def restored_files(document: Mapping[str, Any], folder: str) -> list[tuple[str, int, str]]:
    """Return name, size and SHA-256 of every restored file that is still there."""
    found = []
    for path in map(Path, document["files"]):
        if path.is_file():
            status = path.stat()
            digest = _sha256(str(path), status.st_mtime_ns, status.st_size)
            found.append((os.path.relpath(path, folder), status.st_size, digest))
    return found

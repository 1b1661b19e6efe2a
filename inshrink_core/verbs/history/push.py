"""Pushing an archive to the Hugging Face Hub: what is new, in one commit, with a card."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from inshrink_core.errors import ConflictError, InputError
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.text import (
    count,
    counted,
    duration,
    percent,
    plain,
    printable,
    ratio,
    size,
    steps_in_short,
)
from inshrink_core.verbs.shared.groups import ArchiveLike, Decoding
from inshrink_core.verbs.shared.showing import base_text, show_facts

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.archive.manifest import Manifest
    from inshrink_core.archive.storage.hub import HubStorage
    from inshrink_core.chain.archive import Archive

CARD_NAME: Final = "README.md"
_BEGIN: Final = "<!-- inshrink: what stands from here to its end is written by `inshrink push` -->"
_END: Final = "<!-- inshrink: end -->"
_METADATA: Final = "---\nlibrary_name: inshrink\ntags:\n- inshrink\n- checkpoints\n---\n"
_ELSEWHERE: Final = "push to another repository, or to a folder of this one: hf://OWNER/NAME/FOLDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport(Report):
    """What `push` uploaded.

    Parameters
    ----------
    archive, target
        Which archive, and where it lies on the Hub.
    commit
        The last commit of the repository, by which others may name this state.
    uploaded
        Files of frames that were not there.
    nbytes
        Their size.
    removed
        Files of frames that were pruned here, and went there.
    steps
        The steps of the newest branch.
    card
        ``written``, ``same``, or ``kept``: one that somebody else wrote stays as it is.
    changed
        Whether there was anything new.
    seconds
        Wall time.
    """

    archive: str
    target: str
    commit: str
    uploaded: tuple[str, ...]
    nbytes: int
    removed: tuple[str, ...]
    steps: tuple[int, ...]
    card: str
    changed: bool
    seconds: float

    SAYS: ClassVar = "archive target commit changed uploaded bytes_uploaded=nbytes removed steps card seconds"

    def show(self, console: Console) -> None:
        """Print what went there, and how it is read from there."""
        new = f"{counted(len(self.uploaded), 'file')} of frames, {size(self.nbytes)}" if self.uploaded else ""
        gone = counted(len(self.removed), "file") if self.removed else ""
        notes = {
            "kept": "the one that is there is somebody else's and stays",
            "same": "",
            "written": "written",
        }
        facts = [
            ("pushed to", self.target),
            ("steps", steps_in_short(self.steps)),
            ("uploaded", new if self.changed else "nothing: all of it is there"),
            ("removed there", gone),
            ("card", notes[self.card]),
            ("commit", self.commit),
            ("time", duration(self.seconds)),
        ]
        show_facts(console, facts)
        if self.steps:
            step = f"inshrink restore {self.target} --step {self.steps[-1]} -o restored/"
            console.print(printable(step), soft_wrap=True)


@dataclass(frozen=True)
class Push(Decoding, Request[PushReport]):
    """Upload what is new of an archive to the Hugging Face Hub, with a card that says what it is.

    Parameters
    ----------
    archive
        The archive, a folder or packed.
    target
        Where it goes: hf://OWNER/NAME, or a folder of it, hf://OWNER/NAME/FOLDER; of a dataset repository,
        hf://datasets/OWNER/NAME. Made if it is not there.
    public
        Let everybody see a repository that is made; otherwise it is private.

    Raises
    ------
    InputError
        The target is not on the Hub.
    MissingExtraError
        The extra ``hub`` is not installed.
    ConflictError
        Another archive is there, or frames that this one lacks, or somebody else pushed meanwhile.
    MissingFrameError
        A frame of the archive is missing.
    StorageError
        The Hub refused.

    Notes
    -----
    Frames that are not there, the manifest and the card are one commit upon the one that was looked at: who
    reads meanwhile sees the archive as it was, or as it is. Frames that were pruned here are removed there;
    the repository's history keeps them, as it does everything.

    Examples
    --------
    >>> import inshrink_core
    >>> inshrink_core.verbs.push("digits.inshrink", "s3://bucket/digits")
    Traceback (most recent call last):
    ...
    inshrink_core.errors.InputError: s3://bucket/digits: archives are pushed to the Hugging Face Hub (...
    """

    archive: ArchiveLike
    target: Annotated[str, Option(metavar="hf://OWNER/NAME")]
    _: KW_ONLY
    public: bool = False

    INTERRUPTED: ClassVar = "nothing of it is to be seen there; the same command uploads what is missing"
    UNIT: ClassVar = "steps"
    EXAMPLES: ClassVar = (
        "inshrink push digits.inshrink hf://me/digits",
        "inshrink push digits.inshrink hf://datasets/me/runs/digits --public",
    )

    def perform(self) -> PushReport:
        """Compare, and commit what is new."""
        from inshrink_core.archive.layout import FRAME_FOLDER
        from inshrink_core.archive.manifest import MANIFEST_NAME
        from inshrink_core.archive.storage.hub import MovedError

        begun = time.perf_counter()
        hub = _hub_at(self.target)
        archive = self.opened_archive(self.archive)
        reader, storage = archive.reader, archive.reader.storage
        reader.require_whole()
        own = {path.rpartition("/")[2]: path for frame in reader.frames for path in frame.paths}
        sizes = {name: storage.size(path) for name, path in own.items()}
        hub.make(public=self.public)
        head = hub.head()
        there = hub.sizes(FRAME_FOLDER, head)
        before = _known_there(hub, head, archive)
        new = [name for name in own if there.get(name) != sizes[name]]
        gone = [name for name in sorted(there.keys() - own.keys()) if _is_removed(name, archive)]
        contents: dict[str, bytes | Path] = {own[name]: _source(archive, own[name]) for name in new}
        manifest = reader.catalog.manifest.pack()
        if before is None or before.pack() != manifest:
            contents[MANIFEST_NAME] = manifest
        card, text = self._card(archive, hub, head)
        if card == "written":
            contents[CARD_NAME] = text.encode()
        removed = tuple(f"{FRAME_FOLDER}/{name}" for name in gone)
        if contents or removed:
            message = f"inshrink push: steps {steps_in_short(archive.steps)}"[:200]
            try:
                head = hub.put(contents, removed, head, message)
            except MovedError as error:
                raise ConflictError(
                    "somebody else changed the repository meanwhile",
                    where=self.target,
                    remedy="run it again: it compares with what is there then",
                ) from error
        return PushReport(
            archive=str(archive.path),
            target=self.target,
            commit=head,
            uploaded=tuple(own[name] for name in new),
            nbytes=sum(sizes[name] for name in new),
            removed=removed,
            steps=archive.steps,
            card=card,
            changed=bool(contents or removed),
            seconds=time.perf_counter() - begun,
        )

    def _card(self, archive: Archive, hub: HubStorage, head: str) -> tuple[str, str]:
        """Return what becomes of the card, and its text."""
        ours = f"{_BEGIN}\n{_card_text(archive, self.target)}\n{_END}\n"
        try:
            before = hub.at_commit(head).whole(CARD_NAME).decode(errors="replace")
        except FileNotFoundError:
            return "written", f"{_METADATA}\n{ours}"
        top, begin, rest = before.partition(_BEGIN)
        _, end, bottom = rest.partition(f"{_END}\n")
        if not (begin and end):
            return "kept", before
        text = f"{top}{ours}{bottom}"
        return ("same" if text == before else "written"), text


push = python_call(Push)


def _hub_at(target: str) -> HubStorage:
    """Return the storage of an address on the Hub."""
    from inshrink_core.archive.storage import is_url, storage_at
    from inshrink_core.archive.storage.hub import HubStorage, Repository

    found = storage_at(target) if is_url(target) and target.partition(":")[0].lower() == "hf" else None
    if not isinstance(found, HubStorage) or Repository.parse(target) is None:
        raise InputError(
            "archives are pushed to the Hugging Face Hub",
            where=target,
            expected="hf://OWNER/NAME",
            remedy="to another place, copy the archive's folder, or its packed file",
        )
    return found


def _known_there(hub: HubStorage, head: str, archive: Archive) -> Manifest | None:
    """Return the manifest that is there; refuse one that is not an earlier state of this archive."""
    from inshrink_core.archive.manifest import MANIFEST_NAME, Manifest

    try:
        before = Manifest.parse(hub.at_commit(head).whole(MANIFEST_NAME), f"{hub.name}, manifest")
    except FileNotFoundError:
        return None
    own = archive.reader.catalog.manifest
    if before.archive_id != own.archive_id:
        raise ConflictError("another archive is there", where=hub.name, remedy=_ELSEWHERE)
    known = {frame.generation: frame.frame_id for frame in archive.reader.frames}
    lost = [
        frame
        for frame in before.frames
        if known.get(frame.generation) != frame.frame_id and frame.generation not in own.tombstones
    ]
    if lost:
        steps = steps_in_short(sorted({frame.step for frame in lost}))
        raise ConflictError(
            f"frames are there that this archive lacks: of step {steps}",
            where=hub.name,
            remedy=f"they were pushed from another copy; {_ELSEWHERE}",
        )
    return before


def _is_removed(name: str, archive: Archive) -> bool:
    """Tell whether a file is of frames that were removed here, or that lie in another file now."""
    from inshrink_core.archive.layout import file_number

    return 0 < file_number(name) < archive.reader.catalog.next_generation


def _source(archive: Archive, path: str) -> bytes | Path:
    """Return the file of an object, or its bytes where it is none."""
    from inshrink_core.archive.storage import LocalStorage

    storage = archive.reader.storage
    return storage.root / path if isinstance(storage, LocalStorage) else storage.whole(path)


def _card_text(archive: Archive, target: str) -> str:
    """Return what the card says of an archive and how to load it."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in _card_rows(archive) if value)
    steps = archive.steps
    last = steps[-1] if steps else 0
    return f"""# {_cell(target.rstrip("/").rpartition("/")[2])}

Checkpoints of a training as an Inshrink archive: of each step what changed since the one before.

| | |
|---|---|
{rows}

## How to load

    pip install 'inshrink[hub]'
    inshrink restore {target} --step {last} -o restored/
    inshrink restore {target} --step {last} --tensors '*.weight' -o some/

Once installed, the first writes a step as files of the run's own format, and the second some of its tensors;
only what they need is downloaded. In Python:

```python
import inshrink_core

archive = inshrink_core.open("{target}")
model.load_state_dict(archive[{last}].state_dict())
```"""


def _card_rows(archive: Archive) -> Iterable[tuple[str, str]]:
    """Yield what is known of an archive."""
    from inshrink_core.chain import archive_size
    from inshrink_core.report import plain_value

    if not archive.steps:
        return [("steps", "none yet")]
    sizes, meta = archive_size(archive), archive.frame(archive.last).meta
    base = None if sizes.base is None else plain_value(sizes.base)
    return [
        ("steps", f"{count(len(archive.steps))}: {steps_in_short(archive.steps)}"),
        ("checkpoints", size(sizes.raw_total)),
        ("archive", size(sizes.nbytes)),
        ("ratio of everything", ratio(sizes.ratio_total)),
        ("ratio of the weights", ratio(sizes.ratio_weights)),
        ("bits per weight", plain(sizes.bits_per_weight)),
        ("base model", _cell(base_text(base)) if base else ""),
        ("codec", _cell(str(meta.get("codec", "")))),
        ("restore cost", _cost_text(archive)),
    ]


def _cost_text(archive: Archive) -> str:
    """Return what a restore costs, as far as it was measured of the archive as it is."""
    from inshrink_core.verbs.shared.measured import known_comparison

    known = known_comparison(archive)
    costliest = known.costliest if known is not None and known.is_current else None
    if known is None or costliest is None or costliest.restore_cost is None:
        return "not measured"
    cost, steps = percent(costliest.restore_cost), counted(len(known.comparison.steps), "step")
    return f"at most {cost} of the loss (step {costliest.step}; measured at {steps})"


def _cell(text: str) -> str:
    """Return text that may be anybody's as it can stand in a table."""
    return printable(text).translate({ord(sign): " " for sign in "|<>[]`\n"})[:200]

"""What a job does: requests of the engine one after the other, as JSON documents, and who asked for them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inshrink_core.request import Request, fields_of, request_from_json

Requests = Sequence["Request[Any]"]

_OWN = "own"

_AFTER = {"verify": 0.2, "compare": 1.0}
"""About what a request takes of the time of the first one: decoding an archive, and evaluating its steps."""

_LITTLE = 0.05
"""What a request takes that has nearly nothing left to do: packing a folder, looking up what is known."""


@dataclass(frozen=True)
class Own(os.PathLike[str]):
    """A file in the job's own folder: what one of its requests makes for another.

    Parameters
    ----------
    name
        Of the file.
    """

    name: str

    def __fspath__(self) -> str:
        return self.name


def subjects_of(request: Request[Any]) -> list[str]:
    """Return the runs or archives that a request is about: what is given by its place."""
    value = getattr(request, fields_of(type(request))[0].name)
    return [os.fspath(one) for one in ([value] if isinstance(value, str | os.PathLike) else value)]


def subject_of(request: Request[Any]) -> str:
    """Return the run or archive that a request is about, the first of several."""
    return subjects_of(request)[0]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a job is asked.

    Parameters
    ----------
    documents
        Its requests, as `Request.to_json` has them; an `Own` file as ``{"own": name}``.
    page
        The page that asks, and shows the result.
    topic
        What the page asks, where it asks several things; the newest job of a topic is the one on screen.
    shown
        The path that the page is about, to come back to.
    of
        The states of files that it asks about: once one has changed, it is another question.
    trusted
        SHA-256 of the evaluator's file as its reader saw and trusted it; empty for none.
    scratch
        What the requests make for each other; it goes at the end.
    """

    documents: tuple[Mapping[str, Any], ...]
    page: str
    topic: str = ""
    shown: str = ""
    of: tuple[str, ...] = ()
    trusted: str = ""
    scratch: tuple[str | Own, ...] = ()

    @classmethod
    def asking(
        cls, requests: Iterable[Request[Any]], shown: str | Path, page: str, topic: str = "", **more: Any
    ) -> Work:
        """Return work of some requests."""
        documents = tuple(map(_document, requests))
        return cls(documents=documents, shown=str(shown), page=page, topic=topic, **more)

    @functools.cached_property
    def key(self) -> str:
        """The question that it answers: equal ones share a job."""
        asked = [self.page, self.topic, self.shown, self.documents, self.of]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def shares(self) -> tuple[float, ...]:
        """About which share of the whole time each request takes."""
        found, is_known = [], False
        for place, one in enumerate(self.documents):
            verb, fields = str(one["verb"]), one["fields"]
            # Under a bound every step was evaluated when it was written.
            is_little = (verb == "compare" and is_known) or (verb == "export" and fields.get("pack"))
            found.append(1.0 if not place else _LITTLE if is_little else _AFTER.get(verb, 1.0))
            is_known = is_known or fields.get("max_restore_cost") is not None
        return tuple(one / sum(found) for one in found)

    def requests(self, folder: Path) -> tuple[Request[Any], ...]:
        """Return its requests.

        Parameters
        ----------
        folder
            The job's own.

        Raises
        ------
        InputError
            A document is none that this version reads.
        """
        return tuple(request_from_json(_placed(one, folder)) for one in self.documents)

    def texts(self) -> list[str]:
        """Return everything in it that may be a path."""
        return [
            *texts_in([one["fields"] for one in self.documents]),
            self.shown,
            *texts_in(self.to_json()["scratch"]),
        ]

    def placed_scratch(self, folder: Path) -> list[Path]:
        """Return where that is which goes at the end."""
        return [folder / one for one in self.scratch]

    def to_json(self) -> dict[str, Any]:
        """Return what is kept on disk."""
        scratch = [{_OWN: one.name} if isinstance(one, Own) else one for one in self.scratch]
        return {**vars(replace(self)), "scratch": scratch}

    @classmethod
    def from_json(cls, document: Any) -> Work:
        """Accept only what `to_json` gives; raises ValueError, TypeError or KeyError."""
        documents = document["documents"]
        if not documents or not all(
            isinstance(one.get("verb"), str) and isinstance(one.get("fields"), dict) for one in documents
        ):
            raise TypeError("these are no requests")
        return cls(
            documents=tuple(documents),
            **{name: str(document[name]) for name in ("page", "topic", "shown", "trusted")},
            of=tuple(map(str, document["of"])),
            scratch=tuple(Own(str(o[_OWN])) if isinstance(o, dict) else str(o) for o in document["scratch"]),
        )


def _document(request: Request[Any]) -> dict[str, Any]:
    """Return a request as JSON, where files of the job are told from others."""
    document = request.to_json()
    for name in document["fields"]:
        value = getattr(request, name)
        if isinstance(value, Own):
            document["fields"][name] = {_OWN: value.name}
        elif isinstance(value, tuple) and any(isinstance(one, Own) for one in value):
            document["fields"][name] = [{_OWN: o.name} if isinstance(o, Own) else o for o in value]
    return document


def _placed(value: Any, folder: Path) -> Any:
    """Return a document with the paths of the job's own files; a name that leads elsewhere is none."""
    if isinstance(value, Mapping):
        if set(value) == {_OWN}:
            return str(folder / Path(str(value[_OWN])).name)
        return {name: _placed(one, folder) for name, one in value.items()}
    return [_placed(one, folder) for one in value] if isinstance(value, list) else value


def texts_in(value: Any) -> list[str]:
    """Return all texts in JSON data."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    return [text for one in value for text in texts_in(one)] if isinstance(value, Iterable) else []

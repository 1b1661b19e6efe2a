"""The work of a job: requests of the engine, in order, and the page that asked."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from inshrink_core.request import Request, fields_of, request_from_json

Requests = Sequence["Request[Any]"]


class Document(TypedDict):
    """A request in the form of `Request.to_json`."""

    verb: str
    fields: dict[str, Any]


def subjects_of(request: Request[Any]) -> list[str]:
    """Return the runs or archives of a request, from its first field."""
    value = getattr(request, fields_of(type(request))[0].name)
    return [os.fspath(path) for path in ([value] if isinstance(value, str | os.PathLike) else value)]


def subject_of(request: Request[Any]) -> str:
    """Return the run or archive of a request, the first of several."""
    return subjects_of(request)[0]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a job.

    Parameters
    ----------
    documents
        Its requests.
    page
        The page that asks, and shows the result.
    topic
        The question, for a page with several; the page shows the newest job of a topic.
    shown
        The path that the page is about.
    of
        The states of the files involved; once one has changed, the question is new.
    trusted
        SHA-256 of the evaluator's file as the user saw and trusted it; empty for none.
    scratch
        Paths of intermediate files, which are removed at the end.
    """

    documents: tuple[Document, ...] = ()
    page: str
    topic: str = ""
    shown: str = ""
    of: tuple[str, ...] = ()
    trusted: str = ""
    scratch: tuple[str, ...] = ()

    @classmethod
    def asking(
        cls, requests: Iterable[Request[Any]], shown: str | Path, page: str, topic: str = "", **more: Any
    ) -> Work:
        """Return the work of some requests."""
        documents = tuple(
            Document(verb=request.verb(), fields=request.to_json()["fields"]) for request in requests
        )
        return cls(documents=documents, shown=str(shown), page=page, topic=topic, **more)

    @functools.cached_property
    def key(self) -> str:
        """The identity of the question; equal ones share a job. Names of scratch files do not count."""
        asked = json.dumps([self.page, self.topic, self.shown, self.documents, self.of], sort_keys=True)
        for place, path in enumerate(self.scratch):
            asked = asked.replace(json.dumps(path), f"scratch {place}")
        return hashlib.sha256(asked.encode()).hexdigest()

    @functools.cached_property
    def requests(self) -> tuple[Request[Any], ...]:
        """Its requests.

        Raises
        ------
        InputError
            A document is of another version.
        """
        return tuple(map(request_from_json, self.documents))

    @property
    def texts(self) -> list[str]:
        """All texts in it that may be paths."""
        return [*texts_in([document["fields"] for document in self.documents]), self.shown, *self.scratch]


def texts_in(value: Any) -> list[str]:
    """Return all texts in JSON data."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    return [text for part in value for text in texts_in(part)] if isinstance(value, Iterable) else []

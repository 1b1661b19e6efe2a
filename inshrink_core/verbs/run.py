"""Perform a request stored in a file, as the explorer's jobs do."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from inshrink_core.errors import NotFoundError
from inshrink_core.evaluate import Executing
from inshrink_core.report import Report
from inshrink_core.request import MAX_REQUEST_BYTES, Option, Request, python_call, read_document
from inshrink_core.verbs.shared.groups import PathLike


@dataclass(frozen=True)
class Run(Request[Report]):
    """Run any verb with the request in a JSON file.

    Parameters
    ----------
    request
        A JSON document: verb, mode where the verb has some, and fields by their names in Python.
    trust
        SHA-256 of a file of code that may be executed, such as an evaluator; may be repeated.

    Raises
    ------
    NotFoundError
        The file does not exist.
    InputError
        The file is no valid request: it is too large or deep, or has an unknown verb, field or value.
    UntrustedCodeError
        The request would execute code that is not one of the trusted files.

    Notes
    -----
    The function raises the errors of the verb and returns its report. `to_json` of a request returns its
    document.

    Examples
    --------
    >>> import inshrink_core, json, pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "request.json"
    >>> fields = {"source": str(inshrink_core.sample("digits-cnn"))}
    >>> _ = file.write_text(json.dumps({"verb": "inspect", "fields": fields}))
    >>> len(inshrink_core.verbs.run(file).to_json()["steps"]) > 10
    True
    """

    request: Annotated[PathLike, Option(metavar="REQUEST.json")]
    _: KW_ONLY
    trust: Annotated[Collection[str], Option(metavar="SHA256", many=True)] = ()

    EXAMPLES: ClassVar = (
        "inshrink run request.json --json",
        "inshrink run request.json --trust 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    )
    INTERRUPTED: ClassVar = "the same request continues if its verb does"

    def meant(self) -> Request[Any]:
        """Return the request in the file."""
        path = Path(self.request)
        if not path.is_file():
            raise NotFoundError("there is no such request", where=str(path))
        with path.open("rb") as file:
            asked = read_document(file.read(MAX_REQUEST_BYTES + 1), str(path))
        beside: dict[str, Any] = {"progress": self.progress} if self.progress is not None else {}
        if isinstance(asked, Executing):
            beside["trusted"] = frozenset(self.trust)
        return replace(asked, **beside)

    def perform(self) -> Report:
        """Perform the request in the file."""
        report: Report = self.meant().perform()
        return report


run = python_call(Run)

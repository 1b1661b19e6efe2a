"""Verb that opens the explorer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from typing import Annotated, ClassVar

from inshrink_core.request import Option, Request
from inshrink_core.verbs.shared.groups import PathLike


@dataclass(frozen=True)
class Ui(Request[None]):
    """Open the explorer in the browser.

    Parameters
    ----------
    path
        A run or an archive to open at once, also at an address in a bucket.
    host
        Address to listen on; by default only this computer can connect.
    port
        Port to listen on.
    root
        A folder or address that the explorer may show; it shows nothing else. May be repeated.
    browser
        Open the browser, or do not.
    window
        Open a desktop window instead; closing it ends the explorer.

    Raises
    ------
    InputError
        A root is neither a folder nor an address, the path lies outside of the roots, the port is taken, the
        host is open to others and no roots were given, or no window can be opened.
    MissingExtraError
        The explorer's packages are not installed.
    """

    path: Annotated[PathLike | None, Option(metavar="PATH")] = None
    _: KW_ONLY
    host: Annotated[str, Option(metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, Option(metavar="N", least=1, most=65535)] = 8501
    root: Annotated[Sequence[PathLike], Option(metavar="DIR", many=True)] = ()
    browser: bool = True
    window: bool = False

    REPORTS: ClassVar = False
    EXAMPLES: ClassVar = (
        "inshrink ui runs/digits",
        "inshrink ui --port 8600 --root ~/runs --root s3://bucket/runs",
    )

    def perform(self) -> None:
        """Serve the explorer until it is interrupted, or its window is closed."""
        # Imported by name, because the engine must not depend on the explorer.
        launch = import_module("inshrink_app.launch")
        # Ctrl-C is the usual way to stop the explorer, so it is no error.
        with suppress(KeyboardInterrupt):
            launch.run(
                None if self.path is None else os.fspath(self.path),
                host=self.host,
                port=self.port,
                roots=[os.fspath(folder) for folder in self.root],
                open_browser=self.browser,
                window=self.window,
            )

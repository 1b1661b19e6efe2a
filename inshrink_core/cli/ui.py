"""``inshrink ui``: open the explorer."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["EXAMPLE", "ui"]

EXAMPLE = "$ inshrink ui runs/digits\n$ inshrink ui --port 8600 --root ~/runs"


def ui(
    path: Annotated[
        str | None, typer.Argument(metavar="[PATH]", help="A run or an archive to open at once.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others can connect only if you change it.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8501,
    root: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="The explorer sees nothing outside of it; may be repeated."),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the browser.")] = True,
    window: Annotated[
        bool, typer.Option("--window", help="Open a desktop window instead; closing it ends the explorer.")
    ] = False,
) -> None:
    """Open the explorer in the browser."""
    # By name, because the engine must not depend on the explorer, which depends on it.
    launch = import_module("inshrink_app.launch")
    # Ctrl-C is how one stops the explorer, so it is no interruption.
    with suppress(KeyboardInterrupt):
        launch.run(
            path,
            host=host,
            port=port,
            roots=[str(folder) for folder in root or []],
            open_browser=browser,
            window=window,
        )

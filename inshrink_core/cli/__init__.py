"""The command line `inshrink`: one file a verb, no logic of its own."""

from inshrink_core.cli.application import app, main

__all__ = ["app", "main"]

"""The pages of the explorer: a folder each, and its name in the list below."""

from __future__ import annotations

import importlib

from inshrink_app.model import Page

NAMES = (
    "open",
    "run",
    "archives",
)
"""Folders of this package, in the order of the navigation. The explorer begins at the first one."""


def page(name: str) -> Page:
    """Return what the module ``view`` of a folder offers as ``PAGE``."""
    offered: Page = importlib.import_module(f"{__name__}.{name}.view").PAGE
    return offered._replace(address=offered.address or name)

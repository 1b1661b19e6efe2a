"""The pages of the explorer: one folder per page, listed below."""

from __future__ import annotations

import importlib

from inshrink_app.model import Page

NAMES = (
    "open",
    "run",
    "archives",
)
"""Folders of this package, in the order of the navigation. The explorer starts at the first one."""


def page(name: str) -> Page:
    """Return the ``PAGE`` of a folder's module ``view``."""
    offered: Page = importlib.import_module(f"{__name__}.{name}.view").PAGE
    return offered._replace(address=offered.address or name)

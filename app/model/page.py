"""A page of the explorer, as the navigation and links know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Page(NamedTuple):
    """What a page offers to the explorer.

    Parameters
    ----------
    title
        What the navigation calls it.
    icon
        Its sign there, as ``:material/grid_on:``.
    show
        Draws it.
    address
        Its word in a link; by default the name of its folder.
    former
        Words that lead to it too, as links from earlier have them.
    """

    title: str
    icon: str
    show: Callable[[], None]
    address: str = ""
    former: tuple[str, ...] = ()

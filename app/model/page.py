"""A page of the explorer, for navigation and links."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Page(NamedTuple):
    """The entry of a page in the navigation.

    Parameters
    ----------
    title
        Its name in the navigation.
    icon
        Its icon there, such as ``:material/grid_on:``.
    show
        Draws it.
    address
        Its word in a link; by default the name of its folder.
    """

    title: str
    icon: str
    show: Callable[[], None]
    address: str = ""

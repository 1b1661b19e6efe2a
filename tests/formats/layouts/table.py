"""The table of public layouts: one small run for each, and what must come of it."""

from typing import Final

from tests.formats.layouts import distributed, plain, research, trainers
from tests.formats.layouts.layout import Layout

TABLE: Final = tuple(
    row
    for part in (plain, trainers, research, distributed)
    for row in vars(part).values()
    if isinstance(row, Layout)
)
"""Every layout, in the order of the documentation."""

"""Which archive a link is about."""

from __future__ import annotations

from typing import Final

ARCHIVE: Final = "archive"

"""What a worker tells the explorer: one JSON object a line on standard output."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

__all__ = ["Report"]

_SECONDS_BETWEEN_MESSAGES = 0.2


class Report:
    """Passes messages on; progress not more often than a page can show."""

    def __init__(self) -> None:
        self._sent_at = 0.0
        self._last_total = -1

    def progress(self, done: int, total: int, item: str = "") -> None:
        """Say how far the work is, and what it is at."""
        now = time.monotonic()
        if now - self._sent_at >= _SECONDS_BETWEEN_MESSAGES or done >= total or total != self._last_total:
            self._sent_at, self._last_total = now, total
            self._send({"done": done, "total": total, "item": item})

    def log(self, text: str) -> None:
        """Add a line to the job's log."""
        self._send({"log": text})

    def row(self, **values: Any) -> None:
        """Hand over a piece of the result as soon as it is known; plain JSON values."""
        self._send({"row": values})

    def problem(self, what: str, where: str = "", remedy: str = "", detail: str = "") -> None:
        """Say why the work cannot be done."""
        self._send({"problem": [what, where, remedy, detail]})

    @staticmethod
    def _send(message: dict[str, Any]) -> None:
        """Write one message; the explorer reads line by line."""
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

"""What was measured, as the engine keeps it: every page that shows a figure of an archive asks here."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from inshrink_core.chain import ChainReport
from inshrink_core.verbs.shared.measured import Known, Measurement, Measurements, known_comparison


def known_of(chain: ChainReport) -> Known | None:
    """Return what is known of an archive beside its run, step by step; None where nothing was measured.

    Where nothing is known of the archive as it is, what was measured before its last change
    (`Known.is_current`).
    """
    return known_comparison(chain) if chain.archive_id else None


def verified(chain: ChainReport) -> Iterator[Measurement]:
    """Yield what verifying the archive as it is has found, the newest first."""
    if chain.archive_id:
        yield from Measurements.of_archive(chain).rows("verify")


def when(at: float) -> str:
    """Say when something was measured (Unix time)."""
    return f"{moment(at):%d %b %Y, %H:%M}"


def moment(at: float) -> datetime:
    """Return a time as the clock of this computer shows it."""
    return datetime.fromtimestamp(at, UTC).astimezone()

"""Stored measurements of the engine, for every page that shows figures of an archive."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from inshrink_core.chain.report import ChainReport
from inshrink_core.verbs.shared.measured import Known, Measurement, Measurements
from inshrink_core.verbs.shared.measured import known_by_metric as known_by_metric


def known_of(chain: ChainReport) -> Known | None:
    """Return the measurement of an archive beside its run, step by step; None without one.

    If the present archive was not measured, return the measurement from before its last change
    (`Known.is_current`).
    """
    return next(iter(known_by_metric(chain).values()), None)


def verified(chain: ChainReport) -> Iterator[Measurement]:
    """Yield verifications of the present archive, newest first."""
    return Measurements.of_archive(chain).rows("verify")


def when(at: float) -> str:
    """Return a Unix time in words, in the time zone of this computer."""
    return f"{datetime.fromtimestamp(at, UTC).astimezone():%d %b %Y, %H:%M}"

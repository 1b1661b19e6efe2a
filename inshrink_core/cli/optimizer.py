"""Saying of optimizer state how it is stored, and of everything what comes back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inshrink_core.chain import Exactness

__all__ = ["optimizer_text", "stored_text"]

_STATE = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum", "master"})
_WORDS = {"lossless": "bit-exact", "drop": "left out; a resumed training warms its optimizer up again"}
_COMPRESSED = (
    "compressed ({}), not bit for bit: training resumes from it; --optimizer lossless keeps every bit"
)


def optimizer_text(optimizer: str | None, roles: Iterable[str]) -> str:
    """Return how optimizer state of some roles was stored; nothing where there is none.

    Examples
    --------
    >>> optimizer_text("lossless", ["weight", "exp_avg"]), optimizer_text("lossless", ["weight"])
    ('bit-exact', '')
    """
    if optimizer is None or (optimizer != "drop" and not set(roles) & _STATE):
        return ""
    return _WORDS.get(optimizer, _COMPRESSED.format(optimizer))


def stored_text(stored: Exactness) -> str:
    """Return which roles are exact, and which are not, in a line each."""
    lines = [
        f"{what}: {_listed(roles)}"
        for what, roles in (("bit-exact", stored.exact), ("compressed with an error", stored.lossy))
        if roles
    ]
    return "\n".join(lines)


def _listed(roles: Iterable[str]) -> str:
    return ", ".join(sorted(roles))
